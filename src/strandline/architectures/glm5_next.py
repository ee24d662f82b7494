"""Configurations of GLM-5.3-Flash."""

from typing import Any, Final

from strandline.architectures.architecture import (
    Architecture,
    Values,
    every,
    first_layers_dense,
    num_layers,
    spelled_by,
)
from strandline.architectures.kimi_linear import LINEAR, linear_fields, unpack_linear
from strandline.config_fields import MAX_LAYERS, Fields

NUM_DENSE: Final = 3
LOWER_BOUND: Final = -5.0
INDEXER_LETTERS: Final = {"F": "full", "S": "shared"}


def _unpack(fields: Fields) -> Values:
    """Read the settings of recurrent layers; null as their bound of decays may stay."""
    values = unpack_linear(fields)
    if "gate_lower_bound" in fields.value(LINEAR, {}):
        values["linear_lower_bound"] = fields.value(LINEAR)["gate_lower_bound"]
    return values


def _complete(fields: Fields) -> Values:
    count = num_layers(fields)
    values: dict[str, Any] = {"mlp_layer_types": first_layers_dense(NUM_DENSE, count)}
    if fields.value(LINEAR) is not None and linear_fields(fields).flag("safe_gate", default=True):
        values["linear_lower_bound"] = LOWER_BOUND  # instead of null
    if isinstance(fields.value("index_topk_pattern"), list):
        return {**values, "indexer_types": fields.value("index_topk_pattern")}
    if fields.value("index_topk_pattern") is not None:
        return {**values, "indexer_types": spelled_by(fields, "index_topk_pattern", INDEXER_LETTERS)}
    step = max(fields.size("index_topk_freq", at_least=0, at_most=MAX_LAYERS), 1)
    offset = fields.size("index_skip_topk_offset", at_least=0, at_most=MAX_LAYERS)
    kinds = ["shared" if max(index - offset + 1, 0) % step else "full" for index in range(count)]
    return {**values, "indexer_types": kinds}


GLM5_NEXT: Final = Architecture(
    model_types=("glm5_next", "glm5_next_text"),
    layer_types=every(4, "indexed_attention", "linear_attention"),
    layer_kinds={"full_attention": "indexed_attention"},
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 256,
        "v_head_dim": 256,
        "moe_intermediate_size": 2048,
        "num_local_experts": 288,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_kpool": 16,
        "index_kpool_always_select_tail": True,
        "index_topk_freq": 1,
        "index_skip_topk_offset": 2,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": LOWER_BOUND,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
    },
    spellings={"n_routed_experts": "num_local_experts"},
    unpack=_unpack,
    complete=_complete,
)
