"""Records hits: in the snapshots on a path, and, without snapshots, in its runs."""

from collections.abc import Iterator

from strandline.cache.lease import Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.tree import Run, Snapshot, children_with_prefix, snapshot_above
from strandline.cache.use import Use, UseHistory
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES


def record_hit(lease: Lease, source: Snapshot, memory: CacheMemory, reuse: UseHistory) -> None:
    """Record that a lease resumes from ``source``.

    A hit also counts as a use of the shared prefixes above the source. Otherwise a larger cache, which hits deeper,
    would evict those prefixes and hit less. The return of a path does not make its prefixes shared; it supersedes the
    snapshots at the end of the previous turn and at the end of its prompt, from which the path does not continue
    again. A snapshot at the end of a prompt counts as ``PROMPT_END``, whatever it was taken for.

    A rung from which a prompt resumes is a stand-in if the prompt matches deeper: it is not shared then, since the
    prompt leaves a snapshot at the branch point. Otherwise a probe is the snapshot at a branch point from now on.
    """
    tick = memory.next_tick()
    is_return = lease.is_return
    is_probe = source.kind is SnapshotKind.PROBE
    is_rung = is_probe or source.kind is SnapshotKind.LADDER
    is_stand_in = is_rung and source.position < lease.account.kv_tokens
    if is_probe and not is_stand_in:
        source.kind = SnapshotKind.BRANCH
    if not is_return and not is_probe:
        reuse.count_hit(source.num_continuations)
    if source.position == len(lease.tokens):
        source.record_prompt_end()
    elif is_return:
        for previous in (source, snapshot_above(source)):
            if previous is not None:
                previous.is_superseded = True
    for snapshot in (source, *_branch_snapshots(lease.run, lease.tokens.data)):
        is_source = snapshot is source
        is_return_here = is_return or (is_source and is_stand_in)
        snapshot.record_hit(tick, reuse.now, is_source=is_source, is_return=is_return_here)


def record_use(lease: Lease, copied_run: Run | None, memory: CacheMemory, reuse: UseHistory) -> None:
    """Record that a lease uses the blocks of its path, and part of a block of ``copied_run``.

    This counts as a use of the whole path, which the return of a path does not make shared.
    """
    memory.touch(lease.run, copied_run)
    for run in lease.run.ancestry():
        run.use = run.use.next(reuse.now)
        run.is_shared |= not lease.is_return
    if copied_run is not None:
        copied_run.use = copied_run.use.next(reuse.now)


def record_departure(lease: Lease, reuse: UseHistory) -> None:
    """Record that a lease leaves the blocks of its path; what several paths share is used when they begin alone."""
    for run in (lease.tail, *lease.run.ancestry()):
        if run is not None and not run.is_shared:
            run.use = Use(reuse.now, lease.interarrival_bin)


def _branch_snapshots(run: Run, data: bytearray) -> Iterator[Snapshot]:
    """Yield the deepest snapshot before each branch of the path to the end of ``run``, deepest first."""
    for node in run.ancestry():
        if len(node.child_keys) > 1 and (snapshot := _before_branch(node, data)) is not None:
            yield snapshot


def _before_branch(run: Run, data: bytearray) -> Snapshot | None:
    """Return a run's deepest snapshot on the path of the data that several of its children continue."""
    offset = run.end_block * BLOCK_KEY_BYTES
    after = bytes(data[offset : offset + BLOCK_KEY_BYTES - TOKEN_BYTES])
    for snapshot in run.snapshots_in(run.end_block, after):
        if len(children_with_prefix(run, snapshot.key[1])) > 1:
            return snapshot
    num_own = run.num_own_snapshots
    return run.snapshots[run.keys[num_own - 1]] if num_own else None
