"""Configurations of LFM2, dense and with experts."""

from typing import Any, Final

from strandline.architectures.architecture import Architecture, listed

DEFAULTS: Final[dict[str, Any]] = {
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "eos_token_id": 2,
    "num_key_value_heads": 8,
    "conv_bias": False,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}

LFM2: Final = Architecture(
    model_types=("lfm2", "lfm2_vl"),
    layer_types=listed("full_attn_idxs", "full_attention", "conv", default="full_attention"),
    defaults={
        **DEFAULTS,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    spellings={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
)

LFM2_MOE: Final = Architecture(
    model_types=("lfm2_moe",),
    layer_types=listed("full_attn_idxs", "full_attention", "conv", default="full_attention"),
    defaults={
        **DEFAULTS,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    spellings={"tie_embedding": "tie_word_embeddings"},
)
