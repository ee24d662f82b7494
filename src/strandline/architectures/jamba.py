"""Configurations of Jamba."""

from collections.abc import Sequence
from typing import Final

from strandline.architectures.architecture import Architecture, Values, num_layers
from strandline.architectures.mamba import time_step_rank
from strandline.config_fields import MAX_LAYERS, Fields


def _layer_types(fields: Fields) -> Sequence[str]:
    count, period = num_layers(fields), fields.size("attn_layer_period", at_most=MAX_LAYERS)
    offset = fields.size("attn_layer_offset", at_least=0, at_most=period - 1)
    return ["full_attention" if index % period == offset else "linear_attention" for index in range(count)]


def _complete(fields: Fields) -> Values:
    return {"mamba_dt_rank": time_step_rank(fields)}


JAMBA: Final = Architecture(
    model_types=("jamba",),
    layer_types=_layer_types,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "num_experts": 16,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    spellings={"layers_block_type": "layer_types", "num_local_experts": "num_experts"},
    complete=_complete,
)
