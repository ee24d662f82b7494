"""The index finds what a naive search finds, whatever was appended and dropped, in bounded memory."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.engine.requests.suffix_index import BULK_TOKENS, MAX_OCCURRENCES, MIN_MATCH_TOKENS, Match, SuffixIndex
from strandline.records.tokens import TokenBuffer, decode, encode

PIECE = st.builds(
    lambda seed, length: random.Random(seed).choices(range(4), k=length),
    st.integers(0, 1000),
    st.integers(0, 2 * BULK_TOKENS),
)
"""Tokens to be appended: one by one or together, by their number."""


def naive_search(text: list[int], last: list[int], max_tokens: int) -> Match:
    """Return the longest match among the latest occurrences, by comparing the text at every position."""
    shortest = last[-MIN_MATCH_TOKENS:]
    ends = range(len(text) - 1, MIN_MATCH_TOKENS - 1, -1)
    ends = [end for end in ends if text[end - MIN_MATCH_TOKENS : end] == shortest][:MAX_OCCURRENCES]
    if len(last) < MIN_MATCH_TOKENS or not ends:
        return Match(0, [])

    def num_equal(end: int) -> int:
        pairs = zip(reversed(text[:end]), reversed(last), strict=False)
        return next((index for index, (left, right) in enumerate(pairs) if left != right), min(end, len(last)))

    longest = max(map(num_equal, ends))
    found = [end for end in ends if num_equal(end) == longest]
    return Match(longest, [encode(text[end : end + max_tokens]) for end in found])


@given(pieces=st.lists(PIECE, max_size=8), max_match=st.integers(1, 12), max_tokens=st.integers(1, 5))
def test_a_request_finds_what_a_naive_search_finds(pieces: list[list[int]], max_match: int, max_tokens: int) -> None:
    tokens, text = TokenBuffer(), list[int]()
    index = SuffixIndex(tokens)
    for piece in pieces:
        tokens.extend(piece)
        text += piece
        index.update()
        last = text[-max_match:]
        assert index.find(encode(last), max_tokens) == naive_search(text, last, max_tokens)


@given(steps=st.lists(st.tuples(PIECE, st.floats(0, 1), st.integers(1, 8)), max_size=8))
def test_dropped_tokens_are_never_found(steps: list[tuple[list[int], float, int]]) -> None:
    tokens, text = TokenBuffer(), list[int]()
    index = SuffixIndex(tokens)
    for piece, share, max_match in steps:
        tokens.extend(piece)
        text += piece
        index.update()
        num_dropped = int(share * len(text))
        index.drop_first(num_dropped)
        dropped, text = text[:num_dropped], text[num_dropped:]
        assert len(index) == len(text)
        for last in (dropped[-max_match:], dropped[:max_match], piece[:max_match]):
            assert index.find(encode(last), 3) == naive_search(text, last, 3)


@settings(max_examples=settings().max_examples // 4)
@given(seed=st.integers(0, 1000), vocabulary=st.sampled_from([2, 30, 248_000, 1 << 31]))
def test_tokens_one_by_one_are_indexed_as_together(seed: int, vocabulary: int) -> None:
    text = random.Random(seed).choices(range(vocabulary), k=500)
    text += text[100:200] + text[50:150]
    single, together = TokenBuffer(), TokenBuffer(text)
    one_by_one = SuffixIndex(single)
    for token in text:
        single.append(token)
        one_by_one.update()
    index = SuffixIndex(together)
    for end in range(MIN_MATCH_TOKENS, len(text)):
        last = encode(text[max(end - 20, 0) : end])
        assert one_by_one.find(last, 8) == index.find(last, 8)
        assert index.find(last, 8).num_tokens >= MIN_MATCH_TOKENS


def test_long_matches_are_found_beside_frequent_short_ones() -> None:
    frequent = [1, 2, 3]
    text = [9, 8, 7, *frequent, 4, 5] + [token for other in range(10, 10 + MAX_OCCURRENCES) for token in (
        *frequent, other)]  # fmt: skip
    index = SuffixIndex(TokenBuffer(text))
    # The oldest occurrence is one too many for its last three tokens; one token more tells it from the others.
    assert index.find(encode([9, 8, 7, *frequent]), 2).num_tokens == MIN_MATCH_TOKENS
    assert index.find(encode([9, 8, 7, *frequent, 4]), 1) == Match(7, [encode([5])])


@pytest.mark.parametrize("vocabulary", [1, 2, 100_000])
def test_memory_is_bounded_by_the_tokens_left(vocabulary: int) -> None:
    rng, tokens = random.Random(0), TokenBuffer()
    index = SuffixIndex(tokens)
    for _ in range(200):
        tokens.extend(rng.choices(range(vocabulary), k=1000))
        index.update()
        index.drop_first(max(len(index) - 5000, 0))
    assert len(index) == 5000
    assert decode(tokens.slice(len(tokens) - 3, len(tokens)))
    assert index.num_bytes <= 60 * 5000
