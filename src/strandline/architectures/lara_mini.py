"""Configurations of Lara."""

from collections.abc import Sequence
from typing import Final

from strandline.architectures.architecture import Architecture, num_layers
from strandline.config_fields import Fields

PERIOD: Final = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


def _layer_types(fields: Fields) -> Sequence[str]:
    return [PERIOD[index % len(PERIOD)] for index in range(num_layers(fields))]


LARA_MINI: Final = Architecture(
    model_types=("lara_mini",),
    layer_types=_layer_types,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "eos_token_id": 151_643,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 512,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
)
