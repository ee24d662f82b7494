"""Placeholders of pictures while a conversation's messages are texts, and the parts that templates get for them.

Every API's parts are joined to texts before a chat template sees them, and texts may be moved from one message to
another. A placeholder keeps a picture where it was: between the same words. It consists of characters that Unicode
reserves for internal use; a client that writes them itself can repeat a picture of its own prompt, and nothing else.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from strandline.errors import RequestError
from strandline.records.pictures import PictureReference
from strandline.text.chat_messages import MARKS

BEGIN, END = "\U0010fffe", "\U0010ffff"
PLACEHOLDER: Final = re.compile(rf"{BEGIN}(\d{{1,9}}){END}")
AROUND: Final = re.compile(rf"\n?({BEGIN}\d{{1,9}}{END})\n?")
"""A placeholder and the line breaks by which it was joined to the texts around it."""
DETAILS: Final = ("auto", "low", "high", "original")
HOLDERS: Final = frozenset({"content", "output", "source"})
"""Fields that hold parts."""
OPENAI_TYPES: Final = ("image_url", "input_image", "computer_screenshot")
LOADED_TYPES: Final = ("image", "image_pil")
"""Types of parts that hold a picture of Pillow (``LLM.chat``)."""


class PicturePlaceholders:
    """The pictures of a request, which placeholders stand for."""

    def __init__(self) -> None:
        self.references: list[Any] = []
        """A ``PictureReference`` each, or what Pillow has read."""
        self.paths: list[str] = []
        """Where each is in the request."""

    def insert(self, value: Any, path: str) -> Any:
        """Return a part of a request with text parts instead of pictures.

        Args:
            path: where it is in the request.

        Raises:
            RequestError: a picture's part is malformed; the error names it.
        """
        if isinstance(value, list | tuple):
            return [self.insert(item, f"{path}.{index}") for index, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        found = _reference(value, path)
        if found is not None:
            placeholder = f"{BEGIN}{len(self.references)}{END}"
            self.references.append(found[0])
            self.paths.append(found[1])
            own = {name: value[name] for name in MARKS if name in value}
            return {"type": "text", "text": placeholder, **own}
        inside = f"{path}.tool_result" if value.get("type") == "tool_result" else path
        return {
            name: self.insert(item, f"{inside}.{name}") if name in HOLDERS else item for name, item in value.items()
        }


def pictures_in(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the pictures in messages, in their order."""
    texts = [text for message in messages if isinstance(text := message.get("content"), str)]
    return [int(number) for text in texts for number in PLACEHOLDER.findall(text)]


def with_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages as templates take them: those with pictures as a list of parts."""
    return [
        {**message, "content": _parts(text)}
        if isinstance(text := message.get("content"), str) and PLACEHOLDER.search(text)
        else message
        for message in messages
    ]


def _parts(text: str) -> list[dict[str, str]]:
    pieces = AROUND.split(text)
    return [
        {"type": "image"} if index % 2 else {"type": "text", "text": piece}
        for index, piece in enumerate(pieces)
        if index % 2 or piece
    ]


def _reference(part: Mapping[str, Any], path: str) -> tuple[Any, str] | None:
    """Return the picture that a part refers to, and its path; None: it refers to none."""
    kind, source = part.get("type"), part.get("source")
    loaded = next((part[name] for name in LOADED_TYPES if kind == name and part.get(name) is not None), None)
    if loaded is not None and not isinstance(loaded, str):
        return loaded, path
    if kind == "image":
        return _of_anthropic(source if isinstance(source, Mapping) else {}, f"{path}.image"), f"{path}.image"
    if kind in OPENAI_TYPES or (kind is None and "image_url" in part):
        return _of_openai(part, path), path
    return None


def _of_anthropic(source: Mapping[str, Any], path: str) -> PictureReference:
    kind = source.get("type")
    name = {"base64": "data", "url": "url"}.get(str(kind))
    value = source.get(name) if name is not None else None
    if not isinstance(value, str):
        raise RequestError(
            f"{path}: the source must be {{'type': 'base64', 'data': …}} or {{'type': 'url', 'url': …}}"
            + ("" if kind is None else f"; got type {str(kind)[:60]!r}"),
            param="messages",
        )
    return PictureReference(f"data:;base64,{value}" if kind == "base64" else value)


def _of_openai(part: Mapping[str, Any], path: str) -> PictureReference:
    value: Any = part.get("image_url")
    detail = part.get("detail")
    if isinstance(value, Mapping):
        value, detail = value.get("url"), value.get("detail", detail)
    if not isinstance(value, str):
        wanted = "file_id is not supported: send " if part.get("file_id") is not None else "a picture needs "
        raise RequestError(f"{path}: {wanted}image_url, a data: URL or an address", param="messages")
    if detail is not None and detail not in DETAILS:
        raise RequestError(
            f"{path}: detail must be one of {', '.join(DETAILS)}; got {str(detail)[:60]!r}", param="messages"
        )
    return PictureReference(value, detail or "auto")
