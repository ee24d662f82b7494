"""The prefix cache: which blocks and slots a request gets, which tokens it may skip, and what stays cached.

The life of a request in the cache: ``admit`` grants a *lease*, ``extend`` allocates blocks, ``reserve_step`` decides
what a step reads and writes, ``commit`` records what was computed, ``leave_snapshot`` publishes the request's state
on the way, and ``release`` takes the lease back. The cache never touches device memory: it issues actions
(``take_actions``), to be carried out in order before the next step.

Invariants, held by ``cache/inspection/invariants.py``: a published slot is never a lease's ``dst``; a block has one
owner; the path of a lease is never evicted; byte accounting is exact.

A request that resumes at ``p`` reads the shared snapshot at ``p`` in place and shares all whole blocks that
match, including those beyond ``p``, where it recomputes the state but not the keys and values. When ``p`` is
inside a block, the request gets its own copy of that block's first ``p % 64`` tokens.

What requests and snapshots have besides, slots or windows, and when snapshots are published, is for ``RequestStates``
to say. A model that keeps no states has no slots but the null slot.
"""

from dataclasses import replace

from strandline.cache.admission_terms import FIRST_ADMISSION, AdmissionTerms
from strandline.cache.announcements import Announces
from strandline.cache.below import Below
from strandline.cache.counters import CacheCounters
from strandline.cache.eviction import Entry, EvictionOrder
from strandline.cache.index import PrefixIndex
from strandline.cache.internals import Internals
from strandline.cache.leaders import Leaders
from strandline.cache.lease import Lead, Lease, LogUse, StepGrant
from strandline.cache.logs import LogPool
from strandline.cache.memory import CacheMemory
from strandline.cache.miss_reasons import MissReasons
from strandline.cache.placement import RESERVE_SHARE, Admission, Placement
from strandline.cache.publish import Publisher
from strandline.cache.request_states import NewStates
from strandline.cache.resume import Match, ResumeRule
from strandline.cache.size import CacheSize
from strandline.cache.slab_allocator import SlabAllocator
from strandline.cache.stats import CacheStats, MemoryUse
from strandline.cache.tree import Run
from strandline.cache.use import UseHistory, interarrival_bin
from strandline.cache.walk import Walk
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NULL_LOG, BlockId, RequestId
from strandline.records.account import UNCOUNTED, Account, Reason, SnapshotKind
from strandline.records.actions import Action, CopyTokens
from strandline.records.tokens import TokenBuffer

_new_grant = tuple.__new__
"""Makes a ``StepGrant`` in half the time of its constructor, which counts per sequence and step."""


class PrefixCache:
    """Token-exact prefix cache over one arena of blocks and slots. ``policy.new_cache`` supplies the policies.

    Args:
        placement: chooses which snapshots to take.
        order: ranks what to evict.
        reuse: records uses, and learns from them how likely others are.
        rule: where prompts resume.
        states: makes what running requests are resumed from, and takes snapshots of it.
        enabled: when False, requests get blocks and slots, but nothing is cached.
        announcer: collects events; None: events are off.
    """

    def __init__(
        self,
        size: CacheSize,
        *,
        placement: Placement,
        order: EvictionOrder,
        reuse: UseHistory,
        rule: ResumeRule,
        states: NewStates,
        enabled: bool = True,
        announcer: Announces | None = None,
    ) -> None:
        self.is_enabled = enabled
        self._rule = rule
        self._placement = placement
        self._allocator = SlabAllocator(
            size.num_slabs, size.blocks_per_slab, size.max_slots, num_null_blocks=size.num_null_blocks
        )
        self._leases: dict[RequestId, Lease] = {}
        self._reuse = reuse
        self._announcer = announcer
        self._memory = CacheMemory(self._allocator, order, self._leases.values, announcer, size.windows)
        self._index = PrefixIndex(self._memory, self._leases.values, rule)
        self._counters = CacheCounters()
        self._publisher = Publisher(self._memory, self._reuse, self._counters, self._leases.values)
        self._below: Below | None = None
        self._reasons = MissReasons(self._index, self._leases.values(), rule)
        self._states = states(self._memory, self._publisher, placement if enabled else None)
        self._leaders = Leaders(self._index, self._leases, placement, rule)
        self._expected: dict[RequestId, Entry] = {}
        self._is_stepwise = enabled and placement.is_stepwise
        self._logs = LogPool(size.num_logs)
        self._num_reserved_slabs = int(RESERVE_SHARE * size.num_slabs)
        self.snapshot_blocks = size.snapshot_blocks(self._states.num_slots)
        """Size of a snapshot in blocks; 0: prompts resume without snapshots."""
        self._log_tokens = size.log_tokens

    def attach(self, below: Below) -> None:
        """Offer evicted entries to these tiers, and let lookups find what is being loaded. Called once."""
        self._below = self._leaders.below = self._reasons.below = below
        self._memory.lower = below.first_tier

    # Looking up

    def lookup(self, tokens: TokenBuffer, salt: str = "") -> Account:
        """Return what a request with these tokens would hit, and why its other tokens would miss. Changes nothing."""
        if not self.is_enabled:
            return Account.not_asked(len(tokens))
        return self._reasons.account(tokens, salt, self._index.match(salt, tokens.data))

    def hit_tokens(self, tokens: TokenBuffer, salt: str = "") -> int:
        """Return how many tokens a request would hit, without the reasons. Changes nothing."""
        match = self._index.match(salt, tokens.data) if self.is_enabled else None
        return match.position if match else 0

    def expect(self, request_id: RequestId, tokens: TokenBuffer, salt: str = "") -> None:
        """Protect what a queued request would hit: it is evicted only when nothing else can be."""
        if not self.is_enabled or request_id in self._expected:
            return
        match = self._index.match(salt, tokens.data)
        source = match.source if match else None
        if source is not None:
            source.num_waiters += 1
            self._expected[request_id] = source

    def forget(self, request_id: RequestId) -> None:
        """Stop protecting a request's expected hit. ``admit`` does this implicitly."""
        source = self._expected.pop(request_id, None)
        if source is not None:
            self._memory.forget_waiter(source)

    def find_leader(self, tokens: TokenBuffer, salt: str = "", *, beyond: int = 0, grid_tokens: int = 1) -> Lead | None:
        """Find a running request that is about to compute a prefix of this prompt, or a load of one. Changes nothing.

        A running request is worth waiting for when it computes at least one block of tokens beyond what is cached, or
        the whole prompt.

        Args:
            beyond: ignore running requests that share no more tokens than this.
            grid_tokens: round the shared prefix down to a multiple of this.
        """
        if not self.is_enabled or not self._leases:
            return None
        return self._leaders.find(tokens, salt, beyond, grid_tokens)

    def follow(self, lead: Lead) -> None:
        """Have the leader publish the end of the shared prefix, for a request that waits to resume there."""
        if lead.lease.transfer is None:
            lead.lease.planned_cuts[lead.position] = SnapshotKind.BRANCH

    # Admitting

    def admit(
        self,
        request_id: RequestId,
        tokens: TokenBuffer,
        *,
        salt: str = "",
        step_tokens: int = 1,
        terms: AdmissionTerms = FIRST_ADMISSION,
    ) -> Lease | None:
        """Grant a lease: the cached blocks of the prompt, a slot and a log. It starts where the prompt resumes.

        When no other request runs and the memory cannot hold both the snapshot and the request's own state, the
        request starts from the first token (``NO_ROOM``): no release would ever make room for it. Without snapshots,
        the same holds for the part of a block, and the request starts after the whole ones.

        Args:
            tokens: all tokens known so far. The lease keeps the buffer and sees tokens appended later.
            step_tokens: tokens of the request's first step, which need room beyond what is cached.
            terms: what differs from the admissions of other requests with the same tokens.

        Returns:
            The lease, or None when memory does not suffice; then nothing has changed.
        """
        if request_id in self._leases:
            raise CacheInvariantError(f"request {request_id} has a lease already")
        root = self._index.root(salt)
        is_asked = terms.may_read and self.is_enabled
        match = self._index.find(root, tokens.data) if is_asked else Match(end := Walk(root, 0, None, 0), 0, None, end)
        upper = self._index.split_at(match.end)
        account = self._reasons.account(tokens, salt, match) if is_asked else Account.not_asked(len(tokens))
        account = account.blaming(Reason.LOAD_FAILED, terms.load_failed_end)
        if not terms.is_counted:
            account = UNCOUNTED
        if not self._try_pin(upper, match, tokens, step_tokens):
            if not match.position or self._leases:
                return None
            match = self._rule.without_copy(match, upper, tokens.data)
            account = account.without_room(match.position)
            if not self._try_pin(upper, match, tokens, step_tokens):
                return None
        lease = Lease(request_id, tokens, salt, root, upper, account)
        lease.log = self._logs.grant()
        if terms.shared_end is not None:
            lease.shared_end = terms.shared_end
        self._leases[request_id] = lease
        self.forget(request_id)
        if terms.past_bin is not None:
            lease.interarrival_bin = terms.past_bin
        elif is_asked:
            self._reuse.count_admission()
            lease.interarrival_bin = self._reuse.record_return(salt, tokens.data)
        self._fill_lease(lease, match)
        if self.is_enabled:
            self._plan_snapshots(lease, match.end.kv_tokens, terms.marks)
        if terms.is_counted:
            self._counters.count(account)
        return lease

    def _try_pin(self, upper: Run, match: Match, tokens: TokenBuffer, step_tokens: int) -> bool:
        """Pin what the match uses if the remaining blocks and a slot can be allocated."""
        end_block = -(-min(match.position + step_tokens, max(len(tokens), 1)) // BLOCK_TOKENS)
        num_blocks = max(end_block - match.end.num_blocks, 0)
        num_window_blocks = end_block - match.position // BLOCK_TOKENS
        return self._memory.try_pin(upper, match, num_blocks, self._states.num_slots, num_window_blocks)

    def _fill_lease(self, lease: Lease, match: Match) -> None:
        lease.computed = lease.folded = match.position
        shared = lease.num_published * BLOCK_TOKENS
        lease.kv_start = max(shared, lease.computed)
        self._states.begin(lease, match)
        if (copied := match.copied_run) is not None:
            self._copy_partial(lease, copied)

    def _plan_snapshots(self, lease: Lease, kv_tokens: int, marks: tuple[int, ...]) -> None:
        """Ask the placement at which positions the lease leaves snapshots."""
        start, end, data = lease.computed, len(lease.tokens), lease.tokens.data
        size, may_probe = self.snapshot_blocks, self._publisher.may_probe(lease)
        num_spare_blocks = (self._allocator.num_free_slabs - self._num_reserved_slabs) * self._allocator.blocks_per_slab
        num_spare = num_spare_blocks // max(size, 1)
        admission = Admission(start, end, kv_tokens, marks, num_spare, size * BLOCK_TOKENS, may_probe, data)
        lease.planned_cuts = self._placement.on_admission(admission)

    def _copy_partial(self, lease: Lease, run: Run) -> None:
        """Give the lease its own copy of the block that it resumes in; unpin ``run``, which holds the original."""
        lease.table += self._memory.take_promised_blocks(1)
        source = BlockId(run.blocks[lease.num_published - run.start_block])
        copy = CopyTokens(source, BlockId(lease.table[-1]), lease.computed % BLOCK_TOKENS)
        self._memory.actions.append(copy)
        self._memory.remove_user(run)

    # Growing

    def extend(self, lease: Lease, end: int) -> bool:
        """Allocate blocks for tokens up to ``end``. False when memory does not suffice; nothing has changed then."""
        memory = self._memory
        missing = max(-(-end // BLOCK_TOKENS) - len(lease.table), 0)
        num_window_blocks = lease.num_missing_window_blocks(end)
        if not missing and not num_window_blocks:
            return True
        while not memory.can_take(missing, 0, num_window_blocks):
            dropped = [self._states.drop_fallback(each) for each in self._leases.values()]
            if not any(dropped):
                return False
        lease.table += memory.take_promised_blocks(missing)
        if num_window_blocks:
            memory.extend_windows(lease.windows, num_window_blocks)
        return True

    def reserve_step(self, lease: Lease, end: int, use: LogUse) -> StepGrant:
        """Reserve what the step that computes the tokens up to ``end`` reads and writes.

        Allocates slots for the cuts that are due and decides how many tokens the step folds. A step that does not use
        the log, or uses it for something else than the last one, finds it empty: an action folds its tokens first. A
        step that emits a cut does not use it; no cut may be due among drafts.
        """
        computed, src, dst = lease.computed, lease.src, lease.dst
        may_cut = (lease.planned_cuts or self._is_stepwise) and computed < lease.shared_end
        cuts = self._states.reserve(lease, end) if may_cut else ()
        is_fit = use is LogUse.DRAFTS or (use is LogUse.DECODED and self._log_tokens and end - computed == 1)
        if not (is_fit and lease.log) or cuts:
            self._states.fold(lease)
            return _new_grant(StepGrant, (src, dst, cuts, NULL_LOG, 0, end - computed))
        holds_drafts = use is LogUse.DRAFTS
        if lease.holds_drafts != holds_drafts:
            self._states.fold(lease)
        lease.holds_drafts, num_logged = holds_drafts, computed - lease.folded
        is_appended = not holds_drafts and src == dst and num_logged < self._log_tokens
        return _new_grant(StepGrant, (src, dst, cuts, lease.log, num_logged, 0 if is_appended else num_logged + 1))

    def is_cut_due(self, lease: Lease, end: int) -> bool:
        """Whether a step that computes the tokens up to ``end`` may emit a snapshot."""
        is_due = lease.has_planned_cut(end) or self._placement.in_step(lease.computed, end) is not None
        return is_due and self.is_enabled and lease.computed < lease.shared_end

    # Publishing

    def commit(self, lease: Lease, computed: int, num_folded: int | None = None) -> None:
        """Record that ``computed`` tokens are computed: their KV is in the lease's blocks, the state in ``lease.dst``.

        Args:
            num_folded: ``StepGrant.num_folded`` of the step: tokens after ``lease.folded`` that are in the state now;
                the others are in the log. None: all.
        """
        if not lease.computed < computed <= len(lease.tokens) or not lease.has_room(computed):
            room = min(len(lease.tokens), len(lease.table) * BLOCK_TOKENS)
            raise CacheInvariantError(
                f"{lease.request_id}: cannot commit {computed} tokens; {lease.computed} are computed, {room} have room"
            )
        lease.computed = computed
        lease.folded = computed if num_folded is None else lease.folded + num_folded
        if lease.src != lease.dst:
            self._move_to_own_slot(lease)
        if computed >= (lease.num_published + 1) * BLOCK_TOKENS and self.is_enabled:
            self._publisher.publish_blocks(lease)
        if lease.cuts or lease.planned_cuts:
            self._states.commit(lease)
        for window in lease.windows:
            window.advance(computed)

    def _move_to_own_slot(self, lease: Lease) -> None:
        """Read the state from the lease's own slot from now on; unpin the snapshot that it was read from."""
        lease.src = lease.dst
        if lease.source is not None:
            self._memory.unpin_snapshot(lease.source)
            lease.source = None

    def leave_snapshot(self, lease: Lease, kind: SnapshotKind) -> bool:
        """Publish the lease's slot as a snapshot at ``lease.computed`` and give the lease a new slot.

        Without slots, the snapshot is the lease's window. Without snapshots, publish the block that the lease is
        filling, as far as it is computed.

        Returns:
            False when that snapshot exists already, or no slot can be allocated; the lease keeps its slot.
        """
        return self._states.leave(lease, kind)

    def keep_fallback(self, lease: Lease, position: int) -> None:
        """Keep the state at a position, if that is the lease's last one: the request may end with what comes after."""
        if position == lease.computed:
            self._states.keep_fallback(lease)

    def drop_fallback(self, lease: Lease) -> None:
        """Keep that state no longer: the request goes on."""
        if lease.fallback is not None:
            self._states.drop_fallback(lease)

    def release(self, lease: Lease, kind: SnapshotKind, end: int | None = None) -> None:
        """Take the lease back: publish its slot as a snapshot at ``lease.computed``, free its log and own blocks.

        Args:
            end: prompts that continue this one share the tokens before this position alone; None: all. The snapshot is
                the last one up to there that is still possible.
        """
        memory = self._memory
        if self._leases.get(lease.request_id) is not lease:
            raise CacheInvariantError(f"{lease.request_id} has no lease to release")
        del self._leases[lease.request_id]
        lease.is_active = False
        lease.run.last_tick = self._memory.next_tick()
        if kind is SnapshotKind.PREEMPTION:
            lease.interarrival_bin = interarrival_bin(0)
        elif self.is_enabled and lease.account is not UNCOUNTED:
            self._reuse.record_departure(
                lease.salt, lease.tokens.data, lease.account.queried, lease.computed, lease.interarrival_bin
            )
        if lease.source is not None:
            memory.unpin_snapshot(lease.source)
        for cut in lease.cuts:
            memory.free_cut(cut)
        self._states.end(lease, kind, lease.computed if end is None else end)
        memory.take_back(lease)
        self._logs.free(lease.log)

    def take_actions(self) -> list[Action]:
        """Return the actions issued since the last call, in order."""
        if self._below is not None:
            self._below.begin_spills()
        actions = self._memory.actions
        self._memory.actions = []
        return actions

    # Reading

    @property
    def holds_for_others(self) -> bool:
        """Whether loads or holds keep memory that they will free, which no running request uses."""
        return any(not lease.is_request for lease in self._leases.values())

    def memory_use(self) -> MemoryUse:
        """Return how much memory is allocated. Cheap enough for every step."""
        return self._memory.use()

    def stats(self) -> CacheStats:
        """Return all figures of the cache."""
        counters, memory = self._counters, self._memory
        return CacheStats(
            memory=self.memory_use(),
            num_leases=sum(lease.is_request for lease in self._leases.values()),
            num_snapshots=sum(counters.snapshots_taken.values())
            + counters.loads.num_snapshots
            - memory.num_snapshots_evicted,
            num_snapshots_evicted=memory.num_snapshots_evicted,
            num_blocks_evicted=memory.num_blocks_evicted,
            queries=counters.queries,
            queried_tokens=counters.queried_tokens,
            hit_tokens=counters.hit_tokens,
            missed_tokens=dict(counters.missed_tokens),
            told_tokens=dict(counters.told_tokens),
            hits_by_kind=dict(counters.hits_by_kind),
            snapshots_taken=dict(counters.snapshots_taken),
            loads=replace(counters.loads),
        )

    def internals(self) -> Internals:
        """Return the parts of the cache, for the checks, views and tests of this package."""
        return Internals(
            memory=self._memory,
            leases=self._leases,
            placement=self._placement,
            index=self._index,
            expected=self._expected,
            reuse=self._reuse,
            logs=self._logs,
            rule=self._rule,
            states=self._states,
            publisher=self._publisher,
            counters=self._counters,
            below=self._below,
        )
