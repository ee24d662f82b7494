"""Which snapshots are taken: by default, in the modes that serve as baselines, and with little room."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strandline.cache.admission_terms import AdmissionTerms
from strandline.cache.placement import Admission, Placement
from strandline.cache.policy import placement
from strandline.cache.policy.placements import Align, Auto, EveryBoundary, NoSnapshots, ladder, probe
from strandline.errors import ConfigError
from strandline.ids import RequestId
from strandline.records.account import SnapshotKind
from strandline.records.tokens import TokenBuffer
from tests.cpu.cache.driver import Driver, published
from tests.cpu.cache.test_lookup import prompt


def admission(
    end: int,
    start: int = 0,
    *,
    kv: int = 0,
    marks: tuple[int, ...] = (),
    spare: int = 1000,
    slot: int = 3200,
    may_probe: bool = True,
) -> Admission:
    return Admission(start, end, kv, marks, spare, slot, may_probe)


def positions(driver: Driver) -> list[int]:
    return sorted(len(tokens) for _, tokens in published(driver.cache))


@given(st.integers(256, 500_000), st.integers(0, 3000))
@example(256, 256)
def test_prefix_of_256_tokens_has_rung_in_last_fifth(prefix: int, more: int) -> None:
    rungs = ladder(0, max(prefix + more, 512))
    deepest = max((rung for rung in rungs if rung <= prefix), default=0)
    assert deepest >= 0.8 * prefix - 64 or prefix == max(prefix + more, 512)


@given(st.integers(0, 300_000), st.integers(1, 300_000))
def test_ladder_is_sparse_and_on_the_grid(start: int, more: int) -> None:
    rungs = ladder(start, start + more)
    assert all(start < rung < start + more and rung % 64 == 0 for rung in rungs)
    assert rungs == sorted(set(rungs))
    assert len(rungs) <= 60
    assert not rungs or more >= 512


@given(st.integers(0, 300_000), st.integers(512, 300_000))
@example(1023, 1024)
@example(1024, 1024)
def test_resumed_prompt_has_all_rungs_after_its_start(start: int, more: int) -> None:
    rungs = [rung for rung in ladder(0, start + more) if rung > start]
    assert set(rungs) <= set(ladder(start, start + more))


@given(st.integers(512, 100_000))
def test_prompt_without_its_last_block_has_a_rung_near(end: int) -> None:
    assert end - 128 <= max(rung for rung in ladder(0, end) if rung <= end - 64)


@given(st.integers(512, 100_000), st.integers(1, 60))
def test_ladder_takes_at_most_the_spare_slots(end: int, spare: int) -> None:
    positions = Auto().on_admission(admission(end, spare=spare, slot=0))
    assert len(positions) <= spare
    assert set(positions) <= set(ladder(0, end))


@given(st.integers(0, 200_000), st.integers(1, 500_000))
def test_scarce_memory_leaves_few_rungs_in_long_turns_alone(start: int, new: int) -> None:
    positions = sorted(Auto().on_admission(admission(start + new, start, spare=0, may_probe=False)))
    assert len(positions) <= 2 * new / (10 * 3200)
    assert bool(positions) == (new >= 10 * 3200)
    if positions:
        assert 64 <= start + new - positions[-1] < 128, "one shortly before its end, for rewinds"
        gaps = [after - before for before, after in zip([start, *positions], [*positions, start + new], strict=False)]
        assert max(gaps) < 2 * 20 * 3200 + 128


@given(
    st.integers(0, 20_000),
    st.integers(1, 20_000),
    st.integers(0, 20_000),
    st.lists(st.integers(1, 40_000)),
    st.booleans(),
)
def test_prompt_has_one_probe_when_mostly_new(
    start: int, more: int, kv: int, marks: list[int], may_probe: bool
) -> None:
    end = start + more
    known = max(start, kv, *(mark for mark in marks if mark < end))
    asked = admission(end, start, kv=kv, marks=tuple(marks), spare=0, slot=0, may_probe=may_probe)
    position = probe(asked)
    assert (position is not None) == (may_probe and end - known >= max(512, known))
    if position is not None:
        assert known < position < end
        assert position % 64 == 0
        assert abs(position - known - 3 * (end - known) / 4) < 64
        assert Auto().on_admission(asked).get(position) in (SnapshotKind.PROBE, SnapshotKind.MARK, SnapshotKind.BRANCH)


def test_branches_and_marks_are_taken_without_spare_memory() -> None:
    positions = Auto().on_admission(admission(700, 100, kv=300, marks=(50, 200, 700), spare=0))
    assert positions == {300: SnapshotKind.BRANCH, 200: SnapshotKind.MARK}


def test_second_prompt_hits_the_ladder_and_third_the_whole_prefix() -> None:
    driver = Driver(200)
    hits = [driver.serve(prompt(1500) + prompt(300, 5000 + 1000 * index)).hit for index in range(3)]
    assert hits[0] == 0
    assert 0.8 * 1500 <= hits[1] < 1500
    assert hits[2] == 1500


def test_marked_prefix_is_hit_by_the_second_prompt() -> None:
    driver = Driver()
    lease = driver.cache.admit(RequestId("a"), TokenBuffer(prompt(200)), terms=AdmissionTerms(marks=(77, 130)))
    assert lease is not None
    driver.prefill(lease)
    driver.release(lease)
    assert driver.lookup(prompt(77) + prompt(5, 5000)).hit == 77
    assert driver.lookup(prompt(150) + prompt(5, 5000)).hit == 130


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("align", [128, 256, 320]), ("all", [64, 128, 192, 256, 320]), ("none", []), ("auto", [300, 330])],
)
def test_each_mode_takes_its_own_snapshots_only(mode: str, expected: list[int]) -> None:
    driver = Driver(placement=placement(mode, 64))
    driver.serve(prompt(300), generated=prompt(30, 5000), chunk=150)
    assert positions(driver) == expected


@pytest.mark.parametrize("mode", ["auto", "align", "all", "none"])
def test_preempted_request_loses_nothing_in_any_mode(mode: str) -> None:
    driver = Driver(placement=placement(mode, 64))
    lease = driver.admit(prompt(100))
    driver.step(lease, 50)
    driver.release(lease, SnapshotKind.PREEMPTION)
    assert driver.admit(prompt(100)).computed == 50


@pytest.mark.parametrize("other", [Align(64), Align(256), EveryBoundary(256), NoSnapshots()])
def test_coarse_baselines_never_hit_more_than_auto_with_spare_memory(other: Placement) -> None:
    trace = [prompt(600) + prompt(100 * turn, 5000) + prompt(40, 7000 * turn) for turn in range(6)]
    hits = []
    for chosen in (Auto(), other):
        driver = Driver(400, placement=chosen)
        hits.append(sum(driver.serve(tokens, generated=[1, 2]).hit for tokens in trace))
    assert hits[0] >= hits[1]


def test_unknown_mode_or_grid_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="one of auto, align, all, none"):
        placement("best", 64)
    with pytest.raises(ConfigError, match="multiple of 64"):
        placement("align", 100)
