"""Answers of earlier requests, so that one that comes back in a prompt is encoded as it was generated.

Text has many encodings. A model that samples, or follows a grammar, often chooses another one than the tokenizer would,
and a prompt that holds its answer, tokenized anew, would miss in the prefix cache where the answer begins. The memory
maps the text of a prompt to the tokens that were generated after it. Where a later prompt begins with that text, and
continues as those tokens do, the tokens are taken for the part of the text that is equal, byte for byte, or for a call
in channels that says the same (``channel_answers.py``). Everything else is tokenized as if the memory were empty.

The salt is a part of the key, so requests of another salt find nothing. Losing an answer changes no text, only the
number of tokens that later prompts hit.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Container, Sequence
from functools import cached_property
from hashlib import blake2b
from threading import Lock
from typing import Any, Final, NamedTuple

from strandline.text.channel_answers import end_of_call, uses_channels
from strandline.text.token_bytes import TokenBytes

KEY_BYTES: Final = 16
OPENING_BYTES: Final = 8
"""The last bytes of a prompt, by which the offsets in a text are found at which an answer may begin."""
MAX_OPENINGS: Final = 64
"""A chat template has a few; continued messages bring others."""
MAX_ANSWERS_PER_PROMPT: Final = 64
PROMPT_BYTES: Final = 320
"""What Python needs for a remembered prompt, without its answers."""
ANSWER_BYTES: Final = 80
"""What Python needs for an answer, without its tokens."""
REPLACEMENT: Final = "\ufffd".encode()


class PromptKey(NamedTuple):
    """Identifies a prompt's text under a salt."""

    digest: bytes
    opening: bytes


class Recalled(NamedTuple):
    """A part of a text that is encoded as it was generated."""

    start: int
    """In characters."""
    ends: tuple[int, ...]
    """Where each token ends, in characters; a token that ends inside a character ends where that begins.

    Tokens of a call that is spelled in another way end where it begins to differ, and the last one where it ends.
    """
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.ends[-1]

    def token_at(self, character: int) -> int | None:
        """Return the index of the token that covers a character of the text."""
        index = bisect_right(self.ends, character)
        return index if self.start <= character and index < len(self.ends) else None

    def start_of(self, index: int) -> int:
        """Return the first character that a token covers."""
        return self.ends[index - 1] if index else self.start

    def between(self, start: int, end: int) -> tuple[tuple[int, ...], int]:
        """Return the tokens from a character on that end before another, and where they end.

        Args:
            start: where one of its tokens begins.
        """
        first = bisect_left(self.ends, start) + 1 if start > self.start else 0
        count = bisect_right(self.ends, end)
        while count > first and self.start_of(count - 1) == self.ends[count - 1]:
            count -= 1  # it is a part of the next character
        return self.token_ids[first:count], self.ends[count - 1] if count > first else start


class Recollection(NamedTuple):
    """What a prompt has to do with remembered answers."""

    key: PromptKey
    """Under which answers to it are remembered."""
    num_answers: int
    """Earlier answers in it that are encoded as they were generated."""
    num_tokens: int
    """The tokens of these."""


class RememberedAnswers:
    """The latest answers, in bounded memory. Any thread may call it.

    Args:
        max_bytes: the most memory; the answers of the least recently used prompts are dropped. 0: none are kept.
    """

    def __init__(self, tokenizer: Any, max_bytes: int) -> None:
        self.max_bytes: Final = max_bytes
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)
        self._added = tuple(sorted(map(str.encode, tokenizer.get_added_vocab())))
        self._uses_channels = uses_channels(tokenizer)
        self._lock = Lock()
        self._answers = OrderedDict[bytes, tuple["array[int]", ...]]()
        """By the digest of a prompt, the one used last at the end; each prompt's answers, the latest at the end."""
        self._openings = OrderedDict[bytes, None]()
        """The one used last at the end."""
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The memory of all answers."""
        return self._num_bytes

    @property
    def num_prompts(self) -> int:
        """The prompts whose answers are remembered."""
        return len(self._answers)

    def key(self, salt: str, prompt: str) -> PromptKey:
        """Return the key under which the answers to a prompt are remembered."""
        data = prompt.encode()
        digest = _begin_digest(salt)
        digest.update(data)
        return PromptKey(digest.digest(), data[-OPENING_BYTES:])

    def add(self, key: PromptKey, token_ids: Sequence[int]) -> None:
        """Remember an answer."""
        if not token_ids or not self.max_bytes:
            return
        answer = array("I", token_ids)
        with self._lock:
            known = self._answers.pop(key.digest, ())
            self._num_bytes -= _num_bytes(known)
            kept = (*(other for other in known if other != answer), answer)[-MAX_ANSWERS_PER_PROMPT:]
            self._answers[key.digest] = kept
            self._num_bytes += _num_bytes(kept)
            while self._num_bytes > self.max_bytes:
                _, dropped = self._answers.popitem(last=False)
                self._num_bytes -= _num_bytes(dropped)
            self._openings[key.opening] = None
            self._openings.move_to_end(key.opening)
            if len(self._openings) > MAX_OPENINGS:
                self._openings.popitem(last=False)

    def find(self, salt: str, text: str) -> list[Recalled]:
        """Return the parts of a prompt's text that are encoded as they were generated, in their order."""
        if not self._answers:
            return []
        data = text.encode()
        digest, hashed = _begin_digest(salt), 0
        found: list[Recalled] = []
        end, num_characters = 0, 0  # where the last part ends, in bytes and in characters
        beginnings = self._beginnings(data)
        for offset in sorted(beginnings):
            if offset < end:
                continue
            digest.update(memoryview(data)[hashed:offset])
            hashed = offset
            answers = self._take(digest.copy().digest())
            matches = (self._found(answer, data, offset, beginnings) for answer in reversed(answers))
            token_ids, byte_ends = max(matches, key=_reach, default=((), []))
            if byte_ends:
                num_characters += len(data[end:offset].decode())
                recalled = _in_characters(num_characters, data, offset, token_ids, byte_ends)
                found.append(recalled)
                end, num_characters = byte_ends[-1], recalled.end
        return found

    def _beginnings(self, data: bytes) -> set[int]:
        """Return the offsets at which a remembered answer may begin."""
        with self._lock:
            openings = list(self._openings)
        offsets = set[int]()
        for opening in openings:
            offset = data.find(opening)
            while offset >= 0:
                offsets.add(offset + len(opening))
                offset = data.find(opening, offset + 1)
        return offsets

    def _take(self, digest: bytes) -> tuple["array[int]", ...]:
        """Return the answers to a prompt, and count it as used."""
        with self._lock:
            answers = self._answers.get(digest, ())
            if answers:
                self._answers.move_to_end(digest)
            return answers

    def _found(
        self, answer: "array[int]", data: bytes, offset: int, beginnings: Container[int]
    ) -> tuple[Sequence[int], list[int]]:
        """Return the tokens of an answer that says what the data do at an offset, and where each of them ends."""
        token_ids, ends = self._matched(answer, data, offset, beginnings)
        pieces = [self._token_bytes[token] for token in answer] if self._uses_channels else []
        if len(ends) < len(pieces) and None not in pieces:
            end = end_of_call(b"".join(filter(None, pieces)), data, offset)
            if end is not None:
                differs = ends[-1] if ends else offset
                return answer, [*ends, *[differs] * (len(answer) - len(ends) - 1), end]
        return token_ids, ends

    def _matched(
        self, answer: "array[int]", data: bytes, offset: int, beginnings: Container[int]
    ) -> tuple[Sequence[int], list[int]]:
        """Return the tokens of an answer that the data continue with at an offset, and where each of them ends.

        They end where a character does, and not inside a word that goes on in another way, unless another answer may
        begin there: one that was continued.
        """
        ends: list[int] = []
        position, known = offset, self._token_bytes
        for token in answer:
            piece = known[token]
            if not piece or not data.startswith(piece, position) or REPLACEMENT in piece:
                break
            position += len(piece)
            ends.append(position)
        fault = data.find(REPLACEMENT, offset, position)
        while ends and (0 <= fault < ends[-1] or (_is_inside(data, ends[-1]) and ends[-1] not in beginnings)):
            ends.pop()
        if ends and not (ends[-1] == len(data) or data.startswith(self._added, ends[-1]) or self._joins_pieces):
            ends.clear()
        return answer[: len(ends)], ends

    @cached_property
    def _joins_pieces(self) -> bool:
        """Whether the tokens of two texts, joined, are tokens of the joined text: none begins with a space of its own.

        Otherwise the text after an answer must begin with a control token.
        """
        pieces = [self._token_bytes[token] for token in self._tokenizer.encode("a", add_special_tokens=False)]
        return pieces == [b"a"]


def _begin_digest(salt: str) -> Any:
    name = salt.encode()
    return blake2b(len(name).to_bytes(8) + name, digest_size=KEY_BYTES)


def _num_bytes(answers: Sequence["array[int]"]) -> int:
    return sum((ANSWER_BYTES + answer.itemsize * len(answer) for answer in answers), PROMPT_BYTES) if answers else 0


def _reach(matched: tuple[Sequence[int], list[int]]) -> int:
    """Return where the matching tokens of an answer end."""
    return matched[1][-1] if matched[1] else 0


def _is_inside(data: bytes, position: int) -> bool:
    """Return whether a position is inside of a character or a word."""
    return position < len(data) and _is_of_word(data[position - 1]) and _is_of_word(data[position])


def _is_of_word(byte: int) -> bool:
    """Return whether a byte belongs to a letter, a digit or a character beyond ASCII."""
    return byte >= 0x80 or chr(byte).isalnum()


def _in_characters(
    start: int, data: bytes, offset: int, token_ids: Sequence[int], byte_ends: Sequence[int]
) -> Recalled:
    """Return matched tokens with the ends of their texts in characters.

    Args:
        start: the characters before the offset.
    """
    if data[offset : byte_ends[-1]].isascii():
        return Recalled(start, tuple(start + end - offset for end in byte_ends), tuple(token_ids))
    ends: list[int] = []
    character, counted = start, offset
    for end in byte_ends:
        if end == len(data) or data[end] & 0xC0 != 0x80:
            character += len(data[counted:end].decode())
            counted = end
        # Otherwise the token ends inside a character, for which that character's beginning stands.
        ends.append(character + len(data[counted:end].decode(errors="ignore")))
    return Recalled(start, tuple(ends), tuple(token_ids))
