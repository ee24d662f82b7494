"""Configurations of Mamba and Falcon Mamba."""

from typing import Any, Final

from strandline.architectures.architecture import Architecture, Values, all_layers
from strandline.config_fields import MAX_SIZE, Fields

CHANNELS_PER_RANK: Final = 16

DEFAULTS: Final[dict[str, Any]] = {
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 0,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
}


def time_step_rank(fields: Fields) -> int:
    """Return the rank of time steps that goes with the hidden size."""
    return -(-fields.size("hidden_size") // CHANNELS_PER_RANK)


def _complete(fields: Fields) -> Values:
    size = int(fields.number("expand", at_least=0, at_most=MAX_SIZE) * fields.size("hidden_size"))
    return {"time_step_rank": time_step_rank(fields), "intermediate_size": size}


MAMBA: Final = Architecture(
    model_types=("mamba",), layer_types=all_layers("linear_attention"), defaults=DEFAULTS, complete=_complete
)

FALCON_MAMBA: Final = Architecture(
    model_types=("falcon_mamba",),
    layer_types=all_layers("linear_attention"),
    defaults={**DEFAULTS, "mixer_rms_eps": 1e-6},
    complete=_complete,
)
