"""Fields that builders read equal those of transformers' classes, in whatever spelling a file has them.

A release of transformers that renames a field or a kind of layers fails here, and no model with it.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig

from strandline.architectures.supported import SUPPORTED
from strandline.config_fields import Fields, read_eps, read_head_dim, read_max_position
from strandline.errors import ConfigError
from strandline.model_config import LAYER_LISTS, parse_model_config
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.registry import builder_for

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 2048,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
INFINITE = {"__float__": "Infinity"}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
MROPE = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "rope_type": "default"}
QWEN3_5_ROPE = {**MROPE, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
LINEAR = {"head_dim": 64, "num_heads": 16, "short_conv_kernel_size": 3}
INDEXER: dict[str, Any] = {f"indexer_{name}": 64 for name in ("n_heads", "head_dim", "budget", "compress_ratio")}
INDEXER["indexer_kv_heads"] = 1
QWEN4: dict[str, Any] = {**SIZES, **INDEXER, "rope_parameters": QWEN3_5_ROPE, "num_experts": 8, **EXPERTS}
QWEN4_LINEAR = ["linear_attention"] * 3
PATTERN = "MEM*-EM*"
GLM: dict[str, Any] = {**SIZES, "num_attention_heads": 64, "n_routed_experts": 8, **EXPERTS}
INKLING: dict[str, Any] = {**SIZES, "num_attention_heads": 64, "n_routed_experts": 8, "num_experts_per_tok": 3}
ZAMBA: dict[str, Any] = {
    **SIZES,
    "n_mamba_heads": 64,
    "layers_block_type": [*["mamba"] * 5, "hybrid", "mamba", "hybrid"],
}
MAMBA2: dict[str, Any] = {**SIZES, "hidden_size": 4096}

ABSENT = object()
"""Marks fields that a file leaves out."""

NESTED = "nested"
"""Marks files whose text part is a part."""

FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {}),
    "llama-3.1": (
        "LlamaForCausalLM",
        "llama",
        {
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
            | {"original_max_position_embeddings": 8192},
            "eos_token_id": [128001, 128008],
            "torch_dtype": "bfloat16",
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
        },
    ),
    "llama-3.1-without-original-length": (
        "LlamaForCausalLM",
        "llama",
        {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "llama-nulls": (
        "LlamaForCausalLM",
        "llama",
        {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None, "rope_parameters": None}
        | {"eos_token_id": None},
    ),
    "llama-both-ropes": (
        "LlamaForCausalLM",
        "llama",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ),
    "llama-rope-beside-theta": (
        "LlamaForCausalLM",
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}, "rope_theta": 5e5},
    ),
    "llama-tied": ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {}),
    "qwen3-8b": (
        "Qwen3ForCausalLM",
        "qwen3",
        {"num_key_value_heads": 8, "rope_theta": 1000000, "rope_scaling": None, "sliding_window": None}
        | {"use_sliding_window": False, "max_window_layers": 36, "max_position_embeddings": 40960},
    ),
    "qwen3-yarn": ("Qwen3ForCausalLM", "qwen3", {"rope_theta": 1000000, "rope_scaling": YARN}),
    "qwen3-null-heads": ("Qwen3ForCausalLM", "qwen3", {"num_key_value_heads": None}),
    "qwen3-no-window": ("Qwen3ForCausalLM", "qwen3", {"use_sliding_window": True, "max_window_layers": 28}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe", {}),
    "qwen3_moe-30b": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {"num_experts": 16, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    "qwen3_moe-local": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {"num_local_experts": 12, **EXPERTS, "mlp_only_layers": None},
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", "qwen3_next", {}),
    "qwen3_next-80b": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {"full_attention_interval": 2, "partial_rotary_factor": 0.5, "rope_theta": 10000000, "rope_scaling": None}
        | {"num_experts": 16, **EXPERTS, "mlp_only_layers": [1]},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "qwen3_5_text", {}),
    "qwen3_5-flat": (
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        {"rope_parameters": QWEN3_5_ROPE, "partial_rotary_factor": 0.5},
    ),
    "qwen3_5-published": (
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {
            NESTED: {
                "rope_parameters": QWEN3_5_ROPE,
                "partial_rotary_factor": 0.25,
                "attn_output_gate": True,
                "output_gate_type": "swish",
                "mamba_ssm_dtype": "float32",
                "mtp_num_hidden_layers": 1,
                "full_attention_interval": 4,
                "eos_token_id": 500,
                "dtype": "bfloat16",
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5-yarn": (
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {NESTED: {"rope_parameters": {**QWEN3_5_ROPE, **YARN, "rope_type": "yarn"}}, "tie_word_embeddings": False},
    ),
    "qwen3_5-own-types": (
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        {"layer_types": ["full_attention", *["linear_attention"] * 7], "full_attention_interval": 2},
    ),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", {}),
    "qwen3_5_moe-published": (
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        {NESTED: {"num_experts": 16, **EXPERTS, "rope_parameters": QWEN3_5_ROPE}, "tie_word_embeddings": False},
    ),
    "qwen4_exp": ("Qwen4ExpForCausalLM", "qwen4_exp_text", QWEN4),
    "qwen4_exp-published": (
        "Qwen4ExpForConditionalGeneration",
        "qwen4_exp",
        {
            NESTED: {
                **QWEN4,
                "layer_types": [*QWEN4_LINEAR, "full_attention"] * 2,
                "ple_layer_ids": [3, 1, 3],
                "eos_token_id": 3,
                "split_ngram_parts": 8,
                "ngram_vocab_size_base": 50,
                "make_ngram_vocab_size_divisible_by": 4,
                "output_gate_type": "sigmoid",
            },
            "tie_word_embeddings": False,
        },
    ),
    "qwen4_exp-5.17": (
        "Qwen4ExpForCausalLM",
        "qwen4_exp_text",
        {**QWEN4, "layer_types": [*QWEN4_LINEAR, "qwen_sparse_attention"] * 2, "output_gate_type": None},
    ),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h", {"hybrid_override_pattern": PATTERN}),
    "nemotron_h-nano-2": (
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "hybrid_override_pattern": "MM*-",
            "num_hidden_layers": 4,
            "mamba_n_groups": 4,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_dt_limit": [0.0, float("inf")],
            "mlp_hidden_act": "relu2",
        },
    ),
    "nemotron_h-3.5": (
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp", "moe", "mamba", "attention"],
            "mtp_layers_block_type": ["attention", "moe"],
            "num_nextn_predict_layers": 1,
            "moe_latent_size": 64,
            "n_routed_experts": 16,
            "n_group": 1,
            "topk_group": 1,
            **EXPERTS,
            "time_step_limit": [0.0, INFINITE],
        },
    ),
    "nemotron_h-drafts": (
        "NemotronHForCausalLM",
        "nemotron_h",
        {"hybrid_override_pattern": PATTERN, "mtp_hybrid_override_pattern": "*-", "num_nextn_predict_layers": 1},
    ),
    "granite": ("GraniteMoeHybridForCausalLM", "granitemoehybrid", {}),
    "granite-4.0-h": (
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "mamba", "attention", "mamba"] * 2,
            "rope_theta": 10000,
            "rope_scaling": None,
            "position_embedding_type": "nope",
            "mamba_d_head": 64,
            "mamba_n_heads": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 12,
            "num_experts_per_tok": 3,
            "time_step_limit": [0.0, INFINITE],
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12,
            "logits_scaling": 16,
        },
    ),
    "granite-rope": (
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            "position_embedding_type": "rope",
            "layers_block_type": ["full_attention", "linear_attention"] * 4,
            "num_local_experts": 0,
        },
    ),
    "falcon_h1": ("FalconH1ForCausalLM", "falcon_h1", {}),
    "falcon_h1-7b": (
        "FalconH1ForCausalLM",
        "falcon_h1",
        {
            "attn_layer_indices": None,
            "mamba_d_ssm": 3072,
            "mamba_d_head": 128,
            "mamba_n_heads": 24,
            "rope_theta": 100000000000.0,
            "mamba_use_mlp": True,
            "mlp_multipliers": [0.88, 0.19],
            "head_dim": 128,
            "ssm_multipliers": [0.3, 0.25, 0.5, 1.1, 0.2],
            "key_multiplier": 0.4,
            "mamba_rms_norm": False,
        },
    ),
    "falcon_h1-null": ("FalconH1ForCausalLM", "falcon_h1", {"mamba_d_ssm": None, "num_key_value_heads": None}),
    "bamba": ("BambaForCausalLM", "bamba", {}),
    "bamba-9b": (
        "BambaForCausalLM",
        "bamba",
        {"attn_layer_indices": [2, 5], "mamba_d_head": 32, "partial_rotary_factor": 0.25, "rope_theta": 5e4},
    ),
    "bamba-rope": (
        "BambaForCausalLM",
        "bamba",
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
    ),
    "jamba": ("JambaForCausalLM", "jamba", {}),
    "jamba-v0.1": (
        "JambaForCausalLM",
        "jamba",
        {
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_dt_rank": 100,
            "num_local_experts": 4,
            "expert_layer_period": 3,
        },
    ),
    "mamba": ("MambaForCausalLM", "mamba", {"intermediate_size": 4096, "time_step_rank": 160}),
    "mamba-minimal": ("MambaForCausalLM", "mamba", {"intermediate_size": ABSENT, "expand": 3}),
    "falcon_mamba": ("FalconMambaForCausalLM", "falcon_mamba", {"expand": 16, "intermediate_size": 4096}),
    "mamba2": ("Mamba2ForCausalLM", "mamba2", MAMBA2),
    "mamba2-codestral": (
        "Mamba2ForCausalLM",
        "mamba2",
        {**MAMBA2, "time_step_limit": [0.0, float("inf")], "n_groups": 4, "tie_word_embeddings": True},
    ),
    "minimax": ("MiniMaxForCausalLM", "minimax", {}),
    "minimax-hf": (
        "MiniMaxForCausalLM",
        "minimax",
        {
            "layer_types": [*["linear_attention"] * 7, "full_attention"],
            "full_attn_alpha_factor": 3.5565588200778455,
            "mlp_beta_factor": 2.0,
            "rope_theta": 10000000,
            "rotary_dim": 64,
            "head_dim": 128,
            "sliding_window": None,
        },
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "olmo_hybrid", {}),
    "olmo_hybrid-7b": (
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        {
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "linear_num_key_heads": 16,
            "eos_token_id": 2,
        },
    ),
    "olmo_hybrid-top-level": ("OlmoHybridForCausalLM", "olmo_hybrid", {"rope_theta": None, "linear_key_head_dim": 32}),
    "olmo_hybrid-rotated": ("OlmoHybridForCausalLM", "olmo_hybrid", {"rope_parameters": None, "num_hidden_layers": 3}),
    "kimi_linear": ("KimiLinearForCausalLM", "kimi_linear", {}),
    "kimi_linear-48b": (
        "KimiLinearForCausalLM",
        "kimi_linear",
        {
            "linear_attn_config": {**LINEAR, "kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]},
            "num_experts": 16,
            "num_experts_per_token": 3,
            "num_shared_experts": 2,
            "moe_renormalize": False,
            "num_expert_group": 4,
            "topk_group": 2,
            "model_max_length": 4096,
            "first_k_dense_replace": 2,
            "head_dim": 72,
            "q_lora_rank": None,
            "moe_router_activation_func": "sigmoid",
            "mla_use_nope": True,
        },
    ),
    "glm5_next": ("Glm5NextForConditionalGeneration", "glm5_next", {NESTED: {**GLM, "num_key_value_heads": 64}}),
    "glm5_next-flat": (
        "Glm5NextForConditionalGeneration",
        "glm5_next",
        {
            **GLM,
            "layer_types": ["linear_attention", *["deepseek_sparse_attention"] * 3] * 2,
            "linear_attn_config": {**LINEAR, "gate_lower_bound": -4.0, "kda_layers": [0, 4]},
            "index_topk_pattern": "FFSFFFFS",
            "first_k_dense_replace": 1,
            "head_dim": 192,
        },
    ),
    "glm5_next-full": (
        "Glm5NextForConditionalGeneration",
        "glm5_next",
        {
            NESTED: {
                **GLM,
                "layer_types": [*["linear_attention"] * 2, "full_attention", "full_attention"] * 2,
                "index_topk_freq": 2,
                "index_skip_topk_offset": 3,
                "linear_lower_bound": None,
            }
        },
    ),
    "glm5_next-5.17": (
        "Glm5NextForConditionalGeneration",
        "glm5_next",
        {
            NESTED: {
                **GLM,
                "layer_types": ["linear_attention", "deepseek_sparse_attention"] * 4,
                "mlp_layer_types": ["dense", *["sparse"] * 7],
                "indexer_types": ["full"] * 8,
            }
        },
    ),
    "inkling": ("InklingForCausalLM", "inkling_text", INKLING),
    "inkling2": ("Inkling2ForCausalLM", "inkling2_text", {**INKLING, "vocab_size": 201_024}),
    "inkling2-published": (
        "Inkling2ForConditionalGeneration",
        "inkling2",
        {
            NESTED: {
                **INKLING,
                "sconv_kernel_size": 3,
                "model_max_length": 4096,
                "intermediate_size": 48,
                "unpadded_vocab_size": 500,
                "sliding_window": 96,
                "routed_scaling_factor": 2.0,
            },
            "vision_config": {"text_hidden_size": 2048},
        },
    ),
    "inkling-published": (
        "InklingForConditionalGeneration",
        "inkling_mm_model",
        {
            NESTED: {
                **INKLING,
                "sconv_kernel_size": 3,
                "model_max_length": 4096,
                "dense_mlp_idx": 2,
                "local_layer_ids": [0, 2, 4],
                "dense_intermediate_size": 160,
                "intermediate_size": 48,
                "unpadded_vocab_size": 500,
                "logits_mup_width_multiplier": 16.0,
            },
            "mtp_config": {"num_nextn_predict_layers": 8, "local_layer_ids": [0, 2]},
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", "lfm2", {}),
    "lfm2-1.2b": (
        "Lfm2ForCausalLM",
        "lfm2",
        {
            "block_ff_dim": 12288,
            "intermediate_size": 6144,
            "full_attn_idxs": [2, 5],
            "tie_embedding": False,
            "theta": 7.0,
            "rope_theta": 1e6,
            "block_ffn_dim_multiplier": 1.5,
            "block_multiple_of": 64,
        },
    ),
    "lfm2-types": ("Lfm2ForCausalLM", "lfm2", {"layer_types": ["conv", "full_attention"] * 4, "conv_L_cache": 4}),
    "lfm2-vl": (
        "Lfm2VlForConditionalGeneration",
        "lfm2_vl",
        {
            NESTED: {"model_type": "lfm2", "full_attn_idxs": [2, 5], "block_ff_dim": 6656, "theta": 1e6}
            | {"block_multiple_of": 256, "tie_embedding": True, "eos_token_id": 7},
            "image_token_id": 396,
            "projector_hidden_size": 2560,
            "vision_config": {"model_type": "siglip2_vision_model", "hidden_size": 1152},
        },
    ),
    "minicpmv4_6": (
        "MiniCPMV4_6ForConditionalGeneration",
        "minicpmv4_6",
        {NESTED: {"model_type": "qwen3_5_text", "rope_parameters": QWEN3_5_ROPE}, "tie_word_embeddings": True},
    ),
    "minicpmv4_7": (
        "MiniCPMV4_7ForConditionalGeneration",
        "minicpmv4_7",
        {NESTED: {"model_type": "qwen3_5_text", "rope_parameters": QWEN3_5_ROPE}, "eos_token_id": 5},
    ),
    "nemotron_h_omni": (
        "NemotronH_Omni_Reasoning_V3",
        "nemotron_h_omni",
        {NESTED: {"model_type": "nemotron_h", "hybrid_override_pattern": PATTERN}},
    ),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        "bailing_hybrid",
        {"num_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    ),
    "bailing_hybrid-flash": (
        "BailingHybridForCausalLM",
        "bailing_hybrid",
        {
            "model_max_length": 65536,
            "moe_renormalize": False,
            "num_expert_group": 2,
            "topk_group": 1,
            "num_experts": 16,
            "num_experts_per_token": 3,
            "num_shared_experts": 2,
            "num_nextn_predict_layers": 0,
            "layer_group_size": 4,
            "first_k_dense_replace": 1,
            "rope_theta": 1e5,
            "kda_lower_bound": -3.0,
            "q_lora_rank": 96,
        },
    ),
    "lara_mini": ("LaraMiniForCausalLM", "lara_mini", {}),
    "lara_mini-own": (
        "LaraMiniForCausalLM",
        "lara_mini",
        {
            "layer_types": ["linear_attention", "full_attention"] * 4,
            "rope_theta": 5e6,
            "num_experts": 8,
            "sliding_window": 64,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3": ("Lfm3ForCausalLM", "lfm3", {}),
    "lfm3-1.7b": (
        "Lfm3ForCausalLM",
        "lfm3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "norm_eps": 1e-06,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "conv_L_cache": 5,
            "use_attention_gate": False,
        },
    ),
    "lfm3-vl": (
        "Lfm3VlForConditionalGeneration",
        "lfm3_vl",
        {NESTED: {"model_type": "lfm3", "rms_norm_eps": 1e-3}, "image_token_id": 125030, "vision_config": {}},
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
            "tie_embedding": True,
            "num_experts": 8,
            **EXPERTS,
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", {"intermediate_size": 6912, "hidden_size": 1152}),
    "gemma3-1b": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 20000,
            "rope_scaling": None,
            "rope_theta": 2000000,
            "sliding_window": 512,
            "sliding_window_pattern": 3,
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
        },
    ),
    "gemma3-4b": (
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            NESTED: {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 8,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
                "vocab_size": ABSENT,
                "num_attention_heads": ABSENT,
            },
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "image_size": 896},
        },
    ),
    "gemma3-saved": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "final_logit_softcapping": 20.0,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss", {}),
    "gpt_oss-20b": (
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": 200002,
            "experts_per_token": 3,
            "head_dim": 64,
            "hidden_act": "silu",
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn"}
            | {"original_max_position_embeddings": 4096, "truncate": False},
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        },
    ),
    "gpt_oss-own": (
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "num_experts": 4,
            "swiglu_alpha": 1.5,
            "attention_bias": False,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", "recurrent_gemma", {}),
    "recurrent_gemma-own": (
        "RecurrentGemmaForCausalLM",
        "recurrent_gemma",
        {"block_types": ["attention", "recurrent"], "lru_width": 1024, "num_key_value_heads": 1, "head_dim": 128}
        | {"partial_rotary_factor": 0.25},
    ),
    "zamba2": ("Zamba2ForCausalLM", "zamba2", ZAMBA),
    "zamba2-published": (
        "Zamba2ForCausalLM",
        "zamba2",
        {**ZAMBA, "intermediate_size": None, "attention_head_dim": 64, "use_long_context": True, "use_mem_rope": True},
    ),
    "zamba2-saved": (
        "Zamba2ForCausalLM",
        "zamba2",
        {
            **ZAMBA,
            "layers_block_type": ["linear_attention", "hybrid"] * 4,
            "mamba_headdim": 32,
            "hybrid_layer_ids": [1],
        },
    ),
    "zaya": ("ZayaForCausalLM", "zaya", {}),
    "zaya-published": (
        "ZayaForCausalLM",
        "zaya",
        {
            "rope_parameters": {
                "hybrid": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25},
                "rope_type": "default",
            },
            "rope_theta": 3.0,
            "layer_types": ["hybrid"] * 8,
            "sliding_window": None,
        },
    ),
}

OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.24")
KNOWN_FAULTS = {("inkling-published", "moe_intermediate_size")} if OLD_TRANSFORMERS else set()
"""Fields that a release of transformers reads wrongly."""

MEANINGS_OF_NULL = {"time_step_limit": [0.0, math.inf], "position_embedding_type": "nope"}
UNREAD = ("type", "mrope_section", "mrope_interleaved")
"""Parameters of rotary embeddings that have no influence, or none on text."""

EXTRAS = frozenset(
    {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "rotary_dim", "time_step_limit"}
    | {"num_experts", "block_configs"}
)
"""Fields that files may have and some classes have no default for."""

WITHOUT_CLASS = {
    "InternS2PreviewForConditionalGeneration",
    "NemotronHPuzzleForCausalLM",
    "NemotronH_Nano_Omni_Reasoning_V3",
}
"""Architectures that transformers has no class for."""

WITHOUT_TYPES = {"llama", "qwen3_moe", "falcon_h1"}
"""Model types without kinds of layers in transformers: all are of one kind."""


def written(name: str) -> dict[str, Any]:
    """Return the contents of a file."""
    architecture, model_type, values = FILES[name]
    outer = {"architectures": [architecture], "model_type": model_type}
    if NESTED in values:
        text = {**SIZES, **values[NESTED]}
        of_text = {"text_config": {field: value for field, value in text.items() if value is not ABSENT}}
        return {**outer, **of_text, **{field: value for field, value in values.items() if field != NESTED}}
    return {**outer, **{field: value for field, value in {**SIZES, **values}.items() if value is not ABSENT}}


def fields_read(values: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the fields that building a model reads from the text part, with their values."""
    config, read, value = parse_model_config(values), set[str](), Fields.value

    def recorded(self: Fields, name: str, default: Any = None) -> Any:
        if self is config.text:
            read.add(name)
        return value(self, name, default)

    with monkeypatch.context() as patched:
        patched.setattr(Fields, "value", recorded)
        builder_for(config)(config, Site(torch.float32, "meta"))
    found = {name: config.text.value(name) for name in read}
    if "head_dim" in read:
        found["head_dim"] = read_head_dim(config.text)
    return found


def theirs(config: Any, field: str) -> Any:
    """Return a field of transformers' class."""
    text = config.get_text_config()
    if field == "tie_word_embeddings":
        return getattr(config if hasattr(config, field) else text, field)
    if field == "layer_types":
        return getattr(text, field, getattr(text, "layers_block_type", None))
    if field == "output_gate_type":
        return text.output_gate_type or text.hidden_act
    if field == "head_dim":
        return getattr(text, field, None) or text.hidden_size // text.num_attention_heads
    return getattr(text, field, None) if field in EXTRAS else getattr(text, field)


def plain(architecture: str, field: str, value: Any) -> Any:
    """Return a field's value in the form in which it is compared."""
    if value is None:
        return MEANINGS_OF_NULL.get(field)
    if field in LAYER_LISTS:
        return [SUPPORTED[architecture].kind(kind) for kind in value]
    if field == "rope_parameters":
        return {key: entry for key, entry in value.get("hybrid", value).items() if key not in UNREAD}
    if field == "ple_layer_ids":
        return sorted(set(value))
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_fields_equal_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = written(name)
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, architecture = AutoConfig.from_pretrained(tmp_path), values["architectures"][0]
    differing = {}
    for field, value in fields_read(values, monkeypatch).items():
        if (name, field) in KNOWN_FAULTS or (field == "layer_types" and config.model_type in WITHOUT_TYPES):
            continue
        found = plain(architecture, field, value), plain(architecture, field, theirs(config, field))
        if found[0] != found[1]:
            differing[field] = found
    assert differing == {}


def test_every_architecture_is_compared() -> None:
    assert {architecture for architecture, *_ in FILES.values()} == set(SUPPORTED) - WITHOUT_CLASS


def read(name: str, **changes: Any) -> Fields:
    """Return the fields of a file with other values in it, or in its text part."""
    values = written(name)
    values.get("text_config", values).update(changes)
    return parse_model_config(values).text


def test_published_pattern_of_recurrent_gemma_has_an_underscore() -> None:
    fields = read("recurrent_gemma", _block_types=["attention", "recurrent"])
    assert fields.value("layer_types") == ["sliding_attention", "linear_attention"] * 4


def test_infinity_is_read_in_every_spelling() -> None:
    for infinity in (INFINITE, float("inf"), json.loads("Infinity")):
        assert read("bamba", time_step_limit=[0.0, infinity]).value("time_step_limit") == [0.0, math.inf]
    rope = {"rope_type": "linear", "factor": {"__float__": "NaN"}}
    with pytest.raises(ConfigError, match=r"rope_parameters\.factor is nan"):
        rotary_frequencies(read("llama", rope_parameters=rope))
    with pytest.raises(ConfigError, match=r"rms_norm_eps is \{'__float__': 'x'\}"):
        read_eps(read("llama", rms_norm_eps={"__float__": "x"}))


def test_null_is_a_field_that_is_not_given() -> None:
    nulls = read("llama", rms_norm_eps=None, max_position_embeddings=None, tie_word_embeddings=None)
    assert read_eps(nulls) == 1e-6
    assert (read_max_position(nulls), nulls.flag("tie_word_embeddings")) == (2048, False)
    assert nulls.value("eos_token_id") == 2
    assert read("llama", eos_token_id=None).value("eos_token_id") is None


@pytest.mark.parametrize(("inner", "outer", "expected"), [(True, None, True), (True, False, False), (None, True, True)])
def test_tied_embeddings_are_those_of_the_whole_file(inner: Any, outer: Any, expected: bool) -> None:
    values = written("qwen3_5_moe-published")
    values["text_config"]["tie_word_embeddings"], values["tie_word_embeddings"] = inner, outer
    assert parse_model_config(values).text.flag("tie_word_embeddings") is expected


def test_shared_fields_are_found_in_either_part() -> None:
    values, recipe = written("inkling-published"), {"quant_method": "fp8"}
    values |= {"eos_token_id": 7, "torch_dtype": "float16", "quantization_config": recipe}
    config = parse_model_config(values)
    assert (config.text.value("eos_token_id"), config.dtype, config.quantization) == (7, "float16", recipe)
    values["text_config"] |= {"eos_token_id": 5, "dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}
    config = parse_model_config(values)
    assert (config.text.value("eos_token_id"), config.dtype, config.quantization) == (5, "bfloat16", recipe)
    del values["quantization_config"]
    assert parse_model_config(values).quantization == {"quant_method": "awq"}


def test_experts_of_published_inkling_have_their_own_width() -> None:
    fields = read("inkling-published")
    assert (fields.value("intermediate_size"), fields.value("moe_intermediate_size")) == (160, 48)


def test_blocks_of_a_puzzle_have_their_own_experts() -> None:
    blocks = [
        {"block_type": "mamba", "moe_intermediate_size": None},
        {"block_type": "moe", "moe_intermediate_size": 24, "num_experts_per_tok": 3},
        {"block_type": "attention"},
        {"block_type": "moe", "moe_intermediate_size": 40, "num_experts_per_tok": 1},
    ]
    values = {**SIZES, "block_configs": blocks, "mtp_block_configs": blocks[2:], "num_nextn_predict_layers": 1}
    config = parse_model_config({"architectures": ["NemotronHPuzzleForCausalLM"], **values, "n_routed_experts": 4})
    model = builder_for(config)(config, Site(torch.float32, "meta"))
    model.add_draft_layer()
    experts = [(x.config.size, x.config.routing.top_k) for x in model.modules() if isinstance(x, Experts)]
    assert experts == [(24, 3), (40, 1), (40, 1)]
    del blocks[3]["moe_intermediate_size"]
    with pytest.raises(ConfigError, match="moe_intermediate_size is missing"):
        builder_for(config)(
            parse_model_config({**values, "model_type": "nemotron_h_puzzle"}), Site(torch.float32, "meta")
        )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("kimi_linear-48b", {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3]}},
         r"linear_attn_config.kda_layers is \[1, 2\]; it must be such that it and full_attn_layers name each of the 8"),
        ("kimi_linear-48b", {"linear_attn_config": {"kda_layers": [0], "full_attn_layers": []}},
         r"kda_layers\[0\] is 0; it must be a whole number from 1 to 8"),
        ("kimi_linear-48b", {"linear_attn_config": [3]}, r"linear_attn_config is \[3\]; it must be an object"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, r"hybrid_override_pattern is 'MX'; it must be a text of the"),
        ("nemotron_h-3.5", {"hybrid_override_pattern": 3, "layers_block_type": None}, "hybrid_override_pattern is 3; "),
        ("glm5_next-flat", {"index_topk_pattern": "FT"}, "index_topk_pattern is 'FT'; it must be a text of the"),
        ("recurrent_gemma", {"_block_types": []}, "_block_types .*; it must be a list of recurrent and attention"),
        ("minimax", {"postnorm": False}, "postnorm is False; it must be true"),
        ("bamba-9b", {"attn_layer_indices": ["x"]}, r"attn_layer_indices\[0\] is 'x'; it must be a whole number"),
        ("llama", {"layer_types": ["linear_attention"] * 8}, r"layer_types\[0\] 'linear_attention' is not supported"),
        ("llama", {"hidden_size": None}, "hidden_size is missing; it must be a whole number"),
        ("mamba", {"layer_types": ["full_attention"] * 8}, r"layer_types\[0\] 'full_attention' is not supported"),
        ("qwen3", {"per_layer_config": {"1": {"num_key_value_heads": 4}}}, "per_layer_config is .*; it must be null: "),
        ("granite", {"mamba_n_heads": 0}, "mamba_n_heads is 0; it must be a whole number from 1"),
        ("zamba2", {"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole number from 1"),
        ("olmo_hybrid", {"linear_num_key_heads": 0}, "linear_num_key_heads is 0; it must be a whole number from 1"),
    ],
)  # fmt: skip
def test_fields_that_others_follow_from_are_checked(name: str, changes: dict[str, Any], message: str) -> None:
    values = {**written(name), **changes}
    with pytest.raises(ConfigError, match=f"^config.json: .*{message}"):
        builder_for(config := parse_model_config(values))(config, Site(torch.float32, "meta"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("safe_gate", [None, True, False])
@pytest.mark.parametrize("linear", [{}, {"gate_lower_bound": None}, {"gate_lower_bound": -3.0}])
@pytest.mark.parametrize("bound", [{}, {"linear_lower_bound": None}, {"linear_lower_bound": -2.0}])
def test_bounds_of_decays_equal_those_of_transformers(
    safe_gate: bool | None, linear: dict[str, Any], bound: dict[str, Any]
) -> None:
    gate = {} if safe_gate is None else {"safe_gate": safe_gate}
    for given in (bound, {**bound, "linear_attn_config": {**linear, **gate}}):
        expected = transformers.Glm5NextTextConfig(**given).linear_lower_bound
        assert read("glm5_next", **given).value("linear_lower_bound") == expected


FIRST_OF_TYPE = {model_type: name for name, (_, model_type, _) in reversed(FILES.items())}
"""A file of each model type."""


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in FIRST_OF_TYPE.values() else pytest.mark.long) for x in FILES]
)
def test_fields_of_another_architecture_are_refused_or_ignored(name: str) -> None:
    values, model_type = written(name), FILES[name][1]
    for architecture, description in SUPPORTED.items():
        other = {**values, "architectures": [architecture], "model_type": description.model_types[0]}
        with contextlib.suppress(ConfigError):
            builder_for(config := parse_model_config(other))(config, Site(torch.float32, "meta"))
        if model_type not in description.model_types:
            with pytest.raises(ConfigError, match=f"model_type '{model_type}' is not supported; supported: "):
                parse_model_config({**other, "model_type": model_type})
