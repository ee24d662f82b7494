"""Models whose weights stay in FP8 hold the published numbers, and answer as the dequantised ones within bounds."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight, StackedWeight
from strandline.kernels.rowwise.quantized_rows import GROUP
from strandline.model_config import read_model_config
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import families, fp8, quantized
from tests.cpu.models.quantized import TOLERANCE_FP8, assert_same_weights, load, values_of
from tests.cpu.models.storage.test_quantization import (
    block_config,
    blocks_of,
)
from tests.cpu.models.test_weights import fuse_experts, unfuse_experts

PER_CHANNEL = "FP8_PER_CHANNEL_PER_TOKEN"
BLOCKS: dict[str, Any] = {"config": block_config(128, 128), "block": blocks_of(128, 128)}


def save(name: str, directory: Path, scheme: dict[str, Any], **options: Any) -> Path:
    """Write a family with its experts one by one, in FP8."""
    source = fp8.change_tensors(families.save(name, directory), unfuse_experts)
    return fp8.convert(source, directory, **scheme, **options)[0]


def check(directory: Path) -> Any:
    """Compare a model that stays in FP8 with the dequantised one; return it."""
    return quantized.check(directory, TOLERANCE_FP8)


def wide_model(directory: Path, size: int) -> Path:
    """Write a model in FP8 whose feed-forward parts have blocks side by side, with different scales."""
    source = save_tiny_model(directory / "source", intermediate_size=size)
    return fp8.convert(source, directory, **BLOCKS)[0]


def down_of(model: Any) -> Any:
    return model.decoder.layers[0].mlp.down.weight


@pytest.mark.parametrize(("size", "form"), [(512, ScaledWeight), (384, DenseWeight)])
def test_scales_are_cut_with_inputs_in_whole_blocks(size: int, form: type, tmp_path: Path) -> None:
    directory = wide_model(tmp_path, size)
    whole = load(directory, keeps_quantized=True)
    shards = [load(directory, keeps_quantized=True, shard=Shard(index, 2)) for index in range(2)]
    assert {type(down_of(shard)) for shard in shards} == {form}
    assert torch.equal(torch.cat([values_of(down_of(shard)) for shard in shards], dim=1), values_of(down_of(whole)))
    gate_ups = [values_of(shard.decoder.layers[0].mlp.gate_up.weight).chunk(2) for shard in shards]
    joined = torch.cat([torch.cat(parts) for parts in zip(*gate_ups, strict=True)])
    assert torch.equal(joined, values_of(whole.decoder.layers[0].mlp.gate_up.weight))


def test_experts_in_one_tensor_stay(tmp_path: Path) -> None:
    source = fp8.change_tensors(families.save("qwen3_5_moe", tmp_path), fuse_experts)
    check(fp8.convert(source, tmp_path, **BLOCKS)[0])


def test_files_decide_row_by_row_what_stays(tmp_path: Path) -> None:
    def is_converted(name: str, tensor: Tensor) -> bool:
        return fp8.is_projection(name, tensor) and crc32(name.encode()) % 3 > 0

    model = check(save("qwen3_5_moe", tmp_path, BLOCKS, is_converted=is_converted))
    forms = {type(module.weight) for module in model.modules() if isinstance(module, Projection)}
    assert forms == {DenseWeight, ScaledWeight, StackedWeight}


def test_blocks_of_another_width_are_dequantised(tmp_path: Path) -> None:
    scheme = {"config": block_config(16, 16), "block": blocks_of(16, 16)}
    directory = save("qwen3_5", tmp_path, scheme)
    model = load(directory, keeps_quantized=True)
    assert len(model.weights_report.stored) == 0
    assert_same_weights(model, load(directory, keeps_quantized=False))


def test_large_matrices_have_a_scale_per_block(tmp_path: Path) -> None:
    directory = save("qwen3_5", tmp_path, BLOCKS)
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    tensors = load_file(directory / "model.safetensors")
    model = load(directory, keeps_quantized=True)
    weight = model.decoder.layers[0].mlp.down.weight
    assert torch.equal(weight.scales[:, : tensors[name].shape[1]], tensors[name])
    assert weight.values.dtype == torch.float8_e4m3fn


def test_draft_layers_stay_in_fp8(tmp_path: Path) -> None:
    directory = save("qwen3_5", tmp_path, BLOCKS)
    model: Any = load_model(
        "nowhere",
        ModelOptions(keeps_quantized=True, with_draft_layer=True),
        FillOptions(load_format="dummy"),
        config=read_model_config(directory),
    )
    assert isinstance(model.drafter.layer.mlp.down.weight, ScaledWeight)
    assert isinstance(model.drafter.fc.weight, DenseWeight)


def load_random(directory: Path, recipe: dict[str, Any]) -> Any:
    config = replace(read_model_config(directory), quantization={"quant_method": "modelopt", **recipe})
    return load_model("nowhere", ModelOptions(keeps_quantized=True), FillOptions(load_format="dummy"), config=config)


@pytest.mark.parametrize(("algorithm", "grid"), [("FP8", (1, 1)), ("FP8_PB_WO", (2, 2)), (PER_CHANNEL, (192, 1))])
def test_random_experts_are_scaled_as_configured(algorithm: str, grid: tuple[int, int], tmp_path: Path) -> None:
    directory = families.save("nemotron_h", tmp_path, hidden_size=256, moe_intermediate_size=192)
    model = load_random(directory, {"quant_algo": algorithm})
    (part,) = next(module for module in model.modules() if isinstance(module, Experts)).parts
    scales_XYG = part.up.scales.repeat_interleave(part.up.rows_per_scale, 1)[:, :192]
    assert scales_XYG[0].unique().numel() == grid[0] * grid[1]
    assert part.up.rows_per_scale == (1 if algorithm == PER_CHANNEL else GROUP)
    assert not torch.equal(scales_XYG[0], scales_XYG[1])


@pytest.mark.parametrize("field", ["ignore", "exclude_modules", "modules_to_not_convert"])
def test_random_weights_that_are_ignored_are_not_quantised(field: str, tmp_path: Path) -> None:
    directory = families.save("nemotron_h", tmp_path)
    ignored = ["*.mixer.q_proj", "*.mixer.k_proj", "*.mixer.v_proj"]
    model = load_random(directory, {"quant_algo": "FP8", field: ignored})
    attention = next(module for module in model.modules() if isinstance(module, Attention))
    assert (type(attention.in_proj.weight), type(attention.out_proj.weight)) == (DenseWeight, ScaledWeight)
