"""Configurations of Bailing's hybrids (Ling 3)."""

from typing import Final

from strandline.architectures.architecture import Architecture, Values, every, first_layers_dense, num_layers
from strandline.config_fields import MAX_LAYERS, Fields

HEAD_DIM: Final = 128
ROTATED_DIM: Final = 64


def _unpack(fields: Fields) -> Values:
    """Tell heads of recurrent layers, ``head_dim`` in published files, from the rotated channels of attention."""
    linear = fields.value("linear_head_dim", fields.value("head_dim", HEAD_DIM))
    return {"linear_head_dim": linear, "head_dim": fields.value("qk_rope_head_dim", ROTATED_DIM)}


def _complete(fields: Fields) -> Values:
    num_dense = fields.size("first_k_dense_replace", at_least=0, at_most=MAX_LAYERS)
    return {
        "mlp_layer_types": first_layers_dense(num_dense, num_layers(fields)),
        "linear_num_heads": fields.value("num_attention_heads"),
        "linear_conv_kernel_dim": fields.value("short_conv_kernel_size"),
    }


BAILING_HYBRID: Final = Architecture(
    model_types=("bailing_hybrid",),
    layer_types=every(6, "full_attention", "linear_attention", "layer_group_size"),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 6e6,
        "eos_token_id": 156_895,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_key_value_heads": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": ROTATED_DIM,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "moe_intermediate_size": 768,
        "num_local_experts": 512,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 2,
        "num_mtp_layers": 1,
    },
    spellings={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_nextn_predict_layers": "num_mtp_layers",
    },
    unpack=_unpack,
    complete=_complete,
)
