"""Configurations of Inkling."""

from collections.abc import Sequence
from typing import Final

from strandline.architectures.architecture import Architecture, Values, first_layers_dense, indices, num_layers
from strandline.config_fields import MAX_LAYERS, Fields

LOCAL, GLOBAL = "hybrid_sliding", "hybrid"
PERIOD: Final = 6


def _layer_types(fields: Fields) -> Sequence[str]:
    count = num_layers(fields)
    if fields.value("local_layer_ids") is None:
        return [LOCAL if (index + 1) % PERIOD else GLOBAL for index in range(count)]
    local = set(indices(fields, "local_layer_ids"))
    return [LOCAL if index in local else GLOBAL for index in range(count)]


def _unpack(fields: Fields) -> Values:
    """Tell the widths of dense parts and of experts apart.

    Files with ``dense_intermediate_size`` mean the experts' by ``intermediate_size``.
    """
    if fields.value("dense_intermediate_size") is None:
        return {}
    return {
        "intermediate_size": fields.value("dense_intermediate_size"),
        "moe_intermediate_size": fields.value("intermediate_size"),
    }


def _complete(fields: Fields) -> Values:
    num_dense = fields.size("dense_mlp_idx", at_least=0, at_most=MAX_LAYERS)
    return {"mlp_layer_types": first_layers_dense(num_dense, num_layers(fields))}


INKLING: Final = Architecture(
    model_types=("inkling_mm_model", "inkling_text"),
    layer_types=_layer_types,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 16,
        "swa_head_dim": 128,
        "sliding_window_size": 512,
        "d_rel": 16,
        "rel_extent": 1024,
        "log_scaling_alpha": 0.1,
        "conv_kernel_size": 4,
        "dense_mlp_idx": 0,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "shared_expert_sink": True,
        "route_scale": 8.0,
        "logits_mup_width_multiplier": 24.0,
    },
    spellings={
        "embedding_multiplier": "logits_mup_width_multiplier",
        "model_max_length": "max_position_embeddings",
        "num_local_experts": "n_routed_experts",
        "sconv_kernel_size": "conv_kernel_size",
        "sliding_window": "sliding_window_size",
    },
    unpack=_unpack,
    complete=_complete,
)
