"""Sliding windows: what lies behind them is freed, and every snapshot can still be resumed.

The simulated device poisons what is freed and fails a step that reads it.
"""

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from strandline.cache.evict_all import evict_all
from strandline.cache.inspection.invariants import check
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy.placements import placement
from strandline.cache.policy.resume_rules import BehindWindows
from strandline.cache.resume import first_block_seen
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, RequestId
from strandline.records.account import SnapshotKind
from strandline.records.tokens import TokenBuffer
from tests.cpu.cache.driver import Driver, published
from tests.cpu.cache.history import History, pattern
from tests.cpu.cache.test_state_machine import (
    SHAPES,
    HungryCacheMachine,
    TieredCacheMachine,
    check_long_history_with_tiers,
    random_event,
    tier_sizes,
)

WINDOWS = [1, 2, 63, 64, 65, 100, 130, 200]


class WindowedCacheMachine(HungryCacheMachine):
    """The state machine of all caches, with windows."""

    @initialize(shape=st.sampled_from(SHAPES[::-1]), window_tokens=st.sampled_from(WINDOWS))
    def start(self, shape: tuple[int, int], window_tokens: int = 1) -> None:
        self.history = History(*shape, BehindWindows(window_tokens))


WindowedCacheMachine.TestCase.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=50)
TestWindowedCacheMachine = WindowedCacheMachine.TestCase


class WindowedTiersMachine(TieredCacheMachine):
    """The same, with loads from other stores, and with one to three tiers below the device."""

    @initialize(
        shape=st.sampled_from(SHAPES[::-1]), window_tokens=st.sampled_from(WINDOWS), lower_blocks=tier_sizes(1, 3)
    )
    def start(self, shape: tuple[int, int], window_tokens: int = 1, lower_blocks: Sequence[int] = ()) -> None:
        self.history = History(*shape, BehindWindows(window_tokens), lower_blocks=lower_blocks)


WindowedTiersMachine.TestCase.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=50)
TestWindowedTiersMachine = WindowedTiersMachine.TestCase


@pytest.mark.parametrize("lower_blocks", [(30,), (300,), (30, 40), (16, 400), (16, 20, 400)], ids=str)
@pytest.mark.parametrize(("shape", "window_tokens"), [((16, 1), 65), ((9, 5), 1), ((9, 5), 130)])
def test_long_histories_with_tiers_below_agree_with_the_dictionary(
    shape: tuple[int, int], window_tokens: int, lower_blocks: tuple[int, ...]
) -> None:
    check_long_history_with_tiers(History(*shape, BehindWindows(window_tokens), lower_blocks=lower_blocks), str(shape))


@pytest.mark.parametrize("window_tokens", WINDOWS)
@pytest.mark.parametrize("shape", [(12, 2), pytest.param((9, 5), marks=pytest.mark.long), (40, 5)])
def test_long_histories_agree_with_the_dictionary(shape: tuple[int, int], window_tokens: int) -> None:
    choose = random.Random(f"{shape} {window_tokens}")
    history = History(*shape, BehindWindows(window_tokens))
    for _ in range(200):
        random_event(history, choose)
        if choose.random() < 0.1:
            history.take(choose.randrange(shape[0] * shape[1] // 2), choose.randrange(2), "by turns")
        history.check()
    history.driver.drain()


def driver(window_tokens: int = 100, mode: str = "auto") -> Driver:
    return Driver(40, 5, rule=BehindWindows(window_tokens), placement=placement(mode, 64))


def num_blocks(of: Driver) -> int:
    return of.cache.internals().allocator.num_blocks


@pytest.mark.parametrize("chunk", [1, 64, 200])
def test_request_alone_holds_its_window_and_its_step(chunk: int) -> None:
    alone = driver(mode="none")
    lease = alone.admit(pattern(0, 1200))
    while lease.computed < len(lease.tokens):
        alone.step(lease, min(lease.computed + chunk, len(lease.tokens)))
        assert num_blocks(alone) <= -(-(100 + chunk) // BLOCK_TOKENS) + 1
        assert lease.table[: lease.computed // BLOCK_TOKENS - 2].count(NULL_BLOCK) >= lease.computed // BLOCK_TOKENS - 3
    alone.release(lease)
    assert num_blocks(alone) == 0


@pytest.mark.parametrize("chunk", [1, 50, 130])
def test_request_alone_outgrows_the_memory_of_its_path(chunk: int) -> None:
    """Snapshots that it left behind are evicted, and their windows with them."""
    small = Driver(8, 2, rule=BehindWindows(100))
    lease = small.admit(pattern(0, 1500))
    while lease.computed < len(lease.tokens):
        assert small.step(lease, min(lease.computed + chunk, len(lease.tokens)))


def test_next_turn_hits_behind_a_gap() -> None:
    talk = driver()
    first, answer = pattern(0, 700), pattern(1, 600)
    talk.serve(first, answer)
    assert num_blocks(talk) <= 700 // BLOCK_TOKENS + 4
    assert talk.serve([*first, *answer, 2, 2, 2]).hit == 1300
    assert talk.serve([*first, *answer, 2, 2, 2]).hit == 1303


def test_prompt_that_parts_in_a_gap_resumes_before_it() -> None:
    """And the third that parts there hits, as without windows."""
    talk = driver()
    first, answer = pattern(0, 100), pattern(1, 900)
    talk.serve(first, answer)
    shared = [*first, *answer[:450], 3 - answer[450]]
    before = {len(tokens) for _, tokens in published(talk.cache)}
    account = talk.serve([*shared, *pattern(2, 60)])
    assert account.hit == max(address for address in before if address <= 550)
    assert account.kv_tokens == 550
    assert talk.serve([*shared, *pattern(3, 60)]).hit >= 550


def test_evicting_a_snapshot_frees_its_window() -> None:
    talk = driver()
    lease = talk.admit(pattern(0, 400))
    talk.prefill(lease)
    talk.decode(lease, [1] * 300)
    memory = talk.cache.internals().memory
    held = num_blocks(talk)
    snapshot = next(s for _, _, s in published_snapshots(talk.cache) if s.position == 400)
    memory.drop_snapshot(snapshot)
    talk.flush()
    assert num_blocks(talk) < held
    talk.release(lease)


def test_requests_that_share_a_path_keep_what_the_slowest_needs() -> None:
    talk = driver(mode="none")
    slow, fast = talk.admit(pattern(0, 600)), talk.admit(pattern(0, 600))
    talk.step(slow, 200)
    talk.step(fast, 600)
    assert all(slow.table[first_block_seen(200, 100) : 3])
    talk.step(slow, 600)
    talk.release(slow, SnapshotKind.PREEMPTION)
    talk.release(fast, SnapshotKind.PREEMPTION)


@pytest.mark.parametrize(("position", "window_tokens", "first"), [(0, 1, 0), (64, 1, 1), (64, 2, 0), (300, 100, 3)])
def test_first_block_seen_is_that_of_the_oldest_token(position: int, window_tokens: int, first: int) -> None:
    assert first_block_seen(position, window_tokens) == first


def test_prompt_that_ends_in_a_gap_leaves_a_snapshot_there() -> None:
    """Its tokens are in the index, but the keys and values of its last block are not."""
    talk = driver()
    first, answer = pattern(0, 700), pattern(1, 600)
    talk.serve(first, answer)
    assert talk.lookup(first[:450]).kv_tokens == 450
    assert (450 not in positions(talk), talk.serve(first[:450]).hit < 450) == (True, True)
    assert 450 in positions(talk)
    assert talk.serve(first[:450]).hit == 450
    talk.serve([*first[:450], 3 - first[450]])
    assert talk.serve([*first, *answer]).hit == 1300


def positions(of: Driver) -> set[int]:
    return {len(tokens) for _, tokens in published(of.cache)}


def test_hold_keeps_the_windows_of_its_snapshots() -> None:
    talk = driver()
    talk.serve(pattern(0, 700))
    hold = talk.holds.keep(RequestId("hold"), TokenBuffer([*pattern(0, 700), 1]))
    assert hold is not None
    assert hold.held
    check(talk.cache)
    for snapshot in hold.held:
        window = range(first_block_seen(snapshot.position, 100), -(-snapshot.position // BLOCK_TOKENS))
        assert all(hold.table[index] for index in window)
    talk.flush()
    evict_all(talk.cache)
    check(talk.cache)
    talk.flush()
    assert num_blocks(talk) > 0
    talk.holds.drop(hold)
    check(talk.cache)
    talk.flush()
    talk.drain()


@pytest.mark.parametrize("disk_blocks", [0, 100])
def test_a_window_rests_and_returns_without_what_lies_behind_it(disk_blocks: int) -> None:
    talk = Driver(rule=BehindWindows(100), lower_blocks=(100, disk_blocks))
    for tier in talk.loads.tiers[: disk_blocks > 0]:
        tier.num_spare_blocks = tier.num_blocks
    prompt = pattern(0, 700)
    talk.serve(prompt)
    evict_all(talk.cache)
    talk.flush()
    while talk.end_spill():
        pass
    tier = talk.loads.tiers[-1]
    assert num_blocks(talk) == 0
    windows = {p: range(first_block_seen(p, 100), p // BLOCK_TOKENS) for p in (s.position for s in tier.snapshots())}
    demoted = set().union(*windows.values())
    assert tier.num_used == len(demoted) + sum(tier.slot_blocks + (p % BLOCK_TOKENS > 0) for p in windows)
    assert talk.bring_back([*prompt, 1])
    assert num_blocks(talk) == len(windows[700]) + 1
    assert talk.serve([*prompt, 1]).hit == 700
    talk.drain()


def test_load_fills_gaps_of_a_path_that_goes_on() -> None:
    talk = driver()
    first, answer = pattern(0, 450), pattern(1, 600)
    talk.serve(first, answer)
    snapshot = next(s for _, _, s in published_snapshots(talk.cache) if s.position == 450)
    talk.cache.internals().memory.drop_snapshot(snapshot)
    talk.flush()
    held = num_blocks(talk)
    lead = talk.load(first, talk.offer(first, [450]))
    assert lead is not None
    assert lead.lease.transfer is not None
    talk.end_load(lead.lease.transfer, is_done=True)
    assert num_blocks(talk) == held + 450 // BLOCK_TOKENS + 1 - first_block_seen(450, 100)
    assert talk.serve(first).hit == 450
    assert talk.serve([*first, *answer]).hit == 1050
