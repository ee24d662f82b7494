"""Configurations of OLMo Hybrid."""

from collections.abc import Sequence
from typing import Final

from strandline.architectures.architecture import Architecture, Values, every, num_layers
from strandline.config_fields import MAX_HEADS, Fields

KEY_SHARE: Final = 0.75
"""Channels of all keys of a recurrent layer, per channel of the hidden states."""


def _layer_types(fields: Fields) -> Sequence[str]:
    kinds = list(every(4, "full_attention", "linear_attention")(fields))
    return kinds if "full_attention" in kinds else [*kinds[: num_layers(fields) - 1], "full_attention"]


def _complete(fields: Fields) -> Values:
    heads = fields.size("num_attention_heads", at_most=MAX_HEADS)
    key_heads = fields.size("linear_num_key_heads", at_most=MAX_HEADS, default=heads)
    share = int(KEY_SHARE * fields.size("hidden_size") / key_heads)
    key_dim = fields.size("linear_key_head_dim", default=share)
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
    }


OLMO_HYBRID: Final = Architecture(
    model_types=("olmo_hybrid",),
    layer_types=_layer_types,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "eos_token_id": 100_257,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    nulls=frozenset({"rope_theta"}),
    complete=_complete,
)
