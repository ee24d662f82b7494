"""Log-probabilities and ranks of the tokens that a request names, at every position of its output."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM

from strandline import LLM, SamplingParams
from strandline.errors import RequestError
from strandline.records.outputs import RequestOutput
from strandline.records.sampling_params import StructuredOutputsParams
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tokenizers import byte_tokenizer

PROMPT: Final = "1 0 m0 and so on"
TOLERANCE: Final = 1e-3
IDS: Final = [200, 0, 255, 65, 0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = save_tiny_model(tmp_path_factory.mktemp("bytes"), vocab_size=256)
    byte_tokenizer().save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(str(directory), memory="16MiB", device="cpu")


def params_of(**params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "logprob_token_ids": IDS, **params})


def assert_exact(directory: Path, output: RequestOutput, ids: Sequence[int]) -> None:
    """Check an output's log-probabilities against those of the whole vocabulary."""
    completion = output.outputs[0]
    token_ids = [*output.prompt_token_ids, *completion.token_ids]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected_TV = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    assert len(completion.logprobs or ()) == len(completion.token_ids)
    first = len(output.prompt_token_ids) - 1
    entries = zip(expected_TV[first:-1], completion.token_ids, completion.logprobs or (), strict=True)
    for expected_V, sampled, entry in entries:
        assert list(entry) == list(dict.fromkeys((sampled, *ids)))
        for token, found in entry.items():
            assert found.logprob == pytest.approx(float(expected_V[token]), abs=TOLERANCE)
            # Neighbours closer than the rounding of another implementation may swap.
            higher = int((expected_V > expected_V[token] + TOLERANCE).sum()) + 1
            assert higher <= found.rank <= int((expected_V > expected_V[token] - TOLERANCE).sum())


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 4},
        {"temperature": 1.5, "seed": 3, "top_k": 40},
        {"temperature": 0, "repetition_penalty": 3.0},
        {"temperature": 0, "logit_bias": {66: 100.0}},
        {"temperature": 1.0, "seed": 5, "structured_outputs": StructuredOutputsParams(regex="[a-z]{12}")},
        {"temperature": 0, "logprob_token_ids": list(range(128))},
        {"temperature": 0, "logprob_token_ids": [7]},
    ],
    ids=str,
)
def test_values_are_those_of_the_raw_logits(llm: LLM, directory: Path, params: dict[str, Any]) -> None:
    wishes = params_of(**{"stop_token_ids": [0], **params})
    for _ in range(2):  # the second time from the cache
        [output] = llm.generate([PROMPT], wishes, use_tqdm=False)
        assert_exact(directory, output, wishes.logprob_token_ids or ())


def test_neighbours_in_a_batch_change_nothing(llm: LLM, directory: Path) -> None:
    kinds = [
        params_of(temperature=0),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3),
        params_of(temperature=1.0, seed=1, logprob_token_ids=[9, 8]),
    ]
    prompts = [f"{index}{PROMPT}" for index in range(4)]
    first, bare, top, last = llm.generate(prompts, kinds, use_tqdm=False)
    assert_exact(directory, first, IDS)
    assert_exact(directory, last, [9, 8])
    assert bare.outputs[0].logprobs is None
    assert [len(entry) for entry in top.outputs[0].logprobs or ()] == [3] * 12


def test_tokens_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token 256 of logprob_token_ids is not in the vocabulary"):
        llm.generate([PROMPT], params_of(logprob_token_ids=[1, 256]), use_tqdm=False)
