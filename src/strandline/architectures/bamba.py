"""Configurations of Bamba."""

from typing import Any, Final

from strandline.architectures.architecture import (
    Architecture,
    Values,
    listed,
    mamba_head_dim,
)
from strandline.config_fields import Fields

MAMBA2: Final[dict[str, Any]] = {
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "eos_token_id": 2,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
"""Defaults of models with attention and layers of Mamba-2."""


def _unpack(fields: Fields) -> Values:
    """Rotate half of a head's channels: a factor at the top level of a file is ignored."""
    del fields
    return {"partial_rotary_factor": 0.5}


BAMBA: Final = Architecture(
    model_types=("bamba",),
    layer_types=listed("attn_layer_indices", "full_attention", "linear_attention", default="linear_attention"),
    defaults={
        **MAMBA2,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
    },
    spellings={"layers_block_type": "layer_types"},
    unpack=_unpack,
    complete=mamba_head_dim,
)
