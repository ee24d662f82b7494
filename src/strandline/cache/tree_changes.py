"""Changes of the prefix tree: runs are split, linked and removed; snapshots are attached and detached."""

from bisect import bisect_left, insort
from typing import TypeVar

from strandline.cache.tree import Home, Run, Snapshot
from strandline.errors import CacheInvariantError
from strandline.records.tokens import BLOCK_KEY_BYTES

Key = TypeVar("Key")
Value = TypeVar("Value")

MAX_GHOSTS = 64
"""Evicted children, and evicted snapshots, that a run remembers to explain misses."""


def split(run: Run, at_block: int) -> Run:
    """Split a run before its block ``at_block`` (counted from the root) and return the upper part.

    The lower part keeps the run's identity, so that children, leases and snapshots below stay valid.
    """
    count = at_block - run.start_block
    if not 0 < count < len(run.blocks) or run.parent is None:
        raise CacheInvariantError(f"cannot split blocks [{run.start_block}, {run.end_block}) at {at_block}")
    parent, size = run.parent, count * BLOCK_KEY_BYTES
    upper = Run(parent, run.start_block, bytes(run.tokens[:size]), run.blocks[:count])
    del run.blocks[:count], run.tokens[:size]
    upper.hashes, run.hashes = run.hashes[:count], run.hashes[count:]
    run.parent, run.start_block = upper, at_block
    parent.children[upper.first_key] = upper
    upper.children[run.first_key] = run
    upper.child_keys.append(run.first_key)
    num_upper = bisect_left(run.keys, (at_block + 1, b""))
    upper.keys, run.keys = run.keys[:num_upper], run.keys[num_upper:]
    for key in upper.keys:
        snapshot = upper.snapshots[key] = run.snapshots.pop(key)
        snapshot.home = upper
    if run.stored is not None:
        upper.stored = run.stored.split(upper, count)
    upper.num_announced = min(run.num_announced, count)
    run.num_announced -= upper.num_announced
    upper.num_users = run.num_users
    upper.last_tick, upper.use, upper.is_shared = run.last_tick, run.use, run.is_shared
    for ghost in [ghost for ghost in run.evicted_snapshots if ghost[0] <= at_block]:
        del run.evicted_snapshots[ghost]
        upper.evicted_snapshots[ghost] = None
    return upper


def attach_snapshot(snapshot: Snapshot, home: Home) -> None:
    """Attach a snapshot to the tree."""
    run, key = home
    snapshot.home, snapshot.key, snapshot.is_attached = run, key, True
    run.snapshots[key] = snapshot
    insort(run.keys, key)
    run.evicted_snapshots.pop(key, None)


def detach_snapshot(snapshot: Snapshot) -> None:
    """Detach a snapshot from the tree; its run remembers the key, to explain misses."""
    run, key = snapshot.home, snapshot.key
    del run.snapshots[key], run.keys[bisect_left(run.keys, key)]
    snapshot.is_attached = False
    _remember(run.evicted_snapshots, key, None)


def add_child(parent: Run, child: Run) -> None:
    """Link a child; no other child of the parent may have its first block."""
    key = child.first_key
    if key in parent.children or parent.is_tail:
        raise CacheInvariantError(f"a run at block {child.start_block} collides with its sibling or has no parent")
    parent.children[key] = child
    insort(parent.child_keys, key)
    parent.evicted_children.pop(hash(key), None)


def remove_child(child: Run, *, ghost_tokens: int) -> None:
    """Unlink a childless run; its parent remembers that ``ghost_tokens`` tokens were cached there, unless 0."""
    parent = child.parent
    if parent is None or child.children or child.keys:
        raise CacheInvariantError(f"the run at block {child.start_block} still carries children or snapshots")
    key = child.first_key
    del parent.children[key]
    del parent.child_keys[bisect_left(parent.child_keys, key)]
    child.parent = None
    child.replacement = parent
    parent.num_waiters += child.num_waiters
    parent.last_tick = max(parent.last_tick, child.last_tick)
    if ghost_tokens and not child.is_tail:
        _remember(parent.evicted_children, hash(key), ghost_tokens + max(child.evicted_children.values(), default=0))


def _remember(ghosts: dict[Key, Value], key: Key, value: Value) -> None:
    ghosts[key] = value
    if len(ghosts) > MAX_GHOSTS:
        del ghosts[next(iter(ghosts))]
