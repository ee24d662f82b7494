"""Weights in 4 bits load as published in every format, and what is wrong with them is named."""

import math
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strandline.errors import ConfigError, WeightsError
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.storage import codes
from strandline.models.weights import load_model
from tests.cpu.models import families, four_bit, fp8
from tests.cpu.models.four_bit import SCHEMES, awq_config, compressed_config, gptq_config
from tests.cpu.models.fp8 import Tensors
from tests.cpu.models.storage.test_quantization import assert_equal
from tests.cpu.models.test_weights import split_into_shards, unfuse_experts


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Return what writes a family in 4 bits and dequantised, by the name of a scheme."""

    def convert(name: str = "qwen3_5", scheme: str = "compressed", **options: Any) -> tuple[Path, Path]:
        source = fp8.change_tensors(families.save(name, tmp_path), unfuse_experts)
        return four_bit.convert(source, tmp_path, SCHEMES[scheme], **options)

    return convert


def load(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return load_model(directory, ModelOptions(dtype=dtype, **options))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_every_format_loads_as_its_values_in_float32(converted: Callable[..., Any], scheme: str) -> None:
    directory, plain = converted("qwen3_5", scheme)
    model = load(directory)
    assert_equal(model, load(plain))
    assert model.weights_report.num_quantized == 2 * 3 + 2 * 4 + 4 * 3  # recurrent layers, attention, feed-forward


@pytest.mark.parametrize("name", ["qwen3_5-odd-tied", "qwen3_5_moe", "falcon_h1"])
def test_every_layout_loads_as_its_values(converted: Callable[..., Any], name: str) -> None:
    directory, plain = converted(name, "gptq act-order")
    assert_equal(load(directory, torch.bfloat16), load(plain, torch.bfloat16))


@pytest.mark.parametrize("scheme", ["awq", "compressed act-order", "gptq act-order"])
def test_shards_load_as_their_values(converted: Callable[..., Any], scheme: str) -> None:
    """Shards begin and end inside of groups, too."""
    directory, plain = converted("qwen3_5", scheme)
    for index in range(2):
        assert_equal(load(directory, shard=Shard(index, 2)), load(plain, shard=Shard(index, 2)))


def test_files_decide_what_is_quantised(converted: Callable[..., Any]) -> None:
    def is_converted(name: str, tensor: Tensor) -> bool:
        return name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight")  # the first is among the exceptions

    directory, plain = converted(is_converted=is_converted)
    model = load(directory)
    assert model.weights_report.num_quantized == 2
    assert_equal(model, load(plain))


def test_parts_of_a_weight_may_be_in_several_files(converted: Callable[..., Any]) -> None:
    directory, plain = converted()
    split_into_shards(directory, 2)
    assert_equal(load(directory), load(plain))


def test_biases_of_zeros_are_skipped(converted: Callable[..., Any]) -> None:
    directory, plain = converted("qwen3_5", "gptq")
    name = "model.layers.1.mlp.up_proj.bias"
    fp8.change_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(40)}))
    assert_equal(load(directory), load(plain))
    fp8.change_tensors(directory, lambda tensors: tensors.update({name: torch.eye(40)[0]}))
    with pytest.raises(WeightsError, match=f"{name} not known"):
        load(directory)


def test_unsorted_index_of_inputs_is_accepted(converted: Callable[..., Any]) -> None:
    directory, plain = converted()
    index = torch.full((32,), -1, dtype=torch.int32)
    fp8.change_tensors(directory, lambda tensors: tensors.update({f"{MODULE}.weight_g_idx": index}))
    assert_equal(load(directory), load(plain))


def test_weights_are_dequantised_in_parts(converted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, plain = converted()
    monkeypatch.setattr(codes, "CHUNK_ELEMENTS", 100)
    assert_equal(load(directory), load(plain))


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
def test_packing_is_that_of_compressed_tensors() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(0, 16, (6, 20))
    assert torch.equal(pack_to_int32((codes - 8).to(torch.int8), 4), four_bit.pack(codes))
    assert torch.equal(pack_to_int32((codes - 8).to(torch.int8), 4, packed_dim=0), four_bit.pack(codes.t()).t())


MODULE = "model.layers.1.self_attn.k_proj"  # [32, 32]


def drop(tensors: Tensors, *, part: str) -> None:
    del tensors[f"{MODULE}.{part}"]


def replace(tensors: Tensors, *, part: str, value: Tensor) -> None:
    tensors[f"{MODULE}.{part}"] = value


def put(tensors: Tensors, *, part: str, value: float) -> None:
    tensors[f"{MODULE}.{part}"][1] = value


INT = torch.int32


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("gptq", partial(drop, part="qzeros"), "qzeros is missing beside model.layers.1.self_attn.k_proj.qweight"),
        ("gptq act-order", partial(drop, part="g_idx"), "k_proj.g_idx is missing beside"),
        ("awq", partial(drop, part="scales"), "k_proj.scales is missing beside"),
        ("awq", partial(drop, part="qweight"), "k_proj.weight .* missing"),
        ("compressed", partial(drop, part="weight_scale"), "k_proj.weight_scale is missing beside"),
        ("compressed asymmetric", partial(drop, part="weight_zero_point"), "weight_zero_point is missing beside"),
        ("compressed act-order", partial(drop, part="weight_g_idx"), "weight_g_idx is missing beside"),
        (
            "gptq",
            partial(replace, part="qweight", value=torch.zeros(8, 32, dtype=INT)),  # of 8 bits
            r"qweight has shape \[8, 32\]; a weight of \[32, 32\] in 4 bits \(gptq, groups of 16\) asks for \[4, 32\]",
        ),
        ("gptq", partial(replace, part="scales", value=torch.ones(4, 32)), r"scales has shape \[4, 32\]"),
        ("gptq", partial(replace, part="qzeros", value=torch.ones(2, 2, dtype=INT)), r"qzeros has shape \[2, 2\]"),
        ("gptq", partial(replace, part="g_idx", value=torch.zeros(31, dtype=INT)), r"g_idx has shape \[31\]"),
        ("gptq", partial(replace, part="g_idx", value=torch.zeros(32)), "g_idx is stored as torch.float32"),
        ("gptq", partial(put, part="g_idx", value=2), "k_proj.g_idx names group 2; there are 2"),
        ("gptq", partial(put, part="g_idx", value=-1), "k_proj.g_idx names group -1; there are 2"),
        ("awq", partial(replace, part="qweight", value=torch.zeros(32, 4)), "qweight is stored as F32"),
        ("awq", partial(put, part="scales", value=math.nan), r"k_proj.scales\[1, 0\] is nan; scales are positive"),
        ("awq", partial(put, part="scales", value=0.0), r"k_proj.scales\[1, 0\] is 0.0; scales are positive"),
        ("compressed", partial(put, part="weight_scale", value=-1.0), r"weight_scale\[1, 0\] is -1.0"),
        ("compressed", partial(put, part="weight_shape", value=30), r"weight_shape says \[32, 30\]"),
        (
            "compressed",
            partial(replace, part="weight", value=torch.zeros(32, 32)),
            "k_proj.weight is published twice, as it is and as model.layers.1.self_attn.k_proj.weight_packed",
        ),
    ],
)  # fmt: skip
def test_fault_is_named(
    converted: Callable[..., Any], scheme: str, change: Callable[[Tensors], None], message: str
) -> None:
    directory, _ = converted("qwen3_5", scheme)
    with pytest.raises(WeightsError, match=message):
        load(fp8.change_tensors(directory, change))


MISSHAPED: tuple[Callable[[Tensor], Tensor], ...] = (
    Tensor.flatten,
    lambda tensor: tensor[:-1],
    lambda tensor: tensor[..., None],
    lambda tensor: torch.cat((tensor, tensor), dim=-1),
)


@pytest.mark.parametrize("module", ["model.layers.1.self_attn.k_proj", "model.layers.2.mlp.experts.3.down_proj"])
@pytest.mark.parametrize("scheme", ["awq", "compressed", "gptq act-order"])
def test_parts_of_any_other_shape_are_refused(converted: Callable[..., Any], scheme: str, module: str) -> None:
    directory, _ = converted("qwen3_5_moe", scheme)
    published = load_file(directory / "model.safetensors")
    for name in [name for name in published if name.startswith(f"{module}.")]:
        for misshape in MISSHAPED:
            value = misshape(published[name]).contiguous()
            if value.shape == published[name].shape:
                continue
            save_file({**published, name: value}, directory / "model.safetensors")
            with pytest.raises(WeightsError, match=re.escape(name)):
                load(directory, keeps_quantized=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gptq_config(128, bits=8), "gptq with 8 bits is not supported; supported: .*4-bit integers"),
        (gptq_config(128, checkpoint_format="marlin"), "checkpoint_format 'marlin' is not supported"),
        (gptq_config(0), "group_size is 0; it must be a whole number from 1"),
        (awq_config(128, version="gemv"), "version 'gemv' is not supported; supported: gemm"),
        (compressed_config(32, num_bits=8), "group_0 has format 'pack-quantized' and 8-bit weights of type 'int'"),
        (compressed_config(32, strategy="tensor"), "weights.strategy 'tensor' is not supported"),
    ],
)
def test_unsupported_quantisation_is_named(tmp_path: Path, config: Any, message: str) -> None:
    directory = families.save("qwen3_5", tmp_path)
    fp8.change_json(directory / "config.json", quantization_config=config)
    with pytest.raises(ConfigError, match=message):
        load(directory)
