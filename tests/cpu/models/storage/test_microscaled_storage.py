"""Models whose weights stay in FP4 or MXFP8 hold the published numbers, and answer as the dequantised ones."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.errors import WeightsError
from strandline.kernels.gemm.formats.dense import DENSE
from strandline.kernels.gemm.formats.format import Format
from strandline.kernels.gemm.formats.fp4 import FP4
from strandline.kernels.gemm.formats.fp8 import FP8
from strandline.kernels.gemm.formats.mxfp8 import MXFP8
from strandline.kernels.gemm.weights import CodedWeight, ScaledWeight, StackedWeight
from strandline.model_config import read_model_config
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model
from tests.cpu.models import families, four_bit, fp8, microscaled
from tests.cpu.models.fp8 import Tensors
from tests.cpu.models.quantized import TOLERANCE, assert_same_weights, check, check_parts_read, load, logits
from tests.cpu.models.rank_threads import RankThread, RankThreads
from tests.cpu.models.test_weights import unfuse_experts

SIZES = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
"""Multiples of groups."""


def save(name: str, directory: Path, way: str = "modelopt", **options: Any) -> Path:
    """Write a family with its experts one by one, in FP4."""
    source = fp8.change_tensors(families.save(name, directory, **SIZES), unfuse_experts)
    return microscaled.convert(source, directory, way, **options)[0]


def is_expert(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is of routed experts."""
    return tensor.dim() > 1 and re.search(r"\.experts\.|block_sparse_moe\.(in|out)put_linear", name) is not None


def is_in_inkling(name: str, _: Tensor) -> bool:
    """Return whether published models have a tensor in FP4: routed experts, but not those of the first such layer."""
    return re.search(r"layers\.2\.mlp\.experts\.w", name) is not None


@pytest.mark.parametrize(("way", "format"), [("inkling", FP4), ("inkling-compressed", FP4), ("inkling-mxfp8", MXFP8)])
def test_routed_experts_stay_if_the_shared_ones_are_not_quantised(way: str, format: Format, tmp_path: Path) -> None:
    source = families.save("inkling-towers", tmp_path, **SIZES)
    directory, plain = microscaled.convert(source, tmp_path, way, is_converted=is_in_inkling)
    model = check(directory)
    assert_same_weights(model, load(plain, keeps_quantized=False))
    parts = [experts.parts for experts in model.modules() if isinstance(experts, Experts)]
    formats = [[(part.up.format, part.held) for part in of_layer] for of_layer in parts]
    assert formats == [[(DENSE, range(7))], [(format, range(5)), (DENSE, range(5, 7))]]


@pytest.mark.parametrize("way", ["inkling-mxfp8", "mxfp8-compressed"])
def test_experts_of_inkling_2_stay_in_mxfp8(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = families.save("inkling2", tmp_path, **SIZES)
    directory, plain = microscaled.convert(source, tmp_path, way, is_converted=is_expert)
    model = check(directory)
    assert_same_weights(model, load(plain, keeps_quantized=False))
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts
    assert {part.up.format for each in experts for part in each.parts} == {MXFP8}
    check_parts_read(directory, monkeypatch)


def save_gpt_oss(directory: Path) -> tuple[Path, Path]:
    """Write gpt-oss as published, and dequantised."""
    source = families.save("gpt_oss", directory, intermediate_size=32)
    return microscaled.convert(source, directory, "gpt_oss", is_converted=lambda name, tensor: name.endswith("_proj"))


def test_transposed_experts_stay_as_gpt_oss_has_them(tmp_path: Path) -> None:
    directory, plain = save_gpt_oss(tmp_path)
    model = check(directory)
    assert_same_weights(model, load(plain, keeps_quantized=False))
    parts = [experts.parts for experts in model.modules() if isinstance(experts, Experts)]
    assert [[(part.up.format, part.held) for part in of_layer] for of_layer in parts] == [[(FP4, range(5))]] * 3
    expected = logits(load(plain, keeps_quantized=False))
    torch.testing.assert_close(logits(load(directory, keeps_quantized=False)), expected, rtol=0, atol=0)

    def run(ranks: RankThread) -> Tensor:
        return logits(load(directory, keeps_quantized=True, shard=Shard(ranks.rank, ranks.size)), ranks=ranks)

    for found in RankThreads(2).run(run):
        torch.testing.assert_close(found, logits(model), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("_blocks", lambda x: x.flatten(-2), r"gate_up_proj_blocks has shape \[5, 64, 16\]; .* \[5, 64, 1, 16\]"),
        ("_scales", lambda x: x.fill_(255), "gate_up_proj_scales has scales that are not numbers"),
        ("_scales", lambda x: x[:, :60], r"gate_up_proj_scales has shape \[5, 60, 1\]"),
    ],
)
def test_wrong_parts_of_gpt_oss_experts_are_named(name: str, change: Any, message: str, tmp_path: Path) -> None:
    directory, _ = save_gpt_oss(tmp_path)
    key = f"model.layers.0.mlp.experts.gate_up_proj{name}"
    fp8.change_tensors(directory, lambda tensors: tensors.update({key: change(tensors[key]).contiguous()}))
    with pytest.raises(WeightsError, match=message):
        load(directory, keeps_quantized=True)


def test_random_experts_of_gpt_oss_are_quantised_alone(tmp_path: Path) -> None:
    directory, _ = save_gpt_oss(tmp_path)
    model = load_model(
        directory, ModelOptions(keeps_quantized=True, dtype=torch.float32), FillOptions(load_format="dummy")
    )
    assert all(part.up.format is FP4 for x in model.modules() if isinstance(x, Experts) for part in x.parts)
    assert not any(module.is_quantized for module in model.modules() if isinstance(module, Projection))
    assert logits(model).isfinite().all()


def test_ranks_compute_what_one_does_with_experts_in_two_formats(tmp_path: Path) -> None:
    source = families.save("inkling-towers", tmp_path, **SIZES)
    directory = microscaled.convert(source, tmp_path, "inkling", is_converted=is_in_inkling)[0]
    expected = logits(load(directory, keeps_quantized=True))

    def run(ranks: RankThread) -> Tensor:
        return logits(load(directory, keeps_quantized=True, shard=Shard(ranks.rank, ranks.size)), ranks=ranks)

    for found in RankThreads(2).run(run):
        assert float((found - expected).norm() / expected.norm()) < TOLERANCE


def test_head_stays(tmp_path: Path) -> None:
    model = check(save("qwen3_5", tmp_path, is_converted=lambda name, _: name == "lm_head.weight"))
    assert model.decoder.embedding.head.weight.format is FP4


def test_fused_weights_keep_the_factor_of_each_matrix(tmp_path: Path) -> None:
    """Queries, keys and values of very different sizes, each with a factor of its own."""

    def scale(tensors: fp8.Tensors) -> None:
        for name, tensor in tensors.items():
            factor = {"k_proj": 16.0, "v_proj": 1 / 64}.get(name.split(".")[-2], 1.0)
            tensor.mul_(factor)

    source = fp8.change_tensors(families.save("qwen3_5", tmp_path, **SIZES), scale)
    model = check(microscaled.convert(source, tmp_path, "modelopt")[0])
    weights = [module.weight for module in model.modules() if isinstance(module, Projection)]
    factors = [weight.factors for weight in weights if isinstance(weight, CodedWeight)]
    assert max(float(x.max() / x.min()) for x in factors) > 100


def test_weights_in_fp4_and_in_fp8_stay_side_by_side(tmp_path: Path) -> None:
    """As ModelOpt's mixed precision publishes them: experts in FP4, attention in FP8."""

    def quantize_others(tensors: fp8.Tensors) -> None:
        for name in [name for name, tensor in tensors.items() if fp8.is_projection(name, tensor)]:
            if not is_expert(name, tensors[name]):
                tensors[name], scale = fp8.quantize(tensors[name], tuple(tensors[name].shape))  # type: ignore[arg-type]
                tensors[f"{name}_scale"] = scale.reshape(())

    layers = {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8"}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    directory = save("qwen3_5_moe", tmp_path, is_converted=is_expert, config=config)
    model = load(fp8.change_tensors(directory, quantize_others), keeps_quantized=True)
    assert_same_weights(model, load(directory, keeps_quantized=False))
    assert any(
        isinstance(m, Projection) and isinstance(m.weight, ScaledWeight | StackedWeight) for m in model.modules()
    )
    assert all(experts.parts[0].up.format is FP4 for experts in model.modules() if isinstance(experts, Experts))


def test_scales_tell_mxfp8_and_fp8_apart(tmp_path: Path) -> None:
    others = Tensors()

    def quantize_others(tensors: Tensors) -> None:
        for name in [name for name, tensor in tensors.items() if fp8.is_projection(name, tensor)]:
            if not is_expert(name, tensors[name]):
                tensors[name], scale = fp8.quantize(tensors[name], (1, tensors[name].shape[1]))
                tensors[f"{name}_scale"] = scale
                others[name] = tensors[name].float() * scale

    in_mxfp8 = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32}
    groups = {"others": GROUPS["others"], "experts": {"format": "mxfp8-quantized", "weights": in_mxfp8}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    source = fp8.change_tensors(families.save("qwen3_5_moe", tmp_path, **SIZES), unfuse_experts)
    directory, plain = microscaled.convert(source, tmp_path, "mxfp8", is_converted=is_expert, config=config)
    model = load(fp8.change_tensors(directory, quantize_others), keeps_quantized=True)
    plain = fp8.change_tensors(plain, lambda tensors: tensors.update(others))
    assert_same_weights(model, load(plain, keeps_quantized=False))
    assert {part.up.format for x in model.modules() if isinstance(x, Experts) for part in x.parts} == {MXFP8}
    assert any(type(m.weight) is ScaledWeight for m in model.modules() if isinstance(m, Projection))


def test_fp4_and_integers_of_one_packing_stay_side_by_side(tmp_path: Path) -> None:
    """Both publish codes as ``weight_packed``."""
    others = Tensors()

    def quantize_others(tensors: Tensors) -> None:
        for name in [name for name, tensor in tensors.items() if fp8.is_projection(name, tensor)]:
            if not is_expert(name, tensors[name]):
                matrix = four_bit.quantize(tensors.pop(name), 32, symmetric=True, shuffled=False, dtype=torch.float16)
                prefix = name.removesuffix("weight")
                tensors |= four_bit.compressed_tensors(matrix, prefix, zeros=False, groups=False)
                others[name] = matrix.dequantize()

    integers = four_bit.compressed_config(32)
    groups = {"fp4": GROUPS["experts"], "int4": {**integers["config_groups"]["group_0"], "format": "pack-quantized"}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    source = fp8.change_tensors(families.save("qwen3_5_moe", tmp_path, **SIZES), unfuse_experts)
    directory, plain = microscaled.convert(source, tmp_path, "compressed", is_converted=is_expert, config=config)
    model = check(fp8.change_tensors(directory, quantize_others))
    assert_same_weights(model, load(fp8.change_tensors(plain, lambda t: t.update(others)), keeps_quantized=False))
    assert {part.up.format for x in model.modules() if isinstance(x, Experts) for part in x.parts} == {FP4}


def formats_of(model: Any) -> dict[str, set[Format]]:
    """Return the formats of experts, of attention's first projections and of the head."""
    attention = [layer.mixer for layer in model.decoder.layers if isinstance(layer.mixer, Attention)]
    return {
        "experts": {part.up.format for x in model.modules() if isinstance(x, Experts) for part in x.parts},
        "attention": {mixer.in_proj.weight.format for mixer in attention},
        "output": {mixer.out_proj.weight.format for mixer in attention},
        "head": {model.decoder.embedding.head.weight.format},
    }


MIXED_LAYERS = {
    **{f"model.language_model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(4)},
    **{f"model.language_model.layers.{i}.self_attn.{x}_proj": {"quant_algo": "FP8"} for i in range(4) for x in "qkv"},
    "lm_head": {"quant_algo": "W4A16_NVFP4"},
}

GROUPS = {
    "experts": {
        "format": "nvfp4-pack-quantized",
        "targets": ["re:.*mlp[.]experts.*"],
        "weights": {"type": "float", "num_bits": 4, "group_size": 16},
    },
    "others": {
        "format": "float-quantized",
        "targets": ["Linear"],
        "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
    },
}


@pytest.mark.parametrize(
    ("config", "output", "head"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED_LAYERS},
            DENSE,
            FP4,
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": ["lm_head"]},
            FP8,
            DENSE,
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": ["re:.*o_proj"]},
            DENSE,
            DENSE,
        ),
    ],
    ids=["modelopt", "compressed", "compressed-ignored"],
)
def test_random_weights_have_the_formats_of_a_mixed_recipe(
    config: dict[str, Any], output: Format, head: Format, tmp_path: Path
) -> None:
    directory = families.save("qwen3_5_moe", tmp_path, **SIZES)
    fp8.change_json(directory / "config.json", quantization_config=config)
    config_of_model = read_model_config(directory)
    model = load(Path("nowhere"), FillOptions(load_format="dummy"), keeps_quantized=True, config=config_of_model)
    expected = {"experts": {FP4}, "attention": {FP8}, "output": {output}, "head": {head}}
    assert formats_of(model) == expected
    assert bool(logits(model).isfinite().all())
