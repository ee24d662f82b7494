"""The engine's promises hold for every family: resumed anywhere, forked, preempted, in steps of any size (contract 6).

``test_exactness.py`` tests more of them, on Qwen3.5. Forks, preemption, published states, drafts and resumption at
every position are tested on one family for each kind of layer; on the others, and in torch where there are Numba
kernels, only with ``--long``. These resume at some positions in every run.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from strandline import LLM, SamplingParams
from strandline.cache.inspection.published import published_snapshots
from strandline.device.sizing import slabs_for
from strandline.env import NUMBA
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import answers, check_resumption, tokens
from tests.cpu.engine.test_speculation import SPECULATION, force, record
from tests.cpu.engine.test_state_oracle import check_published_slots, live_through_much
from tests.cpu.models import families

ALSO_IN_TORCH = ["lfm2", "llama", "nemotron_h", "olmo_hybrid"]
"""One family for each kind of layer that has Numba kernels; other recurrences are computed by torch in any case."""

NUM_REQUESTS = 8
MAX_TOKENS = 40
"""Requests share prefixes, fork and are aborted; ``test_state_oracle.py`` runs more and longer ones on Qwen3.5."""

TURN = SamplingParams(temperature=0, max_tokens=13)
"""A turn with steps of any number of accepted drafts."""

CASES = [*((name, "numba") for name in families.FAMILIES), *((name, "torch") for name in ALSO_IN_TORCH)]

EACH_KIND = [(name, "numba") for name in families.REPRESENTATIVES]


def each_case_of(ordinary: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    """Run a test on every case, on these in every run."""
    cases = [pytest.param(case, marks=[] if case in ordinary else pytest.mark.long) for case in CASES]
    return pytest.mark.parametrize("case", cases, indirect=True, ids="-".join, scope="module")


each_case = each_case_of(CASES)
each_kind = each_case_of(EACH_KIND)
each_other_case = each_case_of([case for case in CASES if case not in EACH_KIND])


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A family, and what computes its kernels."""
    name, backend = request.param
    return name, backend


@pytest.fixture(scope="module")
def directory(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save(case[0], tmp_path_factory.mktemp("families"))


@pytest.fixture
def make_llm(case: tuple[str, str], directory: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    monkeypatch.setenv(NUMBA, str(int(case[1] == "numba")))
    return llm_maker(directory, monkeypatch, device="cpu")


@each_case
def test_greedy_tokens_are_those_of_transformers(make_llm: MakeLLM, case: tuple[str, str]) -> None:
    prompts = [tokens(count, seed=count) for count in (1, 2, 63, 64, 65, 130)]
    expected = answers(make_llm(), prompts)
    assert [len(answer) for answer in expected] == [8] * len(prompts)
    assert expected == families.greedy_tokens(case[0], prompts, expected)
    assert answers(make_llm(max_num_batched_tokens=65), prompts) == expected


@each_kind
def test_resuming_at_every_position_gives_the_same_tokens(make_llm: MakeLLM) -> None:
    check_positions(make_llm, range(1, 70))


@each_other_case
def test_resuming_around_blocks_gives_the_same_tokens(make_llm: MakeLLM) -> None:
    check_positions(make_llm, [*range(1, 8), 31, *range(62, 67), 69])


def check_positions(make_llm: MakeLLM, positions: Sequence[int]) -> None:
    prompt = tokens(70)
    [expected] = answers(make_llm(enable_prefix_caching=False), [prompt])
    check_resumption(make_llm(memory="32MiB"), prompt, expected, positions)


@each_kind
def test_forks_equal_requests_with_their_seeds(make_llm: MakeLLM) -> None:
    prompt = tokens(100)
    llm = make_llm()
    [forked] = llm.generate([prompt], SamplingParams(n=3, seed=11, max_tokens=12), use_tqdm=False)
    params = [SamplingParams(seed=11 + index, max_tokens=12) for index in range(3)]
    alone = make_llm(enable_prefix_caching=False).generate([prompt] * 3, params, use_tqdm=False)
    assert [output.token_ids for output in forked.outputs] == [output.outputs[0].token_ids for output in alone]
    assert llm.engine.cache.stats().hit_tokens == 2 * (100 if llm.engine.core.spec.has_states else 99)


@each_kind
def test_preempted_requests_give_the_same_tokens(make_llm: MakeLLM) -> None:
    prompts = [tokens(60, seed=seed) for seed in range(3)]
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = answers(make_llm(enable_prefix_caching=False), prompts, params)
    spec = make_llm().engine.core.spec
    # Room for one request of the longest kind: several begin, and cannot all end in it.
    llm = make_llm(memory=(slabs_for(spec, 100) + 1) * spec.slab_bytes, max_model_len=100)
    assert answers(llm, prompts, params) == expected
    # Without keys and values a running request needs no more memory than it started with.
    needs_blocks = any(layer.streams for layer in spec.layers)
    assert (llm.engine.scheduler.num_preemptions > 0) == needs_blocks


@each_kind
def test_a_published_slot_holds_the_state_of_its_tokens(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=512, max_num_batched_tokens=100)
    live_through_much(llm, seed=1, num_requests=NUM_REQUESTS, max_tokens=MAX_TOKENS)
    if llm.engine.core.spec.has_states:
        check_published_slots(llm, make_llm(memory="64MiB"))
    else:
        assert list(published_snapshots(llm.engine.cache)) == []  # test_attention_only.py compares the published blocks


@each_kind
def test_weights_that_are_read_again_give_the_same_tokens(make_llm: MakeLLM, directory: Path) -> None:
    llm, prompts = make_llm(), [tokens(70)]
    expected = answers(llm, prompts)
    llm.update_weights_from_disk(str(directory))
    assert answers(llm, prompts) == expected
    llm.sleep(2)
    llm.wake_up()
    assert answers(llm, prompts) == expected


def two_turns(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
    """Return hit tokens and answers of prompts, and of prompts that go on behind these answers."""
    found: list[tuple[int, list[int]]] = []
    for _ in range(2):
        outputs = llm.generate(prompts, TURN, use_tqdm=False)
        found += [(output.num_cached_tokens, output.outputs[0].token_ids) for output in outputs]
        prompts = [[*prompt, *output.outputs[0].token_ids, 7] for prompt, output in zip(prompts, outputs, strict=True)]
    return found


@each_kind
def test_drafts_change_neither_tokens_nor_states(make_llm: MakeLLM) -> None:
    settings = {"memory": "64MiB", "max_model_len": 512, "speculative_config": SPECULATION}
    recording = make_llm(**settings)
    recorder = record(recording)
    prompts = [tokens(count, seed=count) for count in (1, 63, 64, 100)]
    expected = two_turns(make_llm(memory="64MiB", max_model_len=512), prompts)
    assert any(hit for hit, _ in expected)
    assert two_turns(recording, prompts) == expected
    live_through_much(recording, seed=1, num_requests=5, max_tokens=MAX_TOKENS)
    llm = force(make_llm(**settings, max_num_batched_tokens=100), recorder.known, [3, 1, 2, 0])
    assert two_turns(llm, prompts) == expected
    live_through_much(llm, seed=1, num_requests=5, max_tokens=MAX_TOKENS)
    assert llm.engine.core.stats().speculation.num_accepted_tokens > 0
    if llm.engine.core.spec.has_states:
        check_published_slots(llm, make_llm(memory="64MiB"))
