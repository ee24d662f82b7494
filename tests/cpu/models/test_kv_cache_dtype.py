"""Families keep their keys and values in FP8 where they are asked to, and their logits stay close; others refuse."""

from pathlib import Path

import pytest
import torch

from strandline.errors import ConfigError, WeightsError
from strandline.models.model_options import ModelOptions
from strandline.models.weights import load_model
from tests.cpu.models import families, fp8
from tests.cpu.models.driver import Driver, Part, Running

TOKENS = families.prompt(100)

MAX_DIFFERENCE = 0.1
"""``|logits - exact| / |exact|``: keys and values are rounded to four places, and errors grow from layer to layer."""


REFUSED = {name for name, family in families.CONFIGS.items() if not family.keeps_e4m3}
"""Keep a latent of every token or index keys, or attend in a layer of their own."""


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_families_with_other_attention_are_refused(name: str, tmp_path: Path) -> None:
    directory = families.save(name, tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"--kv-cache-dtype: this architecture has no keys and values in .*; it keeps tokens in float32$",
    ):
        load_model(directory, ModelOptions(dtype=torch.float32, kv_cache_dtype="float8_e4m3fn"))


def test_scales_of_absent_keys_are_checked_and_not_used(tmp_path: Path) -> None:
    directory = families.save("kimi_linear", tmp_path)
    name = "model.layers.3.self_attn.k_proj.k_scale"
    fp8.change_tensors(directory, lambda tensors: tensors.update({name: torch.tensor(0.5)}))
    load_model(directory, ModelOptions(dtype=torch.float32))
    fp8.change_tensors(directory, lambda tensors: tensors.update({name: torch.tensor(-0.5)}))
    with pytest.raises(WeightsError, match=r"k_scale is -0\.5; scales are positive numbers"):
        load_model(directory, ModelOptions(dtype=torch.float32))


@pytest.mark.parametrize("name", sorted(families.CONFIGS.keys() - set(REFUSED)))
def test_logits_stay_close_to_full_width(name: str, tmp_path: Path) -> None:
    directory = families.save(name, tmp_path)
    found = []
    for dtype in (None, "float8_e4m3fn"):
        model = load_model(directory, ModelOptions(dtype=torch.float32, kv_cache_dtype=dtype))
        kept = {stream.dtype for layer in model.spec.layers for stream in layer.streams}
        assert kept <= {dtype or "float32"}
        (logits,), _ = Driver(model).step([Part(Running(), TOKENS)])
        found.append(logits)
    difference = float((found[1] - found[0]).norm() / found[0].norm())
    assert difference < MAX_DIFFERENCE
    assert (difference > 0) == bool(kept)


def test_scales_reach_attention_beside_a_recurrent_layer(tmp_path: Path) -> None:
    directory = families.save("falcon_h1", tmp_path)
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.1.self_attn.v_scale": torch.ones(1) * 3,
    }
    fp8.change_tensors(directory, lambda tensors: tensors.update(scales))
    model = load_model(directory, ModelOptions(dtype=torch.float32, kv_cache_dtype="float8_e4m3fn"))
    found = {index: (scale.key, scale.value) for index, scale in model.kv_scales.items()}
    assert (found[0], found[1]) == ((0.5, 1.0), (1.0, 3.0))
