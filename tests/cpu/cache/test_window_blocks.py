"""Window blocks: every snapshot has what it takes to resume, and what no window needs is free.

The simulated device poisons what is freed and fails a step that reads it.
"""

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy.placements import placement
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtWindowEnds
from strandline.cache.resume import ResumeRule
from strandline.cache.size import WindowClass
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import SnapshotKind
from tests.cpu.cache.driver import Driver
from tests.cpu.cache.history import History, pattern
from tests.cpu.cache.test_state_machine import (
    HungryCacheMachine,
    LoadingCacheMachine,
    TieredCacheMachine,
    check_long_history_with_tiers,
    random_event,
    tier_sizes,
)

WINDOWS = [(1,), (2,), (63,), (64,), (65,), (32, 160), (100,), (130,), (64, 65, 1), (200,)]
"""Sizes of windows of a model's layers."""
SHAPES = [(4, 1, 1), (16, 1, 1), (16, 1, 3), (9, 5, 2), (9, 5, 7), (24, 2, 3), (60, 5, 2)]
"""Slabs, blocks and window blocks in each; the second size of windows has one window block more in a slab, and so on.
"""


RULES = [AT_SNAPSHOTS, AtWindowEnds()]


def history(
    shape: tuple[int, int, int],
    window_tokens: tuple[int, ...],
    rule: ResumeRule = AT_SNAPSHOTS,
    lower_blocks: Sequence[int] = (),
    *,
    has_pictures: bool = False,
) -> History:
    """Return a history of a model whose tokens see windows; what is stored is longer where a token is computed again.

    Args:
        shape: slabs, and blocks and window blocks in each.
    """
    num_slabs, num_blocks, num_windows = shape
    again = int(not rule.needs_slots)
    windows = tuple(WindowClass(size + again, num_windows + index) for index, size in enumerate(window_tokens))
    # Each size takes slabs of its own, so that a request needs more of them.
    num_slabs += 4 * (len(window_tokens) - 1)
    return History(num_slabs, num_blocks, rule, lower_blocks=lower_blocks, windows=windows, has_pictures=has_pictures)


class WindowBlocksMachine(HungryCacheMachine):
    """The state machine of all caches, with window blocks."""

    @initialize(shape=st.sampled_from(SHAPES[::-1]), window_tokens=st.sampled_from(WINDOWS))
    def start(self, shape: tuple[int, int, int], window_tokens: tuple[int, ...] = (1,)) -> None:
        self.history = history(shape, window_tokens)


class LoadingWindowBlocksMachine(LoadingCacheMachine):
    """The same, with loads of snapshots and their windows."""

    @initialize(
        shape=st.sampled_from(SHAPES[::-1]), window_tokens=st.sampled_from(WINDOWS), rule=st.sampled_from(RULES)
    )
    def start(
        self, shape: tuple[int, int, int], window_tokens: tuple[int, ...] = (1,), rule: ResumeRule = AT_SNAPSHOTS
    ) -> None:
        self.history = history(shape, window_tokens, rule)


class TieredWindowBlocksMachine(TieredCacheMachine):
    """The same, with tiers below the device."""

    @initialize(
        shape=st.sampled_from(SHAPES[::-1]),
        window_tokens=st.sampled_from(WINDOWS),
        rule=st.sampled_from(RULES),
        lower_blocks=tier_sizes(1, 3),
        has_pictures=st.booleans(),
    )
    def start(  # type: ignore[override]
        self,
        shape: tuple[int, int, int],
        window_tokens: tuple[int, ...] = (1,),
        rule: ResumeRule = AT_SNAPSHOTS,
        lower_blocks: Sequence[int] = (),
        has_pictures: bool = False,
    ) -> None:
        self.history = history(shape, window_tokens, rule, lower_blocks, has_pictures=has_pictures)


class StatelessWindowBlocksMachine(HungryCacheMachine):
    """The same, of a model that keeps no states."""

    @initialize(shape=st.sampled_from(SHAPES[::-1]), window_tokens=st.sampled_from(WINDOWS))
    def start(self, shape: tuple[int, int, int], window_tokens: tuple[int, ...] = (1,)) -> None:
        self.history = history(shape, window_tokens, AtWindowEnds())


MACHINES = (WindowBlocksMachine, StatelessWindowBlocksMachine, LoadingWindowBlocksMachine, TieredWindowBlocksMachine)
for machine in MACHINES:
    machine.TestCase.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=50)
TestStatelessWindowBlocksMachine = StatelessWindowBlocksMachine.TestCase
TestWindowBlocksMachine = WindowBlocksMachine.TestCase
TestLoadingWindowBlocksMachine = LoadingWindowBlocksMachine.TestCase
TestTieredWindowBlocksMachine = TieredWindowBlocksMachine.TestCase


@pytest.mark.parametrize(
    ("lower_blocks", "shape", "window_tokens", "has_pictures", "rule"),
    [
        pytest.param(blocks, *layout, rule, marks=[] if (size + number + kind) % 2 == 0 else pytest.mark.long)
        for size, blocks in enumerate([(12,), (300,), (60, 400), (16, 20, 400)])
        for number, layout in enumerate(
            [
                ((16, 1, 3), (65,), False),
                ((16, 5, 2), (1,), False),
                ((18, 5, 7), (130,), True),
                ((18, 5, 7), (32, 160), True),
            ]
        )
        for kind, rule in enumerate(RULES)
    ],
    ids=str,
)
def test_long_histories_with_tiers_agree_with_the_dictionary(
    shape: tuple[int, int, int],
    window_tokens: tuple[int, ...],
    lower_blocks: tuple[int, ...],
    has_pictures: bool,
    rule: ResumeRule,
) -> None:
    events = history(shape, window_tokens, rule, lower_blocks, has_pictures=has_pictures)
    check_long_history_with_tiers(events, "20" if has_pictures else str(shape))


@pytest.mark.parametrize(
    ("shape", "window_tokens", "rule"),
    [
        pytest.param(shape, sizes, rule, marks=[] if (number + size + kind) % 2 == 0 else pytest.mark.long)
        for number, shape in enumerate([(16, 1, 3), (60, 5, 2)])
        for size, sizes in enumerate(WINDOWS)
        for kind, rule in enumerate(RULES)
    ]
    + [pytest.param((9, 5, 2), sizes, rule, marks=pytest.mark.long) for sizes in WINDOWS for rule in RULES],
    ids=str,
)
def test_long_histories_agree_with_the_dictionary(
    shape: tuple[int, int, int], window_tokens: tuple[int, ...], rule: ResumeRule
) -> None:
    choose = random.Random(f"{shape} {window_tokens}")
    events = history(shape, window_tokens, rule)
    for _ in range(200):
        random_event(events, choose)
        event, index = choose.random(), choose.randrange(4)
        if event < 0.1:
            events.take(choose.randrange(shape[0] * shape[1] // 2), choose.randrange(2), "by turns")
        elif event < 0.2 and events.running:
            events.keep_fallback(index)
        elif event < 0.25 and events.running:
            events.release_at(index, choose.randrange(9))
        events.check()
    events.driver.drain()


def driver(
    window_tokens: int = 100, mode: str = "auto", num_slabs: int = 40, rule: ResumeRule = AT_SNAPSHOTS
) -> Driver:
    chosen, windows = placement(mode, 64), (WindowClass(window_tokens, 3),)
    return Driver(num_slabs, 5, rule=rule, placement=chosen, windows=windows)


def num_window_blocks(of: Driver) -> int:
    return sum(of.cache.memory_use().num_window_blocks)


@pytest.mark.parametrize("chunk", [1, 64, 200])
def test_request_alone_holds_its_window_and_its_step(chunk: int) -> None:
    alone = driver(mode="none")
    lease = alone.admit(pattern(0, 1200))
    while lease.computed < len(lease.tokens):
        alone.step(lease, min(lease.computed + chunk, len(lease.tokens)))
        assert num_window_blocks(alone) <= -(-(100 + chunk) // BLOCK_TOKENS) + 1
        assert len(lease.table) == -(-lease.computed // BLOCK_TOKENS), "other layers attend to all tokens"
    alone.release(lease)
    assert num_window_blocks(alone) == 0


def test_next_turn_resumes_where_the_last_one_ended() -> None:
    talk = driver()
    first, answer = pattern(0, 700), pattern(1, 600)
    talk.serve(first, answer)
    assert talk.serve([*first, *answer, 2, 2, 2]).hit == 1300
    assert talk.serve([*first, *answer, 2, 2, 2]).hit == 1303
    assert talk.serve([*first, 3 - answer[0]]).hit == 700


@pytest.mark.parametrize("num_dropped", [0, 3, 90])
@pytest.mark.parametrize("has_fallback", [False, True])
def test_next_turn_hits_what_precedes_a_stop_string(num_dropped: int, has_fallback: bool) -> None:
    """Without states, as long as the window is there; with a fallback, also after that."""
    talk = driver(rule=AtWindowEnds())
    prompt, answer = pattern(0, 700), pattern(1, 100)
    lease = talk.admit(prompt)
    talk.prefill(lease)
    end = 800 - num_dropped
    talk.decode(lease, answer[: 100 - num_dropped])
    if has_fallback:
        talk.cache.keep_fallback(lease, end)
    talk.decode(lease, answer[100 - num_dropped :])
    talk.release(lease, end=end)
    hit = talk.lookup([*prompt, *answer[: 100 - num_dropped], 3]).hit
    assert hit == (end if num_dropped < 90 or has_fallback else 700), "else only the prompt"


def test_requests_that_resume_from_one_snapshot_share_its_window() -> None:
    talk = driver(mode="none")
    lease = talk.admit(pattern(0, 640))
    talk.prefill(lease, leave=False)
    talk.release(lease, SnapshotKind.PREEMPTION)
    alone = num_window_blocks(talk)
    leases = [talk.admit([*pattern(0, 640), *pattern(seed, 5)]) for seed in range(3)]
    assert [each.computed for each in leases] == [640] * 3
    assert num_window_blocks(talk) == alone == 2


def test_evicting_a_snapshot_frees_its_window() -> None:
    talk = driver()
    lease = talk.admit(pattern(0, 400))
    talk.prefill(lease)
    talk.decode(lease, [1] * 300)
    held = num_window_blocks(talk)
    snapshot = next(s for _, _, s in published_snapshots(talk.cache) if s.position == 400)
    talk.cache.internals().memory.drop_snapshot(snapshot)
    talk.flush()
    assert num_window_blocks(talk) < held
    talk.release(lease)


def test_answer_outgrows_the_window_blocks_of_its_path() -> None:
    """Snapshots that it left are evicted, and their windows with them."""
    small = driver(num_slabs=13)
    lease = small.admit(pattern(0, 1800))
    while lease.computed < len(lease.tokens):
        assert small.step(lease, min(lease.computed + 50, len(lease.tokens)))


def test_smallest_snapshot_has_a_size() -> None:
    """No size would mean that prompts resume without snapshots."""
    assert Driver(16, 1, rule=AtWindowEnds(), windows=(WindowClass(2, 3),)).cache.snapshot_blocks == 1


def test_slabs_of_windows_that_may_be_evicted_count_as_room() -> None:
    idle = Driver(16, 1, windows=(WindowClass(1, 3),))
    idle.serve(pattern(0, 100))
    assert num_window_blocks(idle) == 1
    memory = idle.cache.internals().memory
    assert memory.can_take(15, 0)
    memory.free_blocks(memory.take_promised_blocks(15))
