"""Configurations of Qwen3-Next, Qwen3.5 and its successors, whose sizes have the same names."""

from dataclasses import replace
from typing import Final

from strandline.architectures.architecture import Architecture, every
from strandline.architectures.qwen_vision import QWEN_VISION

DEFAULTS: Final = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
EXPERTS: Final = {
    "num_key_value_heads": 2,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QUARTER: Final = {"partial_rotary_factor": 0.25}
LAYER_TYPES: Final = every(4, "full_attention", "linear_attention", "full_attention_interval")

QWEN3_NEXT: Final = Architecture(
    model_types=("qwen3_next",),
    layer_types=LAYER_TYPES,
    defaults={
        **DEFAULTS,
        **EXPERTS,
        **QUARTER,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    },
)

QWEN3_5: Final = Architecture(
    model_types=("qwen3_5", "qwen3_5_text"),
    layer_types=LAYER_TYPES,
    defaults={**DEFAULTS, **QUARTER, "num_key_value_heads": 4},
    vision=QWEN_VISION,
)

QWEN3_5_MOE: Final = Architecture(
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    layer_types=LAYER_TYPES,
    defaults={**DEFAULTS, **EXPERTS, **QUARTER, "num_experts_per_tok": 8, "num_experts": 256},
    vision=QWEN_VISION,
)

MINICPM_V: Final = replace(
    QWEN3_5, model_types=("minicpmv4_6", "minicpmv4_7"), text_types=("qwen3_5_text",), vision=None
)

INTERN_S2: Final = replace(
    QWEN3_5_MOE, model_types=("intern_s2_preview",), text_types=("qwen3_5_moe_text",), vision=None
)
