"""The answers of every kind of layer are the same on a GPU: from CUDA graphs and from launched kernels.

Greedy tokens are compared exactly, in float32, with those of transformers on the CPU: the tiny models' logits lie
further apart than float32 rounds. Few sequences and short steps, so that an engine starts in a second: one serves all
tests of a family, with a salt for each.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.device.sizing import slabs_for
from strandline.device.steps.graphs import StepGraphs
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import GREEDY, answers, check_resumption, tokens
from tests.cpu.engine.test_speculation import SPECULATION, force
from tests.cpu.models import families

DEVICE = "cuda"
SETTINGS: dict[str, Any] = {"device": DEVICE, "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512}

KINDS = families.REPRESENTATIVES
FURTHER = ["bailing_hybrid", "falcon_h1", "gemma3", "gpt_oss", "granite_hybrid", "inkling2", "lara_mini", "lfm3"]
FURTHER += ["mamba", "zamba2"]
"""Combine the same layers in other ways."""

CASES = [
    *((name, False) for name in [*KINDS, *FURTHER]),
    *((name, True) for name in KINDS),
]
"""And whether every kernel is launched by itself."""

CAPTURED = [(name, False) for name in KINDS]

# Of the seeds that were tried, these lead to the clearest answers: the two greatest logits of any place are 1e-4 apart.
PROMPTS = [
    tokens(count, seed=seed) for count, seed in ((1, 5), (2, 2), (63, 63), (64, 64), (65, 70), (130, 131), (300, 305))
]
RESUMED = tokens(140, seed=1)
DRAFTED = [tokens(60, seed=seed) for seed in (101, 105, 107)]

POSITIONS = [1, 2, 3, 20, 31, 62, 63, 64, 65, 66, 80, 127, 128, 129, 139]
LONG = SamplingParams(temperature=0, max_tokens=20)
LONGER = SamplingParams(temperature=0, max_tokens=100)


def ids(case: tuple[str, bool]) -> str:
    return f"{case[0]}-{'launched' if case[1] else 'captured'}"


each_case = pytest.mark.parametrize("case", CASES, indirect=True, ids=ids, scope="module")
each_kind = pytest.mark.parametrize("case", CAPTURED, indirect=True, ids=ids, scope="module")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> tuple[str, bool]:
    name, is_eager = request.param
    return name, is_eager


@pytest.fixture(scope="module")
def directory(case: tuple[str, bool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save(case[0], tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def make_llm(case: tuple[str, bool], directory: Path) -> Iterator[MakeLLM]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield llm_maker(directory, monkeypatch, enforce_eager=case[1], **SETTINGS)


@pytest.fixture(scope="module")
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm(memory="32MiB")


def salted(prompt: list[int], salt: str) -> Any:
    return {"prompt_token_ids": prompt, "cache_salt": salt}


@each_case
def test_greedy_tokens_are_those_of_transformers(
    llm: LLM, case: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = list[bool]()
    monkeypatch.setattr(StepGraphs, "find", counting(StepGraphs.find, replayed))
    expected = answers(llm, PROMPTS, LONG)
    assert [len(answer) for answer in expected] == [LONG.max_tokens] * len(PROMPTS)
    assert expected == families.greedy_tokens(case[0], PROMPTS, expected)
    assert answers(llm, PROMPTS, LONG) == expected  # resumed where the prompts end
    assert (sum(replayed) > 20) is not case[1]


def counting(replay: Any, replayed: list[bool]) -> Any:
    """Return a method that also notes whether a step was replayed from a graph."""

    def counted(*step: Any, **options: Any) -> Any:
        result = replay(*step, **options)
        replayed.append(result is not None)
        return result

    return counted


@each_case
def test_resuming_gives_the_same_tokens(llm: LLM, case: tuple[str, bool]) -> None:
    [output] = llm.generate([salted(RESUMED, "whole")], GREEDY, use_tqdm=False)
    expected = output.outputs[0].token_ids
    assert [expected] == families.greedy_tokens(case[0], [RESUMED], [expected])
    check_resumption(llm, RESUMED, expected, POSITIONS)


@each_case
def test_forks_equal_requests_with_their_seeds(llm: LLM) -> None:
    prompt, cache = tokens(100, seed=2), llm.engine.cache
    before = cache.stats().hit_tokens
    params = SamplingParams(n=3, seed=11, max_tokens=12)
    [forked] = llm.generate([salted(prompt, "forked")], params, use_tqdm=False)
    assert cache.stats().hit_tokens - before == 2 * (100 if llm.engine.core.spec.has_states else 99)
    alone = llm.generate(
        [salted(prompt, str(index)) for index in range(3)],
        [SamplingParams(seed=11 + index, max_tokens=12) for index in range(3)],
        use_tqdm=False,
    )
    assert [output.num_cached_tokens for output in alone] == [0] * 3
    assert [output.token_ids for output in forked.outputs] == [output.outputs[0].token_ids for output in alone]


@each_kind
def test_drafts_and_preemptions_change_no_token(llm: LLM, make_llm: MakeLLM, case: tuple[str, bool]) -> None:
    expected = answers(llm, DRAFTED, LONGER)
    assert expected == families.greedy_tokens(case[0], DRAFTED, expected)
    spec = llm.engine.core.spec
    # Room for one request of the longest kind: several begin, and cannot all end in it.
    memory = (slabs_for(spec, 170) + 1) * spec.slab_bytes
    drafting = make_llm(memory=memory, max_model_len=170, max_num_seqs=4, speculative_config=SPECULATION)
    force(drafting, {(tuple(x), 0): y for x, y in zip(DRAFTED, expected, strict=True)}, [3, 1, 2, 0])
    assert answers(drafting, DRAFTED, LONGER) == expected
    counts = drafting.engine.core.stats().speculation
    assert 100 < counts.num_accepted_tokens < counts.num_draft_tokens
    # Without keys and values a running request needs no more memory than it started with.
    needs_blocks = any(layer.streams for layer in spec.layers)
    assert (drafting.engine.scheduler.num_preemptions > 0) == needs_blocks
