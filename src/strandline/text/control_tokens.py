"""Prevention of control tokens in the text of users and tools.

A chat template joins messages into one text, in which ``<|im_end|>`` written by a user cannot be distinguished from the
template's own. Messages are therefore split inside every such string before they are rendered; the pieces of the
rendered text are tokenized one by one, so that the string becomes ordinary tokens that decode to it.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from strandline.errors import RequestError
from strandline.text.remembered_answers import Recalled

PLAIN_ROLES: Final = frozenset({"user", "tool", "function"})
"""Roles whose messages have no control tokens. System prompts and the model's own answers may have some."""
SPLITS: Final = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Characters that Unicode reserves for internal use; the first one that no message contains marks the splits."""
ROLE: Final = re.compile(r"[\w.-]{1,64}")

Recall = Callable[[str], Sequence[Recalled]]
"""Finds the parts of a text that are encoded as they were generated, in their order."""


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
            RequestError: messages contain every character that could mark the splits.
        """
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


class TokenizedPiece:
    """A piece of a text, tokenized by itself.

    Args:
        start: where it begins in the text.
    """

    def __init__(self, tokenizer: Any, text: str, start: int) -> None:
        self.start: Final = start
        self.end: Final = start + len(text)
        self._encoding = tokenizer(text, add_special_tokens=False)
        self.token_ids: Final[Sequence[int]] = self._encoding["input_ids"]

    def token_at(self, character: int) -> int | None:
        """Return the index of the token that covers a character of the text, if one does."""
        index: int | None = self._encoding.char_to_token(character - self.start)
        return index

    def start_of(self, index: int) -> int:
        """Return the first character that a token covers."""
        return self.start + int(self._encoding.token_to_chars(index).start)


class SplitText:
    """A rendered text as tokens, with each piece between two splits tokenized separately.

    Args:
        rendered: the text, with the mark at every split.
        mark: the split mark; empty if there are no splits.
        recall: finds the parts of the text, without marks, that are encoded as they were generated. Parts with a split
            inside are tokenized instead: they are not the model's.
    """

    def __init__(self, tokenizer: Any, rendered: str, mark: str = "", recall: Recall = lambda _: ()) -> None:
        pieces = rendered.split(mark) if mark else [rendered]
        self._tokenizer = tokenizer
        self.text: Final = "".join(pieces)
        splits = list(accumulate(map(len, pieces[:-1])))
        self.recalled: Final = [
            part for part in recall(self.text) if not any(part.start < split < part.end for split in splits)
        ]
        cuts = {0, *splits, len(self.text), *(cut for part in self.recalled for cut in (part.start, part.end))}
        self._cuts = sorted(cuts) if self.text else [0, 0]
        by_start = {part.start: part for part in self.recalled}
        self._pieces: list[TokenizedPiece | Recalled] = [
            by_start.get(start) or TokenizedPiece(tokenizer, self.text[start:end], start)
            for start, end in pairwise(self._cuts)
        ]
        self._first_tokens = [0, *accumulate(len(piece.token_ids) for piece in self._pieces)]
        self.token_ids: Final = [token for piece in self._pieces for token in piece.token_ids]

    @property
    def knows_characters(self) -> bool:
        """Whether the tokenizer reports which characters a token covers."""
        return bool(self._tokenizer.is_fast)

    def token_at(self, character: int) -> int | None:
        """Return the token that covers a character of the text, if one does."""
        place = min(bisect_right(self._cuts, character), len(self._pieces)) - 1
        index = self._pieces[place].token_at(character)
        return None if index is None else self._first_tokens[place] + index

    def start_of(self, token: int) -> int:
        """Return the first character that a token covers."""
        place = min(bisect_right(self._first_tokens, token), len(self._pieces)) - 1
        return self._pieces[place].start_of(token - self._first_tokens[place])

    def encode(self, first: int, last: int) -> list[int]:
        """Return the tokens of a part of the text, with the same splits and the same recalled tokens.

        A recalled part that is not covered to its end has the tokens that a text which goes on in another way would
        have in common with it.
        """
        inner = self._cuts[bisect_right(self._cuts, first) : bisect_left(self._cuts, last)]
        token_ids: list[int] = []
        for start, end in pairwise([first, *inner, last]):
            piece = self._pieces[min(bisect_right(self._cuts, start), len(self._pieces)) - 1]
            known, reached = piece.between(start, end) if isinstance(piece, Recalled) else ((), start)
            token_ids += known
            if reached < end:
                token_ids += self._tokenizer.encode(self.text[reached:end], add_special_tokens=False)
        return token_ids
