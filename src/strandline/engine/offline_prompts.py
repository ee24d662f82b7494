"""Prompts as callers of an ``LLM`` write them: texts, token ids or mappings, with pictures or without."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import RequestError
from strandline.pictures.loader import PictureLoader, RefusedPictures
from strandline.plain_values import plain
from strandline.records.pictures import Picture, PlacedPicture, place_pictures, with_virtual_ids
from strandline.text.prompts import encode_text
from strandline.text.remembered_answers import Recollection

Prompt = str | Sequence[int] | Mapping[str, Any]

PROMPT_KEYS: Final = (
    "prompt",
    "prompt_token_ids",
    "cache_salt",
    "marks",
    "recollection",
    "multi_modal_data",
    "pictures",
)


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt of an ``LLM`` as tokens."""

    token_ids: list[int]
    text: str | None
    salt: str
    marks: tuple[int, ...] = ()
    recollection: Recollection | None = None
    pictures: tuple[PlacedPicture, ...] = ()

    @property
    def cached_ids(self) -> list[int]:
        """The tokens as the cache names them: those of pictures have virtual ids."""
        return with_virtual_ids(self.token_ids, [span for span, _ in self.pictures])


class PromptReader:
    """Reads prompts, and loads their pictures.

    Args:
        get_tokenizer: returns the tokenizer. Raises a ``RequestError`` if there is none.
        pictures: loads pictures; None: the model reads none.
    """

    def __init__(self, get_tokenizer: Callable[[], Any], pictures: PictureLoader | RefusedPictures | None) -> None:
        self._get_tokenizer = get_tokenizer
        self._pictures = pictures

    def load_pictures(self, prompt: Prompt) -> list[Picture]:
        """Load the pictures of a prompt; it need not be well-formed otherwise.

        Raises:
            RequestError: the model reads none, or one cannot be loaded.
        """
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        if not data:
            return []
        if not isinstance(data, Mapping) or set(data) != {"image"}:
            raise RequestError(f"multi_modal_data must be {{'image': …}}, got {data!r:.100}")
        if self._pictures is None:
            raise RequestError("this model reads text only")
        if isinstance(self._pictures, RefusedPictures):
            raise RequestError(self._pictures.reason)
        return self._pictures.load(data["image"] if isinstance(data["image"], list | tuple) else [data["image"]])

    def read(self, prompt: Prompt, loaded: list[Picture]) -> ParsedPrompt:
        """Return a prompt as tokens.

        Args:
            loaded: its pictures (``load_pictures``).

        Raises:
            RequestError: it is malformed.
        """
        if isinstance(prompt, str):
            return ParsedPrompt(encode_text(self._get_tokenizer(), prompt), prompt, "")
        if not isinstance(prompt, Mapping):
            return ParsedPrompt(items_of(prompt), None, "")
        unknown = [key for key in prompt if key not in PROMPT_KEYS]
        if unknown:
            raise RequestError(f"unknown prompt field {unknown[0]!r}; known are {', '.join(PROMPT_KEYS)}")
        text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt") or ""
        if text is None and token_ids is None:
            raise RequestError("a prompt needs 'prompt' or 'prompt_token_ids'")
        if not isinstance(salt, str):
            raise RequestError(f"cache_salt must be a string, got {salt!r}")
        if token_ids is None:
            token_ids = encode_text(self._get_tokenizer(), text)
        marks = prompt.get("marks") or ()
        if not all(type(mark) is int and mark > 0 for mark in marks):
            raise RequestError(f"marks must be token positions above 0, got {marks!r}")
        recollection = prompt.get("recollection")
        if not isinstance(recollection, Recollection | None):
            raise RequestError(f"recollection must be what LLM.render returned, got {recollection!r:.100}")
        pictures = prompt.get("pictures", ())
        if prompt.get("multi_modal_data"):
            token_ids, pictures = self._with_pictures(items_of(token_ids), loaded)
        return ParsedPrompt(items_of(token_ids), text, salt, tuple(marks), recollection, tuple(pictures))

    def _with_pictures(self, token_ids: list[int], loaded: list[Picture]) -> tuple[list[int], list[PlacedPicture]]:
        """Return the tokens of a prompt, with one for each token of a picture, and where its pictures are."""
        config = None if self._pictures is None else self._pictures.config
        if config is None:
            raise RequestError("this model reads text only")
        num_found = token_ids.count(config.image_token_id)
        if num_found != len(loaded):
            raise RequestError(
                f"the prompt has {num_found} tokens that stand for pictures ({config.image_token_id}), and "
                f"multi_modal_data has {len(loaded)} pictures"
            )
        return place_pictures(token_ids, config.image_token_id, loaded, config.token_side)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. A list of integers is one prompt. Raises as ``items_of``."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = items_of(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def items_of(prompt: Any) -> list[Any]:
    """Return the token ids of a prompt, or the prompts of a list.

    Raises:
        RequestError: it can be neither.
    """
    items = plain(prompt)
    if not isinstance(items, Iterable):
        raise RequestError(f"a prompt must be a string, a list of token ids or a mapping, got {prompt!r:.100}")
    return list(items)
