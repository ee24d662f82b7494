"""An EAGLE-3 drafter drafts what its reference implementation does, also after hits, and changes no token."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strandline import LLM, SamplingParams
from strandline.engine import loading
from strandline.env import DEBUG_CACHE
from strandline.errors import ConfigError, WeightsError
from tests.cpu.engine.conftest import llm_maker
from tests.cpu.engine.test_block_drafter import (
    MIXED,
    SEVERAL_STREAMS,
    SHORT,
    WINDOWED,
    check_captured_steps,
    check_drafts,
    note_drafts,
)
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.test_ranks import making
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tiny_drafter import EagleReference, load_oracle, save_as_speculators, save_eagle
from tests.cpu.models import families

NUM_DRAFTS = 3
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.5]}
SHARED = {"hidden_size": 32, "draft_vocab_size": None, "norm_before_residual": True}
"""A drafter with the model's embedding and output head."""
DRAFTED = ("gemma3", "kimi_linear", "lfm3", "llama")
"""Families with states, with windows, with both and with neither.

All families hand over the same hidden states to every drafter: ``test_block_drafter.py`` compares them.
"""
MakeLLM = Callable[..., LLM]


def config_of(drafter: Path, **more: Any) -> dict[str, Any]:
    default = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    return {**default, **more}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[{}, SHARED], ids=["own", "shared"])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eagle(tmp_path_factory.mktemp("drafter"), **request.param)


@pytest.fixture(scope="module")
def reference(model: Path, drafter: Path) -> EagleReference:
    return EagleReference(load_oracle(model), drafter)


@pytest.fixture
def make(model: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    """Build LLMs on the tiny model; every step checks the cache."""
    monkeypatch.setenv(DEBUG_CACHE, "1")

    def make(speculation: dict[str, object] | None = None, **options: object) -> LLM:
        settings = {"memory": "32MiB", "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
        config = config_of(drafter, **(speculation or {}))
        return LLM(str(model), **{"speculative_config": config, **settings, **options})

    return make


@pytest.mark.parametrize(
    ("speculation", "step_tokens"), [({}, 7), ({}, 4096), (SYNTHETIC, 7)], ids=["small steps", "whole", "synthetic"]
)
def test_drafts_are_those_of_the_reference(
    make: MakeLLM, reference: EagleReference, speculation: dict[str, object], step_tokens: int
) -> None:
    llm = make(speculation, max_num_batched_tokens=step_tokens)
    drafted = note_drafts(llm)
    answers(llm, [tokens(count, seed=count) for count in (2, 63, 64, 100)], GREEDY)
    check_drafts(reference, drafted)


@pytest.mark.parametrize("changes", [{}, SHARED, {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]}])
def test_files_of_the_library_speculators_draft_what_others_do(
    make: MakeLLM, model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    plain = save_eagle(tmp_path / "plain", **changes)
    copies = {"verifier_lm_head.weight": torch.ones(40, 32), "verifier_norm.weight": torch.ones(32)}
    published = save_as_speculators(tmp_path / "published", plain, copies)
    reference, prompts = EagleReference(load_oracle(model), plain), [tokens(count, seed=count) for count in (2, 64)]
    for drafter in (plain, published):
        llm = make({"model": str(drafter)})
        drafted = note_drafts(llm)
        answers(llm, prompts, GREEDY)
        check_drafts(reference, drafted)


@pytest.mark.parametrize("speculation", [{}, SYNTHETIC], ids=["standard", "synthetic"])
def test_drafts_of_captured_steps_are_those_of_the_reference(
    make: MakeLLM, reference: EagleReference, monkeypatch: pytest.MonkeyPatch, speculation: dict[str, object]
) -> None:
    check_captured_steps(make, reference, monkeypatch, speculation)


def test_drafts_after_hits_are_those_of_the_reference(make: MakeLLM, reference: EagleReference) -> None:
    llm, cold = make(max_num_batched_tokens=100), make(enable_prefix_caching=False)
    prompt = tokens(150)
    [expected] = answers(cold, [prompt], SHORT)
    positions = [1, 20, 63, 65, 149]
    prefixes: list[Any] = [{"prompt_token_ids": prompt[:count], "cache_salt": str(count)} for count in positions]
    llm.generate(prefixes, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    drafted = note_drafts(llm)
    for count in [*positions, *positions]:
        whole: Any = {"prompt_token_ids": prompt, "cache_salt": str(count)}
        [output] = llm.generate(whole, SHORT, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens >= count
    check_drafts(reference, drafted)


def hidden_states(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return the final hidden states of prompts, as embeddings are made of."""
    params, found = SamplingParams(temperature=0, max_tokens=1, returns_hidden_state=True), list[torch.Tensor]()
    for prompt in prompts:
        llm.engine.add_request("embedded", prompt, params)
        for event in llm.engine.core.step().tokens:
            assert event.hidden_state is not None
            found.append(torch.frombuffer(bytearray(event.hidden_state), dtype=torch.float32))
        llm.engine.abort("embedded")
    return found


def test_hidden_states_that_are_returned_are_the_models_alone(make: MakeLLM, model: Path) -> None:
    prompts = [prompt for count in (5, 70) for prompt in [tokens(count, seed=count)] * 2]
    with LLM(str(model), memory="32MiB", device="cpu", skip_tokenizer_init=True) as plain:
        expected = hidden_states(plain, prompts)
    torch.testing.assert_close(hidden_states(make(), prompts), expected)


def test_random_weights_stand_for_drafters_of_any_size(make: MakeLLM) -> None:
    prompts = [tokens(20)]
    plain = answers(make(load_format="dummy", speculative_config=None), prompts, SHORT)
    assert answers(make(load_format="dummy"), prompts, SHORT) == plain


def test_drafts_after_loads_from_disk_are_those_of_the_reference(
    make: MakeLLM, reference: EagleReference, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"disk_cache": str(tmp_path), "disk_cache_size": "64MiB"}
    prompts = [tokens(count, seed=count) for count in (130, 64, 65)]
    with make(**options) as llm:
        expected = answers(llm, prompts, GREEDY)
    with make(**options) as llm:
        drafted = note_drafts(llm)
        assert answers(llm, prompts, GREEDY) == expected
        assert llm.engine.core.cache.stats().hit_tokens == sum(map(len, prompts))
        check_drafts(reference, drafted)


def test_only_a_head_that_drafts_is_rounded(make: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "drafts_in_fp8", lambda *_: True)
    llm = make()
    model: Any = llm.engine.core.executor.runner.model  # type: ignore[attr-defined]
    assert (model.decoder.embedding.draft_weight is None) == (model.drafter.head is not None)
    plain = make(speculative_config=None)
    assert answers(llm, [tokens(70, seed=1)], GREEDY) == answers(plain, [tokens(70, seed=1)], GREEDY)


def test_ranks_draft_what_one_rank_does(model: Path, drafter: Path, reference: EagleReference) -> None:
    prompts = [tokens(count, seed=count) for count in (2, 64, 100)]
    with making(model, 2, memory="32MiB", speculative_config=config_of(drafter)) as make:
        llm = make()
        drafted = note_drafts(llm)
        assert answers(llm, prompts, MIXED[:3]) == answers(make(divided=False), prompts, MIXED[:3])
    check_drafts(reference, drafted)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in DRAFTED else pytest.mark.long)
        for name in [*sorted({*families.REPRESENTATIVES} - {*SEVERAL_STREAMS}), *WINDOWED]
    ],
)
def test_every_family_drafts_what_the_reference_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = families.save(name, tmp_path / "model")
    sizes = json.loads((directory / "config.json").read_text())
    drafter = save_eagle(tmp_path / "drafter", sizes.get("text_config", sizes)["hidden_size"])
    make = llm_maker(directory, monkeypatch, device="cpu", memory="32MiB")
    prompts, params = [tokens(count, seed=count) for count in (2, 64, 100)], MIXED[:3]
    llm, cold = make(speculative_config=config_of(drafter)), make(enable_prefix_caching=False)
    assert llm.engine.core.spec.has_window_blocks == cold.engine.core.spec.has_window_blocks
    drafted = note_drafts(llm)
    found = answers(llm, prompts, params)
    assert found == answers(cold, prompts, params)
    check_drafts(EagleReference(families.oracle(name), drafter), drafted)
    turns = [[*prompt, *answer, 1] for prompt, answer in zip(prompts, found, strict=True)]
    assert answers(llm, turns, params) == answers(cold, turns, params)
    assert llm.engine.cache.stats().hit_tokens > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; it must be 1"),
        ({"norm_output": True}, "norm_output is True; it must be false"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state is False"),
        ({"eagle_aux_hidden_state_layer_ids": [4]}, r"layer_ids are \[4\]; the model has 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, r"layer_ids are \[0, 1\]|\[0\] is 0"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1]}, "each of them once"),
        ({"architectures": ["DFlashDraftModel"]}, "is of a drafter for method dflash, not eagle3"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "q_norm.weight missing"),
        ({"draft_vocab_size": 41}, "lm_head.weight has shape|d2t must be integers of shape"),
    ],
    ids=str,
)
def test_drafters_that_are_not_supported_are_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    drafter = save_eagle(tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises((ConfigError, WeightsError), match=message):
        LLM(str(model), device="cpu", skip_tokenizer_init=True, speculative_config=config_of(drafter))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", torch.zeros(40), "d2t must be integers"),
        ("d2t", -torch.arange(40), "d2t must give different tokens below 97"),
        ("d2t", torch.full((40,), 60), "d2t must give different tokens below 97"),
        ("midlayer.self_attn.q_norm.weight", torch.ones(8), "q_norm.weight not known to this drafter"),
        ("norm.weight", torch.full((24,), torch.nan), r"model\.safetensors: norm\.weight holds NaN"),
    ],
)
def test_bad_tensors_are_refused(model: Path, tmp_path: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    drafter = save_eagle(tmp_path / "drafter")
    shutil.copy(drafter / "model.safetensors", tmp_path / "saved")
    save_file({**load_file(tmp_path / "saved"), name: tensor}, drafter / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        LLM(str(model), device="cpu", skip_tokenizer_init=True, speculative_config=config_of(drafter))
