"""A history of requests over one cache, compared after every event with a dictionary.

The oracle knows of every published snapshot its salt and its tokens, and of the device what each slot and cell
holds. It finds the deepest snapshot by trying them all, and the longest cached prefix by comparing with all. Without
states, the latter is where a prompt resumes, one token before its end at most.
"""

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal

from strandline.cache import Lead, Lease
from strandline.cache.inspection.invariants import check
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens
from strandline.cache.resume import ResumeRule
from strandline.cache.size import WindowClass
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.traversal import all_runs_below
from strandline.cache.tree import Run
from strandline.ids import BLOCK_TOKENS, NO_ADDRESS, PATH, BlockId, RequestId, SlotId
from strandline.records.account import Account, Reason, SnapshotKind
from strandline.records.actions import MoveBlock
from strandline.records.pictures import is_virtual, virtual_ids
from strandline.records.tokens import TokenBuffer, common_tokens, decode, resumable_end
from tests.cpu.cache.device import Tokens, runs
from tests.cpu.cache.driver import Driver, published, reasons

MAX_PROMPT_TOKENS = 420
PICTURES = ((10, 65), (67, 193), (195, 257))
"""Where patterns have pictures. Every second pattern lacks the first one."""
SALTS = ("", "other")

TakeOrder = Literal["blocks first", "slots first", "by turns"]


def pattern(seed: int, num_tokens: int) -> list[int]:
    """Return tokens of an alphabet of two; a seed gives the same prefix at any length."""
    return random.Random(seed).choices((1, 2), k=num_tokens)


def pattern_with_pictures(seed: int, num_tokens: int) -> list[int]:
    """Return a pattern with pictures."""
    tokens = pattern(seed, num_tokens)
    for start, end in PICTURES[seed % 2 :]:
        tokens[start:end] = virtual_ids(bytes([seed, start]), 1, end - start)[: max(num_tokens - start, 0)]
    return with_whole_pictures(tokens)


def with_whole_pictures(tokens: Sequence[int]) -> list[int]:
    """Return a prompt without the picture that it ends inside of."""
    num_tokens = len(tokens)
    while num_tokens and is_virtual(tokens[num_tokens - 1]):
        num_tokens -= 1
    return list(tokens[:num_tokens])


class History:
    """Events in the life of requests, one per method. ``check`` verifies what must hold after each."""

    def __init__(
        self,
        num_slabs: int,
        blocks_per_slab: int,
        rule: ResumeRule = AT_SNAPSHOTS,
        *,
        emits_events: bool = False,
        lower_blocks: Sequence[int] = (),
        windows: tuple[WindowClass, ...] = (),
        has_pictures: bool = False,
    ) -> None:
        self.rule = rule
        self._pattern = pattern_with_pictures if has_pictures else pattern
        self.driver = Driver(
            num_slabs,
            blocks_per_slab,
            rule=rule,
            emits_events=emits_events,
            lower_blocks=lower_blocks,
            windows=windows,
        )
        self.cache, self.loads = self.driver.cache, self.driver.loads
        self.prompts: list[Tokens] = [()]
        self.running: list[tuple[str, Lease]] = []
        self._num_waiters = 0
        self._is_flushed = True
        self._writes: dict[int, tuple[SlotId, int]] = {}
        self._watched: list[object] = []
        self._old_addresses = set[int]()
        """Addresses at which tiers had something, or were to get it, when the cache was reset."""
        self._late_addresses = set[int]()
        """Addresses of what others stored before a reset and what was found after it."""
        self._old_trees: list[dict[str, str]] = []
        """The names of the last tier's trees by salt, in each epoch that has ended."""
        self.num_spills_over_resets = 0
        """Spills that began before a reset, and ended after it or will do so."""

    def lease(self, index: int) -> Lease:
        return self.running[index % len(self.running)][1]

    def _derived(self, base: int, kept: int, pattern_seed: int, num_more: int) -> list[int]:
        """Return a prompt made of the first ``kept`` tokens of an earlier one and a pattern."""
        first = with_whole_pictures(self.prompts[base % len(self.prompts)][:kept])
        return with_whole_pictures([*first, *self._pattern(pattern_seed, num_more)][:MAX_PROMPT_TOKENS]) or [1]

    # Events

    def admit_derived(
        self,
        base: int,
        kept: int,
        pattern_seed: int,
        num_more: int,
        edited: int,
        *,
        salt: str = "",
        step_tokens: int = 1,
        read: bool = True,
    ) -> None:
        """Admit a prompt made of the first ``kept`` tokens of an earlier one, a pattern, and perhaps one edit."""
        prompt = self._derived(base, kept, pattern_seed, num_more)
        if 0 <= edited < len(prompt):
            prompt[edited] ^= 1 if is_virtual(prompt[edited]) else 3
        self.prompts.append(tuple(prompt))
        self.admit(tuple(prompt), salt, step_tokens, read=read)

    def admit_duplicate(self, index: int, num_tokens: int) -> None:
        """Admit a prefix of a running request's tokens, which that request may still be computing."""
        salt, lease = self.running[index % len(self.running)]
        self.prompts.append(tuple(with_whole_pictures(decode(lease.tokens.slice(0, num_tokens)))))
        self.admit(self.prompts[-1], salt)

    def admit(self, prompt: Tokens, salt: str = "", step_tokens: int = 1, *, read: bool = True) -> Lease | None:
        expected = self.driver.lookup(prompt, salt)
        before = published(self.cache)
        lease = self.driver.try_admit(prompt, salt=salt, step_tokens=step_tokens, read=read)
        self._is_flushed = False
        if lease is None:
            assert published(self.cache) == before, "a refusal evicted something"
            return None
        if read and Reason.NO_ROOM in reasons(lease.account):
            assert not self.running, "others could have made room"
            assert not len(self.loads), "a load could have made room"
            assert lease.account.hit < expected.hit
            assert lease.account.hit == 0 or not self.rule.needs_snapshots
        elif read:
            assert lease.account == expected
        assert lease.computed == lease.account.hit
        self.running.append((salt, lease))
        return lease

    def follow(self, index: int, num_tokens: int, pattern_seed: int, num_more: int) -> None:
        """Find a leader for a prompt that shares a running request's prefix, and follow it."""
        salt, lease = self.running[index % len(self.running)]
        shared = with_whole_pictures(decode(lease.tokens.slice(0, num_tokens)))
        prompt = (*shared, *self._pattern(pattern_seed, num_more))
        lead = self.cache.find_leader(TokenBuffer(prompt), salt)
        if lead is not None:
            self.cache.follow(lead)
            assert lead.is_pending
            assert lead.lease.transfer is not None or lead.lease in [lease for _, lease in self.running]
            assert tuple(decode(lead.lease.tokens.slice(0, lead.position))) == prompt[: lead.position]
            assert lead.position > self.driver.lookup(prompt, salt).hit

    def wait(self, base: int, kept: int, pattern_seed: int, num_more: int) -> None:
        """Protect the expected hit of a prompt that shares a prefix with an earlier one."""
        first = with_whole_pictures(self.prompts[base % len(self.prompts)][:kept])
        prompt = (*first, *self._pattern(pattern_seed, num_more))
        self._num_waiters += 1
        self.cache.expect(RequestId(f"waiter-{self._num_waiters}"), TokenBuffer(prompt))

    def stop_waiting(self, index: int) -> None:
        """Stop protecting an expected hit."""
        names = list(self.cache.internals().expected)
        if names:
            self.cache.forget(names[index % len(names)])

    def step(self, sizes: Sequence[int]) -> None:
        """Compute up to ``sizes`` tokens of the running requests, in one batch."""
        wanted = []
        for size, (_, lease) in zip(sizes, self.running, strict=False):
            end = min(len(lease.tokens), lease.computed + size)
            if end > lease.computed:
                wanted.append((lease, end))
        self.driver.step_together(wanted)
        self.driver.flush()
        self._is_flushed = True

    def decode(self, index: int, tokens: Sequence[int]) -> None:
        """Generate tokens, once the prompt is computed."""
        lease = self.lease(index)
        for token in tokens:
            if lease.computed == len(lease.tokens):
                lease.tokens.append(token)
                self.driver.step(lease, len(lease.tokens))
                self._is_flushed = False

    def leave_snapshot(self, index: int) -> None:
        lease = self.lease(index)
        had_state = lease.has_own_state
        left = self.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
        self._is_flushed = False
        self._check_kept_tokens(self.running[index % len(self.running)][0], lease)
        assert had_state or not left
        assert lease.has_own_state == (had_state and not (left and self.rule.needs_slots))

    def keep_fallback(self, index: int) -> None:
        """Keep the state of a lease's last computed token."""
        lease = self.lease(index)
        had_state, computed = lease.has_own_state, lease.computed
        self.cache.keep_fallback(lease, computed)
        self._is_flushed = False
        if lease.fallback is not None and had_state and not lease.has_own_state:
            assert lease.fallback.position == computed

    def drop_fallback(self, index: int) -> None:
        lease = self.lease(index)
        self.cache.drop_fallback(lease)
        self._is_flushed = False
        assert lease.fallback is None or lease.src == lease.fallback.slot

    def release_at(self, index: int, num_dropped: int) -> None:
        """Release a lease whose last tokens no later prompt contains."""
        salt, lease = self.running.pop(index % len(self.running))
        self.prompts.append(tuple(decode(lease.tokens.data)))
        end = min(max(lease.computed - num_dropped, 1), lease.computed)
        ends = [lease.fallback.position] if lease.fallback is not None else []
        if lease.has_own_state and all(window.covers(lease.computed) for window in lease.windows):
            is_in_window = not self.rule.needs_slots and all(window.covers(end) for window in lease.windows)
            ends += [lease.computed, end] if is_in_window else [lease.computed]
        reached = max((position for position in ends if position <= end), default=max(ends, default=0))
        self.driver.release(lease, SnapshotKind.GENERATION_END, end)
        self._is_flushed = True
        if reached and self.rule.needs_snapshots and not is_inside_picture(lease, reached):
            assert (salt, tuple(decode(lease.tokens.slice(0, reached)))) in published(self.cache)
        self._check_kept_tokens(salt, lease)

    def release(self, index: int, kind: SnapshotKind) -> None:
        """Release a lease, finished or not."""
        salt, lease = self.running.pop(index % len(self.running))
        self.prompts.append(tuple(decode(lease.tokens.data)))
        had_state, computed = self._has_own_state(lease), lease.tokens.slice(0, lease.computed)
        self.driver.release(lease, kind)
        self._is_flushed = True
        if had_state and computed and self.rule.needs_snapshots and not is_inside_picture(lease, lease.computed):
            assert (salt, tuple(decode(computed))) in published(self.cache)
        self._check_kept_tokens(salt, lease)

    def preempt_and_readmit(self, index: int) -> None:
        salt, lease = self.running.pop(index % len(self.running))
        had_state, tokens = self._has_own_state(lease), tuple(decode(lease.tokens.data))
        self.driver.release(lease, SnapshotKind.PREEMPTION)
        again = self.admit(tokens, salt)
        num_blocks = -(-len(tokens) // BLOCK_TOKENS)
        fits = self.rule.needs_slots or num_blocks <= self.cache.memory_use().max_blocks
        is_alone = not self.running and not self.cache.holds_for_others
        assert again is not None or not is_alone or not fits, "a request that is alone can always go on"
        had_state &= not (self.rule.needs_snapshots and is_inside_picture(lease, lease.computed))
        if had_state and again is not None and Reason.NO_ROOM not in reasons(again.account):
            last = min(lease.computed, self.rule.last(len(tokens)))
            assert again.computed >= resumable_end(lease.tokens.data, last, self._grid)

    @property
    def _grid(self) -> int:
        return self.rule.grid_tokens if isinstance(self.rule, AtTokens) else 1

    def _has_own_state(self, lease: Lease) -> bool:
        """Return whether a lease can leave a snapshot: without slots, once it has computed a token."""
        return lease.has_own_state and (self.rule.needs_slots or lease.computed > lease.account.hit)

    def _check_kept_tokens(self, salt: str, lease: Lease) -> None:
        """Check that all tokens that a lease has computed are cached, to the last."""
        if not self.rule.needs_snapshots:
            tokens = decode(lease.tokens.slice(0, lease.computed))
            assert self.driver.lookup(tokens, salt).kv_tokens == len(tokens)

    def begin_load(
        self, base: int, kept: int, pattern_seed: int, num_more: int, first_block: int, num_snapshots: int, salt: str
    ) -> None:
        """Begin to load a prefix that begins like an earlier prompt."""
        tokens = self._derived(base, kept, pattern_seed, num_more)
        self.prompts.append(tuple(tokens))
        addresses = random.Random(str((kept, num_more, len(self.prompts))))
        positions = {len(tokens), *(addresses.randint(1, len(tokens)) for _ in range(num_snapshots))}
        positions = {resumable_end(TokenBuffer(tokens).data, position) for position in positions} - {0}
        offer = self.driver.offer(tokens, positions if self.rule.needs_snapshots else (), first_block=first_block)
        prompt = (*tokens, *pattern(pattern_seed, 3))
        before = fingerprint(self.driver)
        is_lacking = self.loads.is_lacking(TokenBuffer(prompt), offer, salt)
        assert fingerprint(self.driver) == before
        found = published(self.cache)
        lead = self.driver.load(prompt, offer, salt)
        self._is_flushed = True
        if lead is None:
            assert published(self.cache) == found, "a refusal evicted something"
            return
        assert is_lacking
        assert lead.is_pending
        assert lead.position == len(tokens)
        found_again = self.cache.find_leader(TokenBuffer(tokens), salt)
        assert found_again is not None
        assert found_again.position == len(tokens)

    def load_from_tier(self, base: int, kept: int, pattern_seed: int, num_more: int, salt: str) -> None:
        """Begin to load what rests of a prompt that begins like an earlier one."""
        tokens = self._derived(base, kept, pattern_seed, num_more)
        before = fingerprint(self.driver)
        offer = self.loads.tier_offer(TokenBuffer(tokens), salt)
        account = self.driver.lookup(tokens, salt)
        assert fingerprint(self.driver) == before, "an offer changed something"
        assert (Reason.DEMOTED in reasons(account)) == (offer is not None), "before costs are known, every load pays"
        if offer is None:
            return
        assert offer.position > account.hit
        buffer = TokenBuffer(tokens)
        if not self.loads.is_lacking(buffer, offer, salt):
            assert self.loads.find_shared(buffer, offer, salt) is not None, "what is offered can be loaded"
        self.driver.load(tokens, offer, salt)
        self._is_flushed = True

    def _resumable_after_load(self, prompt: Tokens, salt: str) -> int:
        """Return the deepest position at which a prompt could resume with a whole entry of a tier, trying them all."""
        best, data = 0, TokenBuffer(prompt).data
        for tier in self.loads.tiers:
            root = tier.tree.roots.get(tier.tree.name(salt))
            for copy in () if root is None else tier.column.below(root):
                path = copy.snapshot.path()
                if self.rule.needs_snapshots:
                    num_shared = copy.position if copy.address and data.startswith(path) else 0
                else:
                    num_shared = common_tokens(path, data) // BLOCK_TOKENS * BLOCK_TOKENS
                position = self.rule.resumes_at(data, num_shared)
                if position > best and tier.is_whole(copy.snapshot):
                    best = position
        return best

    def end_load(self, index: int, *, is_done: bool) -> None:
        """End a transfer of a load, whichever began first; cancelled or not."""
        loading = self.driver.device.loading
        if not loading:
            return
        transfer = list(loading)[index % len(loading)]
        lease = self.loads.find_lease(transfer)
        assert lease is not None
        salt = lease.salt
        wanted = {(salt, tuple(decode(lease.tokens.slice(0, cut.position)))) for cut in lease.cuts}
        before = published(self.cache)
        ended = self.driver.end_load(transfer, is_done=is_done)
        self._is_flushed = True
        assert ended is None or is_done or not ended.is_done
        assert published(self.cache) == (before | wanted if ended is not None and ended.is_done else before)
        if ended is None:
            assert lease.is_active
            return
        if ended.is_done:
            account = self.driver.lookup(decode(lease.tokens.data), salt)
            assert account.kv_tokens == len(lease.tokens)
            assert account.hit == (self.rule.last(len(lease.tokens)) if self.rule.needs_snapshots else account.hit)
        assert not lease.is_active

    def reset(self) -> None:
        """Take back what has memory of the device, and begin another epoch. Other spills end later."""
        device, parts = self.driver.device, self.cache.internals()
        while parts.leases:
            holding = [index for index, spill in enumerate(device.spilling.values()) if spill.blocks]
            if self.running:
                self.release(0, SnapshotKind.PREEMPTION)
            elif device.loading:
                self.end_load(0, is_done=len(parts.leases) % 2 == 0)
            else:
                self.end_spill(holding[0], is_done=True)
        tiers = self.loads.tiers
        self._old_trees.append({salt: tiers[-1].tree.name(salt) if tiers else "" for salt in SALTS})
        self.num_spills_over_resets += len(device.spilling)
        for tier in tiers:
            self._old_addresses.update(*(addresses_below(tier, root) for root in tier.tree.roots.values()))
        for spill in device.spilling.values():
            assert spill.path is not None
            self._old_addresses |= {*spill.path.addresses.values(), spill.path.address, spill.path.tail_address}
        self._old_addresses.discard(NO_ADDRESS)
        self.driver.reset()
        self._is_flushed = True
        assert self.cache.memory_use().num_blocks == self.cache.memory_use().num_slots == 0
        assert [tier.num_snapshots for tier in tiers] == [0] * len(tiers)
        for prompt, salt in product(self.prompts[-8:], SALTS):
            account = self.driver.lookup(prompt, salt)
            assert (account.hit, account.kv_tokens) == (0, 0)
            assert self.loads.tier_offer(TokenBuffer(prompt), salt) is None

    def adopt(
        self,
        base: int,
        kept: int,
        pattern_seed: int,
        num_more: int,
        salt: str,
        idle_s: float = 0.0,
        *,
        is_old: bool = False,
    ) -> None:
        """Find that another engine has stored a prompt that begins like an earlier one in the last tier.

        Args:
            is_old: it was stored in the epoch before the last reset, if there was one.
        """
        tokens = self._derived(base, kept, pattern_seed, num_more)
        if not self.rule.needs_snapshots:  # files then hold whole blocks, which may end inside a picture
            tokens = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS]
        self.prompts.append(tuple(with_whole_pictures(tokens)) or (1,))
        if tokens:
            tree = self._old_trees[-1][salt] if is_old and self._old_trees else None
            before = set(self.driver.device.stored)
            self.driver.adopt(tokens, salt, idle_s, tree=tree)
            if tree is not None:
                self._late_addresses |= set(self.driver.device.stored) - before
            self._is_flushed = True

    def lose(self, base: int, num_tokens: int, salt: str) -> None:
        """Find that the store of the last tier has lost a block or a snapshot of an earlier prompt."""
        if self.prompts and (tokens := self.prompts[base % len(self.prompts)][:num_tokens]):
            self.driver.lose(tokens, salt)
            self._is_flushed = True

    def end_spill(self, index: int, *, is_done: bool) -> None:
        """End a spill, whichever began first."""
        self._is_flushed |= self.driver.end_spill(index, is_done=is_done)

    def flush(self) -> None:
        """Write entries that are only in memory to the persistent tier, and go on as if the process had not ended."""
        loads = self.loads
        flush = loads.begin_flush()
        self.driver.flush()
        while self.driver.end_spill():
            pass
        assert flush is None or flush.num_left == 0
        loads.flush = None
        self._is_flushed = True

    def cancel_load(self, index: int) -> None:
        """Cancel a load, as when the request that it was begun for is aborted; it ends later."""
        loading = self.driver.device.loading
        if loading:
            transfer = list(loading)[index % len(loading)]
            lease = self.loads.find_lease(transfer)
            assert lease is not None
            self.loads.cancel(Lead(lease, len(lease.tokens)))
            self.driver.flush()
            assert transfer in self.driver.device.cancelled

    def take(self, num_blocks: int, num_slots: int, order: TakeOrder) -> None:
        """Allocate and free memory, and check that ``can_take`` is exact."""
        memory = self.cache.internals().memory
        granted = memory.can_take(num_blocks, num_slots)
        blocks, slots = self._follow_moves([]), list[SlotId]()  # earlier moves are of other blocks
        for wants_slot in _allocations(num_blocks, num_slots, order):
            if wants_slot and (slot := memory.take_slot()):
                slots.append(slot)
            elif not wants_slot:
                blocks += map(BlockId, memory.take_blocks(1))
            blocks = self._follow_moves(blocks)
        is_taken = len(blocks) == num_blocks and len(slots) == num_slots
        assert granted == is_taken
        memory.free_blocks(blocks)
        for slot in slots:
            memory.free_slot(slot)
        self.driver.flush()
        self._is_flushed = True

    def _follow_moves(self, blocks: list[BlockId]) -> list[BlockId]:
        # Not by ``take_actions``, which may begin spills, and so keep blocks that ``can_take`` has promised.
        memory = self.cache.internals().memory
        actions, memory.actions = memory.actions, []
        self.driver.device.apply(actions)
        for action in actions:  # in order: a block may be moved twice, or to where another one was
            if isinstance(action, MoveBlock) and action.lifetime == PATH:
                blocks = [action.dst if block == action.src else block for block in blocks]
        return blocks

    # What must hold after each of them

    def check(self) -> None:
        check(self.cache)
        taken = sum(self.cache.stats().snapshots_taken.values())
        taken += self.cache.stats().loads.num_snapshots
        assert len(published(self.cache)) == taken - self.cache.internals().memory.num_snapshots_evicted
        if self._is_flushed:
            self.driver.device.verify(self.cache, self.loads.tiers)
            self._check_that_published_slots_stand_still()
        self._check_lookups()
        if self._old_addresses:
            self._check_that_nothing_old_is_reached()

    def _check_that_nothing_old_is_reached(self) -> None:
        """Check that nothing of before a reset can be loaded, or is left once all spills of that time have ended."""
        for tier, salt in product(self.loads.tiers, SALTS):
            root = tier.tree.roots.get(tier.tree.name(salt))
            reached = set[int]() if root is None else addresses_below(tier, root)
            assert reached.isdisjoint(self._old_addresses | self._late_addresses)
        if self._is_flushed and not self.driver.device.spilling:
            assert self._old_addresses.isdisjoint(self.driver.device.stored)

    def _check_that_published_slots_stand_still(self) -> None:
        snapshots = {id(s): s for _, _, s in published_snapshots(self.cache)}
        snapshots |= {id(lease.source): lease.source for _, lease in self.running if lease.source is not None}
        counts = {key: (s.slot, self.driver.device.num_writes[s.slot]) for key, s in snapshots.items()}
        for key, count in self._writes.items():
            assert counts.get(key, count) == count, "a published slot was written"
        self._writes = counts
        self._watched = list(snapshots.values())

    def _check_lookups(self) -> None:
        before = fingerprint(self.driver)
        found, roots = published(self.cache), self.cache.internals().index.roots
        for salt in SALTS:
            snapshots = {tokens for name, tokens in found if name == salt}
            paths = all_paths(roots[salt]) if salt in roots else []
            for prompt in dict.fromkeys((*self.prompts[-4:], *self.prompts[1:3])):
                account = self.driver.lookup(prompt, salt)
                self._check_account(account, prompt, snapshots, paths)
                demoted = [miss.end for miss in account.misses if miss.reason is Reason.DEMOTED]
                assert max(demoted, default=account.hit) >= self._resumable_after_load(prompt, salt), "a tier has more"
        assert fingerprint(self.driver) == before, "a lookup changed something"

    def _check_account(self, account: Account, prompt: Tokens, found: set[Tokens], paths: list[Tokens]) -> None:
        data = TokenBuffer(prompt).data
        longest = max((num_shared(path, prompt) for path in paths), default=0)
        assert account.kv_tokens == resumable_end(data, longest)
        if self.rule.needs_snapshots:
            last = self.rule.last(len(prompt))
            assert account.hit == max((min(len(t), last) for t in found if prompt[: len(t)] == t), default=0)
        else:
            assert account.hit == resumable_end(data, min(longest, max(len(prompt) - 1, 0)), self._grid)
        assert account.queried == len(prompt) == account.hit + sum(miss.num_tokens for miss in account.misses)
        position = account.hit
        for miss in account.misses:
            assert miss.start == position < miss.end
            position = miss.end


def addresses_below(tier: LowerTier, root: Run) -> set[int]:
    """Return all addresses that a tier has in a tree."""
    found = set[int]()
    for run in all_runs_below(root):
        found.update(tier.column.addresses_in(run))
        found.update(*((copy.address, copy.tail_address) for copy in tier.column.copies(run)))
    return found


def is_inside_picture(lease: Lease, position: int) -> bool:
    """Return whether a position is strictly inside a picture."""
    return resumable_end(lease.tokens.data, position) < position


def _allocations(num_blocks: int, num_slots: int, order: TakeOrder) -> list[bool]:
    """Return in which order blocks (False) and slots (True) are taken."""
    both = min(num_blocks, num_slots)
    orders: dict[TakeOrder, Callable[[], list[bool]]] = {
        "blocks first": lambda: [False] * num_blocks + [True] * num_slots,
        "slots first": lambda: [True] * num_slots + [False] * num_blocks,
        "by turns": lambda: [False, True] * both + [False] * (num_blocks - both) + [True] * (num_slots - both),
    }
    return orders[order]()


def fingerprint(driver: Driver) -> list[Any]:
    """Return all that a lookup could change."""
    cache, parts = driver.cache, driver.cache.internals()
    tree = [(run.start_block, bytes(run.tokens), list(run.blocks), run.num_users, run.last_tick) for run in runs(cache)]
    slots = [(salt, key, s.slot, s.num_readers, s.last_tick, s.kind) for salt, key, s in published_snapshots(cache)]
    memory = (len(parts.memory.actions), parts.memory.use())
    return [tree, slots, memory, list(parts.index.roots), cache.stats(), parts.allocator.used()]


def all_paths(root: Run) -> list[Tokens]:
    """Return the tokens of every path from a tree's root to a leaf."""
    found = []
    paths: list[tuple[Run, Tokens]] = [(root, ())]
    while paths:
        run, prefix = paths.pop()
        tokens: Tokens = (*prefix, *decode(run.tokens))
        paths.extend((child, tokens) for child in run.children.values())
        if not run.children:
            found.append(tokens)
    return found


def num_shared(path: Tokens, prompt: Tokens) -> int:
    """Count the tokens that a path and a prompt begin with."""
    if path[: len(prompt)] == prompt[: len(path)]:
        return min(len(path), len(prompt))
    return next(address for address, (a, b) in enumerate(zip(path, prompt, strict=False)) if a != b)
