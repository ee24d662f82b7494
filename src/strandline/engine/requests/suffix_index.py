"""An index of a growing text that finds where the last tokens of a text occurred before, and what followed there.

Each run of ``MIN_MATCH_TOKENS`` tokens has a bucket of a hash table with the latest position after such a run, and
each position refers to the one before in its bucket, as in compressors of the LZ77 kind. So a token takes a few bytes
and a constant time, the oldest tokens can be dropped at any time, and a search visits a bounded number of positions.
Positions are counted in tokens, and 0 stands for none.
"""

from array import array
from typing import Final, NamedTuple

import numpy as np

from strandline.records.tokens import TOKEN_BYTES, TokenBuffer, decode

MIN_MATCH_TOKENS: Final = 3
"""The shortest match. Shorter runs are frequent, and say little about what follows."""

MAX_OCCURRENCES: Final = 16
"""The latest occurrences of a run that a search compares."""

MAX_VISITS: Final = 4 * MAX_OCCURRENCES
"""The latest positions of a bucket that a search visits: other runs may share it."""

FACTORS: Final = (2654435761, 2246822519, 3266489917)
"""Primes by which the tokens of a run are multiplied."""

MIN_BUCKETS_LOG2: Final = 8
BULK_TOKENS: Final = 32
"""From this number on, tokens are indexed together."""

POSITION: Final = "I"
"""Type code of an array of positions."""


class Match(NamedTuple):
    """The longest match of a search."""

    num_tokens: int
    continuations: list[bytes]
    """What followed each occurrence, the latest one first. None is empty."""


NO_MATCH: Final = Match(0, [])


class SuffixIndex:
    """Indexes the tokens of a buffer, which may grow; ``update`` follows it.

    Args:
        tokens: the buffer; only ``drop_first`` changes it.
    """

    __slots__ = ("_end", "_heads", "_previous", "_shift", "_start", "_tokens")

    def __init__(self, tokens: TokenBuffer) -> None:
        self._tokens = tokens
        self._start = self._end = 0
        """The tokens that are indexed: those before are dropped, those after have not been indexed yet."""
        self._rebuild()

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def num_bytes(self) -> int:
        """The memory of the text and the tables."""
        tables = (len(self._heads) + len(self._previous)) * self._heads.itemsize
        return len(self._tokens.data) + tables

    def update(self) -> None:
        """Index the tokens that were appended to the buffer."""
        end = len(self._tokens)
        if end > len(self._heads):
            self._rebuild()
        elif end - self._end >= BULK_TOKENS:
            self._add_many(end)
        elif end > self._end:
            self._add(end)

    def drop_first(self, num_tokens: int) -> None:
        """Drop the oldest tokens. Their memory is freed when they are as many as those that are left."""
        self._start += num_tokens
        if self._start >= self._end - self._start:
            del self._tokens.data[: self._start * TOKEN_BYTES]
            self._start = 0
            self._rebuild()

    def find(self, last: bytes, max_tokens: int) -> Match:
        """Return the longest match of the last tokens of a text, where something follows.

        Of the occurrences of the last ``MIN_MATCH_TOKENS`` tokens, the latest ``MAX_OCCURRENCES`` are compared.

        Args:
            last: the text's last tokens. No match is longer.
            max_tokens: the most tokens of a continuation.
        """
        max_match = len(last) // TOKEN_BYTES
        if max_match < MIN_MATCH_TOKENS:
            return NO_MATCH
        data, start, end, previous = self._tokens.data, self._start, self._end, self._previous
        wanted, longest, positions = int.from_bytes(last, "big"), MIN_MATCH_TOKENS, list[int]()
        position = self._heads[self._bucket(last)]
        num_occurrences = num_visits = 0
        while position >= start + MIN_MATCH_TOKENS and num_visits < MAX_VISITS and num_occurrences < MAX_OCCURRENCES:
            num_visits += 1
            first = max(position - max_match, start)
            different = wanted ^ int.from_bytes(data[first * TOKEN_BYTES : position * TOKEN_BYTES], "big")
            num_equal = max_match
            if different:
                num_equal = ((different & -different).bit_length() - 1) // (8 * TOKEN_BYTES)
            num_equal = min(num_equal, position - first)
            if num_equal >= MIN_MATCH_TOKENS and position < end:
                num_occurrences += 1
                if num_equal > longest:
                    longest, positions = num_equal, [position]
                elif num_equal == longest:
                    positions.append(position)
            position = previous[position]
        if not positions:
            return NO_MATCH
        size = max_tokens * TOKEN_BYTES
        return Match(longest, [bytes(data[x * TOKEN_BYTES : x * TOKEN_BYTES + size]) for x in positions])

    def _bucket(self, last: bytes) -> int:
        first, second, third = decode(last[-MIN_MATCH_TOKENS * TOKEN_BYTES :])
        return ((first * FACTORS[0] + second * FACTORS[1] + third * FACTORS[2]) & 0xFFFFFFFF) >> self._shift

    def _add(self, end: int) -> None:
        """Index the tokens up to an end, one by one."""
        heads, previous, shift = self._heads, self._previous, self._shift
        start = max(self._end + 1 - MIN_MATCH_TOKENS, 0)
        values = decode(self._tokens.slice(start, end))
        previous.frombytes(bytes((end - self._end) * previous.itemsize))
        a, b, c = FACTORS
        for index in range(len(values) + 1 - MIN_MATCH_TOKENS):
            total = values[index] * a + values[index + 1] * b + values[index + 2] * c
            bucket, position = (total & 0xFFFFFFFF) >> shift, start + index + MIN_MATCH_TOKENS
            previous[position], heads[bucket] = heads[bucket], position
        self._end = end

    def _add_many(self, end: int) -> None:
        """Index the tokens up to an end as ``_add`` does, in vectors."""
        start = max(self._end + 1 - MIN_MATCH_TOKENS, 0)
        self._previous.frombytes(bytes((end - self._end) * self._previous.itemsize))
        self._end = end
        num_runs = end - start + 1 - MIN_MATCH_TOKENS
        if num_runs < 1:
            return
        values = np.frombuffer(self._tokens.slice(start, end), dtype=">u4").astype(np.uint64)
        total = np.zeros(num_runs, dtype=np.uint64)
        for index, factor in enumerate(FACTORS):
            total += values[index : index + num_runs] * np.uint64(factor)
        buckets = (total.astype(np.uint32) >> np.uint32(self._shift)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        buckets, positions = buckets[order], (order + start + MIN_MATCH_TOKENS).astype(np.uint32)
        is_first = np.concatenate(([True], buckets[1:] != buckets[:-1]))
        is_last = np.concatenate((is_first[1:], [True]))
        heads = np.frombuffer(self._heads, dtype=np.uint32)
        before = np.concatenate((positions[:1], positions[:-1]))
        before[is_first] = heads[buckets[is_first]]
        np.frombuffer(self._previous, dtype=np.uint32)[positions] = before
        heads[buckets[is_last]] = positions[is_last]

    def _rebuild(self) -> None:
        """Index all tokens anew, with at least as many buckets as twice the tokens."""
        num_tokens = len(self._tokens)
        buckets_log2 = max((2 * num_tokens).bit_length(), MIN_BUCKETS_LOG2)
        self._shift = 32 - buckets_log2
        self._heads = array(POSITION, bytes(4 << buckets_log2))
        self._previous = array(POSITION, bytes(4))
        """By position, and one more: position 0 stands for none."""
        self._end = 0
        self._add_many(num_tokens)
