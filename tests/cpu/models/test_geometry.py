"""Sizes that are read from a configuration, against the model that transformers makes of it."""

import json
from pathlib import Path

import pytest

from strandline.bench.cost import estimated
from strandline.models.geometry import read_model_size
from tests.cpu.models.families import config_of, oracle

NUM_EXPERTS, NUM_CHOSEN = 5, 2


@pytest.mark.parametrize(
    "name", ["granite_hybrid", "jamba", "lfm2_moe", "minimax", "nemotron_h", "qwen3_5_moe", "qwen3_moe"]
)
def test_active_weights_are_those_that_one_token_uses(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    active = 0.0
    for parameter_name, parameter in oracle(name).named_parameters():
        is_expert = ".experts." in parameter_name
        active += 0 if "embed" in parameter_name else parameter.numel() * (NUM_CHOSEN / NUM_EXPERTS if is_expert else 1)
    # Ours are at most 8 % more: an expert of zeros stands where none is shared, and rows are padded.
    assert active <= read_model_size(tmp_path).num_active_weights <= 1.08 * active


@pytest.mark.parametrize(
    ("name", "num_recurrent", "num_attention"), [("nemotron-3-nano-30b-a3b", 23, 6), ("kimi-linear-48b-a3b", 20, 7)]
)
def test_benchmarks_have_the_shapes_of_published_models(name: str, num_recurrent: int, num_attention: int) -> None:
    size = read_model_size(Path(__file__).parents[3] / "benchmarks" / "configs" / name)
    layers = size.spec.layers
    assert sum(bool(layer.states) for layer in layers) == num_recurrent
    assert sum(bool(layer.streams) for layer in layers) == num_attention
    assert 3.0e9 < size.num_active_weights < 3.3e9


def test_layers_are_read_from_a_published_pattern(tmp_path: Path) -> None:
    config_of("nemotron_h").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["layers_block_type"]
    values |= {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(values))
    layers = read_model_size(tmp_path).spec.layers
    assert [(bool(layer.states), bool(layer.streams)) for layer in layers] == [
        (letter == "M", letter == "*") for letter in "ME*-M"
    ]


def test_a_window_alone_makes_a_small_snapshot(tmp_path: Path) -> None:
    config = config_of("lfm2")
    config.save_pretrained(tmp_path)
    spec = read_model_size(tmp_path).spec
    windows = [spec.layers[index].states for index in (0, 2, 3)]
    assert [[state.shape for state in states] for states in windows] == [[(2, config.hidden_size)]] * 3
    assert spec.log_tokens == 0
    assert spec.raw_slot_bytes < spec.raw_block_bytes


def test_a_model_without_attention_keeps_states_alone(tmp_path: Path) -> None:
    config_of("mamba").save_pretrained(tmp_path)
    size = read_model_size(tmp_path)
    assert size.num_query_heads == 0
    assert not any(layer.streams for layer in size.spec.layers)
    assert size.spec.log_tokens > 0
    cost = estimated(size.spec, size.num_active_weights, size.num_query_heads)
    assert 0 < cost.prefill_s(0, 100) == cost.prefill_s(10_000, 10_100)
