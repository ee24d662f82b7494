"""What a hit says about the snapshots on its path: the one that was resumed from, and those above it."""

from strandline.cache.lease import Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.reuse import ReuseHistory
from strandline.cache.tree import Snapshot, num_continuations, snapshot_above
from strandline.cache.use import NO_INTERARRIVAL
from strandline.cache.walk import branch_snapshots


def record_hit(lease: Lease, source: Snapshot, memory: CacheMemory, reuse: ReuseHistory) -> None:
    """Count the hit as a use also of what it shares with others, though it lies above what was hit.

    Else a larger cache, which hits deeper, would forget the prefixes that many share, and hit less. A path that
    comes back shares nothing by that; it will not go on again from where its last turn ended, or its prompt did.
    Whatever the snapshot was taken for, a prompt that it is the whole of ends there, and goes on from there.
    """
    tick = memory.next_tick()
    is_return = lease.interarrival_bin != NO_INTERARRIVAL
    if not is_return:
        reuse.count_hit(num_continuations(source))
    if source.position == len(lease.tokens):
        source.record_prompt_end()
    elif is_return:
        for passed in (source, snapshot_above(source)):
            if passed is not None:
                passed.is_passed = True
    for snapshot in (source, *branch_snapshots(lease.run, lease.tokens.data)):
        snapshot.record_hit(tick, reuse.now, is_source=snapshot is source, is_return=is_return)
