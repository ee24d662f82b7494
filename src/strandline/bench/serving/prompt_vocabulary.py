"""The tokens that prompts are made of: drawn at random, or from text by a tokenizer."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from strandline.errors import ConfigError
from strandline.text.prompts import encode_text, render_chat


class Vocabulary:
    """The tokens that random prompts are drawn from.

    Args:
        ids: tokens that random prompts are drawn from; none if the model is unknown.
        tokenizer: turns text into tokens; None: text is sent as text, and its tokens are unknown.
    """

    def __init__(self, ids: Sequence[int], tokenizer: Any | None = None) -> None:
        self._ids = np.asarray(ids, np.int64)
        self.tokenizer = tokenizer

    @property
    def is_known(self) -> bool:
        return len(self._ids) > 0

    def draw(self, rng: Random, num_tokens: int) -> list[int]:
        """Return random tokens; special ones are never among them where there is a tokenizer."""
        self.require("random tokens")
        picks = np.random.default_rng(rng.getrandbits(64)).integers(0, len(self._ids), num_tokens)
        ids: list[int] = self._ids[picks].tolist()
        return ids

    def fold(self, data: bytes | bytearray) -> list[int]:
        """Map a trace's encoded tokens, of 31 bits each, to tokens of the model: equal ones to equal ones."""
        self.require("a trace")
        ids: list[int] = self._ids[np.frombuffer(data, ">u4") % len(self._ids)].tolist()
        return ids

    def require(self, what: str) -> None:
        """Raise a ConfigError unless the model's tokens are known."""
        if not self.is_known:
            raise ConfigError(f"{what} needs the model's tokens: name a --tokenizer, or give --vocab-size")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int] | None:
        """Return a text's tokens, None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return encode_text(self.tokenizer, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens.

        Raises:
            ConfigError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError("chats need text: name a --tokenizer, or use --backend openai")
        text: str = self.tokenizer.decode(ids)
        return text

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Return the tokens that the tokenizer's chat template makes of messages; None without one."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            return None
        return encode_text(self.tokenizer, render_chat(self.tokenizer, messages), add_special_tokens=False)


def load_vocabulary(tokenizer_name: str | None, vocab_size: int | None) -> Vocabulary:
    """Return the known facts about the model's tokens.

    Args:
        tokenizer_name: a directory, a hub name or ``demo``; only asked when ``vocab_size`` is None.

    Raises:
        ConfigError: ``vocab_size`` is below 2.
    """
    if vocab_size is not None:
        if vocab_size < 2:
            raise ConfigError(f"--vocab-size must be at least 2, got {vocab_size}")
        return Vocabulary(range(vocab_size))
    if tokenizer_name is None:
        return Vocabulary(())
    from strandline.text.model_files import DEMO_DIRECTORY, DEMO_MODEL
    from strandline.text.vocabulary import load_tokenizer

    tokenizer = load_tokenizer(str(DEMO_DIRECTORY) if tokenizer_name == DEMO_MODEL else tokenizer_name)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return Vocabulary([token for token in range(tokenizer.vocab_size) if token not in special], tokenizer)
