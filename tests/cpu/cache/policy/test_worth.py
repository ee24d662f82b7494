"""What is evicted first: what saves the least computation per byte, and never what covers for something deeper."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.cache import Placement
from strandline.cache.eviction import EvictionOrder
from strandline.cache.inspection.invariants import check
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy import AUTO, new_cache
from strandline.cache.policy.placements import NoSnapshots
from strandline.cache.policy.reuse import ReuseHistory
from strandline.cache.policy.worth import CERTAIN_RATE, LeastRecentlyUsed, WorthPerByte
from strandline.cache.size import CacheSize
from strandline.cache.tree import Snapshot
from strandline.records.account import Reason, SnapshotKind
from strandline.records.tokens import encode
from tests.cpu.cache.driver import Driver, published, reasons
from tests.cpu.cache.test_lookup import prompt

BLOCKS_PER_SLAB = 5


def positions(driver: Driver) -> list[int]:
    return sorted(len(tokens) for _, tokens in published(driver.cache))


class Switch:
    """A placement that a test replaces while requests run."""

    chosen: Placement = AUTO

    def __getattr__(self, name: str) -> Any:
        return getattr(self.chosen, name)


def conversation(driver: Driver, first: int, num_turns: int, turn_tokens: int = 100) -> list[int]:
    """Hold a conversation; return its tokens."""
    tokens: list[int] = []
    for turn in range(num_turns):
        tokens += prompt(turn_tokens, first + 1000 * turn)
        driver.serve(tokens)
    return tokens


def test_superseded_snapshots_are_evicted_before_the_end_of_older_paths() -> None:
    driver = Driver(12, BLOCKS_PER_SLAB)
    old = conversation(driver, 0, 1, 300)
    for index in range(2):
        conversation(driver, 100_000 * (index + 1), 6)
    assert driver.lookup(old).hit == 300
    assert driver.cache.internals().memory.num_snapshots_evicted > 0


def test_kv_that_no_snapshot_needs_is_evicted_first() -> None:
    placement = Switch()
    driver = Driver(6, BLOCKS_PER_SLAB, placement=placement)
    kept = conversation(driver, 0, 1, 128)
    placement.chosen = NoSnapshots()
    bare = driver.admit(prompt(640, 50_000), read=False)
    driver.prefill(bare, leave=False)
    driver.release(bare)
    driver.serve(prompt(300, 90_000))
    assert driver.lookup(kept).hit == 128
    assert driver.lookup(prompt(640, 50_000)).hit == 0


def test_last_snapshot_of_a_path_is_evicted_with_its_kv() -> None:
    driver = Driver(9, BLOCKS_PER_SLAB)
    driver.serve(prompt(500))
    driver.serve(prompt(500, 50_000))
    driver.serve(prompt(500, 90_000))
    driver.serve(prompt(500, 130_000))
    for first in (0, 50_000):
        account = driver.lookup(prompt(500, first))
        assert account.hit in (0, 500)
    snapshots = sum(1 for _ in published_snapshots(driver.cache))
    assert driver.cache.internals().allocator.num_blocks >= 8 * snapshots


def test_snapshot_that_saves_more_outlives_a_newer_one() -> None:
    driver = Driver(9, BLOCKS_PER_SLAB)
    driver.serve(prompt(900))
    for index in range(20):
        driver.serve(prompt(5, 10_000 * (index + 1)))
    assert driver.lookup(prompt(900)).hit == 900


def test_worth_of_unused_entries_falls_however_much_they_save() -> None:
    driver = Driver(12, BLOCKS_PER_SLAB)
    driver.serve(prompt(900))
    for index in range(40):
        driver.serve(prompt(600, 10_000 * (index + 1)))
    assert driver.lookup(prompt(900)).hit == 0


def test_static_shares_of_memory_are_kept() -> None:
    cache = new_cache(CacheSize(21, BLOCKS_PER_SLAB, max_slots=8))
    assert cache.internals().memory.can_take(13 * BLOCKS_PER_SLAB - 1, 8)
    assert not cache.internals().memory.can_take(13 * BLOCKS_PER_SLAB, 0)
    assert not cache.internals().memory.can_take(0, 9)
    blocks = cache.internals().memory.take_blocks(21 * BLOCKS_PER_SLAB)
    slots = list(iter(cache.internals().memory.take_slot, None))
    assert (len(blocks), len(slots)) == (13 * BLOCKS_PER_SLAB - 1, 8)


def chats(seed: int, num_requests: int) -> list[list[int]]:
    """Return prompts of conversations that take turns at random; some share a system prompt."""
    choose = random.Random(seed)
    systems = [prompt(choose.randint(60, 400), 1_000_000 * (index + 1)) for index in range(2)]
    histories = [list(choose.choice(systems)) for _ in range(6)]
    trace = []
    for index in range(num_requests):
        history = choose.choice(histories)
        history += prompt(choose.randint(5, 150), 10_000_000 + 1000 * index)
        trace.append(list(history))
    return trace


def hit_tokens(trace: list[list[int]], num_slabs: int, order: EvictionOrder | None = None) -> int:
    driver = Driver(num_slabs, BLOCKS_PER_SLAB, order=order)
    hits = 0
    for tokens in trace:
        account = driver.serve(tokens)
        assert account.queried == account.hit + sum(reasons(account).values())
        assert Reason.NO_ROOM not in reasons(account)
        hits += account.hit
    check(driver.cache)
    return hits


def test_chats_never_hit_less_than_with_lru() -> None:
    """The sum over twelve draws decides; in a single one either may win."""
    traces = [chats(seed, 40) for seed in range(12)]
    budgets = (14, 18, 24, 32, 48)
    by_worth = [sum(hit_tokens(trace, num_slabs) for trace in traces) for num_slabs in budgets]
    by_age = [sum(hit_tokens(trace, num_slabs, LeastRecentlyUsed()) for trace in traces) for num_slabs in budgets]
    assert sum(by_worth) >= 1.02 * sum(by_age)
    assert all(worth >= 0.995 * age for worth, age in zip(by_worth, by_age, strict=True))


@settings(max_examples=settings().max_examples // 6)
@given(st.integers(0, 10_000))
def test_more_spare_memory_never_means_fewer_hits(seed: int) -> None:
    trace = chats(seed, 20)
    hits = [hit_tokens(trace, num_slabs) for num_slabs in (200, 300, 600)]
    assert hits == sorted(hits)


def test_orders_depend_on_the_size_of_a_snapshot() -> None:
    reuse = ReuseHistory()
    small, large = WorthPerByte(lambda _: 5, reuse), WorthPerByte(lambda _: 15, reuse)
    driver = Driver(40, BLOCKS_PER_SLAB, order=small)
    driver.serve(prompt(320))
    ((_, _, snapshot),) = published_snapshots(driver.cache)
    assert small.worth(snapshot) / large.worth(snapshot) == pytest.approx((320 + 960) / (320 + 320))


def snapshot_after(driver: Driver, tokens: list[int]) -> Snapshot:
    (found,) = [snapshot for _, key, snapshot in published_snapshots(driver.cache) if key == bytes(encode(tokens))]
    return found


def test_path_that_drops_its_answers_shares_nothing() -> None:
    driver = Driver(60, BLOCKS_PER_SLAB)
    history: list[int] = []
    for turn in range(4):
        history += prompt(100, 1000 * turn)
        driver.serve(history, prompt(20, 500_000 + 1000 * turn))
    assert not any(snapshot.is_shared for _, _, snapshot in published_snapshots(driver.cache))
    assert [snapshot_after(driver, history[:end]).is_superseded for end in (100, 200, 300, 400)] == [True] * 3 + [False]


def test_prefix_of_a_second_conversation_is_shared() -> None:
    driver = Driver(60, BLOCKS_PER_SLAB)
    for first in (50_000, 90_000, 130_000):
        driver.serve(prompt(300) + prompt(100, first))
    assert snapshot_after(driver, prompt(300)).is_shared
    assert not any(s.is_shared for _, _, s in published_snapshots(driver.cache) if s.position == 400)


def test_superseded_prompt_ends_are_evicted_before_the_current_one() -> None:
    driver = Driver(60, BLOCKS_PER_SLAB)
    history: list[int] = []
    for turn in range(30):
        if turn % 3 == 0:
            history = prompt(70, 10_000 * turn)
        history += prompt(100, 1000 * turn)
        driver.serve(history, prompt(20, 500_000 + 1000 * turn))
    order = WorthPerByte(lambda _: BLOCKS_PER_SLAB, driver.cache.internals().reuse)
    passed, last = (snapshot_after(driver, history[: len(history) - back]) for back in (100, 0))
    assert passed.is_superseded
    assert not last.is_superseded
    assert order.worth(last) > 3 * order.worth(passed)


def test_snapshot_at_a_prompt_end_becomes_a_prompt_end() -> None:
    driver = Driver(60, BLOCKS_PER_SLAB)
    whole = prompt(100) + prompt(20, 500_000)
    driver.serve(prompt(100), prompt(20, 500_000))
    snapshot = snapshot_after(driver, whole)
    kinds = [snapshot.kind]
    assert driver.serve(whole, prompt(30, 600_000)).hit == len(whole)
    kinds.append(snapshot.kind)
    assert kinds == [SnapshotKind.GENERATION_END, SnapshotKind.PROMPT_END]
    assert not snapshot.is_superseded


def test_prompt_end_size_includes_kv_after_answer_eviction() -> None:
    driver = Driver(60, BLOCKS_PER_SLAB)
    order = WorthPerByte(lambda _: BLOCKS_PER_SLAB, driver.cache.internals().reuse)
    asked, said = prompt(462), prompt(20, 500_000)
    driver.serve(asked, said)
    driver.serve(prompt(40, 900_000))
    answered, asked_end = snapshot_after(driver, asked + said), snapshot_after(driver, asked)
    assert asked_end.num_continuations == 1
    driver.cache.internals().memory.drop_snapshot(answered)
    assert asked_end.num_continuations == 0
    saved_share = 462 / (462 + 64 * BLOCKS_PER_SLAB)
    rate = driver.cache.internals().reuse.rate(asked_end.use.interarrival_bin, 1)
    assert order.worth(asked_end) == pytest.approx(saved_share * rate)


def test_prompt_end_inside_a_cached_prompt_is_shared() -> None:
    driver = Driver(60, BLOCKS_PER_SLAB)
    driver.serve(prompt(300) + prompt(100, 50_000))
    driver.serve(prompt(200), prompt(20, 500_000))
    assert snapshot_after(driver, prompt(200)).is_shared
    assert not snapshot_after(driver, prompt(200) + prompt(20, 500_000)).is_shared


def test_newest_snapshot_is_evicted_after_others_of_equal_savings() -> None:
    driver = Driver(60, BLOCKS_PER_SLAB)
    order = WorthPerByte(lambda _: BLOCKS_PER_SLAB, driver.cache.internals().reuse)
    for turn in range(10):
        driver.serve(prompt(100, 1000 * turn))
    last, before = (snapshot_after(driver, prompt(100, 1000 * turn)) for turn in (9, 8))
    assert order.worth(last) == pytest.approx(CERTAIN_RATE * 100 / (100 + 64 * BLOCKS_PER_SLAB))
    assert order.worth(before) < order.worth(last)
