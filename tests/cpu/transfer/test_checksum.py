"""Checksums of pieces and of wholes agree, and tell any change."""

from hypothesis import given
from hypothesis import strategies as st

from strandline.transfer.checksum import Checksum, checksum


@given(st.lists(st.binary(max_size=600), max_size=4))
def test_pieces_have_the_checksum_of_the_whole(pieces: list[bytes]) -> None:
    hasher = Checksum()
    for piece in pieces:
        hasher.add(memoryview(piece))
    assert hasher.value == checksum(bytearray(b"".join(pieces)))


@given(st.binary(min_size=1, max_size=2000), st.binary(max_size=50), st.data())
def test_changed_bytes_have_another_checksum(first: bytes, second: bytes, data: st.DataObject) -> None:
    expected = checksum(second, checksum(first))
    index = data.draw(st.integers(0, len(first) + len(second) - 1))
    changed = bytearray(first + second)
    changed[index] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(changed[len(first) :], checksum(changed[: len(first)])) != expected
