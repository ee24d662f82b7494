"""Sliding windows: what lies behind them is freed, and every snapshot can still be resumed.

The simulated device poisons what is freed and fails a step that reads it.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from strandline.cache import SnapshotKind
from strandline.cache.placement import placement
from strandline.cache.resume import BehindWindows, first_block_seen
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK
from tests.cpu.cache.driver import Driver, published
from tests.cpu.cache.history import History, pattern
from tests.cpu.cache.test_state_machine import SHAPES, HungryCacheMachine, random_event

WINDOWS = [1, 2, 63, 64, 65, 100, 130, 200]


class WindowedCacheMachine(HungryCacheMachine):
    """The state machine of all caches, with windows."""

    @initialize(shape=st.sampled_from(SHAPES[::-1]), window_tokens=st.sampled_from(WINDOWS))
    def start(self, shape: tuple[int, int], window_tokens: int = 1) -> None:
        self.history = History(*shape, BehindWindows(window_tokens))


WindowedCacheMachine.TestCase.settings = settings(max_examples=settings().max_examples, stateful_step_count=50)
TestWindowedCacheMachine = WindowedCacheMachine.TestCase


@pytest.mark.parametrize("window_tokens", WINDOWS)
@pytest.mark.parametrize("shape", [(12, 2), (9, 5), (40, 5)])
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
    assert account.hit == max(place for place in before if place <= 550)
    assert account.kv_tokens == 550
    assert talk.serve([*shared, *pattern(3, 60)]).hit >= 550


def test_evicting_a_snapshot_frees_its_window() -> None:
    talk = driver()
    lease = talk.admit(pattern(0, 400))
    talk.prefill(lease)
    talk.decode(lease, [1] * 300)
    memory = talk.cache.internals().memory
    held = num_blocks(talk)
    snapshot = next(s for _, _, s in talk.cache.snapshots() if s.position == 400)
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
