"""The shared index knows at every moment what a lookup in each replica's cache would hit, to the token."""

import random

import pytest

from strandline.cache.announcing.announcer import restate_events, take_events
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens
from strandline.cache.resume import ResumeRule
from strandline.events.resumable import PromptHashes, ResumableIndex
from strandline.ids import BLOCK_TOKENS
from strandline.routing.fleet_index import FleetIndex
from tests.cpu.cache.history import SALTS, History
from tests.cpu.cache.test_state_machine import SHAPES, random_event
from tests.cpu.routing.replicas import on_the_wire

NUM_REPLICAS = 3


def hits_by_replica(index: FleetIndex, prompt: PromptHashes) -> dict[int, int]:
    """Return the predicted hits that are not 0; check that they come deepest first, each replica once."""
    found = dict[int, int]()
    pairs = list(index.hits(prompt))
    assert [num_hit for num_hit, _ in pairs] == sorted((num_hit for num_hit, _ in pairs), reverse=True)
    for num_hit, mask in pairs:
        for replica in (replica for replica in range(mask.bit_length()) if mask >> replica & 1):
            assert replica not in found
            found[replica] = num_hit
    return {replica: num_hit for replica, num_hit in found.items() if num_hit}


def shared_by_replica(index: FleetIndex, prompt: PromptHashes) -> list[int]:
    """Return the announced blocks of each replica that a prompt begins with; check that each is in one mask."""
    found = {}
    for num_tokens, mask in index.shared_prefixes(prompt):
        for replica in (replica for replica in range(NUM_REPLICAS) if mask >> replica & 1):
            assert replica not in found
            found[replica] = num_tokens // BLOCK_TOKENS
    return [found.get(replica, 0) for replica in range(NUM_REPLICAS)]


@pytest.mark.parametrize("rules", [(AT_SNAPSHOTS,), (AT_SNAPSHOTS, AtTokens())], ids=["hybrid", "mixed"])
@pytest.mark.parametrize("shape", SHAPES[-2:])
def test_hits_are_those_of_every_replica(shape: tuple[int, int], rules: tuple[ResumeRule, ...]) -> None:
    choose = random.Random(f"fleet {shape}")
    histories = [History(*shape, rules[i % len(rules)], emits_events=True) for i in range(NUM_REPLICAS)]
    index, single = FleetIndex(), [ResumableIndex() for _ in histories]
    for replica in range(NUM_REPLICAS):
        index.add(replica)
    for _ in range(80):
        for replica, history in enumerate(histories):
            seed = choose.random()
            random_event(history, random.Random(seed))
            for event in on_the_wire(take_events(history.cache)):
                index.apply(replica, event)
                single[replica].apply(event)
        if choose.random() < 0.05:
            restart(index, single, histories, choose.randrange(NUM_REPLICAS))
        for prompt in (prompt for history in histories for prompt in history.prompts[-2:]):
            for salt in SALTS:
                hashes = PromptHashes(prompt, salt)
                expected = {replica: each.hit_tokens(hashes) for replica, each in enumerate(single)}
                assert hits_by_replica(index, hashes) == {r: hit for r, hit in expected.items() if hit}
                assert shared_by_replica(index, hashes) == [each.matched_blocks(hashes) for each in single]
                hits = [history.driver.lookup(prompt, salt).hit for history in histories]
                assert all(expected[r] == hit for r, hit in enumerate(hits) if histories[r].rule.needs_slots)
    for replica in range(NUM_REPLICAS):
        index.remove(replica)
    assert (index.num_blocks, index.num_snapshots, index._rests, index._homes) == (0, 0, {}, {})


def restart(index: FleetIndex, single: list[ResumableIndex], histories: list[History], replica: int) -> None:
    """Let a replica leave and come back, and hear everything anew."""
    index.remove(replica)
    index.add(replica)
    single[replica].clear()
    for event in on_the_wire(restate_events(histories[replica].cache)):
        index.apply(replica, event)
        single[replica].apply(event)
