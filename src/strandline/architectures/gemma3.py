"""Configurations of the text part of Gemma 3."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from strandline.architectures.architecture import Architecture, Values, num_layers
from strandline.config_fields import MAX_LAYERS, Fields

FULL, SLIDING = "full_attention", "sliding_attention"
THETAS: Final = {FULL: 1e6, SLIDING: 1e4}
PERIOD: Final = 6


def _layer_types(fields: Fields) -> Sequence[str]:
    period = fields.size("sliding_window_pattern", at_most=MAX_LAYERS, default=PERIOD)
    return [SLIDING if (index + 1) % period else FULL for index in range(num_layers(fields))]


def _unpack(fields: Fields) -> Values:
    """Give each kind of layer its rotary parameters, which older files have in several fields."""
    given: Any = fields.value("rope_parameters") or {}
    if fields.value("rope_scaling"):
        given = {FULL: given}
    if not isinstance(given, Mapping) or not all(isinstance(given.get(kind) or {}, Mapping) for kind in THETAS):
        fields.reject("rope_parameters", f"an object of {FULL} and {SLIDING}")
    thetas = {FULL: fields.value("rope_theta"), SLIDING: fields.value("rope_local_base_freq")}
    return {"rope_parameters": {kind: _complete(given.get(kind) or {}, thetas[kind], THETAS[kind]) for kind in THETAS}}


def _complete(given: Mapping[str, Any], theta: Any, default: float) -> dict[str, Any]:
    return {
        "rope_type": given.get("type", "default"),
        "rope_theta": default if theta is None else theta,
        **{name: value for name, value in given.items() if value is not None},
    }


GEMMA3: Final = Architecture(
    model_types=("gemma3", "gemma3_text"),
    layer_types=_layer_types,
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "use_bidirectional_attention": False,
    },
    unpack=_unpack,
)
