"""Tokens as bytes: exact both ways, ordered as the tokens are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.records.tokens import TokenBuffer, common_tokens, decode, encode

TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), max_size=40)
SMALL = st.lists(st.integers(0, 1), max_size=12)


@given(TOKENS)
def test_decode_inverts_encode(tokens: list[int]) -> None:
    assert decode(encode(tokens)) == tokens


@given(TOKENS, TOKENS)
def test_keys_sort_as_their_tokens_do(left: list[int], right: list[int]) -> None:
    assert (encode(left) < encode(right)) == (left < right)


@given(SMALL, SMALL)
def test_common_tokens_counts_whole_tokens(left: list[int], right: list[int]) -> None:
    count = common_tokens(encode(left), encode(right))
    assert left[:count] == right[:count]
    assert count == min(len(left), len(right)) or left[count] != right[count]


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_common_tokens_of_long_keys(place: int, left: int, right: int) -> None:
    tokens = list(range(max(left, right)))
    edited = [*tokens[:place], *(token + 2**24 for token in tokens[place:])]
    expected = min(left, right, place)
    assert common_tokens(encode(tokens[:left]), encode(edited[:right])) == expected


def test_common_tokens_sees_a_difference_in_the_last_byte() -> None:
    assert common_tokens(encode([1, 256]), encode([1, 257])) == 1
    assert common_tokens(encode([1, 2**31]), encode([1, 0])) == 1


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_that_needs_more_than_32_bits_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        encode([token])
    with pytest.raises(OverflowError):
        TokenBuffer().append(token)


@given(TOKENS, st.integers(0, 50), st.integers(0, 50))
def test_buffer_grows_and_slices_like_a_list(tokens: list[int], start: int, end: int) -> None:
    buffer = TokenBuffer(tokens[:5])
    for token in tokens[5:]:
        buffer.append(token)
    assert len(buffer) == len(tokens)
    assert decode(buffer.slice(start, end)) == tokens[start:end]
