"""Hashes that name prefixes in events: the same in every process, and not computable without the prompt's salt.

With ``‖`` for concatenation and tokens as big-endian integers of four bytes:

- the root of a salt: ``sha256("strandline\\0" ‖ salt in UTF-8)``; prompts without a salt have the empty one;
- a block of 64 tokens: ``sha256(0x00 ‖ hash before it ‖ its tokens)``; the hash before the first block is the root;
- a snapshot: ``sha256(0x01 ‖ hash before its last block ‖ the 1 to 64 tokens from there)``.

A snapshot's hash differs from that of the block that ends at the same position.
"""

from functools import lru_cache
from hashlib import sha256, shake_256
from typing import Final

from strandline.ids import BLOCK_TOKENS
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

ROOT_PREFIX: Final = b"strandline\0"
BLOCK_PREFIX: Final = b"\0"
SNAPSHOT_PREFIX: Final = b"\1"
FIRST_BITS_CLEARED: Final = bytes(byte & 0x7F for byte in range(256))


@lru_cache(maxsize=4096)
def root_hash(salt: str) -> bytes:
    """Return the hash of the empty prefix under a salt."""
    return sha256(ROOT_PREFIX + salt.encode(errors="surrogatepass")).digest()


def block_hashes(before: bytes, data: bytes | bytearray) -> list[bytes]:
    """Return the hashes of the whole blocks of ``data``, encoded tokens that follow the prefix hashed ``before``."""
    hashes = list[bytes]()
    for end in range(BLOCK_KEY_BYTES, len(data) + 1, BLOCK_KEY_BYTES):
        before = sha256(BLOCK_PREFIX + before + data[end - BLOCK_KEY_BYTES : end]).digest()
        hashes.append(before)
    return hashes


def snapshot_hash(before: bytes, tokens: bytes | bytearray) -> bytes:
    """Return the hash of a snapshot.

    Args:
        before: hash of the ``num_blocks_before(position)`` blocks before it.
        tokens: the encoded ones from there to its position.
    """
    return sha256(SNAPSHOT_PREFIX + before + tokens).digest()


def num_blocks_before(position: int) -> int:
    """Return the number of whole blocks before the last token of the first ``position`` tokens."""
    return (position - 1) // BLOCK_TOKENS


def masked_tokens(path_hash: bytes, num_tokens: int) -> bytes:
    """Return encoded tokens that stand for those of a salted prompt in events: drawn from the hash, below 2**31."""
    drawn = bytearray(shake_256(path_hash).digest(num_tokens * TOKEN_BYTES))
    drawn[::TOKEN_BYTES] = drawn[::TOKEN_BYTES].translate(FIRST_BITS_CLEARED)
    return bytes(drawn)
