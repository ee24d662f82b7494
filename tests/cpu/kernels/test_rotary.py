"""Rotary embedding equals that of transformers, plain and mrope, for every kind whose angles depend on the position."""

from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from strandline.errors import ConfigError
from strandline.kernels.rotary import apply_rotary, rotary_table
from strandline.models.layers.rotary import rotary_frequencies

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
]

POSITIONS = torch.tensor([0, 1, 2, 63, 64, 255, 1000])


def config(rope: dict[str, Any]) -> Qwen3NextConfig:
    return Qwen3NextConfig(head_dim=32, num_hidden_layers=1, max_position_embeddings=256, rope_parameters=dict(rope))


def ours(rope: dict[str, Any], x_THD: torch.Tensor) -> torch.Tensor:
    inv_freq_F, attention_factor = rotary_frequencies(config(rope))
    return apply_rotary(x_THD.clone(), rotary_table.reference(POSITIONS, inv_freq_F, attention_factor))


@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: f"{rope['rope_type']}-{rope['partial_rotary_factor']}")
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


def test_channels_past_the_rotary_part_are_left_alone() -> None:
    q_THD = torch.randn(len(POSITIONS), 3, 32)
    rotated = ours(KINDS[0], q_THD)
    assert torch.equal(rotated[..., 8:], q_THD[..., 8:])
    assert not torch.equal(rotated[1:, :, :8], q_THD[1:, :, :8])


def test_bfloat16_is_rotated_in_float32() -> None:
    q_THD = torch.randn(len(POSITIONS), 3, 32).bfloat16()
    assert torch.equal(ours(KINDS[0], q_THD), ours(KINDS[0], q_THD.float()).bfloat16())


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "unheard-of"])
def test_angles_that_depend_on_the_length_are_refused(kind: str) -> None:
    refused = config(KINDS[0])
    refused.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ConfigError, match=f"'{kind}' is not supported; supported: default, linear"):
        rotary_frequencies(refused)
