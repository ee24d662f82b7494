"""Configurations of Granite 4 with Mamba-2 layers."""

from typing import Final

from strandline.architectures.architecture import (
    Architecture,
    all_layers,
    mamba_head_dim,
)
from strandline.architectures.bamba import MAMBA2

GRANITE_HYBRID: Final = Architecture(
    model_types=("granitemoehybrid",),
    layer_types=all_layers("linear_attention"),
    defaults={
        **MAMBA2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "position_embedding_type": "nope",
    },
    spellings={"layers_block_type": "layer_types"},
    complete=mamba_head_dim,
)
