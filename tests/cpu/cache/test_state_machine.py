"""Whatever requests do, in whatever order and under whatever pressure: the cache agrees with a dictionary.

The oracle knows of every published snapshot its salt and its tokens, and of the device what each slot and cell
holds. It finds the deepest snapshot by trying them all, and the longest cached prefix by comparing with all.
"""

import random
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strandline.cache import Account, Lease, MoveBlock, Reason, SnapshotKind
from strandline.cache.invariants import check
from strandline.cache.tokens import decode
from strandline.cache.tree import Run
from strandline.ids import BlockId, SlotId
from tests.cpu.cache.device import Tokens, runs
from tests.cpu.cache.driver import Driver, published, reasons

SHAPES = [(2, 1), (3, 1), (6, 1), (12, 1), (3, 2), (6, 2), (12, 2), (3, 5), (5, 5), (9, 5), (40, 5)]
LENGTHS = [1, 2, 7, 62, 63, 64, 65, 66, 127, 128, 129, 200]
MAX_PROMPT_TOKENS = 420
MAX_RUNNING = 4


def pattern(seed: int, num_tokens: int) -> list[int]:
    """Return tokens of an alphabet of two; the same seed gives the same beginning at any length."""
    return random.Random(seed).choices((1, 2), k=num_tokens)


def fingerprint(driver: Driver) -> list[Any]:
    """Return all that a lookup could change."""
    cache = driver.cache
    tree = [
        (run.start_block, bytes(run.tokens), tuple(run.blocks), run.num_users, run.last_used) for run in runs(cache)
    ]
    slots = [(salt, key, s.slot, s.num_readers, s.last_used, s.kind) for salt, key, s in cache.snapshots()]
    memory = (len(cache.memory.actions), cache.memory.num_evictable_blocks, cache.memory.num_evictable_slots)
    return [tree, slots, memory, list(cache.roots()), str(cache.counters), cache.arena.used()]


class CacheMachine(RuleBasedStateMachine):
    """Requests over one cache."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[Tokens] = [()]
        self.running: list[tuple[str, Lease]] = []
        self.writes: dict[int, tuple[SlotId, int]] = {}
        self.is_flushed = True

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: tuple[int, int]) -> None:
        self.driver = Driver(*shape)
        self.cache = self.driver.cache

    # What requests do

    @precondition(lambda self: len(self.running) < MAX_RUNNING)
    @rule(
        base=st.integers(0, 30),
        kept=st.sampled_from([0, 1, 10, 63, 64, 65, 100, 127, 128, 129, 150, MAX_PROMPT_TOKENS]),
        seed=st.integers(0, 3),
        more=st.sampled_from([0, *LENGTHS]),
        edited=st.sampled_from([-1, 0, 5, 63, 64, 70, 128]),
        salt=st.sampled_from(["", "", "other"]),
        step_tokens=st.sampled_from([1, 64, 500]),
        read=st.sampled_from([True, True, True, False]),
    )
    def admit(
        self, base: int, kept: int, seed: int, more: int, edited: int, salt: str, step_tokens: int, read: bool
    ) -> None:
        prompt = list(self.prompts[base % len(self.prompts)][:kept]) + pattern(seed, more)
        prompt = prompt[:MAX_PROMPT_TOKENS] or [1]
        if 0 <= edited < len(prompt):
            prompt[edited] = 3 - prompt[edited]
        self.prompts.append(tuple(prompt))
        self._admit(tuple(prompt), salt, step_tokens, read)

    def _admit(self, prompt: Tokens, salt: str, step_tokens: int, read: bool) -> Lease | None:
        expected = self.driver.lookup(prompt, salt)
        before = published(self.cache)
        lease = self.driver.try_admit(prompt, salt=salt, step_tokens=step_tokens, read=read)
        self.is_flushed = False
        if lease is None:
            assert published(self.cache) == before, "a refusal evicted something"
            return None
        if read and Reason.NO_ROOM in reasons(lease.account):
            assert not self.running, "others could have made room"
            assert lease.account.hit == 0 < expected.hit
        elif read:
            assert lease.account == expected
        assert lease.computed == lease.account.hit
        self.running.append((salt, lease))
        return lease

    def _pick(self, index: int) -> Lease:
        return self.running[index % len(self.running)][1]

    @precondition(lambda self: self.running)
    @rule(sizes=st.lists(st.sampled_from([0, 1, 3, 63, 64, 65, 128, 500]), min_size=1, max_size=MAX_RUNNING))
    def step(self, sizes: list[int]) -> None:
        """One batch: some requests prefill a chunk, some decode, some wait."""
        wanted = []
        for size, (_, lease) in zip(sizes, self.running, strict=False):
            end = min(len(lease.tokens), lease.computed + size)
            if end > lease.computed:
                wanted.append((lease, end))
        self.driver.step_together(wanted)
        self.driver.flush()
        self.is_flushed = True

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 3), token=st.integers(1, 2))
    def decode(self, index: int, token: int) -> None:
        lease = self._pick(index)
        if lease.computed < len(lease.tokens):
            return
        lease.tokens.append(token)
        self.driver.step(lease, len(lease.tokens))
        self.is_flushed = False

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 3))
    def leave_snapshot(self, index: int) -> None:
        lease = self._pick(index)
        left = self.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
        self.is_flushed = False
        if left:
            assert not lease.has_own_state

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 3), kind=st.sampled_from([SnapshotKind.GENERATION_END, SnapshotKind.PREEMPTION]))
    def release(self, index: int, kind: SnapshotKind) -> None:
        """Finish, or be aborted wherever it stands."""
        salt, lease = self.running.pop(index % len(self.running))
        self.prompts.append(tuple(decode(lease.tokens.data)))
        had_state, computed = lease.has_own_state, lease.tokens.slice(0, lease.computed)
        self.driver.release(lease, kind)
        self.is_flushed = True
        if had_state and computed:
            assert (salt, tuple(decode(computed))) in published(self.cache)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 3))
    def preempt_and_readmit(self, index: int) -> None:
        salt, lease = self.running.pop(index % len(self.running))
        had_state, tokens = lease.has_own_state, tuple(decode(lease.tokens.data))
        self.driver.release(lease, SnapshotKind.PREEMPTION)
        again = self._admit(tokens, salt, 1, True)
        assert again is not None or self.running, "a request that is alone can always go on"
        if had_state and again is not None and again.account.hit:
            assert again.computed >= lease.computed

    # What must hold after each of them

    @invariant()
    def cache_is_consistent(self) -> None:
        check(self.cache)
        taken = sum(self.cache.counters.snapshots_taken.values())
        assert len(published(self.cache)) == taken - self.cache.memory.num_snapshots_evicted

    @invariant()
    def device_holds_what_the_cache_believes(self) -> None:
        if self.is_flushed:
            self.driver.device.verify(self.cache)

    @invariant()
    def published_slots_are_never_written(self) -> None:
        snapshots = {id(s): s for _, _, s in self.cache.snapshots()}
        snapshots |= {id(lease.source): lease.source for _, lease in self.running if lease.source is not None}
        counts = {key: (s.slot, self.driver.device.num_writes[s.slot]) for key, s in snapshots.items()}
        if self.is_flushed:
            for key, count in self.writes.items():
                assert counts.get(key, count) == count
            self.writes = counts
            self.keep_alive = list(snapshots.values())

    @invariant()
    def lookup_agrees_with_the_oracle(self) -> None:
        before = fingerprint(self.driver)
        for prompt in (*self.prompts[-4:], *self.prompts[1:3]):
            for salt in ("", "other"):
                self._check_account(self.driver.lookup(prompt, salt), prompt, salt)
        assert fingerprint(self.driver) == before, "a lookup changed something"

    def _check_account(self, account: Account, prompt: Tokens, salt: str) -> None:
        found = published(self.cache)
        fitting = [len(t) for s, t in found if s == salt and prompt[: len(t)] == t]
        assert account.hit == max(fitting, default=0)
        root = self.cache.roots().get(salt)
        assert account.kv_tokens == (longest_match(root, prompt) if root else 0)
        assert account.queried == len(prompt) == account.hit + sum(miss.num_tokens for miss in account.misses)
        position = account.hit
        for miss in account.misses:
            assert miss.start == position < miss.end
            position = miss.end

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()


def longest_match(root: Run, prompt: Tokens) -> int:
    """Return the most tokens that the prompt shares with any path of the tree, by trying all of them."""
    best = 0
    paths: list[tuple[Run, Tokens]] = [(root, ())]
    while paths:
        run, prefix = paths.pop()
        tokens: Tokens = (*prefix, *decode(run.tokens))
        same = next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), None)
        best = max(best, min(len(tokens), len(prompt)) if same is None else same)
        paths.extend((child, tokens) for child in run.children.values())
    return best


ORDERS: dict[str, Callable[[int, int], list[bool]]] = {
    "blocks first": lambda num_blocks, num_slots: [False] * num_blocks + [True] * num_slots,
    "slots first": lambda num_blocks, num_slots: [True] * num_slots + [False] * num_blocks,
    "by turns": lambda num_blocks, num_slots: (
        [False, True] * min(num_blocks, num_slots)
        + [False] * max(0, num_blocks - num_slots)
        + [True] * max(0, num_slots - num_blocks)
    ),
}
"""In which order blocks (False) and slots (True) are taken."""


class HungryCacheMachine(CacheMachine):
    """The same, while somebody takes and returns memory: what ``can_take`` says is exact."""

    @rule(num_blocks=st.integers(0, 12), num_slots=st.integers(0, 4), order=st.sampled_from(list(ORDERS)))
    def take(self, num_blocks: int, num_slots: int, order: str) -> None:
        memory = self.cache.memory
        granted = memory.can_take(num_blocks, num_slots)
        blocks, slots = list[BlockId](), list[SlotId]()
        for wants_slot in ORDERS[order](num_blocks, num_slots):
            if wants_slot and (slot := memory.take_slot()):
                slots.append(slot)
            elif not wants_slot and (block := memory.take_block()):
                blocks.append(block)
            blocks = self._follow_moves(blocks)
        assert granted == (len(blocks) == num_blocks and len(slots) == num_slots)
        for block in blocks:
            memory.free_block(block)
        for slot in slots:
            memory.free_slot(slot)
        self.driver.flush()
        self.is_flushed = True

    def _follow_moves(self, blocks: list[BlockId]) -> list[BlockId]:
        actions = self.cache.take_actions()
        self.driver.device.apply(actions)
        moves = {action.src: action.dst for action in actions if isinstance(action, MoveBlock)}
        return [moves.get(block, block) for block in blocks]


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
HungryCacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase
TestHungryCacheMachine = HungryCacheMachine.TestCase
