"""A converted model is read as what it was, within a format's precision, and has the layout of published models."""

import json
import math
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from strandline.cli import QUANTIZED_FORMATS
from strandline.errors import ConfigError, WeightsError
from strandline.models.layers.feed_forward.moe import SparseMoe
from strandline.models.model_options import ModelOptions
from strandline.models.storage import conversion
from strandline.models.storage.conversion import convert, is_converted
from strandline.models.storage.quantizers import BLOCK, QUANTIZERS, nearest_codes
from strandline.models.weights import load_model
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import families, fp8, microscaled
from tests.cpu.models.quantized import assert_same_weights
from tests.cpu.models.test_weights import fuse_experts, split_into_shards, unfuse_experts

SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 300,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 136,
    "shared_expert_intermediate_size": 20,
}


GROUPS_OF_16 = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}

ERRORS = {"fp8": 0.03, "mxfp8": 0.03, "nvfp4": 0.11, "int4": 0.12}
"""``|weight - exact| / |exact|`` of normally distributed weights."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("dense"), **SIZES)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model(tmp_path_factory.mktemp("sparse"), **SIZES, **EXPERTS)
    return fp8.change_tensors(directory, unfuse_experts)


def copy(source: Path, directory: Path) -> Path:
    return Path(shutil.copytree(source, directory))


def tensors_of(directory: Path) -> fp8.Tensors:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def expected_tensors(directory: Path) -> fp8.Tensors:
    """Return what a model in FP8 consists of, computed block by block."""
    expected: fp8.Tensors = {}
    for name, tensor in tensors_of(directory).items():
        expected[name] = tensor
        if fp8.is_projection(name, tensor):
            expected[name], expected[f"{name}_scale_inv"] = fp8.quantize(tensor, (BLOCK, BLOCK))
    return expected


def assert_same(found: fp8.Tensors, expected: fp8.Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor.float(), expected[name].float()), name


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_projections_are_converted_and_nothing_else(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: Path = request.getfixturevalue(kind)
    report = convert(source, tmp_path / "out")
    found, expected = tensors_of(tmp_path / "out"), expected_tensors(source)
    assert_same(found, expected)
    scales = [name for name in found if name.endswith("_scale_inv")]
    assert report.num_converted == len(scales)
    assert report.bytes_after == sum(tensor.nbytes for tensor in found.values())
    assert report.bytes_before == sum(tensor.nbytes for tensor in tensors_of(source).values())


def test_converted_model_loads_within_the_precision_of_e4m3(sparse: Path, tmp_path: Path) -> None:
    report = convert(sparse, tmp_path / "out")
    models = (load_model(path, ModelOptions(dtype=torch.float32)) for path in (sparse, tmp_path / "out"))
    exact, found = (dict(model.named_parameters()) for model in models)
    assert 0.02 < report.relative_error < 0.03
    for name, weight in found.items():
        error = (weight - exact[name]).abs()
        # Half a step of three binary places, or of the smallest numbers in a block.
        assert bool((error <= exact[name].abs() / 16 + exact[name].abs().max() / 448 * 2**-10).all()), name


@pytest.mark.parametrize(
    ("name", "format"),
    [*((name, "fp8") for name in families.CONFIGS), *((name, "nvfp4") for name in families.FAMILIES)],
)
def test_every_family_loads_from_what_is_written(name: str, format: str, tmp_path: Path) -> None:
    source = families.save(name, tmp_path, **(GROUPS_OF_16 if format == "nvfp4" else {}))
    report = convert(source, tmp_path / "out", format)
    model: Any = load_model(tmp_path / "out", ModelOptions(dtype=torch.float32))
    num_written = sum(name.endswith(("_packed", "_scale_inv")) for name in tensors_of(tmp_path / "out"))
    assert model.weights_report.num_quantized == num_written >= report.num_converted > 0
    exact: Any = load_model(source, ModelOptions(dtype=torch.float32))
    for (weight_name, weight), (_, expected) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        assert float((weight - expected).norm()) <= ERRORS[format] * float(expected.norm()), weight_name
    quantized = load_model(tmp_path / "out", ModelOptions(dtype=torch.float32, keeps_quantized=True))
    assert_same_weights(quantized, model)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose projections have groups of 128 inputs, but for the second one of the shared expert."""
    sizes = {**SIZES, **EXPERTS, "hidden_size": 256, "linear_value_head_dim": 64, "moe_intermediate_size": 128}
    return save_tiny_model(tmp_path_factory.mktemp("wide"), **sizes)


@pytest.mark.parametrize("format", QUANTIZERS)
def test_files_stand_for_the_nearest_numbers(format: str, wide: Path, tmp_path: Path) -> None:
    report = convert(wide, tmp_path / "out", format)
    models = (load_model(path, ModelOptions(dtype=torch.float32)) for path in (wide, tmp_path / "out"))
    exact, found = (dict(model.named_parameters()) for model in models)
    changed = [name for name, weight in found.items() if not torch.equal(weight, exact[name])]
    assert report.num_converted >= len(changed) > 10
    assert report.relative_error < ERRORS[format]
    for name in changed:
        assert float((found[name] - exact[name]).norm()) <= ERRORS[format] * float(exact[name].norm()), name
    quantized = load_model(tmp_path / "out", ModelOptions(dtype=torch.float32, keeps_quantized=True))
    assert_same_weights(quantized, load_model(tmp_path / "out", ModelOptions(dtype=torch.float32)))


@given(st.sampled_from(["nvfp4", "int4"]), st.integers(0, 2**31), st.floats(-20, 20))
def test_no_other_code_is_nearer(format: str, seed: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 256, generator=generator) * 2.0**exponent
    parts, restored = quantize(weight, format)
    if format == "nvfp4":
        numbers, group = torch.cat((microscaled.NUMBERS, -microscaled.NUMBERS)), 16
        scale = parts["_scale"].float() / parts["_global_scale"]
        torch.testing.assert_close(parts["_scale"].float().max(), torch.tensor(448.0), rtol=0, atol=0)
    else:
        numbers, group, scale = torch.arange(-8.0, 8.0), 128, parts["_scale"]
    candidates = numbers * scale.repeat_interleave(group, 1).unsqueeze(-1)
    error, least = (restored - weight).abs(), (candidates - weight.unsqueeze(-1)).abs().amin(-1)
    assert bool((error <= least + 1e-6 * weight.abs().max()).all())


@given(st.integers(0, 2**31), st.floats(-60, 8))
def test_scales_of_mxfp8_are_the_least_that_clip_nothing(seed: int, exponent: float) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[0, 32:], weight[1, 0] = 0, 448 * 2.0 ** round(exponent)
    parts, restored = quantize(weight, "mxfp8")
    scale, largest = 2.0 ** (parts["_scale"].float() - 127), weight.unflatten(1, (-1, 32)).abs().amax(2)
    assert bool((largest <= 448 * scale).all())
    assert bool((largest[largest > 0] > 224 * scale[largest > 0]).all())
    limit = torch.maximum(weight.abs() / 16, scale.repeat_interleave(32, 1) * 2.0**-10)
    assert bool(((restored - weight).abs() <= limit).all())
    assert torch.equal(parts[""].float() * scale.repeat_interleave(32, 1), restored)


def test_joined_projections_share_the_factor_of_the_largest(wide: Path, tmp_path: Path) -> None:
    convert(wide, tmp_path / "out", "nvfp4")
    found, exact = tensors_of(tmp_path / "out"), tensors_of(wide)
    prefix = "model.layers.1.self_attn."
    largest = max(float(exact[f"{prefix}{x}_proj.weight"].abs().max()) for x in "qkv")
    for x in "qkv":
        assert float(found[f"{prefix}{x}_proj.weight_global_scale"]) == pytest.approx(2688 / largest, rel=1e-6)


def test_ignored_modules_stay_as_they_are(sparse: Path, tmp_path: Path) -> None:
    convert(sparse, tmp_path / "out", "fp8", ["*.self_attn.*", "model.layers.0.mlp.experts.3.up_proj"])
    found, exact = tensors_of(tmp_path / "out"), tensors_of(sparse)
    ignored = [name for name in exact if ".self_attn." in name or ".0.mlp.experts.3.up_proj" in name]
    assert all(torch.equal(found[name], exact[name]) for name in ignored)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.experts.3.up_proj" in config["modules_to_not_convert"]
    assert load_model(tmp_path / "out").weights_report.num_quantized > 0


@pytest.mark.parametrize(
    ("ignore", "message"),
    [(["*.self_atn.*"], r"--ignore \*\.self_atn\.\* matches no module"), (["*"], "has no weight to convert to fp8")],
)
def test_patterns_must_match_something_and_leave_something(ignore: list[str], message: str, dense: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(dense, dense / "out", "fp8", ignore)
    assert not (dense / "out").exists()


def test_draft_layers_are_left_to_formats_that_publish_them(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source", **{**SIZES, "hidden_size": 256})
    fp8.change_tensors(source, lambda t: t.update({"mtp.layers.0.mlp.up_proj.weight": torch.randn(128, 256)}))
    for format in QUANTIZERS:
        convert(source, tmp_path / format, format)
        assert ("mtp.layers.0.mlp.up_proj.weight_scale_inv" in tensors_of(tmp_path / format)) == (format == "fp8")
        assert "mtp.layers.0.mlp.up_proj.weight_packed" not in tensors_of(tmp_path / format)


def test_command_names_all_formats() -> None:
    assert tuple(QUANTIZERS) == QUANTIZED_FORMATS


def test_experts_in_one_tensor_are_written_one_by_one(sparse: Path, tmp_path: Path) -> None:
    fused = copy(sparse, tmp_path / "fused")
    fp8.change_tensors(fused, fuse_experts)
    convert(fused, tmp_path / "a")
    convert(sparse, tmp_path / "b")
    assert_same(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))


def test_experts_of_granite_are_converted_in_one_tensor(tmp_path: Path) -> None:
    source = families.save("granite_hybrid", tmp_path)
    convert(source, tmp_path / "out")
    found, exact = tensors_of(tmp_path / "out"), tensors_of(source)
    names = [name for name in exact if ".block_sparse_moe." in name and "router" not in name]
    assert names
    for name in names:
        experts = [fp8.quantize(expert, (BLOCK, BLOCK)) for expert in exact[name]]
        expected = {name: torch.stack([values.float() for values, _ in experts])}
        expected[f"{name}_scale_inv"] = torch.stack([scales for _, scales in experts])
        assert found[name].dtype == torch.float8_e4m3fn
        for part, values in expected.items():
            assert torch.equal(found[part].float(), values)
    quantized: Any = load_model(tmp_path / "out", ModelOptions(dtype=torch.float32, keeps_quantized=True))
    layers = [layer.mlp for layer in quantized.decoder.layers if isinstance(layer.mlp, SparseMoe)]
    assert layers
    assert all(layer.experts.takes_quantized for layer in layers)


def test_experts_in_one_tensor_stay_so_in_int4(tmp_path: Path) -> None:
    source = families.save("granite_hybrid", tmp_path, intermediate_size=128)
    report = convert(source, tmp_path / "out", "int4")
    exact, found = tensors_of(source), load_model(tmp_path / "out", ModelOptions(dtype=torch.float32))
    names = [name for name in exact if name.endswith("block_sparse_moe.output_linear.weight")]
    assert report.num_converted == len(names) == 3
    for layer, name in enumerate(names):
        restored = torch.stack([quantize(expert, "int4")[1] for expert in exact[name]])
        assert torch.equal(found.decoder.layers[layer].mlp.experts.down_XEF, restored)  # type: ignore[attr-defined]


def test_output_is_divided_into_files_with_an_index(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "SHARD_BYTES", 100_000)
    monkeypatch.setattr(conversion, "CHUNK_ELEMENTS", 1)
    convert(dense, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    count = len(files)
    assert [file.name for file in files] == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert_same(tensors_of(tmp_path / "out"), expected_tensors(dense))
    others = (tmp_path / "out" / "config.json").stat().st_mode
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {stat.S_IMODE(others)}


def test_configuration_names_what_is_not_converted(dense: Path, tmp_path: Path) -> None:
    convert(dense, tmp_path / "out")
    before, after = (json.loads((path / "config.json").read_text()) for path in (dense, tmp_path / "out"))
    added = after.pop("quantization_config")
    assert after == before
    gates = [f"model.layers.{layer}.linear_attn.in_proj_{x}" for layer in (0, 2) for x in "ab"]
    assert added == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.embed_tokens", *gates],
    }


def test_other_files_are_copied(dense: Path, tmp_path: Path) -> None:
    source = copy(dense, tmp_path / "source")
    split_into_shards(source)
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "notes.py").write_text("")
    convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ x }}"
    assert not (tmp_path / "out" / "notes.py").exists()
    load_model(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (2, 2), True),
        ("model.layers.0.mlp.gate_proj.weight", (2, 2), True),
        ("model.language_model.layers.0.linear_attn.in_proj_qkvz.weight", (2, 2), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 2, 2), True),
        ("model.layers.0.mlp.experts.3.down_proj.weight", (2, 2), True),
        ("model.layers.0.feed_forward.w1.weight", (2, 2), True),
        ("mtp.layers.0.self_attn.q_proj.weight", (2, 2), True),
        ("mtp.fc.weight", (2, 2), False),
        ("mtp.layers.0.eh_proj.weight", (2, 2), False),
        ("lm_head.weight", (2, 2), False),
        ("model.embed_tokens.weight", (2, 2), False),
        ("model.layers.0.mlp.gate.weight", (2, 2), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 2), False),
        ("model.layers.0.block_sparse_moe.router.layer.weight", (2, 2), False),
        ("model.layers.0.linear_attn.in_proj_ba.weight", (2, 2), False),
        ("model.layers.0.linear_attn.b_proj.weight", (2, 2), False),
        ("model.layers.0.linear_attn.conv1d.weight", (2, 1, 2), False),
        ("model.layers.0.conv.conv.weight", (2, 1, 2), False),
        ("model.visual.blocks.0.attn.qkv.weight", (2, 2), False),
        ("model.layers.0.self_attn.q_proj.bias", (2,), False),
        ("model.layers.0.input_layernorm.weight", (2,), False),
    ],
)
def test_rule_is_that_of_published_models(name: str, shape: tuple[int, ...], *, expected: bool) -> None:
    assert is_converted(name, shape) is expected


def quantize(weight: torch.Tensor, format: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the parts of a matrix, and what they stand for."""
    largest = weight.float().abs().max()
    rows = QUANTIZERS[format].quantize(weight, largest)
    return rows.parts | QUANTIZERS[format].once(weight.shape, largest), rows.restored_NK


@pytest.mark.parametrize("format", QUANTIZERS)
@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-30])
def test_zeros_and_tiny_weights_have_finite_scales(format: str, value: float) -> None:
    weight = torch.zeros(130, 384)
    weight[:, 290] = value
    parts, restored = quantize(weight, format)
    for name, part in parts.items():
        assert bool(part.float().isfinite().all()), name
        assert name not in ("_scale_inv", "_global_scale") or bool((part > 0).all())
    assert not restored[:, :256].any()


@pytest.mark.parametrize("format", QUANTIZERS)
def test_conversion_does_not_change_its_input(format: str) -> None:
    weight = torch.randn(256, 128)
    before = weight.clone()
    quantize(weight, format)
    assert torch.equal(weight, before)


@example(0.25)
@example(-0.75)
@example(1.25)
@example(1.75)
@example(2.5)
@example(-3.5)
@example(5.0)
@example(-0.0)
@given(st.floats(-8, 8, width=32))
def test_fp4_rounds_to_nearest_and_ties_to_even_codes(x: float) -> None:
    code = int(nearest_codes(torch.tensor(x)))
    numbers = microscaled.NUMBERS.tolist()
    distances = [abs(abs(x) - number) for number in numbers]
    nearest = [i for i, distance in enumerate(distances) if distance == min(distances)]
    assert (code & 7) == (nearest[0] if len(nearest) == 1 else next(i for i in nearest if i % 2 == 0))
    assert (code >> 3) == (math.copysign(1, x) < 0)


def to_nan(tensors: fp8.Tensors) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.nan


def quantized_already(directory: Path) -> None:
    fp8.change_json(directory / "config.json", quantization_config={"quant_method": "fp8"})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (quantized_already, ConfigError, "is quantised already"),
        (
            lambda path: fp8.change_json(path / "config.json", architectures=["Other"]),
            ConfigError,
            "names Other",
        ),
        (
            lambda path: fp8.change_tensors(path, to_nan),
            WeightsError,
            r"layers\.0\.mlp\.up_proj\.weight holds a weight that is not a finite number",
        ),
        (lambda path: (path / "model.safetensors").unlink(), WeightsError, "holds no"),
    ],
)
def test_model_that_cannot_be_converted_is_refused(
    dense: Path, tmp_path: Path, change: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    source = copy(dense, tmp_path / "source")
    change(source)
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_output_that_holds_files_is_refused(dense: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty; name a new directory"):
        convert(dense, dense)
    with pytest.raises(ConfigError, match="cannot be written to"):
        convert(dense, dense / "config.json")
