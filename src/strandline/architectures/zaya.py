"""Configurations of ZAYA1."""

from typing import Final

from strandline.architectures.architecture import Architecture, Values, all_layers
from strandline.config_fields import Fields

ROPE_PARAMETERS: Final = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
    for kind, theta in {"hybrid": 5e6, "hybrid_sliding": 1e4}.items()
}
"""Layers of each kind have frequencies of their own."""


def _complete(fields: Fields) -> Values:
    del fields
    return {"rope_parameters": ROPE_PARAMETERS}


ZAYA: Final = Architecture(
    model_types=("zaya",),
    layer_types=all_layers("hybrid"),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 106,
        "attention_bias": False,
        "lm_head_bias": False,
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "router_hidden_size": 256,
        "cca_time0": 2,
        "cca_time1": 2,
    },
    complete=_complete,
)
