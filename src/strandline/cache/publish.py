"""Publication: a lease's full blocks, the beginning of its next block, and its snapshots enter the index.

Blocks are published once. Where another request has published the same tokens, the lease adopts those blocks and
frees its own copies.
"""

from array import array
from collections.abc import Callable, Iterable

from strandline.cache.counters import CacheCounters
from strandline.cache.lease import Cut, Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.probation import Probation
from strandline.cache.tree import (
    Home,
    Run,
    Snapshot,
    child_with_prefix,
    find_home,
    tail_that_begins,
)
from strandline.cache.tree_changes import add_child, attach_snapshot, remove_child, split
from strandline.cache.use import Use, UseHistory
from strandline.cache.walk import common_blocks
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES


class Publisher:
    """Writes leases' blocks and snapshots into the index."""

    def __init__(
        self,
        memory: CacheMemory,
        reuse: UseHistory,
        counters: CacheCounters,
        leases: Callable[[], Iterable[Lease]],
    ) -> None:
        self._memory = memory
        self.reuse = reuse
        self._counters = counters
        self._leases = leases
        self.probation = Probation(memory)

    def may_probe(self, lease: Lease) -> bool:
        """Whether a lease may leave a probe: it continues no path, and the memory is large enough for probes."""
        return not lease.is_return and self.probation.max_probes > 0

    def publish_blocks(self, lease: Lease) -> None:
        """Publish the lease's full blocks; adopt those that the index already has."""
        end = min(lease.computed, lease.shared_end) // BLOCK_TOKENS
        while lease.num_published < end:
            first = lease.num_published
            key = lease.tokens.slice(first * BLOCK_TOKENS, end * BLOCK_TOKENS)
            existing = lease.run.children.get(key[:BLOCK_KEY_BYTES])
            if existing is not None:
                self._adopt(lease, existing, key)
            else:
                self._append(lease, key, lease.table[first:end])

    def _append(self, lease: Lease, key: bytes, blocks: "array[int]") -> None:
        """Add blocks after the lease's run: to the run itself when nothing else continues it, else as a child.

        If tiers have some of these blocks already, adds as many as are in one run there.
        """
        run, first_key = lease.run, key[:BLOCK_KEY_BYTES]
        returning = None if run.stored is None else run.stored.take_out(key)
        if returning is not None:
            key, blocks = bytes(returning.tokens), blocks[: returning.end_block - run.end_block]
        has_rivals = len(run.children) > (tail_that_begins(run, first_key) is not None)
        has_rivals |= run.stored is not None and bool(run.stored.demoted)
        if run.parent is None or run.num_users > 1 or has_rivals:
            run = lease.run = self._add_child(run, returning or Run(run, run.end_block, key, blocks), blocks)
        else:
            if run.stored is not None and returning is not None:
                run.stored.join(run, returning)
            run.append(key, blocks)
            self._subsume_tail(run, first_key, blocks[0])
        self._memory.own(run, blocks)
        if self._memory.announcer is not None:
            self._memory.announcer.store_blocks(run, lease.salt)
        lease.num_published += len(blocks)

    def _add_child(self, run: Run, child: Run, blocks: "array[int]") -> Run:
        """Add a run that one lease uses after its run."""
        child.blocks = blocks
        child.last_tick = run.last_tick
        child.num_users = 1
        add_child(run, child)
        self._subsume_tail(run, child.first_key, blocks[0])
        return child

    def _subsume_tail(self, parent: Run, key: bytes, block: int) -> None:
        """Remove the tail that ``key`` continues, which ``block`` contains. A block that a lease uses is retained."""
        tail = tail_that_begins(parent, key)
        if tail is None:
            return
        if not tail.is_live:
            self._memory.remove_run(tail)
            return
        remove_child(tail, ghost_tokens=0)
        for lease in self._leases():
            if lease.tail is tail:
                lease.tail = None
        if tail.blocks[0] != block:
            self._memory.disown(tail.blocks)

    def _adopt(self, lease: Lease, existing: Run, key: bytes) -> None:
        """Use blocks that another request has published, and free the lease's copies of them."""
        most = min(len(key), len(existing.tokens)) // BLOCK_KEY_BYTES
        num_same = common_blocks(existing.tokens, key, 0, most + 1)
        if num_same < len(existing.blocks):
            existing = split(existing, existing.start_block + num_same)
            self._memory.own(existing, existing.blocks)
        self._memory.add_user(existing)
        first, lease.num_published = lease.num_published, lease.num_published + num_same
        self._memory.free_blocks(lease.table[first : lease.num_published])
        lease.table[first : lease.num_published] = existing.blocks
        lease.run = existing

    def publish_loaded(self, lease: Lease) -> None:
        """Publish all that a load has brought."""
        self.publish_blocks(lease)
        if lease.cuts:
            self.publish_cuts(lease)
        else:
            key = lease.tokens.slice(lease.num_published * BLOCK_TOKENS, lease.computed)
            if key and child_with_prefix(lease.run, key) is None:
                self.publish_tail(lease, key)

    def publish_cuts(self, lease: Lease) -> None:
        reached = [cut for cut in lease.cuts if cut.position <= lease.computed]
        lease.cuts = [cut for cut in lease.cuts if cut.position > lease.computed]
        for cut in reached:
            run, key = home = find_home(lease.run, lease.tokens.data, cut.position)
            if key not in run.snapshots:
                self.publish(lease, cut, home)
            else:
                self._memory.free_cut(cut)

    def publish(self, lease: Lease, cut: Cut, home: Home, *, num_readers: int = 0) -> Snapshot:
        """Publish a snapshot of the lease's path, and the tokens of its block if they are not yet.

        Args:
            home: the result of ``find_home`` for its position.
            num_readers: leases that will read it in their next step.
        """
        slot, position, kind = cut.slot, cut.position, cut.kind
        if kind is SnapshotKind.PROBE and lease.transfer is not None:
            kind = SnapshotKind.BRANCH  # a prompt that needs it has proven it
        run, (num_blocks, tail) = home
        if tail and num_blocks == run.end_block and child_with_prefix(run, tail) is None:
            self.publish_tail(lease, tail)
        is_on_cached_path = kind is SnapshotKind.BRANCH or position <= lease.account.kv_tokens
        is_shared = is_on_cached_path and not lease.is_return
        use = Use(self.reuse.now, lease.interarrival_bin)
        windows = cut.windows or lease.windows_before(position)
        snapshot = Snapshot(slot, position, kind, use, num_readers, is_shared, windows)
        attach_snapshot(snapshot, home)
        if self._memory.announcer is not None:
            self._memory.announcer.store(*home, lease.salt)
        snapshot.last_tick = self._memory.next_tick()
        self._memory.enter_snapshot(snapshot)
        if lease.transfer is None:
            self._counters.snapshots_taken[kind] += 1
        else:
            self._counters.loads.num_snapshots += 1
        if kind is SnapshotKind.PROBE:
            self.probation.enter(snapshot)
        return snapshot

    def publish_tail(self, lease: Lease, key: bytes) -> None:
        """Publish the first tokens of the block that the lease is filling, as a tail."""
        run = lease.run
        blocks = lease.table[lease.num_published : lease.num_published + 1]
        tail = Run(run, run.end_block, key, blocks)
        tail.is_live = True
        tail.num_users = 1
        tail.last_tick = self._memory.tick
        add_child(run, tail)
        self._subsume_tail(run, key, blocks[0])
        self._memory.own(tail, blocks)
        lease.tail = tail
