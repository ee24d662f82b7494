"""Prevention of control tokens in the text of users and tools.

A chat template joins messages into one text, in which ``<|im_end|>`` written by a user cannot be distinguished from the
template's own. Messages are therefore split inside every such string before they are rendered; the pieces of the
rendered text are tokenized one by one, so that the string becomes ordinary tokens that decode to it.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
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
        is_parsed: leave such strings unchanged, so that they become control tokens.
        reserved: tokens that only the template may write; they are plain text in all messages.
    """

    def __init__(self, tokenizer: Any, *, is_parsed: bool = False, reserved: Collection[str] = ()) -> None:
        names = reserved if is_parsed else {*reserved, *(name for name in tokenizer.get_added_vocab() if len(name) > 1)}
        self._of_users = _any_of(names)
        self._of_all = _any_of(reserved)

    def split(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Return messages with user and tool strings split inside every control token, and the split mark.

        Raises:
            RequestError: messages contain every character that could mark the splits.
        """
        fields = [(message, name, value) for message in messages for name, value in message.items()]
        if not any(self._pattern(*field) for field in fields):
            return list(messages), ""
        text = "".join(value for _, _, value in fields if isinstance(value, str))
        mark = next((mark for mark in SPLITS if mark not in text), None)
        if mark is None:
            raise RequestError("messages contain all of the characters U+FDD0 to U+FDEF, which Unicode reserves")

        def in_parts(match: re.Match[str]) -> str:
            return match[0][0] + mark + match[0][1:]

        return [
            {
                name: pattern.sub(in_parts, value) if (pattern := self._pattern(message, name, value)) else value
                for name, value in message.items()
            }
            for message in messages
        ], mark

    def _pattern(self, message: Mapping[str, Any], name: str, value: object) -> re.Pattern[str] | None:
        """Return what finds control tokens in a field of a message; None: it has none."""
        pattern = self._of_users if message.get("role") in PLAIN_ROLES else self._of_all
        if pattern is None or name == "role" or not isinstance(value, str) or not pattern.search(value):
            return None
        return pattern


def _any_of(names: Collection[str]) -> re.Pattern[str] | None:
    """Return what finds the longest of these strings; None: there are none."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


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
        index = min(bisect_right(self._cuts, character), len(self._pieces)) - 1
        token = self._pieces[index].token_at(character)
        return None if token is None else self._first_tokens[index] + token

    def start_of(self, token: int) -> int:
        """Return the first character that a token covers."""
        index = min(bisect_right(self._first_tokens, token), len(self._pieces)) - 1
        return self._pieces[index].start_of(token - self._first_tokens[index])

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
