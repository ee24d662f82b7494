"""Holds: what is kept for other engines stays as it is, whatever else the cache does, and is then free again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.cache import Lease
from strandline.cache.holds import useful_positions
from strandline.cache.inspection.invariants import check
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens
from strandline.cache.resume import ResumeRule
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, BlockId, RequestId
from strandline.records.account import SnapshotKind
from strandline.records.tokens import TokenBuffer, decode
from tests.cpu.cache.driver import Driver, num_holds
from tests.cpu.cache.history import pattern

NAME = RequestId("hold")
RULES = [AT_SNAPSHOTS, AtTokens()]


def keep(driver: Driver, tokens: list[int], salt: str = "", name: RequestId = NAME) -> Lease | None:
    hold = driver.holds.keep(name, TokenBuffer(tokens), salt)
    check(driver.cache)
    driver.flush()
    return hold


def drop(driver: Driver, hold: Lease) -> None:
    driver.holds.drop(hold)
    check(driver.cache)
    driver.flush()


def content(driver: Driver, hold: Lease) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the tokens of the hold's blocks, and of its snapshots, as they lie on the device."""
    cells = [cell for block in hold.table for cell in driver.device.cells(BlockId(block))]
    positions = sorted(snapshot.position for snapshot in hold.held or ())
    slot_at = {snapshot.position: snapshot.slot for snapshot in hold.held or ()}
    return cells[: len(hold.tokens)], [driver.device.state(slot_at[position]) or () for position in positions]


def serve_if_it_fits(driver: Driver, tokens: list[int]) -> None:
    lease = driver.try_admit(tokens)
    if lease is None:
        return
    while lease.computed < len(tokens) and driver.step(lease, min(len(tokens), lease.computed + 130)):
        pass
    driver.release(lease)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200, 1000])
def test_the_whole_prompt_is_kept(rule: ResumeRule, num_tokens: int) -> None:
    driver = Driver(rule=rule)
    prompt = pattern(1, num_tokens)
    driver.serve(prompt)
    hold = keep(driver, [*prompt, 1, 2, 1])
    assert hold is not None
    tokens, states = content(driver, hold)
    assert tokens == prompt == decode(hold.tokens.data)
    assert not rule.needs_slots or states[-1] == tuple(prompt)
    assert len(hold.table) == -(-num_tokens // BLOCK_TOKENS)
    drop(driver, hold)
    driver.drain()


@pytest.mark.parametrize("rule", RULES)
def test_what_is_kept_outlives_all_other_requests(rule: ResumeRule) -> None:
    driver = Driver(12, rule=rule)
    prompt = pattern(1, 300)
    driver.serve(prompt)
    hold = keep(driver, prompt)
    assert hold is not None
    before = content(driver, hold)
    table = list(hold.table)
    for seed in range(2, 12):
        driver.serve(pattern(seed, 900), pattern(seed + 100, 30))
    assert content(driver, hold) == before
    assert list(hold.table) == table, "what another thread reads is not moved"
    drop(driver, hold)
    driver.drain()


def test_a_continued_prompt_does_not_touch_what_is_kept() -> None:
    driver = Driver()
    prompt = pattern(1, 100)
    driver.serve(prompt)
    hold = keep(driver, prompt)
    assert hold is not None
    driver.serve([*prompt, *pattern(2, 200)])
    assert content(driver, hold) == (prompt, [tuple(prompt)])


def test_nothing_is_kept_of_what_is_not_cached() -> None:
    driver = Driver()
    driver.serve(pattern(1, 100), salt="a")
    assert keep(driver, pattern(1, 100)) is None
    assert keep(driver, pattern(2, 100), "a") is None
    assert keep(driver, pattern(1, 100), "a") is not None


def test_nothing_is_kept_without_memory_for_a_copy() -> None:
    driver = Driver(num_slabs=3, blocks_per_slab=1)
    driver.serve(pattern(1, 10))
    before = driver.cache.memory_use()
    assert keep(driver, pattern(1, 10)) is None
    assert driver.cache.memory_use() == before
    driver.drain()


def test_a_hold_is_neither_counted_nor_followed() -> None:
    driver = Driver()
    driver.serve(pattern(1, 100))
    before = driver.cache.stats()
    hold = keep(driver, pattern(1, 100))
    assert driver.cache.find_leader(TokenBuffer([*pattern(1, 100), 1, 2])) is None
    stats = driver.cache.stats()
    assert (stats.queries, stats.num_leases, stats.num_snapshots) == (1, 0, before.num_snapshots)
    assert hold is not None
    assert num_holds(driver.cache) == 1


def test_names_and_drops_are_checked() -> None:
    driver = Driver()
    driver.serve(pattern(1, 100))
    hold = keep(driver, pattern(1, 100))
    assert hold is not None
    with pytest.raises(CacheInvariantError, match="has a lease already"):
        keep(driver, pattern(1, 100))
    drop(driver, hold)
    with pytest.raises(CacheInvariantError, match="is not held"):
        drop(driver, hold)


@pytest.mark.parametrize(
    ("num_spare", "expected"),
    [(-3, [900]), (0, [900]), (1, [836, 900]), (2, [500, 836, 900]), (9, [100, 500, 836, 900])],
)
def test_useful_snapshots_are_loaded_as_far_as_there_is_room(num_spare: int, expected: list[int]) -> None:
    offered = {
        900: SnapshotKind.GENERATION_END,
        836: SnapshotKind.LADDER,
        700: SnapshotKind.LADDER,
        500: SnapshotKind.BRANCH,
        100: SnapshotKind.MARK,
    }
    assert useful_positions(offered, num_spare) == expected
    assert useful_positions({}, 3) == []


prompts = st.tuples(st.integers(0, 3), st.integers(1, 400), st.integers(0, 2), st.integers(0, 90))


@given(
    num_slabs=st.integers(8, 20),
    rule=st.sampled_from(RULES),
    phases=st.lists(st.lists(prompts, max_size=4), min_size=3, max_size=3),
    kept=st.lists(prompts, min_size=1, max_size=3),
)
@settings(max_examples=80, deadline=None)
def test_traffic_changes_nothing_of_what_is_kept(
    num_slabs: int,
    rule: ResumeRule,
    phases: list[list[tuple[int, int, int, int]]],
    kept: list[tuple[int, int, int, int]],
) -> None:
    """Every operation checks the cache's invariants and the content of all memory in use."""
    driver = Driver(num_slabs, rule=rule)
    holds = []
    for parts in [*phases[0], *kept]:
        serve_if_it_fits(driver, prompt_of(parts))
    for index, parts in enumerate(kept):
        hold = keep(driver, prompt_of(parts), name=RequestId(f"hold {index}"))
        if hold is not None:
            holds.append((hold, list(hold.table), content(driver, hold)))
    for parts in phases[1]:
        serve_if_it_fits(driver, prompt_of(parts))
    for hold, table, before in holds:
        assert (list(hold.table), content(driver, hold)) == (table, before)
        drop(driver, hold)
        for parts in phases[2]:
            serve_if_it_fits(driver, prompt_of(parts))
    driver.drain()


def prompt_of(parts: tuple[int, int, int, int]) -> list[int]:
    seed, num_tokens, other, num_more = parts
    return [*pattern(seed, num_tokens), *pattern(10 + other, num_more)]
