"""Lookups in the prefix tree: how far it matches a prompt, and the snapshots on that path. Changes nothing.

A walk compares one run at a time (one ``memcmp``), so its cost depends on the branches of the path, not on its length.
"""

from bisect import bisect_left
from typing import NamedTuple

from strandline.cache.tree import Run, Snapshot, deepest_snapshot_on
from strandline.ids import BLOCK_TOKENS
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, common_tokens


class PathEnd(NamedTuple):
    """The end of a path of whole blocks."""

    run: Run
    """The one with the last block, or the root."""
    depth: int
    """The number of blocks."""


class Walk(NamedTuple):
    """The longest match of a prompt in a tree."""

    run: Run
    """The deepest run with at least one matching whole block, or the root."""
    num_blocks: int
    """Whole blocks that match, from the root."""
    partial_run: Run | None
    """The run whose next block matches only in its first ``partial_tokens`` tokens."""
    partial_tokens: int
    deeper: PathEnd | None = None
    """The end of the whole blocks that match, if tiers below the device have more of them; None: they have not."""

    @property
    def last(self) -> PathEnd:
        """The end of the whole blocks that match, on the device or below it."""
        return self.deeper or PathEnd(self.run, self.num_blocks)

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * BLOCK_TOKENS + self.partial_tokens


def walk(root: Run, data: bytearray) -> Walk:
    """Match ``data`` against the tree as far as keys and values are cached, and on below. Changes nothing."""
    run, num_blocks = descend(root, data, len(data) // BLOCK_KEY_BYTES)
    asked = bytes(data[num_blocks * BLOCK_KEY_BYTES : (num_blocks + 1) * BLOCK_KEY_BYTES])
    if num_blocks == run.end_block:
        end = _end_between_runs(run, asked)
        if run.stored is None or asked not in run.stored.demoted:
            return end
        return end._replace(deeper=descend_below(run, num_blocks, data, len(data) // BLOCK_KEY_BYTES))
    own = num_blocks - run.start_block
    known = bytes(run.tokens[own * BLOCK_KEY_BYTES : (own + 1) * BLOCK_KEY_BYTES])
    tokens = common_tokens(known, asked)
    return Walk(run, num_blocks, run if tokens else None, tokens)


def descend(root: Run, data: bytes | bytearray, num_blocks: int) -> tuple[Run, int]:
    """Follow a path for up to ``num_blocks`` blocks; return the run with the last that is there, and how many are."""
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


def descend_below(run: Run, depth: int, data: bytes | bytearray, num_blocks: int) -> PathEnd:
    """Follow a path on from where ``descend`` has ended, in what only tiers below the device have."""
    while run.stored is not None and run.end_block == depth < num_blocks:
        start = depth * BLOCK_KEY_BYTES
        child = run.stored.demoted.get(bytes(data[start : start + BLOCK_KEY_BYTES]))
        if child is None:
            break
        most = min(child.end_block, num_blocks) - depth
        run, depth = child, depth + common_blocks(child.tokens, data, start, most + 1)
    return PathEnd(run, depth)


def _end_between_runs(run: Run, key: bytes) -> Walk:
    best_key, best_tokens = None, 0
    index = bisect_left(run.child_keys, key)
    for neighbour in run.child_keys[max(index - 1, 0) : index + 1]:
        tokens = common_tokens(neighbour, key)
        if tokens > best_tokens:
            best_key, best_tokens = neighbour, tokens
    partial = run.children[best_key] if best_key is not None else None
    return Walk(run, run.end_block, partial, best_tokens)


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


def deepest_snapshot(end: Walk, data: bytearray) -> Snapshot | None:
    """Return the deepest snapshot on the walked path, or None. Changes nothing."""
    partial = data[end.num_blocks * BLOCK_KEY_BYTES : end.kv_tokens * TOKEN_BYTES]
    return deepest_snapshot_on(end.run, end.num_blocks, bytes(partial))
