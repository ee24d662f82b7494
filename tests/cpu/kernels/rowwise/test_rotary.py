"""Rotary embedding equals that of transformers, plain and mrope, for every kind whose angles depend on the position."""

from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from strandline.errors import ConfigError
from strandline.kernels.rowwise.rotary import apply_rotary, interleaved_dimensions, rotary_table, rotary_table_3d
from strandline.model_config import parse_model_config
from strandline.models.layers.parts.rotary import RotaryFrequencies, rotary_frequencies

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 1.0,
}

KINDS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.25},
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.25,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
    },
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5, "partial_rotary_factor": 1.0},
    {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "rope_theta": 1e6, "factor": 8.0, "partial_rotary_factor": 0.5},
    {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2},
    {**YARN, "beta_fast": 0, "beta_slow": None, "attention_factor": 1.5},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0},
    {**YARN, "factor": None},
    {**YARN, "factor": 0.5},
    {**YARN, "rope_theta": 2.0, "original_max_position_embeddings": 1},
    {**YARN, "rope_theta": 1e12, "original_max_position_embeddings": 2**20},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "partial_rotary_factor": 1.0},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1, "high_freq_factor": 4}
    | {"partial_rotary_factor": 1.0},
]
"""Not every one states the original context length, which is the model's by default."""

POSITIONS = torch.tensor([0, 1, 2, 63, 64, 255, 1000])


def config(rope: dict[str, Any]) -> Qwen3NextConfig:
    return Qwen3NextConfig(head_dim=32, num_hidden_layers=1, max_position_embeddings=256, rope_parameters=dict(rope))


def ours(rope: dict[str, Any], x_THD: torch.Tensor) -> torch.Tensor:
    inv_freq_F, attention_factor, _ = frequencies(rope_parameters=rope)
    return apply_rotary(x_THD.clone(), rotary_table.reference(POSITIONS, inv_freq_F, attention_factor))


def frequencies(**values: Any) -> RotaryFrequencies:
    sizes = {"head_dim": 32, "hidden_size": 32, "num_attention_heads": 1, "num_hidden_layers": 1}
    written = {"architectures": ["Qwen3NextForCausalLM"], "max_position_embeddings": 256, **sizes, **values}
    return rotary_frequencies(parse_model_config(written).text)


@pytest.mark.parametrize("rope", KINDS)
def test_plain_rotary_equals_transformers(rope: dict[str, Any]) -> None:
    q_THD = torch.randn(len(POSITIONS), 3, 32)
    table = modeling_qwen3_next.Qwen3NextRotaryEmbedding(config(rope))(q_THD, POSITIONS[None])
    expected, _ = modeling_qwen3_next.apply_rotary_pos_emb(q_THD[None], q_THD[None], *table, unsqueeze_dim=2)
    # Both form the angle in float32; at position 1,000 its last bit is 6e-5.
    torch.testing.assert_close(ours(rope, q_THD), expected[0], rtol=0, atol=3e-4)


def test_mrope_of_text_is_plain_rotary() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = Qwen3_5TextConfig(head_dim=32, num_hidden_layers=1, rope_parameters={**rope, **sections})
    q_THD = torch.randn(len(POSITIONS), 3, 32)
    positions = POSITIONS.expand(3, 1, -1)
    table = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(text)(q_THD, positions)
    expected, _ = modeling_qwen3_5.apply_rotary_pos_emb(q_THD[None], q_THD[None], *table, unsqueeze_dim=2)
    torch.testing.assert_close(ours(rope, q_THD), expected[0], rtol=0, atol=3e-4)


@pytest.mark.parametrize("rope", [KINDS[1], YARN])
@pytest.mark.parametrize("sections", [[2, 1, 1], [11, 11, 10], [6, 5, 5]])
def test_positions_in_three_dimensions_are_interleaved(rope: dict[str, Any], sections: list[int]) -> None:
    rope = {**rope, "mrope_section": sections, "mrope_interleaved": True}
    text = Qwen3_5TextConfig(head_dim=32, num_hidden_layers=1, max_position_embeddings=256, rope_parameters=rope)
    q_THD, positions_3T = torch.randn(50, 3, 32), torch.randint(300, (3, 50))
    table = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(text)(q_THD, positions_3T[:, None])
    expected, _ = modeling_qwen3_5.apply_rotary_pos_emb(q_THD[None], q_THD[None], *table, unsqueeze_dim=2)
    inv_freq_F, attention_factor, found_sections = frequencies(rope_parameters=rope)
    assert list(found_sections) == sections
    dimension_F = interleaved_dimensions(len(inv_freq_F), found_sections)
    frequencies_and_factor = (inv_freq_F, attention_factor)
    offsets_3T = positions_3T - positions_3T[1]
    table = rotary_table_3d.reference(positions_3T[1], offsets_3T, dimension_F, *frequencies_and_factor)
    found = apply_rotary(q_THD.clone(), table)
    torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("change", [{"mrope_section": [2, 2]}, {"mrope_interleaved": False}])
def test_other_orders_of_dimensions_are_refused(change: dict[str, Any]) -> None:
    rope = {**KINDS[0], "mrope_section": [2, 1, 1], "mrope_interleaved": True, **change}
    with pytest.raises(ConfigError, match="mrope_section"):
        frequencies(rope_parameters=rope)


def test_channels_past_the_rotary_part_are_left_alone() -> None:
    q_THD = torch.randn(len(POSITIONS), 3, 32)
    rotated = ours(KINDS[0], q_THD)
    assert torch.equal(rotated[..., 8:], q_THD[..., 8:])
    assert not torch.equal(rotated[1:, :, :8], q_THD[1:, :, :8])


def test_bfloat16_is_rotated_in_float32() -> None:
    q_THD = torch.randn(len(POSITIONS), 3, 32).bfloat16()
    assert torch.equal(ours(KINDS[0], q_THD), ours(KINDS[0], q_THD.float()).bfloat16())


@pytest.mark.parametrize("rope", KINDS)
def test_frequencies_equal_transformers(rope: dict[str, Any]) -> None:
    inv_freq_F, attention_factor, _ = frequencies(rope_parameters=rope)
    if rope["rope_type"] == "default":
        embedding = modeling_qwen3_next.Qwen3NextRotaryEmbedding(config(rope))
        expected_F, expected_factor = embedding.inv_freq, embedding.attention_scaling
    else:
        expected_F, expected_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config(rope), torch.device("cpu"))
    assert attention_factor == pytest.approx(expected_factor)
    torch.testing.assert_close(inv_freq_F, expected_F, rtol=2e-6, atol=0)


def test_older_fields_have_the_same_meaning() -> None:
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    scaled = frequencies(rope_scaling=old, rope_theta=1e6, partial_rotary_factor=1.0)
    new = frequencies(rope_parameters=YARN)
    assert torch.equal(scaled.inv_freq_F, new.inv_freq_F)
    assert scaled.attention_factor == new.attention_factor


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "unheard-of"])
def test_angles_that_depend_on_the_length_are_refused(kind: str) -> None:
    refused = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ConfigError, match=f"'{kind}' is not supported; supported: default, linear"):
        frequencies(rope_parameters=refused)
