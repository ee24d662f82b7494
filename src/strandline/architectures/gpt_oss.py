"""Configurations of gpt-oss."""

from typing import Final

from strandline.architectures.architecture import Architecture, Values, every
from strandline.config_fields import Fields

ROPE_PARAMETERS: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _complete(fields: Fields) -> Values:
    del fields
    return {"rope_parameters": ROPE_PARAMETERS}


GPT_OSS: Final = Architecture(
    model_types=("gpt_oss",),
    layer_types=every(2, "full_attention", "sliding_attention"),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    spellings={"num_experts": "num_local_experts"},
    complete=_complete,
)
