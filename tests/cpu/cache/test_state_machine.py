"""A state machine over the cache, compared with a dictionary after every event."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens
from strandline.cache.resume import ResumeRule
from strandline.cache.tiers import loads
from strandline.records.account import SnapshotKind
from tests.cpu.cache.history import History, TakeOrder

SHAPES = [(2, 1), (3, 1), (6, 1), (16, 1), (3, 2), (6, 2), (12, 2), (3, 5), (5, 5), (9, 5), (40, 5)]
"""Slabs, and blocks per slab."""
KEPT = [0, 1, 10, 63, 64, 65, 100, 127, 128, 129, 150, 420]
LENGTHS = [0, 1, 7, 62, 63, 64, 65, 66, 127, 128, 129, 200]
EDITED = [-1, -1, 0, 5, 63, 64, 70, 128]
CHUNKS = [500, 1, 3, 63, 64, 65, 128, 0]
MAX_RUNNING = 4
SIZES = [(60, 25, 200, 8, 1), (300, 60, 20, 1), (300, 100, 20, 1)]
"""Sizes of tiers in blocks, nearest first."""
RULES = [AT_SNAPSHOTS, AT_SNAPSHOTS, AtTokens()]
TIERED: dict[str, st.SearchStrategy[Any]] = {
    "shape": st.sampled_from(SHAPES[::-1]),
    "rule": st.sampled_from(RULES),
    "has_pictures": st.booleans(),
}
ORDERS: list[TakeOrder] = ["blocks first", "slots first", "by turns"]
RELEASE_KINDS = [SnapshotKind.GENERATION_END, SnapshotKind.PREEMPTION]


@pytest.fixture(autouse=True, scope="module")
def _short_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loads, "MIN_PIECE_BLOCKS", 1)
        yield


class CacheMachine(RuleBasedStateMachine):
    """Requests over one cache."""

    history: History

    @initialize(shape=st.sampled_from(SHAPES[::-1]))
    def start(self, shape: tuple[int, int]) -> None:
        self.history = History(*shape)

    @precondition(lambda self: len(self.history.running) < MAX_RUNNING)
    @rule(
        base=st.integers(0, 30),
        kept=st.sampled_from(KEPT[::-1]),
        seed=st.integers(0, 3),
        num_more=st.sampled_from(LENGTHS[::-1]),
        edited=st.sampled_from(EDITED),
        salt=st.sampled_from(["", "", "other"]),
        step_tokens=st.sampled_from([1, 64, 500]),
        read=st.sampled_from([True, True, True, True, False]),
    )
    def admit(
        self, base: int, kept: int, seed: int, num_more: int, edited: int, salt: str, step_tokens: int, read: bool
    ) -> None:
        self.history.admit_derived(base, kept, seed, num_more, edited, salt=salt, step_tokens=step_tokens, read=read)

    @precondition(lambda self: 0 < len(self.history.running) < MAX_RUNNING)
    @rule(index=st.integers(0, 3), num_tokens=st.sampled_from([420, 200, 130, 65]))
    def admit_duplicate(self, index: int, num_tokens: int) -> None:
        self.history.admit_duplicate(index, num_tokens)

    @precondition(lambda self: any(lease.computed + 1 < len(lease.tokens) for _, lease in self.history.running))
    @rule(
        index=st.integers(0, 3),
        num_tokens=st.sampled_from([420, 200, 130, 100, 65]),
        seed=st.integers(0, 3),
        num_more=st.sampled_from(LENGTHS),
    )
    def follow(self, index: int, num_tokens: int, seed: int, num_more: int) -> None:
        self.history.follow(index, num_tokens, seed, num_more)

    @rule(
        base=st.integers(0, 30), kept=st.sampled_from(KEPT), seed=st.integers(0, 3), num_more=st.sampled_from(LENGTHS)
    )
    def wait(self, base: int, kept: int, seed: int, num_more: int) -> None:
        self.history.wait(base, kept, seed, num_more)

    @precondition(lambda self: self.history.cache.internals().expected)
    @rule(index=st.integers(0, 3))
    def stop_waiting(self, index: int) -> None:
        self.history.stop_waiting(index)

    @precondition(lambda self: any(lease.computed < len(lease.tokens) for _, lease in self.history.running))
    @rule(sizes=st.tuples(*[st.sampled_from(CHUNKS)] * MAX_RUNNING))
    def step(self, sizes: tuple[int, ...]) -> None:
        self.history.step(sizes)

    @precondition(lambda self: any(lease.computed < len(lease.tokens) for _, lease in self.history.running))
    @rule(chunk=st.sampled_from([64, 500]))
    def step_all(self, chunk: int) -> None:
        self.history.step([chunk] * MAX_RUNNING)

    @precondition(lambda self: any(lease.computed == len(lease.tokens) for _, lease in self.history.running))
    @rule(index=st.integers(0, 3), tokens=st.lists(st.integers(1, 2), min_size=1, max_size=5))
    def decode(self, index: int, tokens: list[int]) -> None:
        self.history.decode(index, tokens)

    @precondition(lambda self: any(lease.has_own_state for _, lease in self.history.running))
    @rule(index=st.integers(0, 3))
    def leave_snapshot(self, index: int) -> None:
        self.history.leave_snapshot(index)

    @precondition(lambda self: any(lease.has_own_state for _, lease in self.history.running))
    @rule(index=st.integers(0, 3))
    def keep_fallback(self, index: int) -> None:
        self.history.keep_fallback(index)

    @precondition(lambda self: any(lease.fallback is not None for _, lease in self.history.running))
    @rule(index=st.integers(0, 3))
    def drop_fallback(self, index: int) -> None:
        self.history.drop_fallback(index)

    @precondition(lambda self: self.history.running)
    @rule(index=st.integers(0, 3), num_dropped=st.integers(0, 6))
    def release_at(self, index: int, num_dropped: int) -> None:
        self.history.release_at(index, num_dropped)

    @precondition(lambda self: self.history.running)
    @rule(index=st.integers(0, 3), kind=st.sampled_from(RELEASE_KINDS))
    def release(self, index: int, kind: SnapshotKind) -> None:
        self.history.release(index, kind)

    @precondition(lambda self: self.history.running)
    @rule(index=st.integers(0, 3))
    def preempt_and_readmit(self, index: int) -> None:
        self.history.preempt_and_readmit(index)

    @rule(chance=st.integers(0, 3))
    def reset(self, chance: int) -> None:
        if chance == 3:
            self.history.reset()

    @invariant()
    def cache_agrees_with_the_dictionary(self) -> None:
        self.history.check()

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.driver.drain()


class LoadingCacheMachine(CacheMachine):
    """The same, with loads that end late, in any order, well or badly."""

    @rule(
        base=st.integers(0, 30),
        kept=st.sampled_from(KEPT),
        seed=st.integers(0, 3),
        num_more=st.sampled_from(LENGTHS[::-1]),
        first_block=st.sampled_from([0, 0, 0, 1, 3]),
        num_snapshots=st.integers(0, 3),
        salt=st.sampled_from(["", "", "other"]),
    )
    def begin_load(
        self, base: int, kept: int, seed: int, num_more: int, first_block: int, num_snapshots: int, salt: str
    ) -> None:
        self.history.begin_load(base, kept, seed, num_more, first_block, num_snapshots, salt)

    @precondition(lambda self: self.history.loads)
    @rule(index=st.integers(0, 3), is_done=st.sampled_from([True, True, False]))
    def end_load(self, index: int, is_done: bool) -> None:
        self.history.end_load(index, is_done=is_done)

    @precondition(lambda self: self.history.loads)
    @rule(index=st.integers(0, 3))
    def cancel_load(self, index: int) -> None:
        self.history.cancel_load(index)

    @rule(num_blocks=st.integers(0, 12), num_slots=st.integers(0, 4), order=st.sampled_from(ORDERS))
    def take(self, num_blocks: int, num_slots: int, order: TakeOrder) -> None:
        self.history.take(num_blocks, num_slots, order)


def tier_sizes(least: int, most: int) -> st.SearchStrategy[Sequence[int]]:
    """Draw the sizes of a number of tiers below the device, nearest first."""
    return st.integers(least, most).flatmap(lambda num_tiers: st.tuples(*map(st.sampled_from, SIZES[:num_tiers])))


class TieredCacheMachine(LoadingCacheMachine):
    """The same, with a tier below the device."""

    @initialize(**TIERED, lower_blocks=tier_sizes(1, 1))
    def start(
        self,
        shape: tuple[int, int],
        rule: ResumeRule = AT_SNAPSHOTS,
        lower_blocks: Sequence[int] = (),
        has_pictures: bool = False,
    ) -> None:
        self.history = History(*shape, rule, lower_blocks=lower_blocks, has_pictures=has_pictures)

    @rule(
        base=st.integers(0, 30),
        kept=st.sampled_from(KEPT[::-1]),
        seed=st.integers(0, 3),
        num_more=st.sampled_from(LENGTHS),
        salt=st.sampled_from(["", "", "other"]),
    )
    def load_from_tier(self, base: int, kept: int, seed: int, num_more: int, salt: str) -> None:
        self.history.load_from_tier(base, kept, seed, num_more, salt)

    @precondition(lambda self: any(map(len, self.history.loads.spills)))
    @rule(index=st.integers(0, 3), is_done=st.sampled_from([True, True, True, False]))
    def end_spill(self, index: int, is_done: bool) -> None:
        self.history.end_spill(index, is_done=is_done)

    @precondition(lambda self: self.history.loads.spills)
    @rule(
        base=st.integers(0, 30),
        kept=st.sampled_from(KEPT[::-1]),
        seed=st.integers(0, 3),
        num_more=st.sampled_from(LENGTHS),
        salt=st.sampled_from(["", "", "other"]),
        is_old=st.booleans(),
    )
    def adopt(self, base: int, kept: int, seed: int, num_more: int, salt: str, is_old: bool) -> None:
        self.history.adopt(base, kept, seed, num_more, salt, is_old=is_old)

    @precondition(lambda self: self.history.loads.spills)
    @rule(base=st.integers(0, 30), num_tokens=st.sampled_from([64, 128, 1000]), salt=st.sampled_from(["", "", "other"]))
    def lose(self, base: int, num_tokens: int, salt: str) -> None:
        self.history.lose(base, num_tokens, salt)

    @precondition(lambda self: self.history.loads.spills)
    @rule()
    def flush(self) -> None:
        self.history.flush()


class TwoTierCacheMachine(TieredCacheMachine):
    """The same, with a persistent tier below that one, and spills that end late, in any order, well or badly."""

    @initialize(**TIERED, lower_blocks=tier_sizes(2, 2))
    def start(
        self,
        shape: tuple[int, int],
        rule: ResumeRule = AT_SNAPSHOTS,
        lower_blocks: Sequence[int] = (),
        has_pictures: bool = False,
    ) -> None:
        super().start(shape, rule, lower_blocks, has_pictures)


class ThreeTierCacheMachine(TieredCacheMachine):
    """The same, with two persistent tiers."""

    @initialize(**TIERED, lower_blocks=tier_sizes(3, 3))
    def start(
        self,
        shape: tuple[int, int],
        rule: ResumeRule = AT_SNAPSHOTS,
        lower_blocks: Sequence[int] = (),
        has_pictures: bool = False,
    ) -> None:
        super().start(shape, rule, lower_blocks, has_pictures)


class StatelessLoadingCacheMachine(LoadingCacheMachine):
    """The same, of a model that keeps no states."""

    @initialize(shape=st.sampled_from(SHAPES[::-1]), grid_tokens=st.sampled_from([1, 1, 1, 64]))
    def start(self, shape: tuple[int, int], grid_tokens: int = 1) -> None:
        self.history = History(*shape, AtTokens(grid_tokens))


class HungryCacheMachine(CacheMachine):
    """The same, with memory allocated and freed besides."""

    @rule(num_blocks=st.integers(0, 12), num_slots=st.integers(0, 4), order=st.sampled_from(ORDERS))
    def take(self, num_blocks: int, num_slots: int, order: TakeOrder) -> None:
        self.history.take(num_blocks, num_slots, order)


class StatelessCacheMachine(HungryCacheMachine):
    """The same, of a model that keeps no states."""

    @initialize(shape=st.sampled_from(SHAPES[::-1]), grid_tokens=st.sampled_from([1, 1, 1, 64]))
    def start(self, shape: tuple[int, int], grid_tokens: int = 1) -> None:
        self.history = History(*shape, AtTokens(grid_tokens))


CacheMachine.TestCase.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=50)
HungryCacheMachine.TestCase.settings = settings(max_examples=settings().max_examples, stateful_step_count=50)
StatelessCacheMachine.TestCase.settings = settings(max_examples=settings().max_examples, stateful_step_count=50)
LoadingCacheMachine.TestCase.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=50)
StatelessLoadingCacheMachine.TestCase.settings = settings(
    max_examples=settings().max_examples // 4, stateful_step_count=50
)
for machine in (TieredCacheMachine, TwoTierCacheMachine, ThreeTierCacheMachine):
    machine.TestCase.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=50)
TestTieredCacheMachine = TieredCacheMachine.TestCase
TestTwoTierCacheMachine = TwoTierCacheMachine.TestCase
TestThreeTierCacheMachine = ThreeTierCacheMachine.TestCase
TestCacheMachine = CacheMachine.TestCase
TestLoadingCacheMachine = LoadingCacheMachine.TestCase
TestStatelessLoadingCacheMachine = StatelessLoadingCacheMachine.TestCase
TestHungryCacheMachine = HungryCacheMachine.TestCase
TestStatelessCacheMachine = StatelessCacheMachine.TestCase


@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
@pytest.mark.parametrize("shape", [(16, 1), (12, 2), (9, 5), (40, 5)])
def test_long_histories_with_loads_agree_with_the_dictionary(shape: tuple[int, int], rule: ResumeRule) -> None:
    choose = random.Random(str(shape))
    history = History(*shape, rule)
    for _ in range(300):
        event = choose.random()
        if event < 0.15:
            history.begin_load(
                choose.randrange(30),
                choose.choice(KEPT),
                choose.randrange(4),
                choose.choice(LENGTHS),
                choose.choice([0, 0, 1]),
                choose.randrange(3),
                choose.choice(["", "", "other"]),
            )
        elif event < 0.28:
            history.end_load(choose.randrange(4), is_done=choose.random() < 0.7)
        elif event < 0.3:
            history.cancel_load(choose.randrange(4))
        else:
            random_event(history, choose)
        history.check()
    assert history.cache.stats().loads.num_done > 0
    history.driver.drain()


@pytest.mark.parametrize(
    ("lower_blocks", "rule", "shape"),
    [
        pytest.param(blocks, rule, shape, marks=[] if (size + kind + number) % 2 == 0 else pytest.mark.long)
        for size, blocks in enumerate([(12,), (300,), (30, 40), (16, 400), (16, 20, 400)])
        for kind, rule in enumerate([AT_SNAPSHOTS, AtTokens()])
        for number, shape in enumerate([(16, 1), (9, 5)])
    ],
    ids=str,
)
def test_long_histories_with_tiers_below_agree_with_the_dictionary(
    shape: tuple[int, int], rule: ResumeRule, lower_blocks: tuple[int, ...]
) -> None:
    check_long_history_with_tiers(History(*shape, rule, lower_blocks=lower_blocks), str(shape))


@pytest.mark.parametrize(
    ("lower_blocks", "rule", "seed"),
    [
        ((60,), AT_SNAPSHOTS, "20"),
        ((16, 400), AT_SNAPSHOTS, "37"),
        pytest.param((60,), AtTokens(), "(16, 1)", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_long_histories_with_pictures_and_tiers_agree_with_the_dictionary(
    lower_blocks: tuple[int, ...], rule: ResumeRule, seed: str
) -> None:
    check_long_history_with_tiers(History(16, 1, rule, lower_blocks=lower_blocks, has_pictures=True), seed)


@pytest.mark.parametrize(
    ("lower_blocks", "rule"),
    [
        ((), AT_SNAPSHOTS),
        ((300,), AT_SNAPSHOTS),
        ((16, 400), AT_SNAPSHOTS),
        ((16, 400), AtTokens()),
        ((16, 20, 400), AT_SNAPSHOTS),
        pytest.param((16, 20, 400), AtTokens(), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_nothing_of_before_a_reset_is_reached(rule: ResumeRule, lower_blocks: tuple[int, ...]) -> None:
    choose = random.Random(str(lower_blocks))
    history = History(9, 5, rule, lower_blocks=lower_blocks)
    for number in range(300):
        prompt = choose.randrange(30), choose.choice(KEPT), choose.randrange(4), choose.choice(LENGTHS)
        salt, event = choose.choice(["", "", "other"]), choose.random()
        if number % 30 == 29:
            while history.running:
                history.release(0, SnapshotKind.PREEMPTION)
            history.take(39, 0, "blocks first")  # spills of what is demoted whole need nothing of the device
            for tier in history.loads.tiers[:-1]:
                tier.num_spare_blocks = tier.num_blocks
            history.step([0])
            history.reset()
        elif event < 0.1:
            history.load_from_tier(*prompt, salt)
        elif event < 0.2:
            history.end_load(choose.randrange(4), is_done=choose.random() < 0.8)
        elif event < 0.3:
            history.take(choose.randrange(40), 0, "blocks first")
        elif event < 0.33:
            history.end_spill(choose.randrange(4), is_done=choose.random() < 0.8)
        elif event < 0.38 and len(lower_blocks) > 1:
            history.adopt(*prompt, salt, is_old=choose.random() < 0.5)
        else:
            random_event(history, choose)
        history.check()
    assert len(lower_blocks) < 2 or history.num_spills_over_resets > 1
    history.driver.drain()


def check_long_history_with_tiers(history: History, seed: str) -> None:
    """Apply many random events to a cache with tiers below the device."""
    # With this seed every history demotes snapshots to its last tier; with others of six, some do not.
    choose, tiers = random.Random(f"{seed} 5"), history.loads.tiers
    num_blocks, has_states = (history.cache.memory_use().max_blocks + 1) // 2, history.rule.needs_slots
    for _ in range(300):
        event = choose.random()
        if event < 0.15:
            history.load_from_tier(
                choose.randrange(30),
                choose.choice(KEPT),
                choose.randrange(4),
                choose.choice(LENGTHS),
                choose.choice(["", "", "other"]),
            )
        elif event < 0.25:
            history.end_load(choose.randrange(4), is_done=choose.random() < 0.8)
        elif event < 0.32:
            history.take(choose.randrange(num_blocks), 0, "blocks first")
        elif event < 0.45 and len(tiers) > 1:
            history.end_spill(choose.randrange(4), is_done=choose.random() < 0.8)
        elif event < 0.49 and len(tiers) > 1:
            history.adopt(
                choose.randrange(30),
                choose.choice(KEPT),
                choose.randrange(4),
                choose.choice(LENGTHS),
                choose.choice(["", "", "other"]),
                choose.choice([0.0, 100.0]),
            )
        elif event < 0.495 and len(tiers) > 1:
            salt = choose.choice(["", "", "other"])
            history.lose(choose.randrange(30), choose.choice([64, 128, 1000]), salt)
        else:
            random_event(history, choose)
        history.check()
    assert tiers[0].num_blocks < 20 or not has_states or history.cache.stats().loads.num_done > 0
    for index, tier in enumerate(history.loads.stats()[1:] if has_states else ()):
        assert tier.num_snapshots_demoted > 0
        assert index or tier.num_bytes < 100 or tier.num_loads > 0
    history.driver.drain()


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        pytest.param(shape, rule, marks=[] if number % 2 in wanted else pytest.mark.long)
        for number, shape in enumerate(SHAPES)
        for rule, wanted in ((AT_SNAPSHOTS, (0, 1)), (AtTokens(), (0,)), (AtTokens(64), (1,)))
    ],
    ids=str,
)
def test_long_histories_agree_with_the_dictionary(shape: tuple[int, int], rule: ResumeRule) -> None:
    """Longer histories than Hypothesis draws, over a full cache."""
    choose = random.Random(str(shape))
    history = History(*shape, rule)
    for _ in range(250):
        random_event(history, choose)
        history.check()
    history.driver.drain()


def random_event(history: History, choose: random.Random) -> None:
    """Apply one random event."""
    index = choose.randrange(MAX_RUNNING)
    event = choose.random()
    if history.running and event < 0.06 and len(history.running) < MAX_RUNNING:
        history.admit_duplicate(index, choose.choice([420, 200, choose.randint(1, 200)]))
    elif not history.running or (event < 0.3 and len(history.running) < MAX_RUNNING):
        history.admit_derived(
            choose.randrange(30) if choose.random() < 0.5 else len(history.prompts) - 1,
            choose.choice(KEPT) if choose.random() < 0.5 else choose.randrange(300),
            choose.randrange(4),
            choose.choice(LENGTHS),
            choose.choice(EDITED),
            salt=choose.choice(["", "", "", "other"]),
            step_tokens=choose.choice([1, 64, 500]),
            read=choose.random() < 0.9,
        )
    elif event < 0.33:
        history.wait(choose.randrange(30), choose.choice(KEPT), choose.randrange(4), choose.choice(LENGTHS))
    elif event < 0.35:
        history.stop_waiting(index)
    elif event < 0.41:
        history.follow(index, choose.randint(1, 300), choose.randrange(4), choose.choice(LENGTHS))
    elif event < 0.65:
        history.step([choose.choice(CHUNKS) for _ in range(MAX_RUNNING)])
    elif event < 0.78:
        history.decode(index, choose.choices((1, 2), k=choose.randint(1, 20)))
    elif event < 0.85:
        history.leave_snapshot(index)
    elif event < 0.95:
        history.release(index, choose.choice(RELEASE_KINDS))
    else:
        history.preempt_and_readmit(index)
