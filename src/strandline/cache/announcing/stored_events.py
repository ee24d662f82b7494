"""Builds the events of what is stored, on the device or below it."""

from collections.abc import Iterator, Sequence
from typing import Final

from strandline.ids import BLOCK_TOKENS
from strandline.records.cache_events import BlocksStored, SnapshotStored
from strandline.records.path_hashes import masked_tokens, num_blocks_before, snapshot_hash
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

MAX_EVENT_BLOCKS: Final = 128
"""Most blocks in an event, so that encoding one holds Python's lock for less than a millisecond."""


def blocks_stored(hashes: Sequence[bytes], before: bytes | None, tokens: bytes, salt: str) -> Iterator[BlocksStored]:
    """Yield the events of consecutive blocks.

    Args:
        before: the hash of the block before them; None: they begin a path.
        tokens: those of the blocks, encoded.
    """
    if salt:
        tokens = b"".join([masked_tokens(path_hash, BLOCK_TOKENS) for path_hash in hashes])
    for start in range(0, len(hashes), MAX_EVENT_BLOCKS):
        end = start + MAX_EVENT_BLOCKS
        part = tuple(hashes[start:end])
        yield BlocksStored(part, before, tokens[start * BLOCK_KEY_BYTES : end * BLOCK_KEY_BYTES])
        before = part[-1]


def snapshot_stored(before: bytes, tokens: bytes, position: int, salt: str) -> SnapshotStored:
    """Return the event of a snapshot.

    Args:
        before: the hash of the ``num_blocks_before(position)`` blocks before it, or the root's.
        tokens: the encoded ones from there to its position.
    """
    path_hash = snapshot_hash(before, tokens)
    shown = masked_tokens(path_hash, len(tokens) // TOKEN_BYTES) if salt else tokens
    return SnapshotStored(path_hash, position, before if num_blocks_before(position) else None, shown)
