"""Configurations of Mamba-2."""

from typing import Final

from strandline.architectures.architecture import Architecture, all_layers

MAMBA2: Final = Architecture(
    model_types=("mamba2",),
    layer_types=all_layers("linear_attention"),
    defaults={
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 2,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
    },
)
