"""A converted model is read as what it was, within e4m3's precision, and has the layout of published FP8 models."""

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strandline.errors import ConfigError, WeightsError
from strandline.models.layers.moe import SparseMoe
from strandline.models.storage import fp8_conversion
from strandline.models.storage.fp8_conversion import BLOCK, convert_to_fp8, is_converted, quantize_blocks
from strandline.models.weights import load_model
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import families, fp8
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
    report = convert_to_fp8(source, tmp_path / "out")
    found, expected = tensors_of(tmp_path / "out"), expected_tensors(source)
    assert_same(found, expected)
    scales = [name for name in found if name.endswith("_scale_inv")]
    assert report.num_converted == len(scales)
    assert report.bytes_after == sum(tensor.nbytes for tensor in found.values())
    assert report.bytes_before == sum(tensor.nbytes for tensor in tensors_of(source).values())


def test_converted_model_loads_within_the_precision_of_e4m3(sparse: Path, tmp_path: Path) -> None:
    report = convert_to_fp8(sparse, tmp_path / "out")
    models = (load_model(path, dtype=torch.float32) for path in (sparse, tmp_path / "out"))
    exact, found = (dict(model.named_parameters()) for model in models)
    assert 0.02 < report.relative_error < 0.03
    for name, weight in found.items():
        error = (weight - exact[name]).abs()
        # Half a step of three binary places, or of the smallest numbers in a block.
        assert bool((error <= exact[name].abs() / 16 + exact[name].abs().max() / 448 * 2**-10).all()), name


@pytest.mark.parametrize("name", families.CONFIGS)
def test_every_family_loads_from_what_is_written(name: str, tmp_path: Path) -> None:
    source = families.save(name, tmp_path)
    report = convert_to_fp8(source, tmp_path / "out")
    model: Any = load_model(tmp_path / "out", dtype=torch.float32)
    num_scales = sum(name.endswith("_scale_inv") for name in tensors_of(tmp_path / "out"))
    assert model.weights_report.num_quantized == num_scales >= report.num_converted > 0
    exact: Any = load_model(source, dtype=torch.float32)
    for (weight_name, weight), (_, expected) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        assert float((weight - expected).norm()) <= 0.03 * float(expected.norm()), weight_name


def test_experts_in_one_tensor_are_written_one_by_one(sparse: Path, tmp_path: Path) -> None:
    fused = copy(sparse, tmp_path / "fused")
    fp8.change_tensors(fused, fuse_experts)
    convert_to_fp8(fused, tmp_path / "a")
    convert_to_fp8(sparse, tmp_path / "b")
    assert_same(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))


def test_experts_of_granite_are_converted_in_one_tensor(tmp_path: Path) -> None:
    source = families.save("granite_hybrid", tmp_path)
    convert_to_fp8(source, tmp_path / "out")
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
    kept: Any = load_model(tmp_path / "out", dtype=torch.float32, keeps_quantized=True)
    layers = [layer.mlp for layer in kept.decoder.layers if isinstance(layer.mlp, SparseMoe)]
    assert layers
    assert all(layer.experts.takes_quantized for layer in layers)


def test_output_is_divided_into_files_with_an_index(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_conversion, "SHARD_BYTES", 100_000)
    monkeypatch.setattr(fp8_conversion, "CHUNK_ELEMENTS", 1)
    convert_to_fp8(dense, tmp_path / "out")
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
    convert_to_fp8(dense, tmp_path / "out")
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
    convert_to_fp8(source, tmp_path / "out")
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


def test_blocks_of_zeros_and_of_tiny_weights_have_positive_scales() -> None:
    weight = torch.zeros(130, 300)
    weight[:, 290] = 1e-44
    quantized, scale = quantize_blocks(weight)
    assert bool((scale > 0).all())
    assert bool(quantized.float().isfinite().all())
    assert not quantized[:, :256].float().any()


def test_conversion_does_not_change_its_input() -> None:
    weight = torch.randn(256, 128)
    before = weight.clone()
    quantize_blocks(weight)
    assert torch.equal(weight, before)


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
        convert_to_fp8(source, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_output_that_holds_files_is_refused(dense: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty; name a new directory"):
        convert_to_fp8(dense, dense)
    with pytest.raises(ConfigError, match="cannot be written to"):
        convert_to_fp8(dense, dense / "config.json")
