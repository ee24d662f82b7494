"""Drives the cache as the engine does, on a simulated device."""

from collections.abc import Iterable, Sequence

from strandline.cache import Lead, Lease, LogUse, Placement, PrefixCache, StepGrant
from strandline.cache.admission_terms import AdmissionTerms
from strandline.cache.announcing.announcer import Announcer
from strandline.cache.eviction import EvictionOrder
from strandline.cache.holds import Holds
from strandline.cache.inspection.invariants import check
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy import AUTO, new_cache
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS
from strandline.cache.resume import ResumeRule
from strandline.cache.size import CacheSize, WindowClass
from strandline.cache.tiers import LoadCosts, Loads, LowerMemory
from strandline.cache.tiers.known_paths import FoundPath, LostBlock, LostPath, LostSnapshot
from strandline.cache.tiers.loads import EndedLoad
from strandline.cache.tiers.reset import reset
from strandline.ids import BLOCK_TOKENS, NO_ADDRESS, RequestId, TransferId
from strandline.records.account import Account, Miss, Reason, SnapshotKind
from strandline.records.actions import Completion, StoredBlocks, StoredPath
from strandline.records.offer import Offer, OfferedSnapshot
from strandline.records.persisted import NO_ENTRIES, PersistedEntries
from strandline.records.tokens import TokenBuffer, decode
from strandline.specs import SnapshotSize, WindowSize
from tests.cpu.cache.device import NO_STATE, Device, Tokens

OTHERS = 2**48
"""Addresses of what other engines have stored begin here."""
LOG_TOKENS = 3
"""Tokens in a full log."""


class Driver:
    """A cache on a simulated device. Checks both after every operation."""

    def __init__(
        self,
        num_slabs: int = 40,
        blocks_per_slab: int = 5,
        *,
        rule: ResumeRule = AT_SNAPSHOTS,
        order: EvictionOrder | None = None,
        placement: Placement = AUTO,
        enabled: bool = True,
        emits_events: bool = False,
        lower_blocks: Sequence[int] = (),
        lower_snapshots: SnapshotSize | None = None,
        persisted: PersistedEntries = NO_ENTRIES,
        windows: tuple[WindowClass, ...] = (),
    ) -> None:
        announcer = Announcer(needs_snapshots=rule.needs_snapshots) if emits_events else None
        self._has_slots = rule.needs_slots
        num_logs = num_slabs - 1 if rule.needs_slots else 0
        self.cache = new_cache(
            CacheSize(num_slabs, blocks_per_slab, num_logs=num_logs, log_tokens=LOG_TOKENS, windows=windows),
            rule=rule,
            order=order,
            placement=placement,
            enabled=enabled,
            announcer=announcer,
        )
        if lower_snapshots is None:
            slot_blocks = blocks_per_slab if rule.needs_slots else 0
            lower_snapshots = SnapshotSize(slot_blocks, 1, tuple(WindowSize(each.num_tokens, 1) for each in windows))
        memories = tiers(lower_blocks, lower_snapshots, persisted)
        self.loads = Loads(self.cache, memories, announcer=announcer)
        self.holds = Holds(self.cache)
        self.device = Device(num_slabs, blocks_per_slab, windows, num_computed_again=int(not rule.needs_slots))
        self._num_requests = 0
        self._num_found = 0
        self._num_resets = 0

    def lookup(self, tokens: Iterable[int], salt: str = "") -> Account:
        return self.cache.lookup(TokenBuffer(tokens), salt)

    def try_admit(
        self, tokens: Iterable[int], request_id: str = "", *, salt: str = "", step_tokens: int = 1, read: bool = True
    ) -> Lease | None:
        name = RequestId(request_id or self.lease_name())
        lease = self.cache.admit(
            name, TokenBuffer(tokens), salt=salt, step_tokens=step_tokens, terms=AdmissionTerms(may_read=read)
        )
        check(self.cache)
        return lease

    def lease_name(self) -> RequestId:
        """Return the id of a new request."""
        self._num_requests += 1
        return RequestId(f"request-{self._num_requests}")

    def admit(self, tokens: Iterable[int], request_id: str = "", *, salt: str = "", read: bool = True) -> Lease:
        lease = self.try_admit(tokens, request_id, salt=salt, read=read)
        assert lease is not None
        return lease

    def step(self, lease: Lease, end: int) -> bool:
        """Compute the lease's tokens up to ``end``. False when memory does not suffice."""
        return self.step_together([(lease, end)]) == [lease]

    def step_together(self, wanted: Sequence[tuple[Lease, int]]) -> list[Lease]:
        """Reserve, run and commit a batch of steps. Return the leases for which memory sufficed."""
        planned = [(lease, end, self._reserve(lease, end)) for lease, end in wanted if self.cache.extend(lease, end)]
        self.flush()
        for lease, end, grant in planned:
            self.device.run_step(lease, end, self.cache, grant)
        for lease, end, grant in planned:
            self.cache.commit(lease, end, grant.num_folded)
            check(self.cache)
        return [lease for lease, *_ in planned]

    def _reserve(self, lease: Lease, end: int) -> StepGrant:
        grant = self.cache.reserve_step(lease, end, LogUse.DECODED)
        check(self.cache)
        return grant

    def flush(self) -> None:
        """Apply the cache's actions, and compare the device with the cache."""
        self.device.apply(self.cache.take_actions())
        self.device.verify(self.cache, self.loads.tiers)

    def prefill(self, lease: Lease, chunk: int = 10**6, *, leave: bool = True) -> None:
        """Compute all known tokens and leave a snapshot at their end."""
        while lease.computed < len(lease.tokens):
            assert self.step(lease, min(len(lease.tokens), lease.computed + chunk))
        if leave:
            self.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
            check(self.cache)

    def decode(self, lease: Lease, tokens: Iterable[int]) -> None:
        """Append these tokens as generated, and compute each in a step of its own."""
        for token in tokens:
            lease.tokens.append(token)
            assert self.step(lease, len(lease.tokens))

    def release(self, lease: Lease, kind: SnapshotKind = SnapshotKind.GENERATION_END, end: int | None = None) -> None:
        self.cache.release(lease, kind, end)
        check(self.cache)
        self.flush()

    def offer(
        self, tokens: Sequence[int], positions: Iterable[int] = (), *, first_block: int = 0, store: str = "store"
    ) -> Offer:
        """Return what a store offers of a prompt: all its blocks from ``first_block`` on, and snapshots.

        Args:
            positions: positions of the snapshots; the last is the end of the offer, else it ends with the prompt.
        """
        placed = sorted(positions)
        position = placed[-1] if placed else len(tokens)
        starts = range(first_block * BLOCK_TOKENS, position, BLOCK_TOKENS)
        blocks = tuple(self._address(tokens[start : min(start + BLOCK_TOKENS, position)]) for start in starts)
        snapshots = tuple(OfferedSnapshot(p, self._address(tokens[:p], p), SnapshotKind.LADDER) for p in placed)
        return Offer(store, position, first_block, blocks, snapshots)

    def _address(self, tokens: Sequence[int], position: int | None = None) -> int:
        """Put a block or, given its position, a snapshot into the store; return its address."""
        address = min(0, *self.device.stored) - 1 if self.device.stored else -1
        self.device.stored[address] = tuple(tokens)
        if position is not None:
            self.device.put_windows(address, tokens)
        return address

    def load(self, tokens: Iterable[int], offer: Offer, salt: str = "", *, step_tokens: int = 1) -> Lead | None:
        """Begin a load, if the device lacks something and memory suffices."""
        lead = self.loads.begin(TokenBuffer(tokens), offer, salt, step_tokens=step_tokens)
        check(self.cache)
        self.flush()
        return lead

    def load_from_tier(self, tokens: Iterable[int], salt: str = "") -> Lead | None:
        """Begin to load what rests of a prompt below the device."""
        offer = self.loads.tier_offer(TokenBuffer(tokens), salt)
        return None if offer is None else self.load(tokens, offer, salt)

    def bring_back(self, tokens: Iterable[int], salt: str = "") -> bool:
        """Load what rests of a prompt; whether anything did."""
        lead = self.load_from_tier(tokens, salt)
        while lead is not None and lead.is_pending:
            self.end_load(self.transfers_of(lead.lease)[0], is_done=True)
        return lead is not None

    def transfers_of(self, lease: Lease) -> list[TransferId]:
        """Return the transfers of a load that are under way."""
        return [transfer for transfer in self.device.loading if self.loads.find_lease(transfer) is lease]

    def end_load(self, transfer: TransferId, *, is_done: bool) -> EndedLoad | None:
        """End a transfer of a load, well or badly; return what it ended."""
        if not is_done:
            return self.fail(transfer)
        self.device.end_load(transfer)
        return self._complete(Completion(transfer, is_done))

    def fail(self, transfer: TransferId, lost: tuple[int, ...] = ()) -> EndedLoad | None:
        """End a transfer of a load badly, as these addresses cannot be read any more; return what it ended."""
        self.device.fail_load(transfer)
        return self._complete(Completion(transfer, is_done=False, lost=lost))

    def _complete(self, completion: Completion) -> EndedLoad | None:
        lease = self.loads.find_lease(completion.transfer)
        assert lease is not None
        ended = self.loads.complete(completion)
        assert ended is None or ended.lease is lease
        assert (ended is None) == bool(self.transfers_of(lease))
        check(self.cache)
        self.flush()
        return ended

    def end_spill(self, index: int = 0, *, is_done: bool = True) -> bool:
        """End a spill, whichever began first; whether there was one."""
        spilling = self.device.spilling
        if not spilling:
            return False
        transfer = list(spilling)[index % len(spilling)]
        self.device.end_spill(transfer, is_done=is_done)
        assert self.loads.complete(Completion(transfer, is_done)) is None
        check(self.cache)
        self.flush()
        return True

    def reset(self) -> None:
        """Begin another epoch of the cache."""
        self._num_resets += 1
        reset(self.cache, f"epoch {self._num_resets} ")
        check(self.cache)
        self.flush()

    def adopt(self, tokens: Sequence[int], salt: str = "", idle_s: float = 0.0, *, tree: str | None = None) -> None:
        """Enter a prompt that another engine has stored in the last tier, with a snapshot at its end.

        Args:
            tree: the name of its tree; None: that of the salt's.
        """
        tier, num_whole = self.loads.tiers[-1], len(tokens) // BLOCK_TOKENS
        cut = range(0, num_whole * BLOCK_TOKENS, BLOCK_TOKENS)
        blocks = StoredBlocks(0, tuple(self._found(tokens[start : start + BLOCK_TOKENS]) for start in cut))
        tail = tokens[num_whole * BLOCK_TOKENS :]
        path = StoredPath(
            tier.tree.name(salt) if tree is None else tree,
            bytes(TokenBuffer(tokens).data),
            blocks,
            self._found(tokens, is_state=True) if tier.has_snapshots else NO_ADDRESS,
            self._found(tail) if tail else NO_ADDRESS,
            SnapshotKind.PROMPT_END,
            0,
            is_shared=False,
        )
        self.loads.adopt(tier.store, (), [FoundPath(path, idle_s)])
        check(self.cache)
        self.flush()

    def lose(self, tokens: Sequence[int], salt: str = "") -> None:
        """Note that the store has lost the last block of some tokens or, if they end inside one, their snapshot."""
        tier, lost = self.loads.tiers[-1], LostSnapshot if len(tokens) % BLOCK_TOKENS else LostBlock
        data = TokenBuffer(tokens).data
        left: Sequence[LostPath] = [lost(tier.tree.name(salt), bytes(data))]
        while left:
            left = self.loads.forget(tier.store, (), left)
            check(self.cache)
        if len(tokens) % BLOCK_TOKENS:
            assert tier.copy_of(tier.tree.name(salt), data, len(tokens)) is None
        elif (end := tier.tree.find(tier.tree.name(salt), data, len(tokens) // BLOCK_TOKENS)) is not None:
            assert not tier.is_needed(end.run, end.depth - 1 - end.run.start_block)
        check(self.cache)
        self.flush()

    def _found(self, tokens: Sequence[int], *, is_state: bool = False) -> int:
        """Return the address of a block or a state that another engine has stored."""
        self._num_found += 1
        address = OTHERS + self._num_found
        has_cells = not is_state or self._has_slots
        self.device.stored[address] = tuple(tokens) if has_cells else NO_STATE
        if is_state:
            self.device.put_windows(address, tokens)
        return address

    def serve(
        self, prompt: Iterable[int], generated: Iterable[int] = (), *, salt: str = "", chunk: int = 10**6
    ) -> Account:
        """Serve one request from beginning to end, and return its account."""
        lease = self.admit(prompt, salt=salt)
        self.prefill(lease, chunk)
        self.decode(lease, generated)
        self.release(lease)
        return lease.account

    def drain(self) -> None:
        """Release and evict everything, and check that all memory is free."""
        self.flush()
        for transfer in list(self.device.loading):
            self.end_load(transfer, is_done=False)
        while self.end_spill(is_done=False):
            pass
        self.loads.spills = ()
        for lease in list(self.cache.internals().leases.values()):
            self.release(lease, SnapshotKind.PREEMPTION)
        memory, allocator = self.cache.internals().memory, self.cache.internals().allocator
        slots = list(iter(memory.take_slot, None))
        assert len(slots) == allocator.num_slabs - 1
        assert list(published_snapshots(self.cache)) == []
        blocks = memory.take_blocks(allocator.num_slabs * allocator.blocks_per_slab)
        assert len(blocks) == allocator.blocks_per_slab - allocator.num_null_blocks
        for slot in slots:
            memory.free_slot(slot)
        memory.free_blocks(blocks)
        check(self.cache)
        assert (allocator.num_slots, allocator.num_blocks, allocator.num_free_slabs) == (0, 0, allocator.num_slabs - 1)
        assert (memory.num_evictable_blocks, memory.num_evictable_slots) == (0, 0)
        assert all((size.num_evictable, size.allocator.num_blocks) == (0, 0) for size in memory.windows)


STORES = ("host", "disk", "far")
"""The stores of tiers, nearest first."""


def tiers(
    lower_blocks: Sequence[int], snapshots: SnapshotSize, persisted: PersistedEntries = NO_ENTRIES
) -> list[LowerMemory]:
    """Return memories below the device of these sizes, nearest first; 0: none.

    What leaves each of them early, but the last, is a third of it.

    Args:
        persisted: what the second one holds from an earlier process.
    """
    sizes = [size for size in lower_blocks if size]
    memories = []
    for index, (store, size) in enumerate(zip(STORES, sizes, strict=False)):
        spare = size // 3 + 1 if index + 1 < len(sizes) else 0
        key, found = (b"secret" if index else None), (persisted if index == 1 else NO_ENTRIES)
        memories.append(LowerMemory(store, size, 1, snapshots, LoadCosts(), spare, key, found))
    return memories


def num_holds(cache: PrefixCache) -> int:
    """Return how many prefixes are held."""
    return sum(lease.held is not None for lease in cache.internals().leases.values())


def published(cache: PrefixCache) -> set[tuple[str, Tokens]]:
    """Return salt and tokens of every snapshot in the index."""
    return {(salt, tuple(decode(key))) for salt, key, _ in published_snapshots(cache)}


def reasons(account: Account) -> dict[Reason, int]:
    """Return the tokens that were missed, by reason."""
    counts = dict[Reason, int]()
    for miss in account.misses:
        counts[miss.reason] = counts.get(miss.reason, 0) + miss.num_tokens
    return counts


def only_miss(account: Account) -> Miss:
    """Return the one range that was missed."""
    (miss,) = account.misses
    return miss
