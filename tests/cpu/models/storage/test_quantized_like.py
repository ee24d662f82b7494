"""Weights that are sent or read in full precision get the formats of the weights that they replace."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strandline.device.weights.model_memory import pair_tensors
from strandline.errors import WeightsError
from strandline.kernels.gemm.weights import DenseWeight
from strandline.models.model_options import ModelOptions
from strandline.models.storage.conversion import convert
from strandline.models.weights import FillOptions, load_model
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models.quantized import assert_same_weights, load, logits
from tests.cpu.models.storage.test_conversion import EXPERTS, SIZES, tensors_of
from tests.cpu.models.test_weights import unfuse_experts

FORMATS = ["fp8", "mxfp8", "nvfp4", "int4"]
SIZES_OF_GROUPS: dict[str, Any] = SIZES | {
    "hidden_size": 256,
    "intermediate_size": 384,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}


def save(directory: Path, seed: int, kind: str) -> Path:
    sizes = SIZES_OF_GROUPS if kind == "dense" else EXPERTS | SIZES_OF_GROUPS
    return save_tiny_model(directory, seed=seed, **sizes)


def changed_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_plain_weights_become_what_conversion_writes(format: str, kind: str, tmp_path: Path) -> None:
    plain = [save(tmp_path / f"plain-{seed}", seed, kind) for seed in (1, 2)]
    old, new = tmp_path / "old", tmp_path / "new"
    for source, output in zip(plain, (old, new), strict=True):
        convert(source, output, format)
    served, expected = load(old, keeps_quantized=True), load(new, keeps_quantized=True)
    wanted = served.weights_report.stored
    assert wanted == expected.weights_report.stored != {}
    tensors = load_file(plain[1] / "model.safetensors")
    for sent in (tensors, unfuse_experts(tensors) if kind == "sparse" else {}):
        if sent:
            found = load(old, FillOptions(quantized_as=wanted), keeps_quantized=True, tensors=sent)
            assert found.weights_report.stored == wanted
            assert_same_weights(found, load(new, keeps_quantized=False))
    for model in (served, expected, found):
        model.lay_out(DenseWeight)
    assert not torch.equal(logits(served), logits(expected))
    assert torch.equal(logits(found), logits(expected))
    for mine, other in pair_tensors(served, found):
        mine.copy_(other)
    assert torch.equal(logits(served), logits(expected))


@pytest.mark.parametrize("scale", ["channel", "tensor"])
def test_fp8_of_rows_and_tensors_is_rounded_once(scale: str, tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", 1, "dense")
    tensors = load_file(plain / "model.safetensors")
    directory = tmp_path / scale
    convert(plain, directory, "fp8")
    algorithm = {"channel": "FP8_PER_CHANNEL_PER_TOKEN", "tensor": "FP8"}[scale]
    changed_config(directory, quant_method="modelopt", quant_algo=algorithm)
    wanted = load(_with_scales(directory, tensors, scale), keeps_quantized=True).weights_report.stored
    found = load(directory, FillOptions(quantized_as=wanted), keeps_quantized=True, tensors=tensors)
    assert_same_weights(found, load(directory, keeps_quantized=False))


def _with_scales(directory: Path, tensors: dict[str, Tensor], scale: str) -> Path:
    """Write weights in FP8 with a scale for each row or for the whole; return the directory."""
    published = tensors_of(directory)
    for path in [*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"]:
        path.unlink()
    for name in [name for name, tensor in published.items() if tensor.dtype == torch.float8_e4m3fn]:
        weight = tensors[name].float()
        largest = weight.abs().amax(1, keepdim=True) if scale == "channel" else weight.abs().amax().reshape(1)
        del published[f"{name}_scale_inv"]
        published[f"{name}_scale"] = largest / 448
        published[name] = (weight / (largest / 448)).clamp(-448, 448).to(torch.float8_e4m3fn)
    save_file(published, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_weights_that_nothing_converts_are_refused(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", 1, "dense")
    tensors = load_file(plain / "model.safetensors")
    directory = tmp_path / "gptq"
    shutil.copytree(plain, directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    (directory / "config.json").write_text(json.dumps(config))
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    with pytest.raises(WeightsError, match="nothing converts it"):
        load_model(directory, ModelOptions(keeps_quantized=True), FillOptions(quantized_as={name: 0}), tensors=tensors)


def test_weights_with_other_inputs_than_groups_are_refused(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", 1, "dense")
    convert(plain, tmp_path / "int4", "int4")
    wanted = load(tmp_path / "int4", keeps_quantized=True).weights_report.stored
    tensors = load_file(plain / "model.safetensors")
    name = next(iter(wanted))
    with pytest.raises(WeightsError, match="multiple of 128"):
        load(
            tmp_path / "int4",
            FillOptions(quantized_as=wanted),
            keeps_quantized=True,
            tensors=tensors | {name: tensors[name][:, :-1]},
        )
    tensors[name] /= 0
    with pytest.raises(WeightsError, match="not a finite number"):
        load(tmp_path / "int4", FillOptions(quantized_as=wanted), keeps_quantized=True, tensors=tensors)
