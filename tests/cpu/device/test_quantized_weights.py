"""An engine on FP8 weights: what it says at start, and that it answers as on the weights that these stand for."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.config import EngineConfig
from strandline.device import sizing
from strandline.device.hardware import dtypes
from strandline.device.hardware.dtypes import count_matrix_weights, count_weights
from strandline.device.sizing import require_room_for_weights
from strandline.errors import ConfigError
from strandline.kernels.gemm.weights import DenseWeight, HalfWeight
from strandline.kernels.gpu import GPUS, standing_for
from strandline.model_config import read_model_config
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.weights import WeightsReport
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import four_bit, fp8

CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
IN_BFLOAT16 = ModelOptions(dtype=torch.bfloat16)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def quantized(tmp_path: Path) -> tuple[Path, Path]:
    """Return the directories of a model in FP8 and of its values in float32."""
    source = save_tiny_model(tmp_path / "source")
    directories = fp8.convert(source, tmp_path, CONFIG, block=lambda _: (16, 16))
    for directory in directories:
        fp8.change_json(directory / "config.json", dtype="bfloat16")
    return directories


def start(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), memory="8MiB", device="cpu", skip_tokenizer_init=True, **options)


def test_quantised_model_answers_as_its_values_do(quantized: tuple[Path, Path]) -> None:
    prompt = list(range(90))
    outputs = []
    for directory in quantized:
        llm = start(directory, dtype="float32")
        for tokens in (prompt[:70], prompt, prompt):
            outputs.append(llm.generate([tokens], GREEDY, use_tqdm=False)[0])
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens[:3] == tokens[3:]
    assert tokens[1] == tokens[2]
    assert [output.num_cached_tokens for output in outputs[:3]] == [0, 70, 90]


def test_start_says_that_weights_are_dequantised(
    quantized: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    start(quantized[0], dtype="float32")
    expected = "weights: FP8 (blocks of 16 × 16), dequantised to float32 one by one as they load ({}); they take 0 MiB"
    assert [record.message for record in caplog.records] == [expected.format("no GEMMs in FP8 on cpu")]
    caplog.clear()
    start(quantized[0], dtype="float32", dequantize=True)
    assert [record.message for record in caplog.records] == [expected.format("--dequantize")]
    caplog.clear()
    start(quantized[1], dtype="float32")
    assert not caplog.records


def test_start_says_that_weights_in_4_bits_are_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = save_tiny_model(tmp_path / "source")
    directory, plain = four_bit.convert(source, tmp_path, four_bit.SCHEMES["gptq"])
    answers = [
        start(x, dtype="float32").generate([list(range(40))], GREEDY, use_tqdm=False) for x in (directory, plain)
    ]
    assert answers[0][0].outputs[0].token_ids == answers[1][0].outputs[0].token_ids
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("weights: 4 bits (gptq, groups of 16), dequantised to float32 one by one as they load (")


@pytest.mark.parametrize(
    ("block", "architecture", "reason"),
    [
        ([128, 128], "sm_90", None),
        ([128, 128], "sm_89", None),
        ([128, 128], "sm_86", r"GEMMs in FP8 need a GPU of compute capability 8\.9"),
        ([16, 16], "sm_90", r"no GEMMs with FP8 \(blocks of 16 × 16\)"),
    ],
)
def test_gpus_keep_what_they_multiply_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block: list[int],
    architecture: str,
    reason: str | None,
) -> None:
    config, gpu = read_model_config(save_tiny_model(tmp_path)), torch.device("cuda")
    options = EngineConfig(model="nowhere", device="cuda")
    monkeypatch.setattr(dtypes, "gpu_of", lambda device: GPUS[architecture])
    monkeypatch.setattr(dtypes, "why_unavailable", lambda backend, device_type: None)
    assert dtypes.choose_storage(options, config, gpu, torch.bfloat16) == dtypes.StorageChoice(False)
    config = replace(config, quantization={**CONFIG, "weight_block_size": block})
    choice = dtypes.choose_storage(options, config, gpu, torch.bfloat16)
    assert choice.keeps_quantized is (reason is None)
    assert re.search(reason or "kept in FP8; those that are not published so are in bfloat16", choice.note or "")
    assert dtypes.choose_storage(replace(options, tensor_parallel_size=2), config, gpu, torch.bfloat16) == choice
    told = dtypes.choose_storage(replace(options, dequantize=True), config, gpu, torch.bfloat16)
    assert (told.keeps_quantized, "(--dequantize)" in (told.note or "")) == (False, True)


@pytest.mark.parametrize(
    ("group", "architecture", "reason"),
    [
        (128, "sm_90", None),
        (128, "sm_80", None),
        (16, "sm_90", r"no GEMMs with 4 bits \(gptq, groups of 16\)"),
    ],
)
def test_gpus_keep_weights_in_4_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: int,
    architecture: str,
    reason: str | None,
) -> None:
    config, gpu = read_model_config(save_tiny_model(tmp_path)), torch.device("cuda")
    options = EngineConfig(model="nowhere", device="cuda")
    monkeypatch.setattr(dtypes, "gpu_of", lambda device: GPUS[architecture])
    monkeypatch.setattr(dtypes, "why_unavailable", lambda backend, device_type: None)
    config = replace(config, quantization=four_bit.gptq_config(group))
    choice = dtypes.choose_storage(options, config, gpu, torch.bfloat16)
    assert (choice.keeps_quantized, choice.bits) == ((True, 4) if reason is None else (False, None))
    assert re.search(reason or "kept in 4 bits; those that are not published so are in bfloat16", choice.note or "")
    told = dtypes.choose_storage(replace(options, dequantize=True), config, gpu, torch.bfloat16)
    assert (told.keeps_quantized, "(--dequantize)" in (told.note or "")) == (False, True)


@pytest.mark.parametrize(
    ("architecture", "options", "dtype", "is_rounded"),
    [
        ("sm_90", {}, torch.bfloat16, True),
        ("sm_89", {}, torch.float16, True),
        ("sm_86", {}, torch.bfloat16, False),
        ("sm_90", {}, torch.float32, False),
        ("sm_90", {"dequantize": True}, torch.bfloat16, False),
    ],
)
def test_gpus_with_fp8_round_the_output_head_of_drafts(
    architecture: str, options: dict[str, Any], dtype: torch.dtype, is_rounded: bool
) -> None:
    config = EngineConfig(model="nowhere", **options)
    assert not dtypes.drafts_in_fp8(config, torch.device("cpu"), dtype)
    with standing_for(GPUS[architecture]):
        assert dtypes.drafts_in_fp8(config, torch.device("meta"), dtype) == is_rounded


def test_weights_dequantised_beside_others_are_counted() -> None:
    stored = {f"layers.{index}.weight": 0 for index in range(10)}
    assert dtypes.dequantized_note(WeightsReport(20, 10, stored=stored)) is None
    del stored["layers.0.weight"], stored["layers.1.weight"], stored["layers.2.weight"]
    note = dtypes.dequantized_note(WeightsReport(20, 10, stored=stored))
    assert "3 of 10 quantised ones were dequantised" in (note or "")


@pytest.mark.parametrize(
    ("architecture", "layers", "bits", "note"),
    [
        ("sm_80", {"a": {"quant_algo": "NVFP4"}}, 4, "kept in FP4; those"),
        ("sm_90", {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8"}}, 4, "kept in FP8 and FP4; those"),
        ("sm_86", {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8"}}, None, "compute capability 8.9"),
    ],
)
def test_gpus_keep_weights_in_fp4(
    quantized: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    layers: dict[str, Any],
    bits: int | None,
    note: str,
) -> None:
    recipe = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    fp8.change_json(quantized[0] / "config.json", quantization_config=recipe)
    config, gpu = read_model_config(quantized[0]), torch.device("cuda")
    monkeypatch.setattr(dtypes, "gpu_of", lambda device: GPUS[architecture])
    monkeypatch.setattr(dtypes, "why_unavailable", lambda *_: None)
    choice = dtypes.choose_storage(EngineConfig(model="nowhere", device="cuda"), config, gpu, torch.bfloat16)
    assert (choice.keeps_quantized, choice.bits) == (bits is not None, bits)
    assert note in (choice.note or "")


def test_room_is_required_for_weights_in_4_bits(quantized: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_model_config(quantized[0])
    num_matrix = count_matrix_weights(config)
    num_bytes = num_matrix // 2 + 2 * (count_weights(config) - num_matrix)
    assert num_bytes > count_weights(config) // 2  # embeddings are not quantised
    monkeypatch.setattr(sizing, "machine_bytes", lambda: num_bytes)
    require_room_for_weights(config, IN_BFLOAT16, bits=4)
    monkeypatch.setattr(sizing, "machine_bytes", lambda: num_bytes - 1)
    with pytest.raises(ConfigError, match=f"take {num_bytes:,} bytes in 4 bits, embeddings in bfloat16, more than"):
        require_room_for_weights(config, IN_BFLOAT16, bits=4)


def test_room_is_required_for_dequantised_weights(
    quantized: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_model_config(quantized[0])
    num_bytes = 2 * count_weights(config)
    monkeypatch.setattr(sizing, "machine_bytes", lambda: num_bytes)
    require_room_for_weights(config, IN_BFLOAT16)
    monkeypatch.setattr(sizing, "machine_bytes", lambda: num_bytes - 1)
    with pytest.raises(ConfigError, match=f"take {num_bytes:,} bytes in bfloat16, more than"):
        require_room_for_weights(config, IN_BFLOAT16)


def test_room_is_required_for_the_shards_of_all_ranks(
    quantized: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_model_config(quantized[0])
    num_bytes = 2 * sum(count_weights(config, ModelOptions(shard=Shard(index, 2))) for index in range(2))
    assert 2 * count_weights(config) < num_bytes < 3 * count_weights(config)
    monkeypatch.setattr(sizing, "machine_bytes", lambda: num_bytes)
    require_room_for_weights(config, replace(IN_BFLOAT16, shard=Shard(0, 2)))
    monkeypatch.setattr(sizing, "machine_bytes", lambda: num_bytes - 1)
    with pytest.raises(ConfigError, match=f"take {num_bytes:,} bytes in bfloat16, more than"):
        require_room_for_weights(config, replace(IN_BFLOAT16, shard=Shard(0, 2)))


@pytest.mark.skipif(torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="no products with float16 weights")
def test_widened_weights_are_halved_as_those_in_bfloat16(
    quantized: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "has_fast_gemms", lambda dtype: dtype == torch.float32)
    model: Any = start(quantized[0]).engine.core.executor.runner.model
    named = {name.rpartition(".")[2]: x for name, x in model.named_modules() if isinstance(x, Projection)}
    assert isinstance(named["head"].weight, DenseWeight)  # published in float32
    assert {type(named[name].weight) for name in ("out_proj", "gate_up", "down")} == {HalfWeight}
