"""Log-probabilities of tokens that a request names, among 150,000: those of ``log_softmax``, in float32 on the CPU.

In CUDA graphs and in launched steps, with drafts and without, on one GPU and on two, which divide the vocabulary.
"""

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from strandline import LLM, SamplingParams
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import tokens
from tests.cpu.engine.test_logprob_token_ids import assert_exact, params_of
from tests.cpu.engine.test_speculation import SPECULATION, force
from tests.cpu.engine.tiny import save_tiny_model

DEVICE: Final = "cuda"
VOCAB_SIZE: Final = 150_000
IDS: Final = [149_999, 0, 75_000, 74_999, 3, 149_998]
"""At the ends of both halves, which two ranks have."""
REQUESTS: Final = [
    params_of(temperature=0, logprob_token_ids=IDS),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    params_of(temperature=1.5, seed=3, top_k=40, logprob_token_ids=[100_000]),
    params_of(temperature=0, logprob_token_ids=list(range(0, VOCAB_SIZE, VOCAB_SIZE // 128))[:128]),
    params_of(temperature=0, repetition_penalty=3.0, logprob_token_ids=IDS[::-1]),
]
PROMPTS: Final = [tokens(count, seed=count) for count in (1, 64, 20, 65, 130)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("vocabulary"), vocab_size=VOCAB_SIZE)


@pytest.fixture(params=[False, True], ids=["graphs", "eager"])
def make(directory: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> MakeLLM:
    options: dict[str, Any] = {"device": DEVICE, "max_num_seqs": 8, "memory": "32MiB", "max_model_len": 512}
    return llm_maker(directory, monkeypatch, dtype="float32", enforce_eager=request.param, **options)


def check(llm: LLM, directory: Path) -> list[list[int]]:
    """Compare outputs, computed and from the cache; return their tokens."""
    answers: list[list[int]] = []
    for _ in range(2):
        outputs = llm.generate(PROMPTS, REQUESTS, use_tqdm=False)
        for output, params in zip(outputs, REQUESTS, strict=True):
            if params.logprob_token_ids is None:
                assert output.outputs[0].logprobs is None
            else:
                assert_exact(directory, output, params.logprob_token_ids)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
    return answers


def test_values_are_those_of_the_whole_vocabulary(make: MakeLLM, directory: Path) -> None:
    check(make(), directory)


def test_drafts_change_no_value(make: MakeLLM, directory: Path) -> None:
    expected = check(make(), directory)
    known = {
        (tuple(prompt), params.seed or 0): answer
        for prompt, params, answer in zip(PROMPTS, REQUESTS, expected, strict=True)
    }
    llm = force(make(speculative_config=SPECULATION), known, [3, 1, 2, 0])
    assert check(llm, directory) == expected
    assert llm.engine.core.stats().speculation.num_accepted_tokens > 20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 2}], ids=["plain", "ngram"])
def test_ranks_that_divide_the_vocabulary_give_the_same_values(
    make: MakeLLM, directory: Path, drafts: dict[str, Any] | None
) -> None:
    with make(tensor_parallel_size=2, speculative_config=drafts) as llm:
        check(llm, directory)
