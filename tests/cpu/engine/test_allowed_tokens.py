"""Outputs that are limited to some tokens, with everything else that chooses among tokens."""

from pathlib import Path
from typing import Any, Final

import pytest

from strandline import LLM, SamplingParams
from strandline.errors import RequestError
from strandline.records.sampling_params import StructuredOutputsParams
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tokenizers import byte_tokenizer

DIGITS: Final = byte_tokenizer().encode("0123456789")
ZERO: Final = DIGITS[0]
PROMPT: Final = "1 0 m0"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = save_tiny_model(tmp_path_factory.mktemp("bytes"), vocab_size=256)
    byte_tokenizer().save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(str(directory), memory="16MiB", device="cpu")


def tokens_of(llm: LLM, prompt: str = PROMPT, **params: Any) -> list[int]:
    wishes = {"max_tokens": 24, "ignore_eos": True, "allowed_token_ids": DIGITS, **params}
    [output] = llm.generate([prompt], SamplingParams(**wishes), use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 2.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_k": 1},
        {"temperature": 1.0, "seed": 3, "top_p": 0.1, "min_p": 0.5},
        {"temperature": 0, "repetition_penalty": 5.0, "presence_penalty": 2.0},
        {"temperature": 1.0, "seed": 4, "logit_bias": {DIGITS[3]: -50.0, ZERO: -100.0, 250: 100.0}},
        {"temperature": 1.0, "seed": 5, "logprobs": 3},
        {"temperature": 0, "bad_words": ["1", "2", "3", "4", "5", "6"]},
    ],
)
def test_output_has_allowed_tokens_alone(llm: LLM, params: dict[str, Any]) -> None:
    found = tokens_of(llm, **params)
    assert len(found) == 24
    assert set(found) <= set(DIGITS) - {DIGITS[int(word)] for word in params.get("bad_words", ())}


def test_likeliest_of_the_allowed_tokens_is_chosen(llm: LLM) -> None:
    bias = dict.fromkeys(set(range(256)) - set(DIGITS), -100.0)
    assert tokens_of(llm, temperature=0) == tokens_of(llm, temperature=0, allowed_token_ids=None, logit_bias=bias)


def test_neighbours_are_not_limited(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    limited = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, allowed_token_ids=DIGITS)
    [alone] = llm.generate([PROMPT], free, use_tqdm=False)
    first, second = llm.generate([PROMPT, PROMPT], [free, limited], use_tqdm=False)
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids
    assert set(second.outputs[0].token_ids) <= set(DIGITS)


def test_grammar_and_allowed_tokens_hold_together(llm: LLM) -> None:
    structure = StructuredOutputsParams(regex="[a-f0-9]{4}")
    found = tokens_of(llm, temperature=0, structured_outputs=structure, ignore_eos=False, stop_token_ids=[255])
    assert found[-1] == 255
    assert len(found) == 5
    assert set(found[:-1]) <= set(DIGITS)


@pytest.mark.parametrize(
    "params",
    [
        {"structured_outputs": StructuredOutputsParams(regex="[a-f]{4}"), "ignore_eos": False, "stop_token_ids": [255]},
        {"allowed_token_ids": [ZERO], "bad_words": ["0"]},
        {"allowed_token_ids": [ZERO], "stop_token_ids": [ZERO], "min_tokens": 3},
    ],
)
def test_output_without_a_possible_token_ends_with_its_error(llm: LLM, params: dict[str, Any]) -> None:
    wishes = {"max_tokens": 8, "ignore_eos": True, "allowed_token_ids": DIGITS, **params}
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    failed, fine = llm.generate([PROMPT, PROMPT], [SamplingParams(**wishes), free], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert len(fine.outputs[0].token_ids) == 8


def test_drafts_do_not_change_limited_outputs(directory: Path, llm: LLM) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    drafting = LLM(str(directory), memory="16MiB", device="cpu", speculative_config=config)
    for params in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}):
        assert tokens_of(drafting, "12 12 12 12", **params) == tokens_of(llm, "12 12 12 12", **params)


def test_unknown_tokens_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token 256 of allowed_token_ids is not in the vocabulary"):
        tokens_of(llm, allowed_token_ids=[ZERO, 256])


@pytest.mark.usefixtures("forked_workers")
def test_ranks_choose_the_same_tokens(directory: Path, llm: LLM) -> None:
    divided = LLM(str(directory), memory="16MiB", device="cpu", tensor_parallel_size=2)
    structure = StructuredOutputsParams(regex="[a-f0-9]{4}")
    for params in (
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0, "structured_outputs": structure, "ignore_eos": False, "stop_token_ids": [255]},
    ):
        assert tokens_of(divided, **params) == tokens_of(llm, **params)
