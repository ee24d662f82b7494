"""Weights that are copied into the memory of others: nothing of the old ones stays, and no address changes."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strandline.device.weights.model_memory import can_copy, pair_tensors, tensors_of
from strandline.kernels.gemm.weights import lay_out
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model
from tests.cpu.models import families
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.quantized import load
from tests.cpu.models.storage.test_stored_formats import MAIN, save


def random_model(directory: Path, seed: int) -> Any:
    model = load_model(directory, ModelOptions(dtype=torch.float32), FillOptions(load_format="dummy", seed=seed))
    model.lay_out(lay_out)
    return model


def logits(driver: Driver) -> Tensor:
    """Return logits of a prompt and of a token after it."""
    tokens, sequence = families.prompt(71), Running()
    (prefilled,), _ = driver.step([Part(sequence, tokens[:-1])])
    (decoded,), _ = driver.step([Part(sequence, tokens[-1:])])
    return torch.cat((prefilled, decoded))


def addresses(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_of(model)]


@pytest.mark.parametrize("name", list(families.CONFIGS))
def test_copied_weights_compute_as_their_own_model(name: str, tmp_path: Path) -> None:
    directory = families.save(name, tmp_path)
    old, new = random_model(directory, 1), random_model(directory, 2)
    driver, expected, before = Driver(old), logits(Driver(new)), addresses(old)
    assert not torch.equal(logits(driver), expected)
    assert can_copy(old)
    for mine, other in pair_tensors(old, new):
        mine.copy_(other)
    assert torch.equal(logits(driver), expected)
    assert addresses(old) == before


@pytest.mark.parametrize("format", MAIN)
def test_memory_of_quantised_experts_is_found(format: str, tmp_path: Path) -> None:
    directory, _ = save("qwen3_5_moe", format, tmp_path)
    model = load(directory, keeps_quantized=True)
    parts = [part for module in model.modules() if isinstance(module, Experts) for part in module.parts]
    weights = [weight for part in parts for weight in (part.up, part.down)]
    values = [getattr(weight, field.name) for weight in weights for field in fields(weight)]
    taken = {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}
    assert len(taken) >= 2 * len(weights) > 0
    assert taken <= {tensor.untyped_storage().data_ptr() for tensor in tensors_of(model)}
