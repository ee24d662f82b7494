"""Keys and values in FP8: half the memory, the same answers however they are cached, close to those in full width."""

import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.config import EngineConfig
from strandline.device.hardware.dtypes import choose_kv_cache_dtype
from strandline.env import NUMBA
from strandline.errors import ConfigError, WeightsError
from strandline.kernels.batch import KVMemory
from strandline.kernels.gpu import GPUS, standing_for
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import GREEDY, answers, tokens
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tiny_drafter import save_drafter
from tests.cpu.models import fp8

LONG = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(params=["numba", "torch"])
def make_fp8(request: pytest.FixtureRequest, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    monkeypatch.setenv(NUMBA, str(int(request.param == "numba")))
    return llm_maker(model_dir, monkeypatch, device="cpu", kv_cache_dtype="fp8")


def spec_of(llm: LLM) -> Any:
    return llm.engine.core.spec


def kv_memory(llm: LLM) -> list[KVMemory]:
    runner: Any = llm.engine.core.executor.runner
    return [layer for layer in runner._memory.layers if isinstance(layer, KVMemory)]


def test_blocks_take_half_and_states_stay(make_llm: MakeLLM) -> None:
    wide, narrow = make_llm(dtype="bfloat16"), make_llm(dtype="bfloat16", kv_cache_dtype="fp8")
    assert 2 * spec_of(narrow).block_bytes == spec_of(wide).block_bytes
    assert [layer.states for layer in spec_of(narrow).layers] == [layer.states for layer in spec_of(wide).layers]
    num_slabs = [llm.engine.core.executor.facts.num_slabs for llm in (wide, narrow)]
    num_blocks = [n * spec_of(llm).blocks_per_slab for n, llm in zip(num_slabs, (wide, narrow), strict=True)]
    assert num_blocks[1] >= 1.9 * num_blocks[0]
    assert {memory.k_BPGD.dtype for memory in kv_memory(narrow)} == {torch.float8_e4m3fn}


def test_no_operation_falls_back(make_llm: MakeLLM) -> None:
    assert make_llm(kv_cache_dtype="fp8").engine.core.executor.facts.fallbacks == ()


@pytest.mark.parametrize("step_tokens", [1, 63, 100])
def test_steps_of_any_size_give_the_same_tokens(make_fp8: MakeLLM, step_tokens: int) -> None:
    prompts = [tokens(count, seed=count) for count in (5, 64, 129, 200)]
    whole = answers(make_fp8(enable_prefix_caching=False), prompts)
    assert answers(make_fp8(max_num_batched_tokens=step_tokens), prompts) == whole


def test_resumed_requests_give_the_same_tokens(make_fp8: MakeLLM) -> None:
    prompt = tokens(150)
    [expected] = answers(make_fp8(enable_prefix_caching=False), [prompt])
    one = SamplingParams(temperature=0, max_tokens=1)
    llm = make_fp8(memory="64MiB")
    for position in (1, 37, 63, 64, 65, 100, 128, 149, 150):
        salt = {"cache_salt": str(position)}
        llm.generate({"prompt_token_ids": prompt[:position], **salt}, one, use_tqdm=False)
        [output] = llm.generate({"prompt_token_ids": prompt, **salt}, GREEDY, use_tqdm=False)
        assert (output.num_cached_tokens, output.outputs[0].token_ids) == (position, expected)


def test_forks_equal_requests_with_their_seeds(make_fp8: MakeLLM) -> None:
    prompt = tokens(100)
    [forked] = make_fp8().generate([prompt], SamplingParams(n=3, seed=11, max_tokens=12), use_tqdm=False)
    params = [SamplingParams(seed=11 + index, max_tokens=12) for index in range(3)]
    single = make_fp8(enable_prefix_caching=False).generate([prompt] * 3, params, use_tqdm=False)
    assert [o.token_ids for o in forked.outputs] == [o.outputs[0].token_ids for o in single]


def test_preempted_requests_give_the_same_tokens(make_fp8: MakeLLM) -> None:
    prompts = [tokens(60, seed=seed) for seed in range(6)]
    params = SamplingParams(temperature=0, max_tokens=150)
    expected = answers(make_fp8(enable_prefix_caching=False), prompts, params)
    llm = make_fp8(memory=12 * spec_of(make_fp8()).slab_bytes, max_model_len=256)
    assert answers(llm, prompts, params) == expected
    assert llm.engine.scheduler.num_preemptions > 0


def test_speculation_gives_the_same_tokens(make_llm: MakeLLM) -> None:
    prompts = [tokens(20, seed=seed) * 4 for seed in range(4)]
    expected = answers(make_llm(kv_cache_dtype="fp8"), prompts, LONG)
    config = {"method": "ngram", "num_speculative_tokens": 3}
    assert answers(make_llm(kv_cache_dtype="fp8", speculative_config=config), prompts, LONG) == expected


def test_drafter_and_recorded_experts_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    model = save_tiny_model(tmp_path / "model", shared_expert_intermediate_size=20, **experts)
    make = llm_maker(model, monkeypatch, device="cpu", kv_cache_dtype="fp8")
    drafter = {"method": "dflash", "model": str(save_drafter(tmp_path / "drafter")), "num_speculative_tokens": 3}
    llm = make(enable_return_routed_experts=True, speculative_config=drafter)
    prompts = [tokens(count, seed=count) for count in (5, 64, 129)]
    assert answers(llm, prompts, LONG) == answers(make(), prompts, LONG)
    assert llm.engine.core.stats().speculation.num_draft_tokens > 0


def test_deterministic_engines_give_the_same_bits(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    shared = tokens(128)
    prompts = [shared + tokens(count, seed=count) for count in (1, 40, 70)]
    found = []
    for is_cached in (False, True):
        llm = make_llm(kv_cache_dtype="fp8", deterministic=True, enable_prefix_caching=is_cached)
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in (shared, *prompts)]
        found.append([[entry.logprob for x in o.outputs[0].logprobs or () for entry in x.values()] for o in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_stay_close_to_full_width(make_llm: MakeLLM, dtype: str) -> None:
    prompt, params = tokens(300), SamplingParams(max_tokens=0, prompt_logprobs=0)
    found = []
    for kv_cache_dtype in ("auto", "fp8"):
        [output] = make_llm(dtype=dtype, kv_cache_dtype=kv_cache_dtype).generate([prompt], params, use_tqdm=False)
        found.append([next(iter(entry.values())).logprob for entry in output.prompt_logprobs or () if entry])
    difference = (torch.tensor(found[0]) - torch.tensor(found[1])).abs()
    # Attention is one of three layers of a random model; keys and values are rounded to 4 places.
    assert 0 < float(difference.mean()) < 0.05
    assert float(difference.max()) < 0.5


SCALES = {"k_scale": 0.02, "v_scale": 0.05}


def with_scales(model_dir: Path, directory: Path, names: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(model_dir, directory)
    return fp8.change_tensors(directory, lambda tensors: tensors.update(names))


def start(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), memory="8MiB", device="cpu", skip_tokenizer_init=True, **options)


@pytest.mark.parametrize("pattern", ["{}", "attn.{}", "{0[0]}_proj.{0}", "{0[0]}_proj.output_scale"])
def test_published_scales_are_used_for_fp8_alone(model_dir: Path, tmp_path: Path, pattern: str) -> None:
    names = {
        f"model.layers.1.self_attn.{pattern.format(name)}": torch.tensor([value]) for name, value in SCALES.items()
    }
    directory = with_scales(model_dir, tmp_path / "model", names)
    [memory] = kv_memory(start(directory, kv_cache_dtype="fp8_e4m3"))
    assert (memory.k_scale, memory.v_scale) == pytest.approx((0.02, 0.05))
    [memory] = kv_memory(start(directory))
    assert (memory.k_scale, memory.v_scale) == (1, 1)


def test_one_scale_of_keys_and_values_is_used_for_both(model_dir: Path, tmp_path: Path) -> None:
    directory = with_scales(model_dir, tmp_path / "model", {"model.layers.1.self_attn.kv_scale": torch.tensor(0.02)})
    [memory] = kv_memory(start(directory, kv_cache_dtype="fp8_e4m3"))
    assert (memory.k_scale, memory.v_scale) == pytest.approx((0.02, 0.02))


def test_scales_keep_large_numbers(model_dir: Path, tmp_path: Path) -> None:
    def enlarge(tensors: fp8.Tensors) -> None:
        tensors["model.layers.1.self_attn.v_proj.weight"] *= 2000
        tensors["model.layers.1.self_attn.o_proj.weight"] /= 2000

    values = {"model.layers.1.self_attn.v_scale": torch.tensor(20.0)}
    plain = fp8.change_tensors(with_scales(model_dir, tmp_path / "plain", {}), enlarge)
    scaled = fp8.change_tensors(with_scales(model_dir, tmp_path / "scaled", values), enlarge)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)

    def logprobs(llm: LLM) -> torch.Tensor:
        [output] = llm.generate([tokens(200)], params, use_tqdm=False)
        return torch.tensor([next(iter(entry.values())).logprob for entry in output.prompt_logprobs or () if entry])

    exact = logprobs(start(plain))
    with_scale, without = (logprobs(start(path, kv_cache_dtype="fp8")) for path in (scaled, plain))
    assert float((with_scale - exact).abs().mean()) < 0.05 < float((without - exact).abs().mean())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layers.1.self_attn.k_scale", torch.tensor(math.nan), r"k_scale is nan; scales are positive numbers"),
        ("layers.1.self_attn.v_scale", torch.tensor([0.0]), r"v_scale\[0\] is 0\.0; scales are positive numbers"),
        ("layers.1.self_attn.k_scale", torch.ones(2), r"k_scale has shape \[2\]; keys and values of a layer have one"),
        ("layers.0.self_attn.k_scale", torch.tensor(1.0), "k_scale not known to this architecture"),
        (
            "layers.1.self_attn.kv_scale",
            torch.ones(2),
            r"kv_scale has shape \[2\]; keys and values",
        ),
    ],
)
def test_wrong_scale_is_named(model_dir: Path, tmp_path: Path, name: str, value: torch.Tensor, message: str) -> None:
    directory = with_scales(model_dir, tmp_path / "model", {f"model.{name}": value})
    with pytest.raises(WeightsError, match=message):
        start(directory)


def test_unknown_dtype_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype must be one of auto, fp8, fp8_e4m3; got 'fp4'"):
        EngineConfig(model=str(model_dir), kv_cache_dtype="fp4")


def test_gpu_without_conversions_is_refused(model_dir: Path) -> None:
    config, meta = EngineConfig(model=str(model_dir), kv_cache_dtype="fp8"), torch.device("meta")
    message = r"--kv-cache-dtype fp8 needs a GPU of compute capability 8\.9, this .* 8\.0"
    with standing_for(GPUS["sm_80"]), pytest.raises(ConfigError, match=message):
        choose_kv_cache_dtype(config, meta)
    with standing_for(GPUS["sm_89"]):
        assert choose_kv_cache_dtype(config, meta) == "float8_e4m3fn"


def test_random_requests_agree_with_an_uncached_engine(make_fp8: MakeLLM) -> None:
    rng = random.Random(5)
    prompts = [tokens(rng.randint(1, 120), seed=rng.randint(0, 2)) for _ in range(20)]
    assert answers(make_fp8(), prompts) == answers(make_fp8(enable_prefix_caching=False), prompts)
