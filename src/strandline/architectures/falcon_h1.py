"""Configurations of Falcon-H1."""

from typing import Final

from strandline.architectures.architecture import (
    Architecture,
    all_layers,
    mamba_head_dim,
)
from strandline.architectures.bamba import MAMBA2

FALCON_H1: Final = Architecture(
    model_types=("falcon_h1",),
    layer_types=all_layers("hybrid"),
    defaults={
        **MAMBA2,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "projectors_bias": False,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "mlp_multipliers": (1.0,) * 2,
        "ssm_multipliers": (1.0,) * 5,
    },
    spellings={"layers_block_type": "layer_types"},
    complete=mamba_head_dim,
)
