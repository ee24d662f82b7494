"""Trees of paths: what the device's index and the tree of the tiers below it have in common.

A *run* is a sequence of 64-token blocks without a branch. Its children begin where it ends, each with a different first
block. A snapshot belongs to the run with the last whole block before its position, or to the root, and is keyed by the
number of whole blocks before it and the tokens after these, fewer than 64.

A descent compares one run at a time (one ``memcmp``), so its cost depends on the branches of a path, not on its length.

Source: radix trees as in SGLang's RadixAttention; the runs-of-blocks form and the snapshots' keys are our own.
"""

from bisect import bisect_left
from typing import Any, Protocol, Self, TypeVar

from strandline.ids import BLOCK_TOKENS
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

SnapshotKey = tuple[int, bytes]
"""The number of whole blocks before a snapshot, and the tokens from there to its position, encoded."""


class PathRun(Protocol):
    """A run of a tree."""

    parent: Self | None
    start_block: int
    tokens: bytearray
    children: dict[bytes, Self]
    snapshots: dict[SnapshotKey, Any]
    keys: list[SnapshotKey]
    hashes: list[bytes]

    @property
    def end_block(self) -> int: ...

    @property
    def first_key(self) -> bytes: ...


Run_t = TypeVar("Run_t", bound=PathRun)


def position_of(key: SnapshotKey) -> int:
    """Return the position of a snapshot."""
    num_blocks, rest = key
    return num_blocks * BLOCK_TOKENS + len(rest) // TOKEN_BYTES


def descend(root: Run_t, data: bytes | bytearray, num_blocks: int) -> tuple[Run_t, int]:
    """Follow a path of encoded tokens for up to ``num_blocks`` blocks, as far as it is there.

    Returns:
        The run with the last block that is there, or the root, and the number of blocks.
    """
    run, depth = root, 0
    while depth < num_blocks:
        start = depth * BLOCK_KEY_BYTES
        child = run.children.get(bytes(data[start : start + BLOCK_KEY_BYTES]))
        if child is None:
            break
        run, depth = child, child.end_block
        if depth > num_blocks or not data.startswith(child.tokens, start):
            most = min(depth, num_blocks) - run.start_block
            return run, run.start_block + common_blocks(run.tokens, data, start, most + 1)
    return run, depth


def common_blocks(tokens: bytearray, data: bytes | bytearray, offset: int, end: int) -> int:
    """Return how many blocks of a run match ``data`` from ``offset`` on: at least one does, and fewer than ``end``."""
    low, high = 1, end
    with memoryview(tokens) as mine:
        while high - low > 1:
            middle = (low + high) // 2
            piece = mine[low * BLOCK_KEY_BYTES : middle * BLOCK_KEY_BYTES]
            if data.startswith(piece, offset + low * BLOCK_KEY_BYTES):
                low = middle
            else:
                high = middle
            piece.release()
    return low


def insert_above(upper: Run_t, run: Run_t, count: int) -> None:
    """Split a run: its first ``count`` blocks go to ``upper``, a new run that takes its place and becomes its parent.

    Snapshots go to the part that they belong to now. The lower part keeps the run's identity.
    """
    parent, size = run.parent, count * BLOCK_KEY_BYTES
    upper.tokens, run.tokens = run.tokens[:size], run.tokens[size:]
    upper.hashes, run.hashes = run.hashes[:count], run.hashes[count:]
    if parent is not None:
        parent.children[upper.first_key] = upper
    run.parent = upper
    run.start_block += count
    upper.children[run.first_key] = run
    num_upper = bisect_left(run.keys, (run.start_block + 1, b""))
    upper.keys, run.keys = run.keys[:num_upper], run.keys[num_upper:]
    for key in upper.keys:
        snapshot = upper.snapshots[key] = run.snapshots.pop(key)
        snapshot.home = upper
