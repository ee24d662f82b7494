"""An exception that concerns one output ends that output with an error; its neighbours' tokens do not change."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams, StructuredOutputsParams
from strandline.device.sampling import sampler
from strandline.env import DEBUG_CACHE
from strandline.records.plan import TokenLogprobs
from strandline.text import output_streams
from strandline.text.detokenizer import Detokenizer
from strandline.text.frontend import Frontend
from strandline.text.structured import Matcher
from tests.cpu.engine.test_exactness import tokens
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tokenizers import CALLS_IN_JSON, CHAT_VOCAB_SIZE, chat_template, chat_tokenizer

FIELDS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 3}
NEIGHBOURS = [SamplingParams(temperature=0, **FIELDS), SamplingParams(logprobs=2, bad_words=["b"], **FIELDS)]
TOP = 7
"""Alternatives that only the failing request asks for."""
GRAMMAR = StructuredOutputsParams(regex="[a-z]{3,9}")


class PlantedError(Exception):
    """What no code expects."""


def plant(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, is_due: Callable[..., bool]) -> None:
    """Have a function raise where ``is_due`` says so of its arguments."""
    function = getattr(owner, name)

    def raise_or_call(*args: Any, **kwargs: Any) -> Any:
        if is_due(*args):
            raise PlantedError(f"in {name}")
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, raise_or_call)


def plant_in_bad_words(monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    """Ban a word of no tokens, which has no last one."""
    encode = Frontend._encode_bad_words

    def encode_bad_words(self: Frontend, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        return ((),) if params.bad_words == ["planted"] else encode(self, params)

    monkeypatch.setattr(Frontend, "_encode_bad_words", encode_bad_words)
    return SamplingParams(bad_words=["planted"], **FIELDS)


def plant_in_gathering(monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    plant(monkeypatch, sampler, "gather_logprobs", lambda _logits, _tokens, num_top, _ranks: num_top == TOP)
    return SamplingParams(logprobs=TOP, **FIELDS)


def plant_in_gathering_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    return replace(plant_in_gathering(monkeypatch), logprobs=None, prompt_logprobs=TOP)


def plant_in_reading(monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    plant(monkeypatch, sampler.LogprobTensors, "read", lambda tensors: tensors._num_reported == [TOP])
    return SamplingParams(logprobs=TOP, **FIELDS)


def plant_in_advancing(monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    plant(monkeypatch, Matcher, "append", lambda *_: True)
    return SamplingParams(structured_outputs=GRAMMAR, max_tokens=12)


def plant_in_filling(monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    plant(monkeypatch, Matcher, "fill", lambda *_: True)
    return SamplingParams(structured_outputs=GRAMMAR, max_tokens=12)


def plant_in_detokenizing(monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    plant(monkeypatch, Detokenizer, "append", lambda detokenizer, _token: detokenizer._stops == ("planted",))
    return SamplingParams(stop="planted", **FIELDS)


def plant_in_completing_text(monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    plant(monkeypatch, Detokenizer, "finish", lambda detokenizer: detokenizer._stops == ("planted",))
    return SamplingParams(stop="planted", **FIELDS)


def plant_in_decoding(monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    def is_due(entry: TokenLogprobs, *_: object) -> bool:
        return len(entry.reported_ids) == TOP

    plant(monkeypatch, output_streams, "decode_logprobs", is_due)
    return SamplingParams(logprobs=TOP, **FIELDS)


def plant_in_decoding_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    return replace(plant_in_decoding(monkeypatch), logprobs=None, prompt_logprobs=TOP)


PLANTS = [
    plant_in_bad_words,
    plant_in_gathering,
    plant_in_gathering_of_a_prompt,
    plant_in_reading,
    plant_in_advancing,
    plant_in_filling,
    plant_in_detokenizing,
    plant_in_completing_text,
    plant_in_decoding,
    plant_in_decoding_of_a_prompt,
]


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model(tmp_path_factory.mktemp("chat"), vocab_size=CHAT_VOCAB_SIZE)
    chat_tokenizer(chat_template(CALLS_IN_JSON, thinks=False)).save_pretrained(directory)
    return directory


def load(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), memory="16MiB", device="cpu", **options)


def answers(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    prompts = [tokens(90, seed=seed) for seed in range(len(params))]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(chat_dir: Path) -> list[Any]:
    return answers(load(chat_dir), NEIGHBOURS)


@pytest.mark.parametrize("plant_it", PLANTS)
@pytest.mark.parametrize("options", [{"async_scheduling": True}, {}, {"deterministic": True}], ids=str)
def test_failed_output_ends_alone(
    chat_dir: Path,
    expected: list[Any],
    options: dict[str, Any],
    plant_it: Callable[[pytest.MonkeyPatch], SamplingParams],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(DEBUG_CACHE, "1")
    llm = load(chat_dir, **options)
    with monkeypatch.context() as patch:
        params = plant_it(patch)
        *neighbours, failed = answers(llm, [*NEIGHBOURS, params])
    assert failed.finish_reason == "error"
    assert failed.stop_reason.split(":")[0] in ("PlantedError", "ValueError")
    for outputs in (neighbours, answers(llm, NEIGHBOURS)):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert not llm.engine.has_unfinished


@pytest.mark.usefixtures("forked_workers")
def test_output_that_fails_in_a_worker_ends_alone(
    chat_dir: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(chat_dir, distributed_executor_backend="mp")
    *neighbours, failed = answers(llm, [*NEIGHBOURS, plant_in_bad_words(monkeypatch)])
    assert failed.finish_reason == "error"
    assert failed.stop_reason == "ValueError: not enough values to unpack (expected at least 1, got 0)"
    assert [output.token_ids for output in neighbours] == [output.token_ids for output in expected]
    llm.engine.core.close()


def test_failed_output_is_not_audited(chat_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(chat_dir, audit_rate=1)
    prompt = tokens(100)
    llm.generate([prompt], NEIGHBOURS[0], use_tqdm=False)
    for plant_it in (plant_in_gathering, plant_in_reading):
        with monkeypatch.context() as patch:
            [failed] = llm.generate([prompt], plant_it(patch), use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
    llm.generate([prompt], NEIGHBOURS[0], use_tqdm=False)
    while llm.engine.core.has_unfinished:
        llm.engine.step()
    assert llm.engine.core.audits.num_requests == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError, MemoryError])
def test_errors_of_the_whole_step_are_raised(
    chat_dir: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def gather_logprobs(*_: object) -> None:
        raise error

    monkeypatch.setattr(sampler, "gather_logprobs", gather_logprobs)
    with pytest.raises(error):
        answers(load(chat_dir), NEIGHBOURS)
