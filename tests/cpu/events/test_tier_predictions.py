"""With tiers below the device, a prediction is what a request hits if all that rests is loaded for it."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from strandline.cache.announcing.announcer import restate_events, take_events
from strandline.cache.evict_all import evict_all as evict_unused
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens
from strandline.cache.resume import ResumeRule
from strandline.cache.size import WindowClass
from strandline.events.resumable import PromptHashes, ResumableIndex
from strandline.ids import BLOCK_TOKENS
from strandline.records.cache_events import BlocksRemoved, BlocksStored, Cleared, SnapshotRemoved, SnapshotStored
from strandline.records.path_hashes import num_blocks_before
from strandline.records.tokens import TOKEN_BYTES, TokenBuffer, encode
from tests.cpu.cache.driver import Driver, published
from tests.cpu.cache.history import SALTS, History, pattern
from tests.cpu.cache.test_state_machine import KEPT, LENGTHS, SHAPES, TieredCacheMachine, random_event, tier_sizes
from tests.cpu.cache.tiers.test_spills import end_spills, restarted, spilled
from tests.cpu.events.reader import Reader, apply_all

PROMPT = pattern(7, 400)
CACHES: list[dict[str, Any]] = [
    {"rule": AT_SNAPSHOTS},
    {"rule": AtTokens()},
    {"rule": AT_SNAPSHOTS, "windows": (WindowClass(150, 3),)},
]


class TieredEventMachine(TieredCacheMachine):
    """Requests over one cache with one to three tiers below it, and a reader of its events."""

    reader: Reader

    @initialize(cache=st.sampled_from(CACHES), shape=st.sampled_from(SHAPES[::-1]), lower_blocks=tier_sizes(1, 3))
    def start_with(self, cache: dict[str, Any], shape: tuple[int, int], lower_blocks: Sequence[int]) -> None:
        self.history = History(*shape, **cache, emits_events=True, lower_blocks=lower_blocks)
        self.reader = Reader(self.history.cache)

    def start(
        self, shape: tuple[int, int] = (1, 1), rule: ResumeRule = AT_SNAPSHOTS, lower_blocks: Sequence[int] = ()
    ) -> None:
        """Leave it to ``start_with``."""

    @precondition(lambda self: self.history.loads.spills)
    @rule(
        base=st.integers(0, 30),
        kept=st.sampled_from(KEPT[::-1]),
        seed=st.integers(0, 3),
        more=st.sampled_from(LENGTHS),
        is_old=st.booleans(),
    )
    def adopt(self, base: int, kept: int, seed: int, more: int, is_old: bool) -> None:
        """Adopt paths without a salt: files have only a hash of a salt, which events cannot name."""
        self.history.adopt(base, kept, seed, more, "", is_old=is_old)

    @invariant()
    def cache_agrees_with_the_dictionary(self) -> None:
        self.history.check()
        check_bounds(self.history, self.reader)


TieredEventMachine.TestCase.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=50)
TestTieredEventMachine = TieredEventMachine.TestCase


@pytest.mark.parametrize("lower_blocks", [(12,), (300,), (30, 40), (16, 400), (16, 20, 400)], ids=str)
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_predictions_are_bounds_over_long_histories(cache: dict[str, Any], lower_blocks: tuple[int, ...]) -> None:
    choose = random.Random(str(lower_blocks))
    history = History(9, 5, **cache, emits_events=True, lower_blocks=lower_blocks)
    reader = Reader(history.cache)
    for _ in range(250):
        event = choose.random()
        if event < 0.15:
            salt = choose.choice(["", "", "other"])
            base, kept, seed, num_more = choose.randrange(30), choose.choice(KEPT), choose.randrange(4), LENGTHS[3]
            history.load_from_tier(base, kept, seed, num_more, salt)
        elif event < 0.25:
            history.end_load(choose.randrange(4), is_done=choose.random() < 0.8)
        elif event < 0.32:
            history.take(choose.randrange(20), 0, "blocks first")
        elif event < 0.45 and len(lower_blocks) > 1:
            history.end_spill(choose.randrange(4), is_done=choose.random() < 0.8)
        else:
            random_event(history, choose)
        history.check()
        check_bounds(history, reader)


def check_bounds(history: History, reader: Reader) -> None:
    """Compare predictions with hits and offers, what is announced with what there is, and with one who asks now."""
    reader.follow()
    for prompt in (*history.prompts[-4:], *history.prompts[1:3]):
        for salt in SALTS:
            account = history.driver.lookup(prompt, salt)
            offer = history.loads.tier_offer(TokenBuffer(prompt), salt)
            predicted = reader.index.hit_tokens(PromptHashes(prompt, salt))
            if history.rule.needs_slots:
                assert predicted >= account.hit
                assert offer is None or predicted >= offer.position
                continue
            assert predicted >= min(account.kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS, account.hit)
            assert offer is None or predicted >= min(offer.position, len(prompt) - 1)
    if history.rule.needs_slots:
        found = held(history)
        assert len(found) <= reader.index.num_snapshots <= len(found | loading(history))
    fresh = ResumableIndex()
    apply_all(fresh, restate_events(history.cache))
    assert vars(fresh) == vars(reader.index)


def held(history: History) -> set[int]:
    """Return the hashes of the snapshots on the device and at rest."""
    found = {(salt, encode(tokens)) for salt, tokens in published(history.cache)}
    for tier in history.loads.tiers:
        names = {tier.tree.name(salt): salt for salt in SALTS}
        for each in (copy.snapshot for copy in tier.snapshots()):
            if (tree := tier.tree.name_of(each.home)) in names:  # others are of earlier epochs
                found.add((names[tree], each.path()))
    return {snapshot_key(salt, data) for salt, data in found}


def loading(history: History) -> set[int]:
    """Return the hashes of the snapshots that are being loaded, from a tier or from elsewhere."""
    return {snapshot_key(lease.salt, bytes(lease.tokens.data)) for lease in history.loads}


def snapshot_key(salt: str, data: bytes) -> int:
    """Return the hash of a snapshot after encoded tokens."""
    num_tokens = len(data) // TOKEN_BYTES
    num_before = num_blocks_before(num_tokens)
    return PromptHashes(data, salt).snapshot(num_before, num_tokens - num_before * BLOCK_TOKENS)


def evicted(rule: ResumeRule = AT_SNAPSHOTS, lower_blocks: int = 100, salt: str = "") -> Driver:
    """Return a driver that has served a prompt, announced it and evicted it since."""
    driver = Driver(rule=rule, lower_blocks=(lower_blocks,), emits_events=True)
    driver.serve(PROMPT, salt=salt)
    take_events(driver.cache)
    evict_unused(driver.cache)
    driver.flush()
    return driver


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
def test_demotion_announces_nothing(rule: ResumeRule, salt: str) -> None:
    driver = evicted(rule, salt=salt)
    assert driver.cache.memory_use().num_blocks == 0
    assert take_events(driver.cache) == []


@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
def test_return_to_the_device_announces_nothing(rule: ResumeRule) -> None:
    driver = evicted(rule)
    assert driver.bring_back([*PROMPT, 1])
    assert driver.lookup([*PROMPT, 1]).hit >= 384
    assert take_events(driver.cache) == []


def test_what_loads_stays_announced_until_that_fails() -> None:
    driver = evicted()
    assert driver.load_from_tier(PROMPT) is not None
    assert driver.loads.tiers[0].num_snapshots == 0
    assert take_events(driver.cache) == []
    assert any(isinstance(event, SnapshotStored) for event in restate_events(driver.cache))
    [transfer] = driver.device.loading
    driver.end_load(transfer, is_done=False)
    snapshot, blocks = take_events(driver.cache)
    assert isinstance(snapshot, SnapshotRemoved)
    assert isinstance(blocks, BlocksRemoved)
    assert len(blocks.hashes) == 6
    assert len(restate_events(driver.cache)) == 1


def test_what_leaves_the_last_tier_is_removed_deepest_first() -> None:
    driver = evicted()
    stored = [event for event in restate_events(driver.cache) if isinstance(event, BlocksStored)]
    [tier] = driver.loads.tiers
    [demoted] = tier.snapshots()
    tier.evict(demoted)
    snapshot, blocks = take_events(driver.cache)
    assert isinstance(snapshot, SnapshotRemoved)
    assert isinstance(blocks, BlocksRemoved)
    assert blocks.hashes == tuple(h for event in stored for h in event.hashes)[::-1]


def test_what_no_tier_takes_is_removed_at_once() -> None:
    kinds = [type(event) for event in take_events(evicted(lower_blocks=4).cache)]
    assert kinds == [SnapshotRemoved, BlocksRemoved]


def test_only_new_blocks_are_announced_beside_resting_ones() -> None:
    driver = evicted()
    driver.serve([*PROMPT, *pattern(3, 200)])
    stored = [event for event in take_events(driver.cache) if isinstance(event, BlocksStored)]
    assert sum(len(event.hashes) for event in stored) == 3
    assert stored[0].before is not None


@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
def test_restarted_cache_announces_its_disk(rule: ResumeRule) -> None:
    new = restarted(spilled(rule=rule), emits_events=True)
    assert Reader(new.cache).hit([*PROMPT, 1]) == (400 if rule.needs_slots else 384)


def test_restarted_cache_announces_a_salt_with_its_first_request() -> None:
    new = restarted(spilled(salt="secret"), emits_events=True)
    reader = Reader(new.cache)
    assert reader.hit(PROMPT, "secret") == 0
    assert reader.batches[0].events[1:] == []
    new.serve(pattern(1, 10), salt="secret")
    assert reader.hit(PROMPT, "secret") == 400
    shown = [token for batch in reader.batches for event in batch.events for token in getattr(event, "token_ids", [])]
    assert not set(shown) & set(PROMPT)


def test_spill_announces_nothing() -> None:
    driver = Driver(lower_blocks=(13, 100), emits_events=True)
    driver.loads.tiers[0].num_spare_blocks = 13
    driver.serve(PROMPT)
    assert isinstance(take_events(driver.cache)[0], Cleared)
    evict_unused(driver.cache)
    end_spills(driver)
    host, disk = driver.loads.tiers
    assert (host.num_snapshots, disk.num_snapshots) == (0, 1)
    assert take_events(driver.cache) == []
