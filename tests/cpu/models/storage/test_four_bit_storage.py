"""Models whose weights stay in 4 bits hold the published numbers, and answer as the dequantised ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor

from strandline.kernels.gemm.weights import CodedWeight, DenseWeight, StackedWeight
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.storage import coded_storage
from strandline.models.weights import FillOptions, load_model
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import families, four_bit, fp8
from tests.cpu.models.four_bit import SCHEMES, Scheme, awq_config, compressed_config, gptq_config
from tests.cpu.models.quantized import assert_same_weights, check, load, values_of
from tests.cpu.models.test_weights import unfuse_experts

GROUP = 32


def of_group(name: str, config: dict[str, Any], size: int = GROUP) -> Scheme:
    return replace(SCHEMES[name], config=config, size=size)


KEPT = {
    "compressed": of_group("compressed", compressed_config(GROUP)),
    "compressed channels": SCHEMES["compressed channels"],
    "compressed wide groups": of_group("compressed", compressed_config(256), 256),
    "compressed asymmetric": of_group("compressed asymmetric", compressed_config(GROUP, symmetric=False)),
    "gptq": of_group("gptq", gptq_config(GROUP)),
    "gptq channels": SCHEMES["gptq channels"],
    "gptq v2": of_group("gptq v2", gptq_config(64, checkpoint_format="gptq_v2"), 64),
    "awq": of_group("awq", awq_config(GROUP)),
}


def save(name: str, directory: Path, scheme: str = "compressed", **options: Any) -> Path:
    """Write a family with its experts one by one, in 4 bits."""
    source = fp8.change_tensors(families.save(name, directory), unfuse_experts)
    return four_bit.convert(source, directory, KEPT[scheme], **options)[0]


@pytest.mark.parametrize("scheme", sorted(KEPT))
def test_weights_of_every_format_stay(scheme: str, tmp_path: Path) -> None:
    report = check(save("qwen3_5", tmp_path, scheme)).weights_report
    assert len(report.stored) == report.num_quantized > 10


@pytest.mark.parametrize("scheme", ["compressed", "awq"])
def test_random_weights_have_a_mean_of_zero(scheme: str, tmp_path: Path) -> None:
    model = load_model(
        save("qwen3_moe", tmp_path, scheme), ModelOptions(keeps_quantized=True), FillOptions(load_format="dummy")
    )
    weights = [part.up for module in model.modules() if isinstance(module, Experts) for part in module.parts]
    assert weights
    for weight in weights:
        assert isinstance(weight, CodedWeight)
        values = weight.dequantize()
        assert float(values.mean().abs() / values.std()) < 0.02


def test_files_decide_row_by_row_what_stays(tmp_path: Path) -> None:
    def is_converted(name: str, tensor: Tensor) -> bool:
        return fp8.is_projection(name, tensor) and crc32(name.encode()) % 3 > 0

    model = check(save("qwen3_5_moe", tmp_path, is_converted=is_converted))
    forms = {type(module.weight) for module in model.modules() if isinstance(module, Projection)}
    assert forms == {CodedWeight, DenseWeight, StackedWeight}


def test_symmetric_weights_have_no_zero_points(tmp_path: Path) -> None:
    for scheme in ("compressed", "gptq channels"):
        model = load(save("qwen3_5", tmp_path / scheme, scheme), keeps_quantized=True)
        assert model.decoder.layers[0].mlp.down.weight.zeros is None


def test_scales_of_channels_are_repeated_without_memory(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source", intermediate_size=256)
    model = check(four_bit.convert(source, tmp_path, KEPT["gptq channels"])[0])
    scales = model.decoder.layers[0].mlp.down.weight.scales
    assert (scales.dtype, scales.stride(), scales.shape[1]) == (torch.float16, (1, 0), 2)


@pytest.mark.parametrize("scheme", ["compressed act-order", "gptq act-order", "compressed partial groups", "awq"])
def test_what_kernels_do_not_take_is_dequantised(scheme: str, tmp_path: Path) -> None:
    """The last has groups of 16."""
    source = families.save("qwen3_5", tmp_path)
    directory = four_bit.convert(source, tmp_path, SCHEMES[scheme])[0]
    if scheme.endswith("act-order"):
        directory = four_bit.convert(source, tmp_path / "wide", replace(SCHEMES[scheme], size=GROUP))[0]
        config = SCHEMES[scheme].config
        config = (
            gptq_config(GROUP, desc_act=True)
            if "gptq" in scheme
            else compressed_config(GROUP, symmetric=False, actorder="group")
        )
        fp8.change_json(directory / "config.json", quantization_config=config)
    model, dequantized = (load(directory, keeps_quantized=keeps) for keeps in (True, False))
    # Inputs of one group are in order.
    assert len(model.weights_report.stored) < model.weights_report.num_quantized
    assert_same_weights(model, dequantized)


@pytest.mark.parametrize("scheme", ["compressed asymmetric", "awq", "gptq channels"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "falcon_h1"])
def test_shards_hold_their_part_of_the_numbers(name: str, scheme: str, tmp_path: Path) -> None:
    directory = save(name, tmp_path, scheme)
    for index in range(2):
        quantized, dequantized = (
            load(directory, keeps_quantized=keeps, shard=Shard(index, 2)) for keeps in (True, False)
        )
        assert_same_weights(quantized, dequantized)
        assert len(quantized.weights_report.stored) > 0


@pytest.mark.parametrize(("size", "form"), [(192, CodedWeight), (176, DenseWeight)])
def test_inputs_are_cut_between_groups(size: int, form: type, tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source", intermediate_size=size)
    directory = four_bit.convert(source, tmp_path, KEPT["awq"])[0]
    shards = [load(directory, keeps_quantized=True, shard=Shard(index, 2)) for index in range(2)]
    downs = [shard.decoder.layers[0].mlp.down.weight for shard in shards]
    assert {type(down) for down in downs} == {form}
    whole = load(directory, keeps_quantized=True).decoder.layers[0].mlp.down.weight
    assert torch.equal(torch.cat([values_of(down) for down in downs], dim=1), values_of(whole))


def test_weights_are_packed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save("qwen3_5", tmp_path, "gptq")
    monkeypatch.setattr(coded_storage, "CHUNK_ELEMENTS", 100)
    check(directory)
