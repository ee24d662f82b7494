"""Models whose weights stay in FP8 hold the published numbers, and answer as the dequantised ones within bounds."""

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight, StackedWeight
from strandline.model_config import read_model_config
from strandline.models.layers.experts import Experts
from strandline.models.layers.projection import Projection
from strandline.models.layers.shard import WHOLE, Shard
from strandline.models.storage.conversion import convert
from strandline.models.storage.weights_files import WeightsFile
from strandline.models.weights import load_model
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import families, fp8, quantized
from tests.cpu.models.quantized import TOLERANCE_FP8, assert_same_weights, load, logits, values_of
from tests.cpu.models.rank_threads import RankThread, RankThreads
from tests.cpu.models.storage.test_quantization import (
    block_config,
    blocks_of,
    channel,
    compressed_config,
    modelopt_config,
    whole,
)
from tests.cpu.models.test_weights import fuse_experts, unfuse_experts

BLOCKS: dict[str, Any] = {"config": block_config(128, 128), "block": blocks_of(128, 128)}
CHANNELS: dict[str, Any] = {
    "config": compressed_config(strategy="channel"),
    "block": channel,
    "suffix": "_scale",
}
TENSORS: dict[str, Any] = {
    "config": compressed_config(strategy="tensor"),
    "block": whole,
    "suffix": "_scale",
    "shape_scale": lambda scale: scale.reshape(1),
}


def save(name: str, directory: Path, scheme: dict[str, Any], **options: Any) -> Path:
    """Write a family with its experts one by one, in FP8."""
    source = fp8.change_tensors(families.save(name, directory), unfuse_experts)
    return fp8.convert(source, directory, **scheme, **options)[0]


def check(directory: Path) -> Any:
    """Compare a model that stays in FP8 with the dequantised one; return it."""
    return quantized.check(directory, TOLERANCE_FP8)


@pytest.mark.parametrize(
    "name",
    ["qwen3_5", "qwen3_5-odd-tied", "qwen3_5_moe", "qwen3_next-odd", "granite_hybrid", "kimi_linear", "falcon_h1"],
)
def test_weights_stay_as_published(name: str, tmp_path: Path) -> None:
    report = check(save(name, tmp_path, BLOCKS)).weights_report
    # Latent attention multiplies with parts of one projection, head by head.
    assert report.num_kept == report.num_quantized - (name == "kimi_linear") > 0


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "kimi_linear", "falcon_h1"])
@pytest.mark.parametrize("scheme", [BLOCKS, CHANNELS], ids=["blocks", "channels"])
def test_shards_hold_their_part_of_the_numbers(name: str, scheme: dict[str, Any], tmp_path: Path) -> None:
    directory = save(name, tmp_path, scheme)
    for index in range(2):
        kept, dequantized = (load(directory, keeps_quantized=keeps, shard=Shard(index, 2)) for keeps in (True, False))
        assert_same_weights(kept, dequantized)
        report = kept.weights_report
        assert report.num_kept == report.num_quantized - (name == "kimi_linear") > 0


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


def test_shards_in_fp8_compute_what_the_whole_computes(tmp_path: Path) -> None:
    """Experts are divided, and their scales."""
    directory = save("qwen3_5_moe", tmp_path, BLOCKS)
    expected = logits(load(directory, keeps_quantized=True))

    def run(ranks: RankThread) -> Tensor:
        return logits(load(directory, keeps_quantized=True, shard=Shard(ranks.rank, ranks.size)), ranks=ranks)

    for found in RankThreads(2).run(run):
        assert float((found - expected).norm() / expected.norm()) < TOLERANCE_FP8


def test_a_shard_in_fp8_reads_its_part_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [wide_model(tmp_path / "dense", 512), save("qwen3_5_moe", tmp_path / "experts", BLOCKS)]
    num_read, get = 0, WeightsFile.get

    def counting(file: WeightsFile, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        nonlocal num_read
        tensor = get(file, name, index)
        num_read += tensor.nbytes
        return tensor

    monkeypatch.setattr(WeightsFile, "get", counting)
    for directory in directories:
        read = []
        for shard in (WHOLE, Shard(0, 2), Shard(1, 2)):
            num_read = 0
            load(directory, keeps_quantized=True, shard=shard)
            read.append(num_read)
        assert max(read[1:]) < 0.65 * read[0]


MODELOPT: dict[str, Any] = TENSORS | {
    "config": modelopt_config("FP8"),
    "shape_scale": lambda scale: scale.reshape(()),
}


@pytest.mark.parametrize("scheme", [CHANNELS, TENSORS, MODELOPT], ids=["channels", "tensors", "modelopt"])
def test_other_scales_stay_as_published(scheme: dict[str, Any], tmp_path: Path) -> None:
    model = check(save("qwen3_5_moe", tmp_path, scheme))
    assert model.weights_report.num_kept == model.weights_report.num_quantized


def test_experts_in_one_tensor_stay(tmp_path: Path) -> None:
    source = fp8.change_tensors(families.save("qwen3_5_moe", tmp_path), fuse_experts)
    check(fp8.convert(source, tmp_path, **BLOCKS)[0])


@pytest.mark.parametrize("name", ["inkling", "inkling-towers"])
def test_experts_that_every_token_takes_stay_with_others(name: str, tmp_path: Path) -> None:
    convert(families.save(name, tmp_path), tmp_path / "fp8")
    report = check(tmp_path / "fp8").weights_report
    assert report.num_kept == report.num_quantized > 0
    for shard in (Shard(0, 2), Shard(1, 2)):
        assert_same_weights(*(load(tmp_path / "fp8", keeps_quantized=keeps, shard=shard) for keeps in (True, False)))


def test_experts_that_a_token_may_skip_stay(tmp_path: Path) -> None:
    kept = check(save("zaya", tmp_path, BLOCKS))
    assert all(layer.mlp.experts.takes_quantized for layer in kept.decoder.layers)


def test_experts_without_a_gate_stay(tmp_path: Path) -> None:
    kept = check(save("nemotron_h", tmp_path, BLOCKS))
    experts = [module for module in kept.modules() if isinstance(module, Experts)]
    assert experts
    assert all(module.takes_quantized for module in experts)


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
    assert model.weights_report.num_kept == 0
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
        "nowhere", config=read_model_config(directory), load_format="dummy", keeps_quantized=True, with_draft_layer=True
    )
    assert isinstance(model.draft_layer.layer.mlp.down.weight, ScaledWeight)
    assert isinstance(model.draft_layer.fc.weight, DenseWeight)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_random_weights_stay_in_fp8(name: str, tmp_path: Path) -> None:
    config = read_model_config(save(name, tmp_path, BLOCKS))
    model = load(Path("nowhere"), keeps_quantized=True, config=config, load_format="dummy")
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    spread = values_of(model.decoder.layers[0].mixer.in_proj.weight).std() * model.decoder.embed_ZE.shape[1] ** 0.5
    assert 0.5 < float(spread) < 1.5
    assert bool(logits(model).isfinite().all())
