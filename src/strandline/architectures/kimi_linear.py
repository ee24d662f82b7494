"""Configurations of Kimi Linear."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from strandline.architectures.architecture import (
    Architecture,
    Values,
    first_layers_dense,
    num_layers,
)
from strandline.config_fields import MAX_LAYERS, Fields

LINEAR: Final = "linear_attn_config"
SIZES: Final = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def linear_fields(fields: Fields) -> Fields:
    """Return the settings of recurrent layers, which published files have in a part of their own."""
    values = fields.value(LINEAR, {})
    if not isinstance(values, Mapping):
        fields.reject(LINEAR, "an object")
    return Fields(values, f"config.json: {LINEAR}.")


def unpack_linear(fields: Fields) -> dict[str, Any]:
    """Return the sizes of recurrent layers."""
    linear = linear_fields(fields)
    return {name: linear.value(spelled) for spelled, name in SIZES.items() if linear.value(spelled) is not None}


def _layer_types(fields: Fields) -> Sequence[str]:
    """Return the kinds that files list by the numbers of layers, from 1."""
    count, linear = num_layers(fields), linear_fields(fields)
    lists = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
    if any(linear.value(name) is None for name in lists):
        return ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(count)]
    kinds = dict[int, str]()
    for name, kind in lists.items():
        numbers = linear.list_of(name, lambda entries, entry: entries.size(entry, at_most=count))
        kinds.update(dict.fromkeys(numbers, kind))
    if len(kinds) < count:
        linear.reject("kda_layers", f"such that it and full_attn_layers name each of the {count} layers, from 1")
    return [kinds[number] for number in range(1, count + 1)]


def _complete(fields: Fields) -> Values:
    num_dense = fields.size("first_k_dense_replace", at_least=0, at_most=MAX_LAYERS)
    return {"mlp_layer_types": first_layers_dense(num_dense, num_layers(fields))}


KIMI_LINEAR: Final = Architecture(
    model_types=("kimi_linear",),
    layer_types=_layer_types,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 163_586,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_key_value_heads": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 1024,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
    spellings={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    unpack=unpack_linear,
    complete=_complete,
)
