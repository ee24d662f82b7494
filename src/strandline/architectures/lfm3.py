"""Configurations of LFM3, alone and as the text part of LFM3-VL."""

from collections.abc import Sequence
from typing import Final

from strandline.architectures.architecture import Architecture, Values, num_layers
from strandline.config_fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"

ROPE_PARAMETERS: Final = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
"""Layers of each kind have frequencies of their own."""

PERIOD: Final = (SLIDING, "conv", FULL, "conv")


def _layer_types(fields: Fields) -> Sequence[str]:
    """Return kinds that repeat, but that the first layer is a convolution."""
    return [PERIOD[index % len(PERIOD)] if index else "conv" for index in range(num_layers(fields))]


def _complete(fields: Fields) -> Values:
    del fields
    return {"rope_parameters": ROPE_PARAMETERS}


LFM3: Final = Architecture(
    model_types=("lfm3", "lfm3_vl"),
    layer_types=_layer_types,
    defaults={
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "eos_token_id": 124_900,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 256,
        "attention_bias": False,
        "conv_bias": False,
        "conv_L_cache": 7,
        "tie_word_embeddings": True,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
    },
    spellings={"rms_norm_eps": "norm_eps", "tie_embedding": "tie_word_embeddings"},
    complete=_complete,
)
