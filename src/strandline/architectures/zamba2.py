"""Configurations of Zamba2."""

from collections.abc import Sequence
from typing import Any, Final

from strandline.architectures.architecture import Architecture, Values
from strandline.config_fields import MAX_HEADS, MAX_SIZE, Fields

HYBRID_LAYERS: Final = (6, 12, 18, 24, 30, 36, 42, 47, 51)
NUM_LAYERS: Final = 54
LONG_CONTEXT: Final = 16_384


def _layer_types(fields: Fields) -> Sequence[str]:
    del fields
    return ["hybrid" if index in HYBRID_LAYERS else "linear_attention" for index in range(NUM_LAYERS)]


def _unpack(fields: Fields) -> Values:
    is_long = fields.flag("use_long_context", default=False)
    return {"max_position_embeddings": LONG_CONTEXT} if is_long else {}


def _complete(fields: Fields) -> Values:
    hidden_size, expand = fields.size("hidden_size"), fields.number("mamba_expand", at_least=0, at_most=MAX_SIZE)
    heads = fields.size("num_attention_heads", at_most=MAX_HEADS)
    values: dict[str, Any] = {"intermediate_size": 4 * hidden_size, "head_dim": 2 * hidden_size // heads}
    values["mamba_headdim"] = int(expand * hidden_size) // fields.size("n_mamba_heads")
    return values


ZAMBA2: Final = Architecture(
    model_types=("zamba2",),
    layer_types=_layer_types,
    layer_kinds={"m": "linear_attention", "g": "hybrid"},
    defaults={
        "hidden_act": "gelu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "use_conv_bias": True,
        "add_bias_linear": False,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
        "adapter_rank": 128,
        "use_mem_rope": False,
    },
    spellings={"attention_head_dim": "head_dim", "layers_block_type": "layer_types"},
    unpack=_unpack,
    complete=_complete,
)
