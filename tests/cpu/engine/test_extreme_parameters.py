"""Requests at the edge of what floats hold end by themselves: the engine and its other requests go on."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strandline import LLM, SamplingParams
from strandline.errors import RequestError
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_exactness import tokens
from tests.cpu.engine.tiny import VOCAB_SIZE

EVERY_TOKEN = list(range(VOCAB_SIZE))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BANNED = [
    SamplingParams(temperature=temperature, max_tokens=8, min_tokens=2, stop_token_ids=EVERY_TOKEN)
    for temperature in (0.0, 1.0)
]


@pytest.mark.parametrize("params", BANNED, ids=["greedy", "drawn"])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_request_without_a_possible_token_ends_alone(
    make_llm: MakeLLM, params: SamplingParams, is_overlapped: bool
) -> None:
    llm = make_llm(async_scheduling=is_overlapped)
    prompt = tokens(100, seed=1)
    [alone] = llm.generate([prompt], GREEDY, use_tqdm=False)
    bad, good = llm.generate([tokens(70, seed=2), prompt], [params, GREEDY], use_tqdm=False)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
    assert good.outputs[0].token_ids == alone.outputs[0].token_ids
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_turn_nan_end_the_request(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    llm = make_llm()
    prompt = tokens(100, seed=1)
    params = SamplingParams(temperature=temperature, max_tokens=8, logprobs=2, seed=0, ignore_eos=True)
    [before] = llm.generate([prompt], params, use_tqdm=False)
    model = type(llm.engine.core.executor.runner.model)  # type: ignore[attr-defined]
    logits = model.logits
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", lambda self, hidden_NE: logits(self, hidden_NE) * torch.nan)
        [broken] = llm.generate([tokens(90, seed=3)], params, use_tqdm=False)
    assert broken.outputs[0].finish_reason == "error"
    [after] = llm.generate([prompt], params, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.fixture(scope="module")
def llm(model_dir: object) -> LLM:
    return LLM(str(model_dir), memory="8MiB", skip_tokenizer_init=True, device="cpu")


EDGES = [0.0, 1e-300, 1e-45, 1e-38, 1e-6, 1e-3, 0.5, 1.0, 2.0, 100.0, 1e3, 1e6, 1e38, 1e39, 1e308, -1.0, -100.0]
FIELDS = {
    "temperature": st.sampled_from(EDGES),
    "top_p": st.sampled_from(EDGES),
    "min_p": st.sampled_from(EDGES),
    "top_k": st.sampled_from([-1, 0, 1, VOCAB_SIZE, 10**6, 2**63 - 1]),
    "repetition_penalty": st.sampled_from(EDGES),
    "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "logit_bias": st.dictionaries(st.sampled_from([0, 1, VOCAB_SIZE - 1]), st.sampled_from([-100.0, 0.0, 100.0])),
    "min_tokens": st.integers(0, 4),
    "stop_token_ids": st.sampled_from([[], [0], EVERY_TOKEN, EVERY_TOKEN[1:]]),
    "logprobs": st.sampled_from([None, 0, 20]),
    "seed": st.sampled_from([0, -(2**63), 2**63 - 1]),
}


@given(st.fixed_dictionaries({}, optional=FIELDS), st.integers(0, 9))
def test_extreme_parameters_leave_neighbours_alone(llm: LLM, fields: dict[str, object], seed: int) -> None:
    try:
        params = SamplingParams(max_tokens=4, **fields)  # type: ignore[arg-type]
        llm.engine.frontend.check_params(params)
    except RequestError:
        return
    prompt = tokens(40, seed=seed)
    [alone] = llm.generate([prompt], GREEDY, use_tqdm=False)
    odd, good = llm.generate([tokens(30, seed=Random(seed).randrange(99)), prompt], [params, GREEDY], use_tqdm=False)
    assert good.outputs[0].token_ids == alone.outputs[0].token_ids
    assert odd.finished
    assert all(0 <= token < VOCAB_SIZE for token in odd.outputs[0].token_ids)
