"""A family that the engine has never heard of gets all of its contracts: only the model itself knows its layers.

Tokens must be equal: the reference rounds where streams and windows do, and a float32 state that is stored at one token
rather than at another differs by 1e-7 of its size, far less than the two highest logits do.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from strandline.config import EngineConfig
from strandline.device.uni_executor import UniExecutor
from strandline.engine.core import EngineCore
from strandline.env import DEBUG_CACHE
from strandline.ids import RequestId
from strandline.records.events import Submission
from strandline.records.plan import NewRequest
from strandline.records.sampling_params import SamplingParams
from tests.cpu.engine.toy_family import LOG_TOKENS, VOCAB_SIZE, ToyModel

MAX_TOKENS = 12
AT_ONCE = 23
"""Positions that are resumed side by side."""
Prompt = Sequence[int]


@dataclass(frozen=True)
class Toy:
    """A model, and an engine core around it."""

    model: ToyModel
    core: EngineCore

    def add(self, name: str, prompt: Prompt, *, max_tokens: int = MAX_TOKENS, salt: str = "") -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        new = NewRequest(RequestId(name), list(prompt), params, 0, frozenset(), ())
        self.core.add(Submission(new, len(prompt) + max_tokens, salt))

    def finish_all(self) -> dict[str, list[int]]:
        """Run until nothing is left; return the tokens by request."""
        found: dict[str, list[int]] = {}
        while self.core.has_unfinished:
            for event in self.core.step().tokens:
                found.setdefault(event.request_id, []).append(event.token_id)
        return found

    def answers(self, prompts: Sequence[Prompt], *, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
        """Run prompts side by side."""
        for index, prompt in enumerate(prompts):
            self.add(str(index), prompt, max_tokens=max_tokens)
        found = self.finish_all()
        return [found[str(index)] for index in range(len(prompts))]

    def expected(self, prompts: Sequence[Prompt], *, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
        return [self.model.reference_tokens(prompt, max_tokens) for prompt in prompts]


MakeToy = Callable[..., Toy]


@pytest.fixture(params=[True, False], ids=["logs", "no-logs"])
def make_toy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeToy:
    """Build toy engines; every step checks the cache and poisons freed memory."""
    monkeypatch.setenv(DEBUG_CACHE, "1")
    model = ToyModel(keeps_logs=request.param)

    def make(*, num_slabs: int = 400, **options: Any) -> Toy:
        settings = {"memory": num_slabs * model.spec.slab_bytes, "device": "cpu", "max_model_len": 512, **options}
        config = EngineConfig(model="toy", **settings)
        return Toy(model, EngineCore(UniExecutor(model, config, torch.device("cpu")), config))

    return make


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def test_tokens_are_those_of_the_reference(make_toy: MakeToy) -> None:
    prompts = [tokens(count, seed=count) for count in (1, 2, 5, 63, 64, 65, 130)]
    toy = make_toy()
    expected = toy.expected(prompts)
    assert len(set(map(tuple, expected))) == len(prompts)
    assert toy.answers(prompts) == expected
    assert toy.answers(prompts) == expected
    assert make_toy(enable_prefix_caching=False).answers(prompts) == expected
    assert make_toy(async_scheduling=True).answers(prompts) == expected


@pytest.mark.parametrize("step_tokens", [1, 7, 64, 100])
def test_steps_of_any_size_give_the_same_tokens(make_toy: MakeToy, step_tokens: int) -> None:
    toy = make_toy(max_num_batched_tokens=step_tokens)
    prompts = [tokens(count, seed=count) for count in (5, 64, 129)]
    assert toy.answers(prompts) == toy.expected(prompts)


def test_resuming_at_every_position_gives_the_same_tokens(make_toy: MakeToy) -> None:
    toy, prompt = make_toy(), tokens(70)
    [expected] = toy.expected([prompt])
    for first in range(1, len(prompt), AT_ONCE):
        positions = range(first, min(first + AT_ONCE, len(prompt)))
        for position in positions:
            toy.add(f"before {position}", prompt[:position], max_tokens=1, salt=str(position))
        toy.finish_all()
        hits = toy.core.stats().hit_tokens
        for position in positions:
            toy.add(f"whole {position}", prompt, salt=str(position))
        found = toy.finish_all()
        assert [found[f"whole {position}"] for position in positions] == [expected] * len(positions)
        # None hits more than its prefix, so that each hits all of it.
        assert toy.core.stats().hit_tokens - hits == sum(positions)


def test_snapshots_taken_within_a_prompt_can_be_resumed(make_toy: MakeToy) -> None:
    shared = tokens(90)
    prompts = [[*shared, seed, seed] for seed in range(1, 5)]
    expected = make_toy().expected(prompts)
    for options, hits in (({}, [0, 0, 90, 90]), ({"mamba_cache_mode": "all", "mamba_block_size": 64}, [0, 64, 64, 64])):
        toy = make_toy(**options)
        for prompt, answer, num_hits in zip(prompts, expected, hits, strict=True):
            before = toy.core.stats().hit_tokens
            assert toy.answers([prompt]) == [answer]
            assert toy.core.stats().hit_tokens - before == num_hits


def test_forks_resume_from_one_snapshot_and_stay_apart(make_toy: MakeToy) -> None:
    toy, shared = make_toy(), tokens(90)
    prompts = [shared, *(shared + tokens(10, seed=seed) for seed in range(5))]
    toy.add("0", prompts[0], max_tokens=20)
    [first] = toy.core.step().tokens
    for index, prompt in enumerate(prompts[1:], start=1):
        toy.add(str(index), prompt, max_tokens=20)
    found = toy.finish_all()
    found["0"].insert(0, first.token_id)
    assert [found[str(index)] for index in range(6)] == toy.expected(prompts, max_tokens=20)
    assert toy.core.stats().hit_tokens == 5 * len(shared)


def test_preempted_requests_give_the_same_tokens(make_toy: MakeToy) -> None:
    toy = make_toy(num_slabs=15, max_model_len=192)
    prompts = [tokens(60, seed=seed) for seed in range(4)]
    assert toy.answers(prompts, max_tokens=70) == toy.expected(prompts, max_tokens=70)
    assert toy.core.stats().num_preemptions > 0


def test_answers_that_are_continued_hit_to_their_last_token(make_toy: MakeToy) -> None:
    toy = make_toy()
    histories = [tokens(30, seed=seed) for seed in range(6)]
    for turn in range(3):
        known = sum(len(history) - 1 for history in histories) if turn else 0
        for seed, history in enumerate(histories):
            history.extend(tokens(7, seed=100 * turn + seed))
        hits = toy.core.stats().hit_tokens
        found = toy.answers(histories)
        assert found == toy.expected(histories)
        assert toy.core.stats().hit_tokens - hits == known
        for history, answer in zip(histories, found, strict=True):
            history.extend(answer)


def test_logs_are_kept_where_the_recurrence_has_them(make_toy: MakeToy) -> None:
    toy = make_toy()
    log_tokens = toy.core.executor.facts.log_tokens
    assert log_tokens == (LOG_TOKENS if toy.model.spec.log_bytes else 0)
    for seed in range(6):
        toy.add(str(seed), tokens(20, seed=seed))
    longest = 0
    while (plan := toy.core.scheduler.plan()) is not None:
        longest = max(longest, *(sequence.num_logged for sequence in plan.sequences))
        toy.core.scheduler.commit(plan, toy.core.executor.launch(plan).result())
    assert longest == log_tokens
