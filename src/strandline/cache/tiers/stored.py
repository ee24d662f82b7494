"""What tiers below the device have of the index: columns of its runs, and *demoted* runs, which the device lacks.

What the device has is the beginning of every path: demoted runs follow it, and nothing that it has follows them. Their
blocks are null blocks. The core imports none of this; it moves it with the runs (``Stored`` in ``tree.py``).
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain
from typing import Any

from strandline.cache.tree import Run, SnapshotKey
from strandline.cache.walk import common_blocks, descend
from strandline.errors import CacheInvariantError
from strandline.ids import NULL_BLOCK
from strandline.records.tokens import BLOCK_KEY_BYTES


class StoredRun:
    """What tiers have of a run and after it. Implements ``Stored``."""

    __slots__ = ("addresses", "demoted", "keys", "snapshots")

    def __init__(self, addresses: "list[array[int]]") -> None:
        self.addresses = addresses
        """By tier: those of the blocks that it has, which are the first ones."""
        self.snapshots: dict[SnapshotKey, Any] = {}
        self.keys: list[SnapshotKey] = []
        """The keys of ``snapshots``, sorted."""
        self.demoted: dict[bytes, Run] = {}
        """Continuations of the run that the device does not have, by their first blocks."""

    @property
    def has_demoted(self) -> bool:
        return bool(self.demoted)

    def split(self, upper: Run, count: int) -> "StoredRun":
        first = StoredRun([addresses[:count] for addresses in self.addresses])
        self.addresses = [addresses[count:] for addresses in self.addresses]
        num_upper = bisect_left(self.keys, (upper.start_block + count + 1, b""))
        first.keys, self.keys = self.keys[:num_upper], self.keys[num_upper:]
        first.snapshots = {key: self.snapshots.pop(key) for key in first.keys}
        first.belong_to(upper)
        return first

    def take_out(self, key: bytes) -> Run | None:
        run = self.demoted.pop(key[:BLOCK_KEY_BYTES], None)
        if run is not None:
            num_blocks = min(len(key), len(run.tokens)) // BLOCK_KEY_BYTES
            cut_demoted(run, common_blocks(run.tokens, key, 0, num_blocks + 1))
        return run

    def join(self, run: Run, lower: Run) -> None:
        if len(run.hashes) == run.end_block - run.start_block:
            run.hashes += lower.hashes
        run.num_announced += lower.num_announced
        stored = stored_for(lower, len(self.addresses))
        for addresses, more in zip(self.addresses, stored.addresses, strict=True):
            addresses.extend(more)
        self.keys += stored.keys
        self.snapshots |= stored.snapshots
        self.demoted = stored.demoted
        self.belong_to(run)

    def belong_to(self, run: Run) -> None:
        """Link the snapshots and the demoted continuations to a run."""
        for snapshot in self.snapshots.values():
            snapshot.home = run
        for child in self.demoted.values():
            child.parent = run


def stored_of(run: Run) -> StoredRun | None:
    """Return what tiers have of a run and after it, or None."""
    stored = run.stored
    return stored if isinstance(stored, StoredRun) else None


def stored_for(run: Run, num_tiers: int) -> StoredRun:
    """Return what tiers have of a run and after it; enter that they will have something, if they have not."""
    stored = stored_of(run)
    if stored is None:
        stored = run.stored = StoredRun([array("q") for _ in range(num_tiers)])
    return stored


def stored_keys(run: Run) -> list[SnapshotKey]:
    """Return the keys of the snapshots of a run that tiers have, sorted."""
    stored = stored_of(run)
    return [] if stored is None else stored.keys


def demoted_after(run: Run) -> dict[bytes, Run]:
    """Return the continuations of a run that the device does not have, by their first blocks."""
    stored = stored_of(run)
    return {} if stored is None else stored.demoted


def demoted_run(parent: Run, start_block: int, tokens: bytes) -> Run:
    """Return a run that the device does not have."""
    return Run(parent, start_block, tokens, array("i", [NULL_BLOCK]) * (len(tokens) // BLOCK_KEY_BYTES))


def is_on_device(run: Run) -> bool:
    """Return whether the device has the blocks of a run; otherwise tiers alone do."""
    return run.parent is None or run.blocks[0] != NULL_BLOCK


def continuations(run: Run) -> Iterator[Run]:
    """Yield the runs after a run, on the device or not."""
    return chain(run.children.values(), demoted_after(run).values())


def descend_below(root: Run, data: bytes | bytearray, num_blocks: int) -> tuple[Run, int]:
    """Follow a path as ``descend`` does, and on where the device ends and tiers have more of it."""
    run, depth = descend(root, data, num_blocks)
    while run.end_block == depth < num_blocks:
        start = depth * BLOCK_KEY_BYTES
        child = demoted_after(run).get(bytes(data[start : start + BLOCK_KEY_BYTES]))
        if child is None:
            break
        most = min(child.end_block, num_blocks) - depth
        run, depth = child, depth + common_blocks(child.tokens, data, start, most + 1)
    return run, depth


def cut_demoted(run: Run, count: int) -> None:
    """Give what a demoted run has after its first ``count`` blocks to a demoted run after it, if there is anything."""
    if count < len(run.blocks):
        cut_off(run, count)
        del run.blocks[count:], run.tokens[count * BLOCK_KEY_BYTES :]


def cut_off(run: Run, count: int) -> Run:
    """Give what tiers have of a run after its first ``count`` blocks to a new demoted run; leave its tokens and blocks.

    Args:
        run: one without children on the device.
    """
    stored = stored_of(run)
    if stored is None or run.parent is None:
        raise CacheInvariantError(f"tiers have nothing of blocks [{run.start_block}, {run.end_block})")
    parent, at_block = run if count else run.parent, run.start_block + count
    lower = demoted_run(parent, at_block, bytes(run.tokens[count * BLOCK_KEY_BYTES :]))
    lower.hashes, run.hashes = run.hashes[count:], run.hashes[:count]
    lower.num_announced = max(run.num_announced - count, 0)
    run.num_announced -= lower.num_announced
    lower.stored, run.stored = stored, stored.split(run, count)
    stored.belong_to(lower)
    stored_for(parent, len(stored.addresses)).demoted[lower.first_key] = lower
    return lower
