"""A drafter of blocks drafts what its reference implementation does, also behind hits, and changes no token."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strandline import LLM, SamplingParams
from strandline.device.drafters import block_drafts, draft_layer
from strandline.device.sizing import slabs_for
from strandline.device.uni_executor import UniExecutor
from strandline.engine.requests.request import Request
from strandline.env import DEBUG_CACHE
from strandline.errors import ConfigError, WeightsError
from strandline.ids import RequestId
from tests.cpu.engine.conftest import llm_maker
from tests.cpu.engine.eager_graphs import (
    complete_on_device,
    padded_blocks_on_the_host,
    replay_eagerly,
    single_rows_on_the_host,
)
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.test_ranks import making
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tiny_drafter import (
    BLOCK_DRAFTERS,
    EagleReference,
    Reference,
    load_oracle,
    method_of,
    save_as_speculators,
    save_drafter,
)
from tests.cpu.models import families

NUM_DRAFTS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SHORT = SamplingParams(temperature=0, max_tokens=9)
SYNTHETIC = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.6, 0.5, 0.4, 0.3],
}
SEVERAL_STREAMS = ("glm5_next", "qwen4_exp")
"""Families whose layers pass on several residual streams."""
WINDOWED = ("gemma3", "lfm3")
"""Families with windows in some layers, without and with states."""
MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=BLOCK_DRAFTERS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafter"), **BLOCK_DRAFTERS[request.param])


def speculation_of(drafter: Path) -> dict[str, object]:
    """Return the configuration of a drafter with a fixed number of drafts."""
    method = method_of(json.loads((drafter / "config.json").read_text()))
    return {"method": method, "model": str(drafter), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}


@pytest.fixture(scope="module")
def reference(model: Path, drafter: Path) -> Reference:
    return Reference(load_oracle(model), drafter)


@pytest.fixture
def make_with(model: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    """Build LLMs on the tiny model; every step checks the cache."""
    monkeypatch.setenv(DEBUG_CACHE, "1")

    def make(speculation: dict[str, object], **options: object) -> LLM:
        settings = {"memory": "32MiB", "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
        return LLM(str(model), **{"speculative_config": speculation, **settings, **options})

    return make


@pytest.fixture
def make(make_with: MakeLLM, drafter: Path) -> MakeLLM:
    """Build LLMs with each kind of drafter."""

    def make(speculation: dict[str, object] | None = None, **options: object) -> LLM:
        return make_with({**speculation_of(drafter), **(speculation or {})}, **options)

    return make


Drafted = dict[RequestId, tuple[Request, dict[int, tuple[int, ...]]]]
"""By request, what was drafted after how many tokens."""


def note_drafts(llm: LLM) -> Drafted:
    """Return what will hold all drafts of an LLM."""
    drafts, drafted = llm.engine.scheduler.drafts, Drafted()
    look_up = drafts.look_up

    def noted(advanced: Sequence[Request], num_running: int) -> None:
        for request in advanced:
            _, seen = drafted.setdefault(request.request_id, (request, {}))
            if request.drafts.drafted:
                seen[len(request.prompt_ids) + len(request.output_ids)] = request.drafts.drafted
        look_up(advanced, num_running)

    drafts.look_up = noted  # type: ignore[method-assign]
    return drafted


def check_drafts(reference: Reference | EagleReference, drafted: Drafted) -> None:
    """Compare all drafts with the reference; each request must have some."""
    for request, seen in drafted.values():
        whole = [*request.prompt_ids, *request.output_ids]
        features = reference.features(whole)
        assert len(seen) > 2
        for count, drafts in seen.items():
            assert list(drafts) == reference.drafts(features, whole[:count], len(drafts)), count


@pytest.mark.parametrize(
    ("speculation", "step_tokens"),
    [({}, 7), ({}, 65), ({}, 4096), (SYNTHETIC, 65)],
    ids=["small steps", "steps", "whole", "synthetic"],
)
def test_drafts_are_those_of_the_reference(
    make: MakeLLM, reference: Reference, speculation: dict[str, object], step_tokens: int
) -> None:
    llm = make(speculation, max_num_batched_tokens=step_tokens)
    drafted = note_drafts(llm)
    answers(llm, [tokens(count, seed=count) for count in (1, 9, 63, 64, 130)], GREEDY)
    check_drafts(reference, drafted)


def in_graphs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Verify and draft as CUDA graphs do, and plan steps ahead."""
    monkeypatch.setattr(block_drafts, "padded_blocks", padded_blocks_on_the_host)
    monkeypatch.setattr(draft_layer, "single_rows", single_rows_on_the_host)
    executor = llm.engine.core.executor
    assert isinstance(executor, UniExecutor)
    most = (executor.facts.draft_tokens, llm.config.max_num_seqs, llm.engine.core.limits.max_model_len)
    replay_eagerly(executor.runner, *most)
    complete_on_device(llm.engine.scheduler.drafts)
    return llm


MIXED = [
    SamplingParams(temperature=0, max_tokens=30),
    SamplingParams(temperature=1.0, seed=3, max_tokens=13, top_k=20),
    SamplingParams(temperature=0.7, seed=4, max_tokens=21, top_p=0.9),
    SamplingParams(temperature=1.0, seed=5, max_tokens=20, repetition_penalty=1.2),
]


def check_captured_steps(
    make: MakeLLM,
    reference: Reference | EagleReference,
    monkeypatch: pytest.MonkeyPatch,
    speculation: dict[str, object],
) -> None:
    """Compare drafts of captured steps with the reference, and tokens with plain decoding."""
    llm = in_graphs(make(speculation, async_scheduling=True, max_num_seqs=3), monkeypatch)
    drafted = note_drafts(llm)
    prompts = [tokens(count, seed=count) for count in (5, 63, 64, 100)]
    found = answers(llm, prompts, MIXED)
    check_drafts(reference, drafted)
    if not speculation:
        assert found == answers(make(speculative_config=None), prompts, MIXED)


@pytest.mark.parametrize("speculation", [{}, SYNTHETIC], ids=["standard", "synthetic"])
def test_drafts_of_captured_steps_are_those_of_the_reference(
    make: MakeLLM, reference: Reference, monkeypatch: pytest.MonkeyPatch, speculation: dict[str, object]
) -> None:
    check_captured_steps(make, reference, monkeypatch, speculation)


def test_captured_steps_draft_with_window_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without states; the drafter has a window as well."""
    directory = families.save("gemma3", tmp_path / "model")
    hidden_size = json.loads((directory / "config.json").read_text())["hidden_size"]
    drafter = save_drafter(tmp_path / "drafter", hidden_size=hidden_size)
    make_llm = llm_maker(directory, monkeypatch, device="cpu", memory="32MiB")

    def make(changes: dict[str, object] | None = None, **options: Any) -> LLM:
        return make_llm(**{"speculative_config": {**speculation_of(drafter), **(changes or {})}, **options})

    assert make().engine.core.spec.has_window_blocks
    check_captured_steps(make, Reference(families.oracle("gemma3"), drafter), monkeypatch, {})


def test_drafts_after_hits_equal_the_reference(make: MakeLLM, reference: Reference) -> None:
    llm, cold = make(max_num_batched_tokens=100), make(enable_prefix_caching=False)
    prompt = tokens(150)
    [expected] = answers(cold, [prompt], SHORT)
    positions = [1, 20, 63, 64, 65, 128, 149]
    prefixes: list[Any] = [{"prompt_token_ids": prompt[:count], "cache_salt": str(count)} for count in positions]
    llm.generate(prefixes, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    drafted = note_drafts(llm)
    for count in [*positions, *positions]:
        # The second time, nothing is left to compute but tokens of the answer.
        whole: Any = {"prompt_token_ids": prompt, "cache_salt": str(count)}
        [output] = llm.generate(whole, SHORT, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens >= count
    check_drafts(reference, drafted)


def test_drafts_of_forked_and_preempted_requests_equal_the_reference(make: MakeLLM, reference: Reference) -> None:
    spec = make().engine.core.spec
    llm = make(memory=(slabs_for(spec, 90) + 2) * spec.slab_bytes, max_model_len=90)
    drafted = note_drafts(llm)
    prompts = [tokens(60, seed=seed) for seed in range(3)]
    answers(llm, prompts, SamplingParams(temperature=0, max_tokens=25))
    assert llm.engine.scheduler.num_preemptions > 0
    [forked] = llm.generate([prompts[0]], SamplingParams(n=3, seed=11, max_tokens=12), use_tqdm=False)
    plain = make(speculative_config=None)
    [expected] = plain.generate([prompts[0]], SamplingParams(n=3, seed=11, max_tokens=12), use_tqdm=False)
    assert [x.token_ids for x in forked.outputs] == [x.token_ids for x in expected.outputs]
    check_drafts(reference, drafted)


def test_drafts_after_loads_from_tiers_equal_the_reference(make: MakeLLM, reference: Reference, tmp_path: Path) -> None:
    prompts = [tokens(count, seed=count) for count in (300, 257, 256, 191, 130, 65)]
    slab_bytes = make().engine.core.spec.slab_bytes
    tiers = {"host_memory": "8MiB", "disk_cache": str(tmp_path), "disk_cache_size": "64MiB"}
    options: dict[str, Any] = {"memory": 14 * slab_bytes, "max_model_len": 512, **tiers}
    llm = make(**options)
    expected = [answers(llm, [prompt], SHORT) for prompt in prompts]
    for is_restarted in (False, True):
        if is_restarted:
            llm.close()
            llm = make(**options)
        drafted = note_drafts(llm)
        assert [answers(llm, [prompt], SHORT) for prompt in prompts] == expected
        check_drafts(reference, drafted)
        assert llm.engine.core.cache.stats().loads.num_done > 0
    llm.close()


def test_other_drafters_do_not_reuse_a_disk_cache(make: MakeLLM, drafter: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"disk_cache": str(tmp_path / "cache"), "disk_cache_size": "64MiB"}
    other = save_drafter(tmp_path / "other", seed=6, **json.loads((drafter / "config.json").read_text()))
    prompt = tokens(130)
    for model, num_cached in (({}, 0), ({}, 130), ({"model": str(other)}, 0)):
        with make(model, **options) as llm:
            [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == num_cached


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "dflash" else pytest.mark.long) for kind in BLOCK_DRAFTERS]
)
@pytest.mark.parametrize("name", [*families.REPRESENTATIVES, *WINDOWED])
def test_every_family_drafts_what_the_reference_does(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = families.save(name, tmp_path / "model")
    sizes = json.loads((directory / "config.json").read_text())
    hidden_size = sizes.get("text_config", sizes)["hidden_size"]
    drafter = save_drafter(tmp_path / "drafter", **{**BLOCK_DRAFTERS[kind], "hidden_size": hidden_size})
    config = speculation_of(drafter)
    make = llm_maker(directory, monkeypatch, device="cpu", memory="32MiB")
    prompts = [tokens(count, seed=count) for count in (1, 64, 100)]
    if name in SEVERAL_STREAMS:
        with pytest.raises(ConfigError, match="several outputs"):
            make(speculative_config=config)
        return
    llm, cold, params = make(speculative_config=config), make(enable_prefix_caching=False), MIXED[:3]
    assert llm.engine.core.spec.has_window_blocks == cold.engine.core.spec.has_window_blocks
    drafted = note_drafts(llm)
    found = answers(llm, prompts, params)
    assert found == answers(cold, prompts, params)
    check_drafts(Reference(families.oracle(name), drafter), drafted)
    turns = [[*prompt, *answer, 1] for prompt, answer in zip(prompts, found, strict=True)]
    assert answers(llm, turns, params) == answers(cold, turns, params)
    assert llm.engine.cache.stats().hit_tokens > 0


def test_ranks_draft_what_one_rank_does(model: Path, drafter: Path, reference: Reference) -> None:
    config = speculation_of(drafter)
    prompts = [tokens(count, seed=count) for count in (1, 64, 100)]
    with making(model, 2, memory="32MiB", speculative_config=config) as make:
        llm = make()
        drafted = note_drafts(llm)
        assert answers(llm, prompts, MIXED[:3]) == answers(make(divided=False), prompts, MIXED[:3])
    check_drafts(reference, drafted)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("num_drafted", [None, 40])
def test_files_of_the_library_speculators_draft_what_others_do(
    make_with: MakeLLM, model: Path, tmp_path: Path, num_drafted: int | None, kind: str
) -> None:
    changes = {} if num_drafted is None else {"draft_vocab_size": num_drafted}
    plain = save_drafter(tmp_path / "plain", **BLOCK_DRAFTERS[kind], **changes)
    oracle = load_oracle(model)
    copies = {
        "embed_tokens.weight": oracle.get_input_embeddings().weight.detach(),
        "verifier_norm.weight": torch.ones(32),
    }
    published = save_as_speculators(tmp_path / "published", plain, copies)
    reference, prompts = Reference(oracle, plain), [tokens(count, seed=count) for count in (1, 64, 100)]
    for drafter in (plain, published):
        llm = make_with({**speculation_of(plain), "model": str(drafter)})
        drafted = note_drafts(llm)
        answers(llm, prompts, GREEDY)
        check_drafts(reference, drafted)


def test_own_output_heads_have_their_own_tokens(make: MakeLLM, drafter: Path, tmp_path: Path) -> None:
    kind = json.loads((drafter / "config.json").read_text())
    own = save_drafter(tmp_path, **{**kind, "draft_vocab_size": 40})
    with pytest.raises(ConfigError, match="draft_vocab_size is not for a drafter with its own output head"):
        make({"model": str(own), "draft_vocab_size": 9})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 5}, "num_target_layers is 5; the model has 3 layers"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [3]}},
            r"are \[3\].* has 3 layers",
        ),
        ({"dflash_config": {"mask_token_id": 97, "target_layer_ids": [1]}}, "mask_token_id is 97; the model has 97"),
        ({"hidden_size": 64}, "hidden_size is 64; it must be the model's, 32"),
        ({"block_size": 4}, "num_speculative_tokens is 5; the drafter makes at most [34] drafts"),
        ({"intermediate_size": 41, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}, "missing"),
    ],
    ids=str,
)
def test_drafters_of_other_models_are_refused(
    make: MakeLLM, drafter: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    shutil.copytree(drafter, tmp_path / "other")
    config = json.loads((drafter / "config.json").read_text())
    block = {"dflash_config": {**config["dflash_config"], **changes.get("dflash_config", {})}}
    (tmp_path / "other/config.json").write_text(json.dumps({**config, **changes, **block}))
    with pytest.raises((ConfigError, WeightsError), match=message):
        make({"model": str(tmp_path / "other")})


def test_unknown_tensors_are_refused(make: MakeLLM, drafter: Path, tmp_path: Path) -> None:
    shutil.copytree(drafter, tmp_path / "other")
    tensors = load_file(drafter / "model.safetensors")
    name = "layers.0.other_conv.base_kernel"
    save_file({**tensors, name: torch.ones(2, 2, 32)}, tmp_path / "other/model.safetensors")
    with pytest.raises(WeightsError, match=rf"{name} not known to this drafter"):
        make({"model": str(tmp_path / "other")})


def test_the_demo_models_drafter_is_often_right() -> None:
    config = {"method": "dflash", "model": "demo", "num_speculative_tokens": 7, "adaptive": False}
    settings = {"memory": "64MiB", "dtype": "float32", "device": "cpu"}
    questions = ["What is speculative decoding?", "Tell me about yourself.", "What is a prefix cache?"]
    messages = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=60)
    plain, llm = LLM("demo", **settings), LLM("demo", speculative_config=config, **settings)
    expected, found = (
        [x.outputs[0].text for x in each.chat(messages, params, use_tqdm=False)] for each in (plain, llm)
    )
    assert found == expected
    stats = llm.engine.core.stats().speculation
    assert stats.num_accepted_tokens > 2 * stats.num_drafts
