"""Layers are distinct where they may launch different kernels."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strandline.device.meta_device import META, zeros_from_meta
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.distinct_layers import distinct_layers
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model

CONFIGS = Path(__file__).parents[4] / "benchmarks" / "configs"


@dataclass(frozen=True)
class Settings:
    window_tokens: int | None


class Layer(nn.Module):
    def __init__(self, settings: Settings, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.weight = settings, nn.Parameter(torch.zeros(size, 2, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize("other", [{"settings": Settings(8)}, {"size": 6}, {"dtype": torch.bfloat16}], ids=str)
def test_layers_differ_in_settings_shapes_and_dtypes(other: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"settings": Settings(None), "size": 4}
    layers = [Layer(**(usual | (other if index % 3 == 2 else {}))) for index in range(12)]
    assert distinct_layers(layers) == [0, 1, 2, 5]


def load(name: str) -> CausalLM:
    with zeros_from_meta():
        return load_model(CONFIGS / name, ModelOptions(device=META), FillOptions(load_format="dummy"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("qwen3.5-4b", [0, 1, 3, 7]), ("mamba-codestral-7b", [0, 1]), ("lfm2-8b-a1b", [0, 1, 2, 3, 4, 6])],
)
def test_models_of_many_layers_have_few_that_are_distinct(name: str, expected: list[int]) -> None:
    assert distinct_layers(list(load(name).decoder.layers)) == expected


def test_windows_make_layers_distinct(tmp_path: Path) -> None:
    """Windows change no tensor of a layer."""
    config = json.loads((CONFIGS / "inkling-cut" / "config.json").read_text())
    config.update(swa_num_key_value_heads=8, mlp_layer_types=["sparse"] * 6)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with zeros_from_meta():
        model = load_model(tmp_path, ModelOptions(device=META), FillOptions(load_format="dummy"))
    assert distinct_layers(list(model.decoder.layers)) == [0, 1, 5]
