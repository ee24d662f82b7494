"""The façade of the cache: what may be called from outside, and which of its methods change nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from strandline.cache import LogUse, PrefixCache
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.internals import Internals
from strandline.cache.policy import new_cache
from strandline.cache.size import CacheSize
from strandline.ids import NULL_LOG, RequestId
from strandline.records.account import SnapshotKind
from strandline.records.actions import FoldLog
from strandline.records.tokens import TokenBuffer
from tests.cpu.cache.driver import LOG_TOKENS, Driver
from tests.cpu.cache.history import fingerprint
from tests.cpu.cache.test_lookup import prompt

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "src" / "strandline" / "cache"
OUTSIDE = [
    path
    for folder in ("src/strandline", "benchmarks", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if CACHE not in path.parents
]
FACADE = {name for name in dir(PrefixCache) if not name.startswith("_")} - {"internals"} | {
    "is_enabled",
    "snapshot_blocks",
    "loads",
    "holds",
}


def reaches(text: str) -> Iterator[str]:
    """Yield the attributes that a module reads or writes of a cache though they are not of its façade."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
            is_cache = owner in ("cache", "_cache")
            if node.attr == "internals" or (is_cache and node.attr not in FACADE):
                yield f"line {node.lineno}: {owner}.{node.attr}"


def test_modules_outside_the_cache_use_only_its_facade() -> None:
    found = {path.name: list(reaches(path.read_text())) for path in OUTSIDE}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["self.cache.allocator.num_slots", "cache.reuse.clock = now", "engine.cache._leases", "cache.internals()"]
)
def test_access_past_the_facade_is_found(line: str) -> None:
    assert len(list(reaches(line))) == 1


def test_internals_name_every_part_once() -> None:
    parts = new_cache(CacheSize(8, 5)).internals()
    assert isinstance(parts, Internals)
    assert parts.memory.allocator is parts.allocator


def test_queries_change_nothing() -> None:
    driver = Driver()
    driver.serve(prompt(200))
    running = driver.admit(prompt(500))
    driver.step(running, 300)
    before, actions = fingerprint(driver), list(driver.cache.internals().memory.actions)
    wanted = dict(running.planned_cuts)
    tokens = TokenBuffer(prompt(450))
    for _ in range(2):
        driver.cache.lookup(tokens)
        driver.cache.hit_tokens(tokens)
        assert driver.cache.find_leader(tokens) is not None
        driver.cache.stats()
        driver.cache.memory_use()
        list(published_snapshots(driver.cache))
    assert fingerprint(driver) == before
    assert running.planned_cuts == wanted
    assert driver.cache.internals().memory.actions == actions


def test_find_leader_plans_no_snapshot() -> None:
    driver = Driver()
    leader = driver.admit(prompt(500))
    lead = driver.cache.find_leader(TokenBuffer(prompt(150) + prompt(60, 5000)))
    assert lead is not None
    assert 150 not in leader.planned_cuts
    driver.cache.follow(lead)
    assert leader.planned_cuts[150] is SnapshotKind.BRANCH


# Logs


def make_cache(num_logs: int) -> PrefixCache:
    return new_cache(CacheSize(40, 5, num_logs=num_logs, log_tokens=LOG_TOKENS))


def test_release_returns_the_log_for_the_next_lease() -> None:
    cache = make_cache(3)
    leases = [cache.admit(RequestId(name), TokenBuffer([index])) for index, name in enumerate("abc")]
    assert [lease.log for lease in leases if lease] == [1, 2, 3]
    for lease in (leases[2], leases[0]):
        assert lease is not None
        cache.release(lease, SnapshotKind.PREEMPTION)
    again = cache.admit(RequestId("d"), TokenBuffer([9]))
    assert again is not None
    assert again.log == 1
    assert cache.internals().logs.used() == {1, 2}


def test_lease_without_a_free_log_folds_every_token() -> None:
    cache = make_cache(1)
    cache.admit(RequestId("a"), TokenBuffer([1]))
    lease = cache.admit(RequestId("b"), TokenBuffer([2, 3]))
    assert lease is not None
    assert lease.log == NULL_LOG
    assert cache.extend(lease, 2)
    cache.commit(lease, 1, cache.reserve_step(lease, 1, LogUse.DECODED).num_folded)
    grant = cache.reserve_step(lease, 2, LogUse.DECODED)
    assert (grant.log, grant.num_logged, grant.num_folded) == (NULL_LOG, 0, 1)


def test_a_log_holds_decoded_tokens_or_drafts() -> None:
    cache = make_cache(1)
    lease = cache.admit(RequestId("a"), TokenBuffer([1]))
    assert lease is not None
    assert cache.extend(lease, 64)
    cache.commit(lease, 1, cache.reserve_step(lease, 1, LogUse.DECODED).num_folded)
    for token in (2, 3):  # decoded
        lease.tokens.append(token)
        grant = cache.reserve_step(lease, lease.computed + 1, LogUse.DECODED)
        assert grant.num_folded == 0
        cache.commit(lease, lease.computed + 1, 0)
    assert (lease.num_logged, lease.has_logged_drafts) == (2, False)
    cache.take_actions()
    lease.tokens.append(4)
    grant = cache.reserve_step(lease, 6, LogUse.DRAFTS)
    assert cache.take_actions() == [FoldLog(lease.dst, lease.log, 2)]
    assert (grant.num_logged, grant.num_folded) == (0, 1)
    lease.tokens.append(5)
    cache.commit(lease, 5, grant.num_folded)  # one draft is accepted
    assert (lease.num_logged, lease.has_logged_drafts) == (1, True)
    lease.tokens.append(6)
    grant = cache.reserve_step(lease, 6, LogUse.DRAFTS)
    assert (grant.num_logged, grant.num_folded) == (1, 2)
    cache.commit(lease, 6, grant.num_folded)
    assert (lease.num_logged, lease.has_logged_drafts) == (0, False)
    lease.tokens.append(7)
    assert cache.reserve_step(lease, 7, LogUse.DECODED).num_folded == 0
    assert cache.take_actions() == []


def test_logged_drafts_are_folded_when_a_lease_ends() -> None:
    cache = make_cache(1)
    lease = cache.admit(RequestId("a"), TokenBuffer([1, 2, 3]))
    assert lease is not None
    assert cache.extend(lease, 64)
    cache.commit(lease, 1, cache.reserve_step(lease, 1, LogUse.DECODED).num_folded)
    grant = cache.reserve_step(lease, 4, LogUse.DRAFTS)
    cache.commit(lease, 3, grant.num_folded)
    cache.take_actions()
    slot, log = lease.dst, lease.log
    cache.release(lease, SnapshotKind.GENERATION_END)
    assert FoldLog(slot, log, 1, holds_drafts=True) in cache.take_actions()


# What a step folds


def test_full_log_is_folded_with_the_next_token() -> None:
    driver = Driver()
    lease = driver.admit(prompt(100))
    driver.prefill(lease, leave=False)
    grants = []
    for token in range(2 * LOG_TOKENS + 2):
        lease.tokens.append(token)
        assert driver.cache.extend(lease, len(lease.tokens))
        grant = driver.cache.reserve_step(lease, len(lease.tokens), LogUse.DECODED)
        driver.cache.commit(lease, len(lease.tokens), grant.num_folded)
        grants.append((grant.num_logged, grant.num_folded))
    cycle = [*((logged, 0) for logged in range(LOG_TOKENS)), (LOG_TOKENS, LOG_TOKENS + 1)]
    assert grants == cycle + cycle


def test_first_token_after_a_snapshot_is_folded() -> None:
    driver = Driver()
    lease = driver.admit(prompt(100))
    driver.prefill(lease, leave=True)
    lease.tokens.append(7)
    assert driver.cache.extend(lease, 101)
    grant = driver.cache.reserve_step(lease, 101, LogUse.DECODED)
    assert grant.src != grant.dst
    assert (grant.log, grant.num_logged, grant.num_folded) == (lease.log, 0, 1)


@pytest.mark.parametrize("end", [102, 130])
def test_step_without_a_log_folds_it_first(end: int) -> None:
    driver = Driver()
    lease = driver.admit(prompt(100))
    driver.prefill(lease, leave=False)
    driver.decode(lease, [7])
    assert lease.num_logged == 1
    for token in range(end - 101):
        lease.tokens.append(token)
    assert driver.cache.extend(lease, end)
    grant = driver.cache.reserve_step(lease, end, LogUse.NONE)
    assert (grant.log, grant.num_logged, grant.num_folded) == (NULL_LOG, 0, end - 101)
    assert (lease.num_logged, len(driver.cache.take_actions())) == (0, 1)
