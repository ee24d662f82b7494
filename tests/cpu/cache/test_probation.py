"""Probes: what new prompts leave behind in full memory, and how much of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.cache.eviction import EvictionOrder
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy.worth import LeastRecentlyUsed
from strandline.cache.probation import max_probes
from strandline.records.account import SnapshotKind
from tests.cpu.cache.driver import Driver
from tests.cpu.cache.test_lookup import prompt

NUM_SLABS = 80


def full_driver(num_slabs: int = NUM_SLABS, order: EvictionOrder | None = None) -> Driver:
    """Return the driver of a cache whose memory is full of unrelated prompts, which can all be evicted."""
    driver = Driver(num_slabs, order=order)
    fill(driver, 1_000_000)
    return driver


def fill(driver: Driver, first: int) -> None:
    """Serve short prompts until something is evicted."""
    before = driver.cache.stats().num_blocks_evicted
    while driver.cache.stats().num_blocks_evicted == before:
        first += 1000
        driver.serve(prompt(300, first))


def kinds(driver: Driver) -> dict[int, SnapshotKind]:
    """Return the kinds of the cached snapshots by position."""
    return {snapshot.position: snapshot.kind for _, _, snapshot in published_snapshots(driver.cache)}


def num_probes(driver: Driver) -> int:
    return sum(snapshot.kind is SnapshotKind.PROBE for _, _, snapshot in published_snapshots(driver.cache))


def test_second_prompt_hits_a_probe_in_full_memory() -> None:
    driver = full_driver()
    driver.serve(prompt(1500) + prompt(500, 4000))
    assert kinds(driver)[1472] is SnapshotKind.PROBE
    assert driver.serve(prompt(1500) + prompt(500, 6000)).hit == 1472
    assert driver.serve(prompt(1500) + prompt(500, 8000)).hit == 1500


def test_probe_stays_unproven_when_a_branch_follows_it() -> None:
    driver = full_driver()
    driver.serve(prompt(1500) + prompt(500, 4000))
    driver.serve(prompt(1500) + prompt(500, 6000))
    assert kinds(driver)[1472] is SnapshotKind.PROBE
    assert kinds(driver)[1500] is SnapshotKind.BRANCH


def test_probe_where_a_prompt_diverges_becomes_a_branch() -> None:
    driver = full_driver()
    driver.serve(prompt(2000))
    driver.serve(prompt(1472) + prompt(500, 6000))
    assert kinds(driver)[1472] is SnapshotKind.BRANCH


def test_evicted_conversation_leaves_no_probe_when_it_returns() -> None:
    driver = full_driver()
    driver.serve(prompt(1500), generated=[7, 8, 9])
    while driver.cache.internals().memory.evict():
        pass
    fill(driver, 2_000_000)
    assert driver.serve([*prompt(1500), 7, 8, 9, *prompt(300, 6000)]).hit == 0
    assert num_probes(driver) == 0


def test_probe_is_evicted_for_a_running_request() -> None:
    driver = full_driver()
    driver.serve(prompt(1500) + prompt(500, 4000))
    lease = driver.admit(prompt((NUM_SLABS - 4) * 5 * 64, 500_000))
    driver.prefill(lease, leave=False)
    assert num_probes(driver) == 0


def test_newest_probe_replaces_the_oldest() -> None:
    driver = full_driver(400, LeastRecentlyUsed())
    firsts = [3_000_000 + 10_000 * index for index in range(max_probes(400) + 1)]
    for first in firsts:
        driver.serve(prompt(2000, first))
    probes = [s for _, _, s in published_snapshots(driver.cache) if s.kind is SnapshotKind.PROBE]
    assert len(probes) == max_probes(400)
    assert driver.lookup(prompt(1500, firsts[0])).hit == 0
    assert driver.lookup(prompt(1500, firsts[-1])).hit == 1472


def test_small_memory_takes_no_probe() -> None:
    driver = full_driver(19)
    driver.serve(prompt(600, 300_000))
    assert driver.cache.stats().snapshots_taken[SnapshotKind.PROBE] == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 900), st.integers(1, 900), st.booleans()), max_size=30))
def test_unproven_probes_never_exceed_their_share(requests: list[tuple[int, int, int, bool]]) -> None:
    driver = full_driver(40)
    running = []
    for index, (prefix, num_shared, num_own, runs_on) in enumerate(requests):
        tokens = prompt(num_shared, 100_000 * prefix) + prompt(num_own, 10_000_000 + 1000 * index)
        lease = driver.try_admit(tokens)
        if lease is None or not driver.step(lease, len(tokens)):
            for each in (*running, *([lease] if lease else [])):
                driver.release(each, SnapshotKind.PREEMPTION)
            running = []
        elif runs_on:
            running.append(lease)
        else:
            driver.release(lease)
        assert num_probes(driver) <= max_probes(40)  # the driver checks all other invariants
