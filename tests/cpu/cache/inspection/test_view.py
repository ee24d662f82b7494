"""The cache as records: what is shown is what is there, looking changes nothing, and a look is bounded."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from strandline.cache import PrefixCache
from strandline.cache.inspection import view as view_module
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.inspection.view import MAX_SNAPSHOTS_PER_RUN, view
from strandline.cache.policy import new_cache
from strandline.cache.size import CacheSize
from strandline.ids import RequestId
from strandline.records.account import SnapshotKind
from strandline.records.excerpts import BEFORE_TOKENS
from strandline.records.tokens import TokenBuffer
from strandline.records.tree_view import TreeView
from tests.cpu.cache.driver import Driver
from tests.cpu.cache.test_lookup import prompt


def fingerprint(cache: PrefixCache) -> list[Any]:
    """Everything that a use of the cache would change."""
    parts = cache.internals()
    found: list[Any] = [vars(parts.allocator) | {}, cache.stats()]
    waiting = list(parts.index.roots.values())
    while waiting:
        run = waiting.pop()
        found.append(
            (run.last_tick, run.num_users, bytes(run.tokens), list(run.child_keys), list(run.evicted_snapshots))
        )
        snapshots = run.snapshots.values()
        found.append([(s.position, s.last_tick, s.use.at, s.num_readers, s.slot) for s in snapshots])
        waiting.extend(run.children.values())
    return [repr(found), len(parts.memory.actions), parts.memory.tick, parts.reuse.now]


def kinds(tree: TreeView) -> set[tuple[int, SnapshotKind]]:
    return {(snapshot.position, snapshot.kind) for run in tree.runs for snapshot in run.snapshots}


def test_empty_cache_shows_nothing() -> None:
    tree = view(Driver().cache)
    assert (tree.runs, tree.leases, tree.num_snapshots, tree.num_blocks) == ((), (), 0, 0)


def test_tree_is_shown_with_branches_and_snapshots() -> None:
    driver = Driver()
    driver.serve(prompt(150), prompt(10, 9000))
    driver.serve(prompt(100) + prompt(60, 5000))
    tree = view(driver.cache)
    root, shared, *ends = tree.runs
    assert (root.parent, root.start, root.end, root.num_children) == (None, 0, 0, 1)
    assert (shared.parent, shared.start, shared.end, shared.num_children) == (0, 0, 64, 2)
    below = [run for run in ends if run.parent == 1]
    assert {(run.parts_at, run.head.tokens[0]) for run in below} == {(100, 1100), (100, 5000)}
    assert {run.head.before for run in below} == {tuple(prompt(100)[-BEFORE_TOKENS:])}
    assert kinds(tree) >= {
        (150, SnapshotKind.PROMPT_END),
        (160, SnapshotKind.GENERATION_END),
        (100, SnapshotKind.BRANCH),
    }
    assert (
        sum(len(run.snapshots) for run in tree.runs)
        == tree.num_snapshots
        == len(list(published_snapshots(driver.cache)))
    )
    assert [(s.position, s.kind) for s in shared.snapshots] == [(100, SnapshotKind.BRANCH)], "where its children part"
    assert len({run.digest for run in tree.runs}) == len(tree.runs)


def test_snapshot_of_a_short_prompt_is_shown_on_its_run() -> None:
    driver = Driver()
    driver.serve(prompt(40))
    driver.serve(prompt(30, 7000))
    root, *runs = view(driver.cache).runs
    assert root.snapshots == ()
    assert {(run.end, run.snapshots[0].position) for run in runs} == {(40, 40), (30, 30)}


def test_view_names_readers_and_users() -> None:
    driver = Driver()
    driver.serve(prompt(128))
    lease = driver.admit(prompt(128) + prompt(9, 5000), "reader")
    tree = view(driver.cache)
    [shown] = tree.leases
    assert (shown.request_id, shown.hit, shown.computed, shown.num_tokens) == ("reader", 128, 128, 137)
    assert shown.run is not None
    run = tree.runs[shown.run]
    assert (run.end, run.num_users) == (128, 1)
    assert [snapshot.readers for snapshot in run.snapshots if snapshot.position == 128] == [(RequestId("reader"),)]
    driver.prefill(lease)
    driver.release(lease)
    after = view(driver.cache)
    assert after.leases == ()
    assert all(run.num_users == 0 for run in after.runs)


def test_only_the_given_salt_is_shown() -> None:
    driver = Driver()
    driver.serve(prompt(70))
    driver.serve(prompt(80, 5000), salt="mine")
    driver.admit(prompt(90, 6000), "other", salt="theirs")
    tree = view(driver.cache, salt="mine")
    assert {run.end for run in tree.runs} == {0, 64, 80}
    assert tree.leases == ()
    assert tree.num_other_salts == 1
    assert view(driver.cache, salt="unknown").runs == ()


def test_digests_depend_on_their_key() -> None:
    driver = Driver()
    driver.serve(prompt(70))
    digests = [[run.digest for run in view(driver.cache, key=key).runs] for key in (b"a", b"b", b"a")]
    assert digests[0] == digests[2]
    assert digests[0] != digests[1]


def test_view_changes_nothing() -> None:
    driver = Driver()
    driver.serve(prompt(150), prompt(70, 9000))
    driver.serve(prompt(100) + prompt(60, 5000))
    driver.admit(prompt(100) + prompt(80, 7000))
    before = fingerprint(driver.cache)
    view(driver.cache)
    view(driver.cache, max_runs=2)
    assert fingerprint(driver.cache) == before


def test_runs_in_use_and_used_last_are_shown_of_many() -> None:
    driver = Driver(200, 5)
    for index in range(50):
        driver.serve(prompt(70, 1000 * (index + 1)))
    driver.admit([*prompt(64, 1000), 1], "runs")
    tree = view(driver.cache, max_runs=11)
    assert len(tree.runs) == 11
    assert tree.runs[1].num_users == 1
    starts = {run.head.tokens[0] for run in tree.runs[1:]}
    assert {50_000, 49_000, 1000} <= starts
    assert tree.num_runs_left_out == sum(run.num_children_left_out for run in tree.runs) > 0
    assert tree.runs[0].num_children_left_out == 50 - sum(run.parent == 0 for run in tree.runs)


def test_deepest_snapshots_are_shown_of_many_on_one_run() -> None:
    driver = Driver(200, 5)
    lease = driver.admit(prompt(300))
    for end in range(1, 300, 3):
        driver.step(lease, end)
        driver.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
    tree = view(driver.cache)
    assert sum(run.num_snapshots_left_out for run in tree.runs) == 100 - sum(len(r.snapshots) for r in tree.runs) > 0
    assert all(len(run.snapshots) <= MAX_SNAPSHOTS_PER_RUN for run in tree.runs)
    assert max(position for position, _ in kinds(tree)) == 298


@contextmanager
def counted_lines(limit: int) -> Iterator[list[int]]:
    """Count the lines that ``view`` runs: a measure of its work that no clock disturbs."""
    counts = [0]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != view_module.__file__:
            return None
        counts[0] += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counts
    finally:
        sys.settrace(previous)
    assert counts[0] < limit


@pytest.mark.parametrize("num_tokens", [40, 70])
def test_view_costs_no_more_for_a_large_cache(num_tokens: int) -> None:
    work = []
    for num_prompts in (2500, 5000):
        cache = new_cache(CacheSize(12_000, 50))
        for index in range(num_prompts):
            lease = cache.admit(RequestId(str(index)), TokenBuffer(prompt(num_tokens, 100 * index)))
            assert lease is not None
            assert cache.extend(lease, num_tokens)
            cache.commit(lease, num_tokens)
            cache.release(lease, SnapshotKind.GENERATION_END)
        with counted_lines(200_000) as counts:
            view(cache)
        work.append(counts[0])
    assert work[1] <= 1.02 * work[0]
