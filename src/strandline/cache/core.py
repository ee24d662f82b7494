"""The prefix cache: which blocks and slots a request gets, what it may skip, and what stays behind.

A request *leases* room (``admit``), grows it (``extend``), reserves what a step reads and writes
(``reserve_step``), reports what was computed (``commit``), may leave snapshots behind on the way
(``leave_snapshot``), and gives the lease back (``release``). The cache never touches memory: it issues actions
(``take_actions``), to be carried out in order before the next step.

Invariants, held by ``strandline.cache.invariants.check``: a published slot is never a lease's ``dst``; a block
has one owner; the path of a lease is never evicted; byte accounting is exact.

A request that resumes at ``p`` reads the shared snapshot at ``p`` in place and shares all whole blocks that
match, also those beyond ``p`` (it recomputes the state there, not the keys and values). When it resumes inside
a block it gets a copy of that block's first ``p % 64`` tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from strandline.cache.account import NO_ACCOUNT, Account, CacheCounters, SnapshotKind
from strandline.cache.actions import Action, CopyTokens, FoldLog
from strandline.cache.arena import Arena
from strandline.cache.eviction import EvictionOrder, WorthPerByte
from strandline.cache.explain import Explainer
from strandline.cache.hits import record_hit
from strandline.cache.index import PrefixIndex
from strandline.cache.lease import Cut, Lead, Lease, StepGrant
from strandline.cache.logs import LogPool
from strandline.cache.memory import CacheMemory
from strandline.cache.placement import RESERVE_SHARE, Admission, Auto, Placement
from strandline.cache.publish import Publisher
from strandline.cache.reuse import ReuseHistory
from strandline.cache.stats import CacheStats, MemoryUse
from strandline.cache.tokens import TokenBuffer
from strandline.cache.tree import Run, Snapshot, find_home, snapshot_at
from strandline.cache.use import interarrival_bin
from strandline.cache.walk import Walk, copied_run
from strandline.clock import Clock
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NULL_LOG, BlockId, RequestId, SlotId

T = TypeVar("T")

_grant = tuple.__new__
"""Makes a ``StepGrant`` from its fields in half the time of its constructor, for every sequence and step."""

AUTO = Auto()
TAKEN = "memory that was counted as available could not be taken"


@dataclass(frozen=True, slots=True)
class Internals:
    """The parts of a cache. Nothing outside this package reaches for them."""

    arena: Arena
    memory: CacheMemory
    leases: dict[RequestId, Lease]
    placement: Placement
    index: PrefixIndex
    expected: dict[RequestId, Snapshot]
    """By waiting request: the snapshot that it would have resumed from when it was queued."""
    reuse: ReuseHistory
    logs: LogPool


class PrefixCache:
    """Token-exact prefix cache over one arena of blocks and slots.

    Args:
        num_slabs: size of the arena (see ``Arena``), the null slab included.
        blocks_per_slab: blocks in the room of one slot.
        order: which entry is evicted first; the default is the one of least worth per byte.
        placement: which snapshots are taken.
        max_slots: divide the memory: so many slabs are slots, the others blocks. A baseline; None shares it.
        enabled: when False, requests get blocks and slots but nothing is kept or found.
        clock: tells the seconds, to learn how long conversations rest; None: admissions stand for them.
        num_logs: logs to grant, one per lease, numbered from 1; a lease that gets none folds every token.
        log_tokens: capacity of a log.
    """

    def __init__(
        self,
        num_slabs: int,
        blocks_per_slab: int,
        *,
        order: EvictionOrder | None = None,
        placement: Placement = AUTO,
        max_slots: int | None = None,
        enabled: bool = True,
        clock: Clock | None = None,
        num_logs: int = 0,
        log_tokens: int = 0,
    ) -> None:
        self.is_enabled = enabled
        self._placement = placement
        self._arena = Arena(num_slabs, blocks_per_slab, max_slots)
        self._leases: dict[RequestId, Lease] = {}
        self._reuse = ReuseHistory(clock)
        order = order or WorthPerByte(blocks_per_slab, self._reuse)
        self._memory = CacheMemory(self._arena, order, self._leases.values)
        self._index = PrefixIndex(self._memory, self._leases.values)
        self._counters = CacheCounters()
        self._publisher = Publisher(self._memory, self._reuse, self._counters, self._leases.values)
        self._expected: dict[RequestId, Snapshot] = {}
        """By waiting request: where it would have resumed when it came."""
        self._is_stepwise = enabled and placement.is_stepwise
        self._logs = LogPool(num_logs)
        self._log_tokens = log_tokens

    # Finding

    def lookup(self, tokens: TokenBuffer, salt: str = "") -> Account:
        """Say what a request with these tokens would hit, and why not more. Changes nothing."""
        if not self.is_enabled:
            return Account.not_asked(len(tokens))
        root = self._index.roots.get(salt)
        explainer = Explainer(self._index.roots, self._leases.values())
        if root is None:
            return explainer.account(tokens, salt, None, None)
        end, snapshot = self._index.find(root, tokens.data)
        return explainer.account(tokens, salt, end, snapshot)

    def hit_tokens(self, tokens: TokenBuffer, salt: str = "") -> int:
        """Return how many tokens a request would hit, and nothing else. Changes nothing."""
        snapshot = self._index.deepest(salt, tokens.data) if self.is_enabled else None
        return snapshot.position if snapshot else 0

    def expect(self, request_id: RequestId, tokens: TokenBuffer, salt: str = "") -> None:
        """Take note that a request waits: what it would hit is kept for it, as long as anything else can go."""
        if not self.is_enabled or request_id in self._expected:
            return
        snapshot = self._index.deepest(salt, tokens.data)
        if snapshot is not None:
            self._memory.add_waiter(snapshot)
            self._expected[request_id] = snapshot

    def forget(self, request_id: RequestId) -> None:
        """Take note that a request does not wait any more. Who is admitted is forgotten by that."""
        snapshot = self._expected.pop(request_id, None)
        if snapshot is not None:
            self._memory.forget_waiter(snapshot)

    def find_leader(self, tokens: TokenBuffer, salt: str = "", *, beyond: int = 0, grid_tokens: int = 1) -> Lead | None:
        """Find a running request that is about to compute the beginning of this prompt. Changes nothing.

        Waiting for it must be worth it: it computes at least a block's tokens more than are cached, or all of the
        prompt.

        Args:
            beyond: ignore requests that share no more than this.
            grid_tokens: part from it at a multiple of this.
        """
        if not self.is_enabled or not self._leases or not self._placement.takes_branches():
            return None
        snapshot = self._index.deepest(salt, tokens.data)
        known = max(snapshot.position if snapshot else 0, beyond)
        prefilling = [lease for lease in self._leases.values() if lease.computed + 1 < len(lease.tokens)]
        found = Explainer(self._index.roots, prefilling).running_with(tokens, salt, known)
        if found is None:
            return None
        lease, position = found
        position -= position % grid_tokens
        if lease.computed >= position or (position - known < BLOCK_TOKENS and position < len(tokens)):
            return None
        return Lead(lease, position)

    def follow(self, lead: Lead) -> None:
        """Have a leader leave a snapshot at its lead's position, for the requests that wait to resume there."""
        lead.lease.wanted[lead.position] = SnapshotKind.BRANCH

    # Admitting

    def admit(
        self,
        request_id: RequestId,
        tokens: TokenBuffer,
        *,
        salt: str = "",
        step_tokens: int = 1,
        read: bool = True,
        marks: tuple[int, ...] = (),
        shared_end: int | None = None,
        past_bin: int | None = None,
        is_counted: bool = True,
    ) -> Lease | None:
        """Lease a slot and a log for a request and the blocks of what is cached; start it at the deepest snapshot.

        Args:
            tokens: all tokens known so far. The lease keeps the buffer, and sees tokens appended later.
            step_tokens: room to ask for beyond what is cached: the tokens of the request's first step.
            read: when False the request computes everything (it may still leave snapshots behind).
            marks: positions where others are likely to share the prompt's beginning.
            shared_end: others find its blocks up to here only, and no step that starts later takes cuts; None: all.
            past_bin: ``Lease.interarrival_bin`` of before it was preempted; None: it has had no lease.
            is_counted: whether anybody asked for it. When False it has an account of nothing, and nothing is learned
                from it.

        A request that is alone and cannot have its snapshot beside its own state starts over (``NO_ROOM``): nobody
        will ever make room for it.

        Returns:
            The lease, or None when memory does not suffice; then nothing has changed.
        """
        if request_id in self._leases:
            raise CacheInvariantError(f"request {request_id} has a lease already")
        root = self._index.root(salt)
        is_asked = read and self.is_enabled
        end, snapshot = self._index.find(root, tokens.data) if is_asked else (Walk(root, 0, None, 0), None)
        upper = self._index.split_at(end)
        explainer = Explainer(self._index.roots, self._leases.values())
        account = explainer.account(tokens, salt, end, snapshot) if is_asked else Account.not_asked(len(tokens))
        if not is_counted:
            account = NO_ACCOUNT
        if not self._hold(upper, end, snapshot, tokens, step_tokens):
            if snapshot is None or self._leases:
                return None
            end, snapshot, account = Walk(upper, end.num_blocks, None, 0), None, account.without_room()
            if not self._hold(upper, end, snapshot, tokens, step_tokens):
                return None
        lease = Lease(request_id, tokens, salt, root, upper, account)
        lease.log = self._logs.grant()
        if shared_end is not None:
            lease.shared_end = shared_end
        self._leases[request_id] = lease
        self.forget(request_id)
        if past_bin is not None:
            lease.interarrival_bin = past_bin
        elif is_asked:
            self._reuse.tick()
            lease.interarrival_bin = self._reuse.come_back(salt, tokens.data)
        self._fill_lease(lease, end, snapshot)
        self._wish(lease, end.kv_tokens, marks)
        if is_counted:
            self._counters.count(account)
        return lease

    def _hold(self, upper: Run, end: Walk, snapshot: Snapshot | None, tokens: TokenBuffer, step_tokens: int) -> bool:
        """Hold what the request will use, if the memory that it needs besides can be had."""
        position = snapshot.position if snapshot else 0
        self._pin(upper, end, snapshot)
        last = min(max(position + step_tokens, end.num_blocks * BLOCK_TOKENS), max(len(tokens), 1))
        num_blocks = -(-last // BLOCK_TOKENS) - end.num_blocks
        if self._memory.can_take(max(num_blocks, 0), 1):
            return True
        self._unpin(upper, end, snapshot)
        return False

    def _pin(self, upper: Run, end: Walk, snapshot: Snapshot | None) -> None:
        """Hold what the request will use while memory is taken for it."""
        self._memory.pin_run(upper)
        if (partial := copied_run(end, snapshot)) is not None:
            self._memory.join_run(partial)
        if snapshot is not None:
            self._memory.pin_snapshot(snapshot)

    def _unpin(self, upper: Run, end: Walk, snapshot: Snapshot | None) -> None:
        if (partial := copied_run(end, snapshot)) is not None:
            self._memory.quit_run(partial)
        self._memory.unpin_run(upper)
        if snapshot is not None:
            self._memory.unpin_snapshot(snapshot)

    def _fill_lease(self, lease: Lease, end: Walk, snapshot: Snapshot | None) -> None:
        for run in reversed(list(lease.run.ancestry())):
            lease.table += run.blocks
        lease.num_published = len(lease.table)
        lease.computed = lease.folded = snapshot.position if snapshot else 0
        shared = lease.num_published * BLOCK_TOKENS
        lease.kv_start = max(shared, lease.computed)
        lease.dst = _granted(self._memory.take_slot())
        if snapshot is not None:
            lease.source, lease.src = snapshot, snapshot.slot
            record_hit(lease, snapshot, self._memory, self._reuse)
        lease.run.last_tick = self._memory.next_tick()
        if (partial := copied_run(end, snapshot)) is not None:
            self._copy_partial(lease, partial)

    def _wish(self, lease: Lease, kv_tokens: int, marks: tuple[int, ...]) -> None:
        """Ask the placement where the lease is to leave snapshots."""
        if not self.is_enabled:
            return
        num_spare = self._arena.num_free_slabs - int(RESERVE_SHARE * self._arena.num_slabs)
        admission = Admission(
            lease.computed, len(lease.tokens), kv_tokens, marks, num_spare, self._arena.blocks_per_slab * BLOCK_TOKENS
        )
        lease.wanted = self._placement.on_admission(admission)

    def _copy_partial(self, lease: Lease, run: Run) -> None:
        """Give the lease its own copy of the block that it resumes in; ``run`` was held for that."""
        self._take_blocks(lease, 1)
        source = BlockId(run.blocks[lease.num_published - run.start_block])
        copy = CopyTokens(source, BlockId(lease.table[-1]), lease.computed % BLOCK_TOKENS)
        self._memory.actions.append(copy)
        self._memory.quit_run(run)

    # Growing

    def extend(self, lease: Lease, end: int) -> bool:
        """Give the lease blocks for tokens up to ``end``. False when memory does not suffice; nothing changes."""
        missing = -(-end // BLOCK_TOKENS) - len(lease.table)
        if missing <= 0:
            return True
        if not self._memory.can_take(missing, 0):
            return False
        self._take_blocks(lease, missing)
        return True

    def _take_blocks(self, lease: Lease, num_blocks: int) -> None:
        taken = self._memory.take_blocks(num_blocks)
        if len(taken) < num_blocks:
            raise CacheInvariantError(TAKEN)
        lease.table += taken

    def reserve_step(self, lease: Lease, end: int, *, wants_log: bool) -> StepGrant:
        """Grant what the step that computes tokens up to ``end`` reads and writes.

        Reserves slots for the cuts that are due and decides what the step folds. A step that appends nothing to the
        log finds it empty: what the log holds is folded before, by an action.

        Args:
            wants_log: append a single token to the log rather than write the state. The token is folded at once all
                the same when the step emits a cut.
        """
        computed, src, dst = lease.computed, lease.src, lease.dst
        cuts: tuple[tuple[int, SlotId], ...] = ()
        if (lease.wanted or self._is_stepwise) and computed < lease.shared_end:
            cuts = self._reserve_cuts(lease, end)
        num_logged = computed - lease.folded
        if wants_log and lease.log and end - computed == 1 and not cuts:
            is_appended = src == dst and num_logged < self._log_tokens
            return _grant(StepGrant, (src, dst, cuts, lease.log, num_logged, 0 if is_appended else num_logged + 1))
        if num_logged:
            self._fold(lease)
        return _grant(StepGrant, (src, dst, cuts, NULL_LOG, 0, end - computed))

    def _reserve_cuts(self, lease: Lease, end: int) -> tuple[tuple[int, SlotId], ...]:
        """Reserve slots for the snapshots that the step to ``end`` is to emit in passing.

        A cut is left out when no slot can be had: the request goes on without it.
        """
        if not self.is_enabled:
            return ()
        due = {position: kind for position, kind in lease.wanted.items() if lease.computed < position <= end}
        if (boundary := self._placement.in_step(lease.computed, end)) is not None:
            due.setdefault(boundary, SnapshotKind.BOUNDARY)
        lease.wanted = {position: kind for position, kind in lease.wanted.items() if position > end}
        for position in sorted(due):
            slot = self._memory.take_slot() if self._memory.can_take(0, 1) else None
            if slot is not None:
                lease.cuts.append(Cut(position, slot, due[position]))
        return tuple((cut.position, cut.slot) for cut in lease.cuts)

    # Keeping

    def commit(self, lease: Lease, computed: int, num_folded: int | None = None) -> None:
        """Record that ``computed`` tokens are computed: their KV is in the lease's blocks, the state in ``lease.dst``.

        Args:
            num_folded: ``StepGrant.num_folded`` of the step: tokens beyond ``lease.folded`` that are in the state, the
                others are in the log; None: all.
        """
        room = min(len(lease.tokens), len(lease.table) * BLOCK_TOKENS)
        if not lease.computed < computed <= room:
            raise CacheInvariantError(
                f"{lease.request_id} computed {computed} tokens: it had {lease.computed}, and room for {room}"
            )
        lease.computed = computed
        lease.folded = computed if num_folded is None else lease.folded + num_folded
        if lease.src != lease.dst:
            self._settle(lease)
        if computed >= (lease.num_published + 1) * BLOCK_TOKENS and self.is_enabled:
            self._publisher.publish_blocks(lease)
        if lease.cuts:
            self._publisher.publish_cuts(lease)

    def _fold(self, lease: Lease) -> None:
        """Have the lease's log, if there is anything in it, folded into the state in ``lease.dst``."""
        if lease.num_logged:
            self._memory.actions.append(FoldLog(lease.dst, lease.log, lease.num_logged))
            lease.folded = lease.computed

    def _settle(self, lease: Lease) -> None:
        lease.src = lease.dst
        if lease.source is not None:
            self._memory.unpin_snapshot(lease.source)
            lease.source = None

    def leave_snapshot(self, lease: Lease, kind: SnapshotKind) -> bool:
        """Publish the lease's slot as a snapshot at ``lease.computed``; the lease moves on to a new one.

        Returns:
            False when there is such a snapshot already, or no slot to move on to; the lease keeps its slot.
        """
        if not self._may_leave(lease, kind):
            return False
        # The snapshot is held until the next step has read it: that step must find room for its token beside it.
        num_blocks = -(-(lease.computed + 1) // BLOCK_TOKENS) - len(lease.table)
        slot = self._memory.take_slot() if self._memory.can_take(max(num_blocks, 0), 1) else None
        if slot is None:
            return False
        self._fold(lease)
        snapshot = self._publisher.publish(lease, lease.dst, lease.computed, kind, num_readers=1)
        lease.source, lease.src, lease.dst = snapshot, snapshot.slot, slot
        return True

    def release(self, lease: Lease, kind: SnapshotKind) -> None:
        """Take the lease back: its slot becomes a snapshot at ``lease.computed``, its log and own blocks are freed."""
        memory = self._memory
        if self._leases.get(lease.request_id) is not lease:
            raise CacheInvariantError(f"{lease.request_id} has no lease to give back")
        del self._leases[lease.request_id]
        lease.is_active = False
        lease.run.last_tick = self._memory.next_tick()
        if kind is SnapshotKind.PREEMPTION:
            lease.interarrival_bin = interarrival_bin(0)
        elif self.is_enabled and lease.account is not NO_ACCOUNT:
            self._reuse.leave(
                lease.salt, lease.tokens.data, lease.account.queried, lease.computed, lease.interarrival_bin
            )
        if lease.source is not None:
            memory.unpin_snapshot(lease.source)
        for cut in lease.cuts:
            memory.free_slot(cut.slot)
        if not self._leave_last_snapshot(lease, kind):
            memory.free_slot(lease.dst)
        tail = lease.tail
        kept = tail.blocks[0] if tail is not None else None
        memory.free_blocks([block for block in lease.table[lease.num_published :] if block != kept])
        if tail is not None:
            tail.is_live = False
            memory.quit_run(tail)
        memory.unpin_run(lease.run)
        self._logs.free(lease.log)

    def _leave_last_snapshot(self, lease: Lease, kind: SnapshotKind) -> bool:
        if not self._may_leave(lease, kind):
            return False
        self._fold(lease)
        self._publisher.publish(lease, lease.dst, lease.computed, kind)
        return True

    def _may_leave(self, lease: Lease, kind: SnapshotKind) -> bool:
        """Whether a snapshot at ``lease.computed`` is wanted, possible, and not there yet."""
        if not self.is_enabled or not lease.has_own_state or lease.computed == 0 or not self._placement.keeps(kind):
            return False
        home, stub_key = find_home(lease.run, lease.tokens.data, lease.computed)
        return snapshot_at(home, lease.computed, stub_key) is None

    def take_actions(self) -> list[Action]:
        """Return the actions issued since the last call, in order."""
        actions = self._memory.actions
        self._memory.actions = []
        return actions

    # Reading

    def memory_use(self) -> MemoryUse:
        """Return how much memory is allocated. Cheap enough for every step."""
        return self._memory.use()

    def stats(self) -> CacheStats:
        """Return all figures of the cache."""
        counters, memory = self._counters, self._memory
        return CacheStats(
            memory=self.memory_use(),
            num_leases=len(self._leases),
            num_snapshots=self._arena.num_slots - sum(1 + len(lease.cuts) for lease in self._leases.values()),
            num_snapshots_evicted=memory.num_snapshots_evicted,
            num_blocks_evicted=memory.num_blocks_evicted,
            queries=counters.queries,
            queried_tokens=counters.queried_tokens,
            hit_tokens=counters.hit_tokens,
            missed_tokens=dict(counters.missed_tokens),
            told_tokens=dict(counters.told_tokens),
            hits_by_kind=dict(counters.hits_by_kind),
            snapshots_taken=dict(counters.snapshots_taken),
        )

    def snapshots(self) -> Iterator[tuple[str, bytes, Snapshot]]:
        """Return salt, tokens (as a key) and snapshot of everything published, for checks and for people."""
        return self._index.snapshots()

    def internals(self) -> Internals:
        """Return the parts of the cache, for the checks, views and tests of this package."""
        return Internals(
            self._arena,
            self._memory,
            self._leases,
            self._placement,
            self._index,
            self._expected,
            self._reuse,
            self._logs,
        )


def _granted(value: T | None) -> T:
    """Unwrap what ``can_take`` promised."""
    if value is None:
        raise CacheInvariantError(TAKEN)
    return value
