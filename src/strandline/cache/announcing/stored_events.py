"""Builds the events of what is stored, on the device or below it."""

from collections.abc import Iterator, Sequence
from typing import Final

from strandline.cache.tree import Run, SnapshotKey, position_of
from strandline.ids import BLOCK_TOKENS
from strandline.records.cache_events import BlocksStored, SnapshotStored
from strandline.records.path_hashes import block_hashes, masked_tokens, num_blocks_before, root_hash, snapshot_hash
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

MAX_EVENT_BLOCKS: Final = 128
"""Most blocks in an event, so that encoding one holds Python's lock for less than a millisecond."""


def hash_after(run: Run, num_blocks: int, salt: str) -> bytes:
    """Return the hash of the first blocks of the path that ends with ``run``; record those on the way."""
    while run.parent is not None and num_blocks <= run.start_block:
        run = run.parent
    unhashed = list[tuple[Run, int]]()
    while run.parent is not None and len(run.hashes) < num_blocks - run.start_block:
        unhashed.append((run, num_blocks - run.start_block))
        run, num_blocks = run.parent, run.start_block
    path_hash = root_hash(salt) if run.parent is None else run.hashes[num_blocks - run.start_block - 1]
    for node, end in reversed(unhashed):
        if node.hashes:
            path_hash = node.hashes[-1]
        new = node.tokens[len(node.hashes) * BLOCK_KEY_BYTES : end * BLOCK_KEY_BYTES]
        node.hashes.extend(block_hashes(path_hash, new))
        path_hash = node.hashes[-1]
    return path_hash


def path_stored(parts: Sequence[tuple[Run, int, int]], salt: str) -> Iterator[BlocksStored]:
    """Yield the events of consecutive blocks.

    Args:
        parts: consecutive runs, the hashes of whose blocks are recorded, each with the range of its blocks.
    """
    if not parts:
        return
    highest, first, _ = parts[0]
    num_before = highest.start_block + first
    hashes = tuple(path_hash for run, start, end in parts for path_hash in run.hashes[start:end])
    tokens = b"".join(run.tokens[start * BLOCK_KEY_BYTES : end * BLOCK_KEY_BYTES] for run, start, end in parts)
    before = hash_after(highest, num_before, salt) if num_before else None
    yield from blocks_stored(hashes, before, tokens, salt)


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


def snapshot_stored(run: Run, key: SnapshotKey, salt: str) -> SnapshotStored:
    """Return the event of a snapshot.

    Args:
        run: the one that it belongs to.
    """
    num_blocks, tokens = key
    position = position_of(key)
    num_before = num_blocks_before(position)
    if num_before < num_blocks:
        start = (num_before - run.start_block) * BLOCK_KEY_BYTES
        tokens = bytes(run.tokens[start : start + BLOCK_KEY_BYTES])
    before = hash_after(run, num_before, salt)
    path_hash = snapshot_hash(before, tokens)
    shown = masked_tokens(path_hash, len(tokens) // TOKEN_BYTES) if salt else tokens
    return SnapshotStored(path_hash, position, before if num_before else None, shown)
