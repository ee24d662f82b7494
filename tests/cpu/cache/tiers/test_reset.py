"""Resets: what is dropped, what arrives later, and how prefixes are called afterwards."""

import pytest

from strandline.cache.announcing.announcer import restate_events, take_events
from strandline.cache.inspection.invariants import check
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens
from strandline.cache.resume import ResumeRule
from strandline.errors import CacheInvariantError
from strandline.ids import NO_ADDRESS
from strandline.records.cache_events import Cleared
from strandline.records.tokens import TokenBuffer
from tests.cpu.cache.driver import Driver
from tests.cpu.cache.history import addresses_below, pattern
from tests.cpu.cache.tiers.test_lower_tier import evict_all
from tests.cpu.cache.tiers.test_spills import (
    end_spills,
    found_by_others,
    persisted_by,
    restarted,
    spilled,
    tiers,
    whole_paths,
)
from tests.cpu.events.reader import Reader

PROMPT = pattern(7, 400)
RULES = pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)


def spilling(rule: ResumeRule = AT_SNAPSHOTS) -> Driver:
    """Return a driver whose prompt is on its way from the first tier to the second."""
    driver = Driver(lower_blocks=(40, 100), rule=rule, emits_events=True)
    driver.loads.tiers[0].num_spare_blocks = 40
    driver.serve(PROMPT)
    evict_all(driver)
    driver.flush()
    assert driver.device.spilling
    return driver


def is_found(driver: Driver, salt: str = "") -> bool:
    """Return whether a request with the prompt would hit anything, on the device or after a load."""
    return driver.lookup(PROMPT, salt).hit > 0 or driver.loads.tier_offer(TokenBuffer(PROMPT), salt) is not None


@pytest.mark.parametrize("lower_blocks", [(), (100,), (100, 400), (100, 400, 400)], ids=str)
@RULES
def test_reset_drops_what_device_and_tiers_have(rule: ResumeRule, lower_blocks: tuple[int, ...]) -> None:
    driver = Driver(lower_blocks=lower_blocks, rule=rule, emits_events=True)
    for salt in ("", "salt"):
        driver.serve(pattern(8, 400), salt=salt)
        evict_all(driver)
        driver.serve(PROMPT, salt=salt)
    driver.reset()
    assert driver.cache.memory_use().num_blocks == 0
    assert [tier.num_used for tier in driver.loads.tiers] == [0] * len(lower_blocks)
    assert not any(is_found(driver, salt) for salt in ("", "salt"))
    assert take_events(driver.cache) == [Cleared()]
    assert driver.serve(PROMPT).hit == 0
    assert is_found(driver)


@pytest.mark.parametrize("is_done", [True, False])
@RULES
def test_spill_from_before_a_reset_is_dropped_on_arrival(rule: ResumeRule, *, is_done: bool) -> None:
    driver = spilling(rule)
    driver.reset()
    # The same prompt is on its way again before the first one has arrived.
    driver.serve(PROMPT)
    evict_all(driver)
    driver.flush()
    old, new = (spill.path for spill in driver.device.spilling.values())
    assert old is not None
    assert new is not None
    _, disk = tiers(driver)
    tree = disk.tree.roots[disk.tree.name("")]
    assert driver.end_spill(0, is_done=is_done)
    assert addresses_below(disk, tree) == {NO_ADDRESS}
    assert set(old.addresses.values()).isdisjoint(driver.device.stored)
    assert driver.end_spill(0)
    assert addresses_below(disk, tree) >= set(new.addresses.values())
    assert is_found(driver)


@pytest.mark.parametrize("is_done", [True, False])
@RULES
def test_spill_from_before_a_reset_announces_nothing(rule: ResumeRule, *, is_done: bool) -> None:
    driver = spilling(rule)
    reader = Reader(driver.cache)
    driver.reset()
    assert restate_events(driver.cache) == [Cleared()]
    driver.serve([*PROMPT, 1])
    assert reader.hit([*PROMPT, 1]) >= 384
    assert driver.end_spill(0, is_done=is_done)
    assert take_events(driver.cache) == []


@RULES
def test_what_others_stored_before_a_reset_is_not_found(rule: ResumeRule) -> None:
    others = spilled(PROMPT, rule=rule)
    driver = Driver(lower_blocks=(13, 100), rule=rule)
    paths = whole_paths(found_by_others(driver, others), rule)
    driver.reset()
    driver.loads.adopt(driver.loads.tiers[-1].store, (), paths)
    check(driver.cache)
    assert not is_found(driver)


@RULES
def test_another_process_finds_nothing_of_later_epochs(rule: ResumeRule) -> None:
    driver = spilled(PROMPT, rule=rule)
    driver.reset()
    driver.serve(PROMPT)
    evict_all(driver)
    end_spills(driver)
    assert is_found(driver)
    assert persisted_by(driver).blocks
    assert not is_found(restarted(driver))
    assert driver.loads.begin_flush() is None, "it would not be found either"


def test_engines_of_an_epoch_find_what_others_store() -> None:
    others, driver = spilled(pattern(3, 300)), Driver(lower_blocks=(13, 100))
    for each in (others, driver):
        each.reset()
    others.serve(PROMPT)
    evict_all(others)
    end_spills(others)
    persisted = found_by_others(driver, others)
    driver.loads.adopt(tiers(driver)[1].store, (), whole_paths(persisted))
    assert driver.bring_back(PROMPT)


@pytest.mark.parametrize("salt", ["", "salt"])
@pytest.mark.parametrize("lower_blocks", [(), (13,), (13, 100)], ids=str)
@RULES
def test_prefixes_are_announced_under_the_same_hashes(
    rule: ResumeRule, lower_blocks: tuple[int, ...], salt: str
) -> None:
    driver = Driver(lower_blocks=lower_blocks, rule=rule, emits_events=True)
    reader = Reader(driver.cache)
    for _ in range(3):
        driver.serve([*PROMPT, 1], salt=salt)
        assert reader.hit([*PROMPT, 1], salt) >= 384
        evict_all(driver)
        driver.flush()
        assert (reader.hit([*PROMPT, 1], salt) > 0) == bool(lower_blocks)
        driver.reset()
        assert reader.hit([*PROMPT, 1], salt) == 0
        end_spills(driver)
        assert (reader.index.num_blocks, reader.index.num_snapshots) == (0, 0)


def test_resets_need_all_memory_of_the_device() -> None:
    driver = Driver()
    driver.admit(PROMPT, "a request")
    with pytest.raises(CacheInvariantError, match="while a request had memory"):
        driver.reset()
