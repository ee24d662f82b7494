"""The dtype where the user has not said: the model's, or float32 on a CPU that is slow in that and has the memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.config import EngineConfig
from strandline.device.hardware import dtypes
from strandline.device.hardware.dtypes import DtypeChoice, choose_dtype, count_weights, machine_bytes
from strandline.kernels.gemm import linear
from strandline.kernels.gemm.weights import HalfWeight
from strandline.model_config import ModelConfig, read_model_config
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.site import Site
from strandline.models.model_options import ModelOptions
from strandline.models.registry import builder_for
from strandline.models.weights import load_model
from tests.cpu.engine.tiny import save_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(params=["bfloat16", "float16"])
def own(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def slow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "has_fast_gemms", lambda dtype: dtype == torch.float32)


@pytest.fixture
def fast_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "has_fast_gemms", lambda dtype: True)


def model_config(model_dir: Path, dtype: str) -> ModelConfig:
    return replace(read_model_config(model_dir), dtype=dtype)


def choose(model_dir: Path, own: str, said: str = "auto", device: torch.device = CPU) -> DtypeChoice:
    return choose_dtype(EngineConfig(model=str(model_dir), dtype=said), model_config(model_dir, own), device)


@pytest.mark.usefixtures("fast_cpu")
def test_fast_cpu_keeps_the_models_dtype(model_dir: Path, own: str) -> None:
    assert choose(model_dir, own) == DtypeChoice(getattr(torch, own))


@pytest.mark.usefixtures("slow_cpu")
def test_slow_cpu_takes_float32_with_a_note(model_dir: Path, own: str) -> None:
    choice = choose(model_dir, own)
    assert choice.dtype == torch.float32
    assert choice.note is not None
    assert f"the model's {own}" in choice.note
    assert f"--dtype {own}" in choice.note
    assert "\n" not in choice.note


@pytest.mark.usefixtures("slow_cpu")
def test_a_gpu_and_a_model_in_float32_keep_their_dtype(model_dir: Path, own: str) -> None:
    assert choose(model_dir, own, device=torch.device("cuda")) == DtypeChoice(getattr(torch, own))
    assert choose(model_dir, "float32") == DtypeChoice(torch.float32)


@pytest.mark.usefixtures("slow_cpu")
@pytest.mark.parametrize("said", ["float32", "bfloat16", "float16"])
def test_named_dtype_is_obeyed(model_dir: Path, own: str, said: str) -> None:
    assert choose(model_dir, own, said) == DtypeChoice(getattr(torch, said))


@pytest.mark.usefixtures("slow_cpu")
def test_weights_too_large_for_float32_keep_their_dtype(
    model_dir: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide_bytes = 4 * count_weights(model_config(model_dir, own))
    monkeypatch.setattr(dtypes, "machine_bytes", lambda: int(wide_bytes / dtypes.MAX_WEIGHTS_SHARE) - 1)
    choice = choose(model_dir, own)
    assert choice.dtype == getattr(torch, own)
    assert choice.note is not None
    assert "--dtype float32" in choice.note
    monkeypatch.setattr(dtypes, "machine_bytes", lambda: int(wide_bytes / dtypes.MAX_WEIGHTS_SHARE) + 1)
    assert choose(model_dir, own).dtype == torch.float32


@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied head"])
def test_weights_are_counted_without_making_them(tmp_path: Path, is_tied: bool) -> None:
    directory = save_tiny_model(tmp_path, tie_word_embeddings=is_tied)
    loaded = load_model(directory)
    assert count_weights(read_model_config(directory)) == sum(w.numel() for _, w in loaded.named_parameters())


def test_weights_of_the_draft_layer_count_where_it_is_loaded(tmp_path: Path) -> None:
    config = read_model_config(save_tiny_model(tmp_path))
    model = builder_for(config)(config, Site(torch.float32, "meta"))
    num_weights = sum(weight.numel() for weight in model.parameters())
    model.add_draft_layer()
    num_drafting = sum(weight.numel() for weight in model.drafter.parameters())
    assert num_drafting > 0
    assert count_weights(config) == num_weights
    assert count_weights(config, ModelOptions(with_draft_layer=True)) == num_weights + num_drafting


def test_container_limit_bounds_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(dtypes, "MEMORY_LIMITS", (limit,))
    physical = machine_bytes()
    for text in ("max\n", str(2**62)):
        limit.write_text(text)
        assert machine_bytes() == physical
    limit.write_text("1048576\n")
    assert machine_bytes() == 2**20


@pytest.mark.usefixtures("slow_cpu")
def test_weights_keys_and_values_follow_the_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny_model(tmp_path)
    monkeypatch.setattr("strandline.device.hardware.dtypes.published_dtype", lambda config: torch.bfloat16)

    def dtypes_of(**options: Any) -> set[str]:
        llm = LLM(str(directory), memory="8MiB", device="cpu", skip_tokenizer_init=True, **options)
        spec = llm.engine.core.spec
        return {spec.hidden_dtype, *(stream.dtype for layer in spec.layers for stream in layer.streams)}

    assert dtypes_of() == {"float32"}
    assert [record.message.partition(":")[0] for record in caplog.records] == ["dtype"]
    caplog.clear()
    assert dtypes_of(dtype="bfloat16") == {"bfloat16"}
    assert not caplog.records


@pytest.mark.skipif(torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="no products with float16 weights")
@pytest.mark.usefixtures("slow_cpu")
def test_bfloat16_weights_are_halved_unless_a_dtype_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_tiny_model(tmp_path)
    monkeypatch.setattr("strandline.device.hardware.dtypes.published_dtype", lambda config: torch.bfloat16)
    monkeypatch.setattr("strandline.models.weights.published_dtype", lambda config: torch.bfloat16)

    def load(dtype: str) -> LLM:
        return LLM(
            str(directory), dtype=dtype, load_format="dummy", memory="8MiB", device="cpu", skip_tokenizer_init=True
        )

    def halved(llm: LLM) -> set[str]:
        model: Any = llm.engine.core.executor.runner.model
        return {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, Projection) and isinstance(module.weight, HalfWeight)
        }

    auto, wide = load("auto"), load("float32")
    assert halved(auto) == {"in_proj", "out_proj", "gate_up", "down", "head"}
    assert halved(wide) == set()
    prompt, params = list(range(90)), SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for llm in (auto, wide))
    assert first.token_ids == second.token_ids
    pairs = zip(first.logprobs or [], second.logprobs or [], strict=True)
    assert all(
        a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t, (a, b) in zip(first.token_ids, pairs, strict=True)
    )


@pytest.mark.parametrize(
    ("is_supported", "has_avx512", "has_bf16", "has_amx", "is_fast"),
    [
        pytest.param(False, False, False, False, False, id="AVX2, or ARM without bfloat16"),
        pytest.param(True, False, False, False, True, id="ARM with bfloat16, AVX2 with VNNI 2"),
        pytest.param(True, True, False, False, False, id="AVX512, emulated"),
        pytest.param(True, True, True, False, True, id="AVX512 with bfloat16"),
        pytest.param(True, True, True, True, True, id="AMX"),
    ],
)
def test_bfloat16_is_fast_where_there_are_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch,
    is_supported: bool,
    has_avx512: bool,
    has_bf16: bool,
    has_amx: bool,
    is_fast: bool,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_supported)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert linear.has_fast_gemms(torch.bfloat16) is is_fast
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not linear.has_fast_gemms(torch.bfloat16)
    assert linear.has_fast_gemms(torch.float32)
