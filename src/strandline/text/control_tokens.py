"""Prevention of control tokens in the text of users and tools.

A chat template joins messages into one text, in which ``<|im_end|>`` written by a user cannot be distinguished from the
template's own. Messages are therefore split inside every such string before they are rendered; the pieces of the
rendered text are tokenized one by one, so that the string becomes ordinary tokens that decode to it.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from strandline.errors import RequestError

PLAIN_ROLES: Final = frozenset({"user", "tool", "function"})
"""Roles whose messages have no control tokens. System prompts and the model's own answers may have some."""
SPLITS: Final = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Characters that Unicode reserves for internal use; the first one that no message contains marks the splits."""
ROLE: Final = re.compile(r"[\w.-]{1,64}")


class ControlTokens:
    """Finds a tokenizer's added tokens in messages.

    Args:
        is_parsed: leave all messages unchanged, so that such strings become control tokens.
    """

    def __init__(self, tokenizer: Any, *, is_parsed: bool = False) -> None:
        names = [] if is_parsed else sorted((name for name in tokenizer.get_added_vocab() if len(name) > 1), key=len)
        self._found = re.compile("|".join(map(re.escape, reversed(names)))) if names else None

    def split(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Return messages with user and tool strings split inside every control token, and the split mark.

        Raises:
            RequestError: a role is no plain word.
        """
        for message in messages:
            if not ROLE.fullmatch(str(message.get("role", ""))):
                raise RequestError(
                    f"a message's role must be a word such as 'user', got {str(message['role'])[:100]!r}"
                )
        found = self._found
        if found is None or not any(found.search(text) for message in messages for text in _texts(message)):
            return list(messages), ""
        text = "".join(text for message in messages for text in _texts(message))
        mark = next((mark for mark in SPLITS if mark not in text), None)
        if mark is None:
            raise RequestError("messages contain all of the characters U+FDD0 to U+FDEF, which Unicode reserves")

        def in_parts(match: re.Match[str]) -> str:
            return match[0][0] + mark + match[0][1:]

        return [
            {
                name: found.sub(in_parts, value) if _is_plain(message, name, value) else value
                for name, value in message.items()
            }
            for message in messages
        ], mark


def _is_plain(message: Mapping[str, Any], name: str, value: object) -> bool:
    return message.get("role") in PLAIN_ROLES and name != "role" and isinstance(value, str)


def _texts(message: Mapping[str, Any]) -> list[str]:
    return [value for name, value in message.items() if _is_plain(message, name, value)]


class SplitText:
    """A rendered text as tokens, with each piece between two splits tokenized separately.

    Args:
        rendered: the text, with the mark at every split.
        mark: the split mark; empty if there are no splits.
    """

    def __init__(self, tokenizer: Any, rendered: str, mark: str = "") -> None:
        pieces = rendered.split(mark) if mark else [rendered]
        self._tokenizer = tokenizer
        self._encodings = [tokenizer(piece, add_special_tokens=False) for piece in pieces]
        self.text: Final = "".join(pieces)
        self.token_ids: Final = [token for encoding in self._encodings for token in encoding["input_ids"]]
        self._first_character = [0]
        self._first_token = [0]
        for piece, encoding in zip(pieces, self._encodings, strict=True):
            self._first_character.append(self._first_character[-1] + len(piece))
            self._first_token.append(self._first_token[-1] + len(encoding["input_ids"]))

    @property
    def knows_characters(self) -> bool:
        """Whether the tokenizer reports which characters a token covers."""
        return bool(self._tokenizer.is_fast)

    def token_at(self, character: int) -> int | None:
        """Return the token that covers a character of the text, if one does."""
        piece = min(bisect_right(self._first_character, character), len(self._encodings)) - 1
        token = self._encodings[piece].char_to_token(character - self._first_character[piece])
        return None if token is None else self._first_token[piece] + token

    def start_of(self, token: int) -> int:
        """Return the first character that a token covers."""
        piece = min(bisect_right(self._first_token, token), len(self._encodings)) - 1
        start: int = self._encodings[piece].token_to_chars(token - self._first_token[piece]).start
        return self._first_character[piece] + start

    def encode(self, first: int, last: int) -> list[int]:
        """Return the tokens of a part of the text, with the same splits."""
        inner = self._first_character[
            bisect_right(self._first_character, first) : bisect_left(self._first_character, last)
        ]
        return [
            token
            for start, end in pairwise([first, *inner, last])
            for token in self._tokenizer.encode(self.text[start:end], add_special_tokens=False)
        ]
