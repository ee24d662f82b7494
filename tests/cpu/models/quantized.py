"""Compares models whose weights stay quantised with the dequantised ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.kernels.gemm.weights import DenseWeight, StackedWeight
from strandline.kernels.ranks import ONE_RANK, Ranks
from strandline.model_config import ModelConfig
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.storage.weights_files import WeightsFile
from strandline.models.weights import FROM_FILES, FillOptions, load_model
from tests.cpu.models import families
from tests.cpu.models.driver import Driver, Part, Running

TOLERANCE = 2e-5
"""``|logits - those of the dequantised model|`` over the latter, both in float32."""

TOLERANCE_FP8 = 0.2
"""The same where inputs of every product are rounded to four places, in layers of 32 channels, where a token may then
choose another expert."""


def load(
    directory: Path,
    filling: FillOptions = FROM_FILES,
    *,
    keeps_quantized: bool,
    config: ModelConfig | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Any:
    options_of_model = ModelOptions(dtype=torch.float32, keeps_quantized=keeps_quantized, **options)
    return load_model(directory, options_of_model, filling, config=config, tensors=tensors)


def values_of(weight: Any) -> Tensor:
    """Return what a weight of any format stands for."""
    if isinstance(weight, StackedWeight):
        return torch.cat([values_of(part) for part in weight.parts])
    if isinstance(weight, DenseWeight):
        return weight.values_OI
    dequantized: Tensor = weight.dequantize()
    return dequantized


def assert_same_weights(quantized: Any, dequantized: Any) -> None:
    """Compare all weights, bit by bit."""
    rest = dict(dequantized.named_parameters())
    for name, parameter in quantized.named_parameters():
        assert torch.equal(parameter, rest.pop(name)), name
    modules = dict(quantized.named_modules())
    for name, expected in rest.items():
        owner, _, attribute = name.rpartition(".")
        module = modules[owner]
        if isinstance(module, Projection):
            found = values_of(module.weight)
        else:
            found = torch.cat([values_of(part[attribute == "down_XEF"]) for part in module.parts])
        assert torch.equal(found, expected), name


def logits(model: Any, num_tokens: int = 20, ranks: Ranks = ONE_RANK) -> Tensor:
    tokens, sequence = families.prompt(num_tokens + 1), Running()
    driver = Driver(model, ranks=ranks)
    (prefilled,), _ = driver.step([Part(sequence, tokens[:-1])])
    (decoded,), _ = driver.step([Part(sequence, tokens[-1:])])
    return torch.cat((prefilled, decoded))


def check(directory: Path, tolerance: float = TOLERANCE) -> Any:
    """Compare a model whose weights stay quantised with the dequantised one; return it."""
    quantized, dequantized = (load(directory, keeps_quantized=keeps) for keeps in (True, False))
    assert_same_weights(quantized, dequantized)
    found, expected = logits(quantized), logits(dequantized)
    assert float((found - expected).norm() / expected.norm()) < tolerance
    return quantized


def check_parts_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each of two ranks reads about half of the quantised numbers."""
    get, read = WeightsFile.get, list[int]()

    def counted(file: WeightsFile, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        tensor = get(file, name, index)
        is_quantized = tensor.dtype in (torch.uint8, torch.float8_e4m3fn, torch.int32)
        read.append(tensor.numel() * (is_quantized and name.endswith(("weight", "_packed"))))
        return tensor

    monkeypatch.setattr(WeightsFile, "get", counted)
    amounts = []
    for shard in (Shard(0, 1), Shard(0, 2), Shard(1, 2)):
        read.clear()
        load(directory, keeps_quantized=True, shard=shard)
        amounts.append(sum(read))
    whole, *parts = amounts
    assert all(0.4 * whole < part < 0.6 * whole for part in parts)
