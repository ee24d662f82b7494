"""Configurations of Llama."""

from typing import Final

from strandline.architectures.architecture import Architecture, all_layers

LLAMA: Final = Architecture(
    model_types=("llama",),
    layer_types=all_layers("full_attention"),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
)
