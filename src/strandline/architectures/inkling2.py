"""Configurations of Inkling 2."""

from typing import Final

from strandline.architectures.architecture import Architecture, every

INKLING2: Final = Architecture(
    model_types=("inkling2", "inkling2_text"),
    layer_types=every(6, "hybrid", "hybrid_sliding"),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 200_006,
        "unpadded_vocab_size": 200_058,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "swa_num_attention_heads": 48,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 128,
        "sliding_window_size": 1024,
        "d_rel": 16,
        "rel_extent": 1024,
        "log_scaling_n_floor": 128_000,
        "log_scaling_alpha": 0.1,
        "qk_l2_clip_threshold": 22.627416997969522,
        "rel_l2_clip_threshold": 8.0,
        "conv_kernel_size": 4,
        "n_layers_per_attn_res_block": 6,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "route_scale": 8.0,
        "scoring_func": "sigmoid",
        "mlp_gate_softcap": 4.0,
        "mlp_up_softcap": 25.0,
        "final_logit_softcapping": 30.0,
    },
    spellings={
        "intermediate_size": "moe_intermediate_size",
        "model_max_length": "max_position_embeddings",
        "num_local_experts": "n_routed_experts",
        "routed_scaling_factor": "route_scale",
        "sconv_kernel_size": "conv_kernel_size",
        "sliding_window": "sliding_window_size",
    },
)
