"""A reader of the events knows at every moment what a lookup would hit, to the token."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from strandline.cache.announcing.announcer import restate_events
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens
from strandline.cache.resume import ResumeRule
from strandline.events.resumable import PromptHashes, ResumableIndex
from strandline.ids import BLOCK_TOKENS
from tests.cpu.cache.driver import published
from tests.cpu.cache.history import SALTS, History
from tests.cpu.cache.test_state_machine import SHAPES, HungryCacheMachine, random_event
from tests.cpu.events.reader import Reader, apply_all


class EventMachine(HungryCacheMachine):
    """Requests over one cache, and a reader of its events."""

    reader: Reader

    @initialize(shape=st.sampled_from(SHAPES[::-1]))
    def start(self, shape: tuple[int, int]) -> None:
        self.history = History(*shape, emits_events=True)
        self.reader = Reader(self.history.cache)

    @invariant()
    def cache_agrees_with_the_dictionary(self) -> None:
        self.history.check()
        check_predictions(self.history, self.reader)


class StatelessEventMachine(EventMachine):
    """The same, of a model that keeps no states."""

    @initialize(shape=st.sampled_from(SHAPES[::-1]))
    def start(self, shape: tuple[int, int]) -> None:
        self.history = History(*shape, AtTokens(), emits_events=True)
        self.reader = Reader(self.history.cache)


EventMachine.TestCase.settings = settings(max_examples=settings().max_examples, stateful_step_count=50)
StatelessEventMachine.TestCase.settings = settings(max_examples=settings().max_examples, stateful_step_count=50)
TestEventMachine = EventMachine.TestCase
TestStatelessEventMachine = StatelessEventMachine.TestCase


@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_predictions_hold_over_long_histories(shape: tuple[int, int], rule: ResumeRule) -> None:
    choose = random.Random(f"events {shape}")
    history = History(*shape, rule, emits_events=True)
    reader = Reader(history.cache)
    for _ in range(250):
        random_event(history, choose)
        history.check()
        check_predictions(history, reader)
    history.driver.drain()
    reader.follow()
    assert (reader.index.num_blocks, reader.index.num_snapshots) == (0, 0)


def check_predictions(history: History, reader: Reader) -> None:
    """Compare predictions of both groups with the cache, and the reader's index with one that starts now."""
    reader.follow()
    found = published(history.cache)
    for prompt in (*history.prompts[-4:], *history.prompts[1:3]):
        for salt in SALTS:
            hashes, account = PromptHashes(prompt, salt), history.driver.lookup(prompt, salt)
            if not history.rule.needs_slots:
                num_blocks = account.kv_tokens // BLOCK_TOKENS
                assert reader.index.matched_blocks(hashes) == num_blocks
                assert reader.index.hit_tokens(hashes) == min(num_blocks * BLOCK_TOKENS, account.hit)
                continue
            assert reader.index.hit_tokens(hashes) == account.hit
            blocks = [
                end
                for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
                if any(each == salt and tokens[:end] == prompt[:end] for each, tokens in found)
            ]
            assert reader.index.matched_blocks(hashes) == len(blocks)
    fresh = ResumableIndex()
    apply_all(fresh, restate_events(history.cache))
    assert vars(fresh) == vars(reader.index)
