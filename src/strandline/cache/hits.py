"""What a hit says about the snapshots on its path: the one that was resumed from, and those above it."""

from strandline.cache.account import SnapshotKind
from strandline.cache.lease import Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.reuse import NO_HABIT, ReuseHistory, habit_after
from strandline.cache.tree import Snapshot, num_continuations, snapshot_above
from strandline.cache.walk import branch_snapshots


def record_hit(lease: Lease, source: Snapshot, memory: CacheMemory, reuse: ReuseHistory) -> None:
    """Count the hit as a use also of what it shares with others, though it lies above what was hit.

    Else a larger cache, which hits deeper, would forget the prefixes that many share, and hit less. A path that
    comes back shares nothing by that; it will not go on again from where its last turn ended, or its prompt did.
    Whatever the snapshot was taken for, a prompt that it is the whole of ends there, and goes on from there.
    """
    tick = memory.next_tick()
    is_return = lease.habit != NO_HABIT
    if not is_return:
        reuse.count_hit(num_continuations(source))
    if source.position == len(lease.tokens):
        if source.kind is not SnapshotKind.PREEMPTION:
            source.kind, source.is_passed = SnapshotKind.PROMPT_END, False
    elif is_return:
        for passed in (source, snapshot_above(source)):
            if passed is not None:
                passed.is_passed = True
    for snapshot in (source, *branch_snapshots(lease.run, lease.tokens.data)):
        snapshot.is_shared |= not is_return
        if snapshot.last_used != tick and (snapshot is source or snapshot.is_shared):
            snapshot.habit = habit_after(reuse.now - snapshot.used_at)
            snapshot.used_at = reuse.now
        snapshot.last_used = tick
