"""FP8 weights load as published, whatever their scales cover, and what is wrong with them is named."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from strandline.errors import ConfigError, WeightsError
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.storage import fp8 as reader
from strandline.models.storage.fp8 import scale_grid
from strandline.models.storage.quantization_config import CHANNEL, TENSOR, Block, Fp8Scheme
from strandline.models.weights import FillOptions, load_model
from tests.cpu.models import families, fp8
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.fp8 import Tensors
from tests.cpu.models.test_weights import fuse_experts, split_into_shards, unfuse_experts

TOKENS = families.prompt(20)


def block_config(rows: int, columns: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [rows, columns],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"],
        **more,
    }


def compressed_config(**weights: Any) -> dict[str, Any]:
    values = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **weights}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"weights": values, "input_activations": activations, "targets": ["Linear"], "format": "float-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def modelopt_config(algorithm: str, **more: Any) -> dict[str, Any]:
    """Return what ModelOpt writes into ``config.json``."""
    group = {"weights": {"num_bits": 8, "type": "float", "dynamic": False}, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "model.layers.0.mlp*"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "producer": {"name": "modelopt", "version": "0.40.0"},
        **more,
    }


def whole(tensor: Tensor) -> tuple[int, int]:
    rows, columns = tensor.shape[-2:]
    return rows, columns


def channel(tensor: Tensor) -> tuple[int, int]:
    return 1, tensor.shape[-1]


def blocks_of(rows: int, columns: int) -> Callable[[Tensor], tuple[int, int]]:
    return lambda _: (rows, columns)


SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks": (block_config(16, 16), {"block": blocks_of(16, 16)}),
    "oblong blocks": (block_config(24, 9), {"block": blocks_of(24, 9)}),
    "blocks larger than matrices": (block_config(128, 128), {"block": blocks_of(128, 128)}),
    "tensors": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"block": whole, "suffix": "_scale", "shape_scale": Tensor.squeeze},
    ),
    "compressed tensors": (
        compressed_config(strategy="tensor"),
        {"block": whole, "suffix": "_scale", "shape_scale": lambda scale: scale.reshape(1)},
    ),
    "modelopt": (
        modelopt_config("FP8"),
        {"block": whole, "suffix": "_scale", "shape_scale": lambda scale: scale.reshape(())},
    ),
    "modelopt blocks": (
        modelopt_config("fp8_pb_wo"),
        {"block": blocks_of(128, 128), "suffix": "_scale", "shape_scale": lambda scale: scale[:, None, :, None]},
    ),
    "modelopt channels": (
        modelopt_config("FP8_PER_CHANNEL_PER_TOKEN"),
        {"block": channel, "suffix": "_scale", "shape_scale": lambda scale: scale.squeeze(1)},
    ),
    "compressed channels": (compressed_config(strategy="channel"), {"block": channel, "suffix": "_scale"}),
    "compressed blocks": (
        compressed_config(strategy="block", block_structure=[16, 8]),
        {"block": blocks_of(16, 8), "suffix": "_scale"},
    ),
}


MIXED: dict[str, Any] = {
    "model.layers.0.linear_attn.in_proj_qkv": {"quant_algo": "FP8"},
    "model.layers.1.mlp.experts": {"quant_algo": "FP8_PB_WO", "group_size": 128},
    "mtp.fc": {"quant_algo": None},
}
"""What ModelOpt writes as ``quantized_layers``; the files decide all the same."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes a family as its publishers do, experts one by one."""
    directory = tmp_path_factory.mktemp("saved")

    def save(name: str) -> Path:
        if not (directory / name).is_dir():
            families.save(name, directory)
            fp8.change_tensors(directory / name, unfuse_experts)
        return directory / name

    return save


@pytest.fixture
def converted(saved: Callable[[str], Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Return what writes a family in FP8 and dequantised, by the name of a scheme."""

    def convert(name: str = "qwen3_5", scheme: str = "blocks", **options: Any) -> tuple[Path, Path]:
        config, defaults = SCHEMES[scheme]
        return fp8.convert(saved(name), tmp_path, config, **{**defaults, **options})

    return convert


def load(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return load_model(directory, ModelOptions(dtype=dtype, **options))


def assert_equal(found: Any, expected: Any) -> None:
    pairs = zip(found.named_parameters(), expected.named_parameters(), strict=True)
    assert [name for (name, x), (_, y) in pairs if not torch.equal(x, y)] == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_loads_as_its_values_in_float32(converted: Callable[..., Any], scheme: str) -> None:
    directory, plain = converted("qwen3_5", scheme)
    model = load(directory)
    assert_equal(model, load(plain))
    assert model.weights_report.num_quantized == 2 * 3 + 2 * 4 + 4 * 3  # recurrent layers, attention, feed-forward


@pytest.mark.parametrize("name", ["qwen3_5-odd-tied", "qwen3_5-vision", "qwen3_5_moe", "qwen3_next-odd", "olmo_hybrid"])
def test_every_layout_loads_as_its_values_in_float32(converted: Callable[..., Any], name: str) -> None:
    directory, plain = converted(name)
    assert_equal(load(directory), load(plain))
    assert_equal(load(directory, torch.bfloat16), load(plain, torch.bfloat16))


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "olmo_hybrid"])
def test_shards_load_as_their_values_in_float32(converted: Callable[..., Any], name: str) -> None:
    """Shards begin and end inside of blocks, too."""
    directory, plain = converted(name)
    for index in range(2):
        assert_equal(load(directory, shard=Shard(index, 2)), load(plain, shard=Shard(index, 2)))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_logits_are_those_of_transformers(converted: Callable[..., Any], name: str) -> None:
    directory, plain = converted(name)
    (logits,), _ = Driver(load(directory)).step([Part(Running(), TOKENS)])
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_experts_in_one_tensor_load(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = fp8.change_tensors(families.save("qwen3_5_moe", tmp_path), fuse_experts)
    assert any(
        tensor.dim() == 3 and "experts" in name for name, tensor in load_file(source / "model.safetensors").items()
    )
    directory, plain = fp8.convert(source, tmp_path, block_config(16, 16), block=blocks_of(16, 16))
    assert_equal(load(directory), load(plain))


def test_files_decide_what_is_quantised(converted: Callable[..., Any]) -> None:
    def is_converted(name: str, tensor: Tensor) -> bool:
        return tensor.dim() == 2 and (name == "lm_head.weight" or crc32(name.encode()) % 2 == 1)

    directory, plain = converted(is_converted=is_converted)
    assert "lm_head.weight_scale_inv" in load_file(directory / "model.safetensors")  # named among the exceptions
    assert_equal(load(directory), load(plain))


def test_scales_may_be_in_another_file(converted: Callable[..., Any]) -> None:
    directory, plain = converted()
    split_into_shards(directory, 2)
    assert_equal(load(directory), load(plain))


def test_draft_layers_are_skipped_quantised_or_not(converted: Callable[..., Any]) -> None:
    directory, plain = converted()
    names = ["mtp.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight_scale_inv", "mtp.fc.weight"]
    values = [torch.zeros(2, 2).to(torch.float8_e4m3fn), torch.ones(1, 1), torch.zeros(2, 2)]
    fp8.change_tensors(directory, lambda tensors: tensors.update(zip(names, values, strict=True)))
    model = load(directory)
    assert_equal(model, load(plain))
    assert model.weights_report.skipped["mtp."] == 3


def add_scales_of_activations(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name.replace("weight_scale", "input_scale")] = torch.tensor(0.5)


def test_scales_of_activations_are_accepted(converted: Callable[..., Any]) -> None:
    directory, plain = converted("qwen3_5", "tensors")
    assert_equal(load(fp8.change_tensors(directory, add_scales_of_activations)), load(plain))


@pytest.mark.parametrize("name", ["qwen3_5_moe", "nemotron_h", "nemotron_h-odd", "llama", "kimi_linear"])
def test_modelopt_weights_load_with_scales_of_activations(converted: Callable[..., Any], name: str) -> None:
    directory, plain = converted(name, "modelopt")
    fp8.change_tensors(directory, add_scales_of_activations)
    model = load(directory)
    assert_equal(model, load(plain))
    assert model.weights_report.num_quantized
    assert_equal(load(directory, torch.bfloat16), load(plain, torch.bfloat16))


@pytest.mark.parametrize("nests", [True, False])
@pytest.mark.parametrize("algorithm", ["FP8", "MIXED_PRECISION"])
def test_recipe_beside_the_configuration_is_read(converted: Callable[..., Any], algorithm: str, *, nests: bool) -> None:
    directory, plain = converted("nemotron_h", "modelopt")
    recipe = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "mtp*"]}
    recipe |= {"quantized_layers": MIXED} if algorithm == "MIXED_PRECISION" else {}
    content = {"producer": {"name": "modelopt"}, "quantization": recipe} if nests else recipe
    (directory / "hf_quant_config.json").write_text(json.dumps(content))
    fp8.change_json(directory / "config.json", quantization_config=None)
    assert_equal(load(directory), load(plain))


@pytest.mark.parametrize("method", ["modelopt", "modelopt_mixed", None])
@pytest.mark.parametrize("nests", [True, False])
def test_recipe_in_the_configuration_is_read_in_any_form(
    converted: Callable[..., Any], method: str | None, *, nests: bool
) -> None:
    directory, plain = converted("llama", "modelopt")
    recipe: dict[str, Any] = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    config = {"quant_method": method, **({"quantization": recipe} if nests else recipe)}
    fp8.change_json(directory / "config.json", quantization_config=config)
    assert_equal(load(directory), load(plain))


def test_recipe_in_the_configuration_comes_first(converted: Callable[..., Any]) -> None:
    directory, plain = converted("llama", "modelopt")
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert_equal(load(directory), load(plain))


@pytest.mark.parametrize(
    "content", [{"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, {"quant_algo": None}]
)
def test_recipe_for_keys_and_values_alone_changes_no_weights(
    converted: Callable[..., Any], content: dict[str, Any]
) -> None:
    _, plain = converted("llama", "modelopt")
    expected = load(plain)
    (plain / "hf_quant_config.json").write_text(json.dumps(content))
    assert_equal(load(plain), expected)


def test_algorithm_of_a_recipe_beside_the_configuration_is_named(converted: Callable[..., Any]) -> None:
    _, plain = converted("llama", "modelopt")
    (plain / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ConfigError, match="quant_algo 'W4A8_AWQ' is not supported"):
        load(plain)


def test_layers_of_a_mixed_recipe_load(converted: Callable[..., Any]) -> None:
    directory, plain = converted("qwen3_5_moe", "modelopt")
    config = modelopt_config("MIXED_PRECISION", quantized_layers=MIXED)
    fp8.change_json(directory / "config.json", quantization_config=config)
    assert_equal(load(directory), load(plain))


@pytest.mark.parametrize("elements", [1, 100, 2**30])
def test_weights_are_dequantised_in_parts(
    converted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    directory, plain = converted("qwen3_5_moe")
    monkeypatch.setattr(reader, "CHUNK_ELEMENTS", elements)
    assert_equal(load(directory), load(plain))


def test_weights_are_rounded_before_they_are_widened(converted: Callable[..., Any]) -> None:
    directory, plain = converted()
    rounded = {name: weight.to(torch.bfloat16).float() for name, weight in load(plain).named_parameters()}
    rounded_model = load_model(directory, ModelOptions(dtype=torch.float32), FillOptions(rounded_to=torch.bfloat16))
    for name, weight in rounded_model.named_parameters():
        if name.endswith("out_proj.weight_OI"):
            assert torch.equal(weight, rounded[name])


WEIGHT = "model.layers.1.self_attn.k_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"


def drop(tensors: Tensors) -> None:
    del tensors[SCALE]


def replace(tensors: Tensors, *, name: str = SCALE, value: Tensor) -> None:
    tensors[name] = value


def put(tensors: Tensors, *, value: float) -> None:
    tensors[SCALE][1, 0] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, f"{WEIGHT} is stored as F8_E4M3, but neither {SCALE} nor {WEIGHT}_scale is published"),
        (partial(replace, value=torch.ones(2, 3)), rf"{SCALE} has shape \[2, 3\], .*\[32, 32\] asks for \[2, 2\]"),
        (partial(replace, value=torch.ones(4)), rf"{SCALE} has shape \[4\]"),
        (partial(replace, value=torch.ones(2, 2).int()), f"{SCALE} is stored as torch.int32; scales are float32"),
        (partial(put, value=math.nan), rf"{SCALE}\[1, 0\] is nan; scales are positive numbers"),
        (partial(put, value=math.inf), rf"{SCALE}\[1, 0\] is inf; scales are positive numbers"),
        (partial(put, value=0.0), rf"{SCALE}\[1, 0\] is 0\.0; scales are positive numbers"),
        (partial(put, value=-1.0), rf"{SCALE}\[1, 0\] is -1\.0; scales are positive numbers"),
        (
            partial(replace, name=WEIGHT.replace("weight", "input_scale"), value=torch.tensor(math.nan)),
            r"k_proj\.input_scale is nan; scales are positive numbers",
        ),
        (
            partial(replace, name=WEIGHT.replace("weight", "input_scale"), value=torch.ones(2)),
            r"k_proj\.input_scale has shape \[2\]; activations of a matrix have one scale",
        ),
        (
            partial(replace, name=WEIGHT, value=torch.zeros(32, 32)),
            f"{SCALE} not known to this architecture",
        ),
        (
            partial(replace, name=WEIGHT, value=torch.zeros(32, 32).to(torch.float8_e5m2)),
            f"{SCALE} not known to this architecture",
        ),
        (
            partial(replace, name=WEIGHT, value=torch.zeros(32, 16).to(torch.float8_e4m3fn)),
            rf"{WEIGHT} has shape \[32, 16\], the configuration asks for \[32, 32\]",
        ),
        (
            partial(replace, name="model.norm.weight", value=torch.ones(32).to(torch.float8_e4m3fn)),
            r"model\.norm\.weight is stored as F8_E4M3, but neither",
        ),
    ],
)  # fmt: skip
def test_wrong_scale_is_named(converted: Callable[..., Any], change: Callable[[Tensors], None], message: str) -> None:
    directory, _ = converted()
    with pytest.raises(WeightsError, match=message):
        load(fp8.change_tensors(directory, change))


FORMS: dict[str, tuple[tuple[Block, ...], Callable[..., set[tuple[int, ...]]]]] = {
    "blocks": (
        (Block(4, 3),),
        lambda outer, n, k: {(*outer, -(-n // 4), -(-k // 3)), (*outer, -(-n // 4), 1, -(-k // 3), 1)},
    ),
    "channels": ((CHANNEL,), lambda outer, n, k: {(*outer, n), (*outer, n, 1)}),
    "tensors": ((TENSOR,), lambda outer, n, k: {outer, (*outer, 1), (*outer, 1, 1)}),
}
"""What scales cover, and the shapes that they are published in, by the shape of a weight."""


@pytest.mark.parametrize("form", FORMS)
@given(
    outer=st.lists(st.integers(1, 3), max_size=1).map(tuple),
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    data=st.data(),
)
def test_scales_of_any_other_shape_are_refused(
    form: str, outer: tuple[int, ...], rows: int, columns: int, data: st.DataObject
) -> None:
    blocks, shapes = FORMS[form]
    right, weight = shapes(outer, rows, columns), (*outer, rows, columns)
    sizes = sorted({1, 2, rows, columns, *outer, *(size for shape in right for size in shape)})
    shape = tuple(data.draw(st.lists(st.sampled_from(sizes), max_size=5)))
    if shape in right:
        block, scale = scale_grid("scale", torch.ones(shape), weight, Fp8Scheme(blocks))
        assert (*outer, *block.grid(rows, columns)) == scale.shape
    else:
        with pytest.raises(WeightsError, match=r"^scale has shape .*a weight of .* asks for"):
            scale_grid("scale", torch.ones(shape), weight, Fp8Scheme(blocks))


@pytest.mark.parametrize("keeps_quantized", [False, True])
@pytest.mark.parametrize("rows", [16, 32, 128])
@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_flat_scale_of_an_expert_is_refused(
    converted: Callable[..., Any], part: str, rows: int, *, keeps_quantized: bool
) -> None:
    name = f"model.layers.2.mlp.experts.3.{part}_proj.weight_scale_inv"

    def flatten(tensors: Tensors) -> None:
        tensors[name] = tensors[name].flatten()

    size = (rows, 128) if keeps_quantized else (rows, 16)
    options: dict[str, Any] = {"block": blocks_of(*size)}
    directory, _ = converted("qwen3_5_moe", **options)
    fp8.change_json(directory / "config.json", quantization_config=block_config(*size))
    load(directory, keeps_quantized=keeps_quantized)
    with pytest.raises(WeightsError, match=rf"{name} has shape \[\d+\], a weight of"):
        load(fp8.change_tensors(directory, flatten), keeps_quantized=keeps_quantized)


def test_scaled_vector_is_refused(converted: Callable[..., Any]) -> None:
    def scale_norm(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
        tensors["model.norm.weight_scale_inv"] = torch.ones(1, 1)

    with pytest.raises(WeightsError, match=r"norm\.weight_scale_inv scales a weight of shape \[32\]; only matrices"):
        load(fp8.change_tensors(converted()[0], scale_norm))


def test_fp8_without_a_quantization_config_is_refused(converted: Callable[..., Any]) -> None:
    directory, _ = converted()
    fp8.change_json(directory / "config.json", quantization_config=None)
    fp8.change_tensors(directory, lambda tensors: [tensors.pop(x) for x in list(tensors) if x.endswith("_scale_inv")])
    with pytest.raises(WeightsError, match="F8_E4M3; supported: F32, BF16, F16; F8_E4M3 with a quantization_config"):
        load(directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "bits": 4},
            r"""quant_method 'bitsandbytes' is not supported; supported: quant_method "fp8" """,
        ),
        ({"bits": 4}, "quant_method None is not supported"),
        (block_config(128, 128, fmt="e5m2"), "quantization_config.fmt 'e5m2' is not supported; supported: e4m3"),
        (block_config(128, 128, activation_scheme="none"), "activation_scheme 'none' is not supported"),
        (block_config(128, 128, weight_block_size=[128]), "weight_block_size is .128.; it must be two sizes"),
        (block_config(128, 0), r"weight_block_size\[1\] is 0; it must be a whole number from 1"),
        (compressed_config(num_bits=4), "group_0 has format 'float-quantized' and 4-bit weights of type 'float'"),
        (compressed_config(type="int"), "8-bit weights of type 'int'"),
        (compressed_config(strategy="group"), "weights.strategy 'group' is not supported; supported: block, channel"),
        (compressed_config(strategy="block"), "weights.block_structure is missing; it must be a list"),
        ({**compressed_config(), "config_groups": {}}, "config_groups names no group of weights"),
        ({**compressed_config(), "config_groups": {"a": 3}}, "config_groups.a names no weights"),
        (modelopt_config("W4A8_AWQ"), "quant_algo 'W4A8_AWQ' is not supported; supported: .*modelopt"),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, "weight_block_size is .*; it must be 1 and 32"),
        ({"quant_method": "modelopt"}, "modelopt without quant_algo is not supported"),
        (
            modelopt_config("MIXED_PRECISION", quantized_layers=MIXED | {"lm_head": {"quant_algo": "W4A8_AWQ"}}),
            "quant_algo 'W4A8_AWQ' of lm_head is not supported",
        ),
        (
            modelopt_config("MIXED_PRECISION"),
            "quantized_layers of MIXED_PRECISION must be an object of objects, got None",
        ),
        (
            modelopt_config("MIXED_PRECISION", quantized_layers={"a": 3}),
            "quantized_layers of MIXED_PRECISION must be an",
        ),
    ],
)
def test_unsupported_quantisation_is_named(
    saved: Callable[[str], Path], tmp_path: Path, config: Any, message: str
) -> None:
    directory, _ = fp8.convert(saved("qwen3_5"), tmp_path, config, block=blocks_of(16, 16))
    with pytest.raises(ConfigError, match=message):
        load(directory)
