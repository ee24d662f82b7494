"""Configurations of RecurrentGemma."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, Final

from strandline.architectures.architecture import Architecture, Values, num_layers
from strandline.config_fields import Fields


def _layer_types(fields: Fields) -> Sequence[str]:
    """Return the kinds that a shorter list repeats."""
    kinds: Any = fields.value("block_types")
    if not isinstance(kinds, list | tuple) or not kinds:
        fields.reject("block_types", "a list of recurrent and attention")
    return list(islice(cycle(kinds), num_layers(fields)))


def _complete(fields: Fields) -> Values:
    return {
        "lru_width": fields.value("hidden_size"),
    }


RECURRENT_GEMMA: Final = Architecture(
    model_types=("recurrent_gemma",),
    layer_types=_layer_types,
    layer_kinds={"recurrent": "linear_attention", "attention": "sliding_attention"},
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "eos_token_id": 1,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "block_types": ("recurrent", "recurrent", "attention"),
        "attention_window_size": 2048,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
    },
    spellings={
        "_block_types": "block_types",
        "layers_block_type": "layer_types",
        "sliding_window": "attention_window_size",
    },
    complete=_complete,
)
