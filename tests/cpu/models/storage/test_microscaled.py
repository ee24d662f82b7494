"""Weights published in NVFP4, MXFP4 and MXFP8 load as what they stand for; bad files are named."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.errors import ConfigError, WeightsError
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.weights import load_model
from tests.cpu.models import families, microscaled
from tests.cpu.models.fp8 import Tensors, change_json, change_tensors, is_projection, quantize
from tests.cpu.models.storage.test_quantization import assert_equal, load, whole

WEIGHT = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Return what writes a family quantised and dequantised."""
    root = tmp_path_factory.mktemp("microscaled")

    def convert(name: str = "llama", way: str = "modelopt") -> tuple[Path, Path]:
        directory = root / f"{name}-{way}"
        if not directory.is_dir():
            directory.mkdir()
            microscaled.convert(families.save(name, directory), directory, way)
        return directory / "quantized", directory / "plain"

    return convert


@pytest.fixture
def own(converted: Callable[..., tuple[Path, Path]], tmp_path: Path) -> Callable[..., Path]:
    """Return what writes a model in FP4 that a test may change."""

    def copy(way: str = "modelopt", name: str = "llama") -> Path:
        return Path(shutil.copytree(converted(name, way)[0], tmp_path / "own"))

    return copy


@pytest.mark.parametrize("way", microscaled.WAYS)
def test_weights_load_as_what_they_stand_for(converted: Callable[..., tuple[Path, Path]], way: str) -> None:
    quantized, plain = converted("llama", way)
    model = load(quantized)
    assert_equal(model, load(plain))
    assert model.weights_report.num_quantized
    assert_equal(load(quantized, torch.bfloat16), load(plain, torch.bfloat16))


@pytest.mark.parametrize("way", microscaled.WAYS)
def test_shards_hold_parts_of_the_whole(converted: Callable[..., tuple[Path, Path]], way: str) -> None:
    quantized, plain = converted("qwen3_5_moe", way)
    for index in range(2):
        shard = Shard(index, 2)
        assert_equal(load_model(quantized, ModelOptions(shard=shard)), load_model(plain, ModelOptions(shard=shard)))


def test_layers_of_one_model_have_formats_of_their_own(tmp_path: Path) -> None:
    def is_expert(name: str, tensor: Tensor) -> bool:
        return is_projection(name, tensor) and "expert" in name

    layers = {"a": {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    source = families.save("qwen3_5_moe", tmp_path)
    quantized, plain = microscaled.convert(source, tmp_path, "modelopt", is_expert, config)
    numbers = dict[str, Tensor]()

    def quantize_others(tensors: Tensors) -> None:
        for name in [name for name, tensor in tensors.items() if is_projection(name, tensor) and "expert" not in name]:
            tensors[name], scale = quantize(tensors[name], whole(tensors[name]))
            tensors[f"{name}_scale"] = scale.reshape(())
            numbers[name] = tensors[name].float() * scale.reshape(())

    change_tensors(quantized, quantize_others)
    change_tensors(plain, lambda tensors: tensors.update(numbers))
    assert numbers
    assert_equal(load(quantized), load(plain))


def test_biases_of_zeros_and_groups_of_zeros_load(
    converted: Callable[..., Any], own: Callable[..., Path], tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[WEIGHT.replace("weight", "bias")] = torch.zeros(len(tensors[WEIGHT]))
        tensors[f"{WEIGHT}_scale"].view(torch.uint8)[0] = 0

    directory, plain = change_tensors(own(), change), tmp_path / "plain"
    shutil.copytree(converted()[1], plain)
    change_tensors(plain, lambda tensors: tensors[WEIGHT][0].zero_())
    assert_equal(load(directory), load(plain))


def test_recipe_beside_the_configuration_is_read(converted: Callable[..., Any], own: Callable[..., Path]) -> None:
    directory = own()
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    change_json(directory / "config.json", quantization_config=None)
    assert_equal(load(directory), load(converted()[1]))


def remove(tensors: Tensors, *, part: str) -> None:
    del tensors[WEIGHT + part]


def replace(tensors: Tensors, *, part: str, value: Tensor) -> None:
    tensors[WEIGHT + part] = value


def spoil(tensors: Tensors, *, part: str, byte: int) -> None:
    tensors[WEIGHT + part].view(torch.uint8)[1, 0] = byte


def invert(tensors: Tensors, *, part: str) -> None:
    tensors[WEIGHT + part] = 1 / tensors[WEIGHT + part]


@pytest.mark.parametrize(
    ("way", "change", "message"),
    [
        ("modelopt", partial(remove, part="_scale"), "k_proj.weight_scale is missing beside .*k_proj.weight"),
        ("modelopt", partial(remove, part="_scale_2"), "k_proj.weight_scale_2 is missing beside .*k_proj.weight"),
        ("compressed", partial(remove, part="_scale"), "k_proj.weight_scale is missing beside .*weight_packed"),
        ("compressed", partial(remove, part="_global_scale"), "weight_global_scale is missing beside"),
        ("compressed", partial(remove, part="_packed"), "k_proj.weight .* missing"),
        ("modelopt", partial(replace, part="_scale", value=torch.ones(3, 4)), r"weight_scale has shape \[3, 4\]"),
        ("modelopt", partial(replace, part="_scale_2", value=torch.ones(3)), r"weight_scale_2 has shape \[3\]"),
        ("modelopt", partial(replace, part="_scale_2", value=torch.tensor(-1.0)), "scales are positive numbers"),
        ("modelopt", partial(replace, part="_scale_2", value=torch.tensor(math.nan)), "scales are positive numbers"),
        ("modelopt", partial(invert, part="_scale_2"), "weight_scale_2 makes weights of up to"),
        ("compressed", partial(invert, part="_global_scale"), "weight_global_scale makes weights of up to"),
        ("modelopt", partial(spoil, part="_scale", byte=0x7F), "k_proj.weight_scale has scales that are not numbers"),
        ("modelopt", partial(spoil, part="_scale", byte=0x80 | 0x38), "k_proj.weight_scale has negative scales"),
        ("mxfp4", partial(spoil, part="_scale", byte=255), "k_proj.weight_scale has scales that are not numbers"),
        ("mxfp4", partial(spoil, part="_scale", byte=250), "k_proj.weight_scale makes weights of up to"),
        ("mxfp8", partial(remove, part="_scale"), "k_proj.weight_scale is missing beside .*k_proj.weight"),
        ("mxfp8", partial(replace, part="_scale", value=torch.ones(3, 4).byte()), r"weight_scale has shape \[3, 4\]"),
        (
            "mxfp8",
            partial(replace, part="_scale", value=torch.ones(32, 1)),
            "weight_scale is stored as F32; scales of MXFP8 .* are U8 or F8_E8M0",
        ),
        ("mxfp8", partial(spoil, part="_scale", byte=255), "k_proj.weight_scale has scales that are not numbers"),
        ("mxfp8", partial(spoil, part="_scale", byte=140), "k_proj.weight_scale makes weights of up to"),
        ("mxfp8", partial(spoil, part="", byte=0x7F), "k_proj.weight holds a weight that is not a number"),
        ("mxfp8", partial(spoil, part="", byte=0xFF), "k_proj.weight holds a weight that is not a number"),
        ("mxfp8-inverse", partial(spoil, part="_scale_inv", byte=255), "weight_scale_inv has scales that are not"),
        ("mxfp4", partial(replace, part="", value=torch.zeros(32, 64)), "published twice, as it is and as .*_packed"),
        ("modelopt", partial(replace, part=".input_scale", value=torch.ones(1)), "not known to this architecture"),
    ],
)
def test_fault_is_named(own: Callable[..., Path], way: str, change: Callable[[Tensors], None], message: str) -> None:
    directory = change_tensors(own(way), change)
    with pytest.raises(WeightsError, match=message):
        load(directory)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"type": "float", "num_bits": 4, "group_size": 32}, "group_size is 32; it must be 16"),
        ({"type": "int", "num_bits": 4, "group_size": 16}, "has format 'nvfp4-pack-quantized' and 4-bit weights"),
    ],
)
def test_configuration_of_another_format_is_refused(
    own: Callable[..., Path], weights: dict[str, Any], message: str
) -> None:
    directory = own("compressed")
    _, config = microscaled.WAYS["compressed"]
    change_json(directory / "config.json", quantization_config={**config, "config_groups": {"a": {"weights": weights}}})
    with pytest.raises(ConfigError, match=message):
        load(directory)
