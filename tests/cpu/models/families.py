"""Tiny random models of every family, made by transformers: the oracle that ours are held to."""

import copy
import json
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Glm5NextConfig,
    GraniteMoeHybridConfig,
    InklingConfig,
    InklingTextConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm2VlConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MiniCPMV4_6Config,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen4ExpConfig,
    Qwen4ExpTextConfig,
    RecurrentGemmaConfig,
    Zamba2Config,
    ZayaConfig,
)
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from strandline.model_config import ModelConfig, parse_model_config
from strandline.models.layers.parts.site import Site
from strandline.models.registry import ARCHITECTURES


def since_5_24(name: str) -> Callable[..., PretrainedConfig]:
    """Return a configuration's class that transformers has or heeds since 5.24; before, what skips its tests."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24):
        return getattr(transformers, name)  # type: ignore[no-any-return]

    def skip(**values: Any) -> PretrainedConfig:
        pytest.skip(f"transformers {transformers.__version__} has no {name}, or does not heed all of it")

    return skip


BailingHybridConfig = since_5_24("BailingHybridConfig")
GptOssConfig = since_5_24("GptOssConfig")  # older oracles clamp at 7.0, whatever ``swiglu_limit`` says
Inkling2Config = since_5_24("Inkling2Config")
Inkling2TextConfig = since_5_24("Inkling2TextConfig")
LaraMiniConfig = since_5_24("LaraMiniConfig")
Lfm3Config = since_5_24("Lfm3Config")
Lfm3VlConfig = since_5_24("Lfm3VlConfig")
MiniCPMV4_7Config = since_5_24("MiniCPMV4_7Config")


class PuzzleConfig(NemotronHConfig):  # type: ignore[misc]
    """What transformers lacks: layers that differ (``block_configs``)."""

    model_type = "nemotron_h_puzzle"

    def __init__(self, **values: Any) -> None:
        kinds = [block["block_type"] for block in values["block_configs"]]
        super().__init__(**{**values, "layers_block_type": kinds})


class OmniConfig(NemotronHConfig):  # type: ignore[misc]
    """The configuration of the text part alone, written as NVIDIA does."""

    model_type = "NemotronH_Nano_Omni_Reasoning_V3"
    part = "llm_config"

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is written to the file."""
        text = {**super().to_diff_dict(), "model_type": "nemotron_h"}
        return {"architectures": text.pop("architectures"), "model_type": self.model_type, self.part: text}


class SavedOmniConfig(OmniConfig):
    """The same, written as transformers does."""

    model_type = "nemotron_h_omni"
    part = "text_config"


class InternS2Config(Qwen3_5MoeConfig):  # type: ignore[misc]
    """Qwen3.5's under another name."""

    model_type = "intern_s2_preview"


ORACLES = {
    "InternS2PreviewForConditionalGeneration": "Qwen3_5MoeForConditionalGeneration",
    "NemotronHPuzzleForCausalLM": "NemotronHForCausalLM",
    "NemotronH_Nano_Omni_Reasoning_V3": "NemotronHForCausalLM",
    "NemotronH_Omni_Reasoning_V3": "NemotronHForCausalLM",
}
"""Classes of transformers for architectures that it has no class for, or whose towers are of no interest."""

RENAMED: dict[str, Callable[[str], str]] = {
    "nemotron_omni": lambda name: f"language_model.{name.replace('model.', 'backbone.', 1)}",
    "nemotron_omni-saved": lambda name: f"language_model.{name}",
}
"""Published names of tensors that those classes save."""

VOCAB_SIZE = 97
UNGROUPED = (BambaRMSNormGated, MambaRMSNormGated)
"""Gated norms of transformers that ignore groups."""

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 512,
}
ODD: dict[str, Any] = {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"],
    "attention_bias": True,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
PICTURE_TOKENS: dict[str, int] = {"image_token_id": 94, "vision_start_token_id": 95, "vision_end_token_id": 96}


def rope(partial_rotary_factor: float, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 1e5,
        "partial_rotary_factor": partial_rotary_factor,
        **more,
    }


def dense(**changes: Any) -> dict[str, Any]:
    return {**TEXT, "rope_parameters": rope(0.25), **changes}


def sparse(**changes: Any) -> dict[str, Any]:
    values = {**dense(**EXPERTS), **changes}
    del values["intermediate_size"]
    return values


ATTENTION_ONLY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": rope(1.0),
}
OLMO: dict[str, Any] = {
    **{name: value for name, value in TEXT.items() if name != "head_dim"},
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "pad_token_id": None,
    "eos_token_id": None,
}
ZAYA: dict[str, Any] = {
    **{name: value for name, value in ATTENTION_ONLY.items() if name != "intermediate_size"},
    "num_experts": 5,
    "moe_intermediate_size": 12,
    "router_hidden_size": 16,
    "rope_parameters": {"hybrid": rope(0.5)},
    "pad_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = rope(1.0, original_max_position_embeddings=64, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)

LARA: dict[str, Any] = {
    **{name: value for name, value in TEXT.items() if name not in ("intermediate_size", "layer_types")},
    **EXPERTS,
    "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
    "sliding_window": 20,
    "rope_parameters": rope(1.0),
    "eos_token_id": None,
}
LFM2: dict[str, Any] = {
    **{name: value for name, value in ATTENTION_ONLY.items() if name != "head_dim"},
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
    "pad_token_id": None,
    "eos_token_id": None,
}
LFM2_VISION: dict[str, Any] = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "num_patches": 16,
}
LFM3: dict[str, Any] = {
    **ATTENTION_ONLY,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    "sliding_window": 20,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LFM3_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "patch_size": 4,
}
LFM2_MOE: dict[str, Any] = {
    **{name: value for name, value in LFM2.items() if not name.startswith("block")},
    "num_dense_layers": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "state_size": 6,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
JAMBA: dict[str, Any] = {
    **{name: value for name, value in ATTENTION_ONLY.items() if name not in ("head_dim", "rope_parameters")},
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "use_mamba_kernels": False,
    "mamba_d_state": 6,
    "pad_token_id": None,
    "eos_token_id": None,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
BAMBA: dict[str, Any] = {
    **{name: value for name, value in ATTENTION_ONLY.items() if name != "head_dim"},
    **MAMBA2,
    "attn_layer_indices": [1],
    "pad_token_id": None,
    "eos_token_id": None,
    "rope_parameters": rope(0.5),
}
GRANITE: dict[str, Any] = {
    **{name: value for name, value in BAMBA.items() if name != "attn_layer_indices"},
    "layer_types": ["mamba", "attention", "mamba"],
    "intermediate_size": 12,
    "shared_intermediate_size": 20,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 1.5,
    "logits_scaling": 0.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
}

GEMMA3: dict[str, Any] = {
    **ATTENTION_ONLY,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
    "query_pre_attn_scalar": 10,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GEMMA3_VISION: dict[str, Any] = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"image_size": 16, "patch_size": 4},
    "mm_tokens_per_image": 4,
    "image_token_index": 96,
    "boi_token_index": 95,
    "eoi_token_index": 94,
}
GPT_OSS: dict[str, Any] = {
    **ATTENTION_ONLY,
    "intermediate_size": 12,
    "sliding_window": 20,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
QWEN3_5_PART: dict[str, Any] = {"model_type": "qwen3_5_text", **dense()}
MINICPM_VISION: dict[str, Any] = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"image_size": 16, "patch_size": 4},
    "insert_layer_id": 0,
    "image_token_id": 94,
    "video_token_id": 93,
}
NEMOTRON: dict[str, Any] = {
    **{name: value for name, value in ATTENTION_ONLY.items() if name not in ("num_hidden_layers", "rope_parameters")},
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "time_step_min": 1e-30,
    "time_step_max": 2.0,
    "time_step_floor": 0.3,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
    "pad_token_id": None,
    "eos_token_id": None,
}

FALCON_H1: dict[str, Any] = {
    **{name: value for name, value in ATTENTION_ONLY.items() if name != "head_dim"},
    **MAMBA2,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 2,
    "mamba_norm_before_gate": False,
    "pad_token_id": None,
    "eos_token_id": None,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 1.2,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.4,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.7, 1.3, 0.9, 1.1, 1.6],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.9,
}

PURE_MAMBA2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 1,
    "pad_token_id": None,
    "eos_token_id": None,
}

KIMI: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 12,
    "v_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "moe_intermediate_size": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
BAILING: dict[str, Any] = {
    **{name: value for name, value in KIMI.items() if not name.startswith("linear_")},
    "head_dim": 8,
    "num_local_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
GLM5: dict[str, Any] = {
    **{name: value for name, value in KIMI.items() if name not in ("layer_types", "num_local_experts")},
    "layer_types": ["linear_attention", "deepseek_sparse_attention", "deepseek_sparse_attention", "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],
    "q_lora_rank": 14,
    "qk_rope_head_dim": 0,
    "n_routed_experts": 5,
    "swiglu_limit": 0.6,
    "index_n_heads": 8,
    "index_head_dim": 12,
    "index_topk": 24,
    "index_kpool": 4,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
}
GLM5_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
    "projection_intermediate_size": 32,  # of 10,240 by default, in files of 200 MB
}
RECURRENT_GEMMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "block_types": ["recurrent", "attention", "recurrent"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "attention_window_size": 20,
    "lru_width": 24,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MINIMAX: dict[str, Any] = {
    **ATTENTION_ONLY,
    "num_hidden_layers": 4,
    "intermediate_size": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "block_size": 8,
    "linear_attn_alpha_factor": 1.5,
    "linear_attn_beta_factor": 0.7,
    "full_attn_alpha_factor": 0.8,
    "full_attn_beta_factor": 1.2,
    "mlp_alpha_factor": 1.3,
    "mlp_beta_factor": 0.9,
    "eos_token_id": None,
}
ZAMBA2: dict[str, Any] = {
    **{name: value for name, value in ATTENTION_ONLY.items() if name not in ("head_dim", "num_key_value_heads")},
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
    "n_mamba_heads": 8,
    "mamba_d_state": 16,
    "num_mem_blocks": 2,
    "adapter_rank": 6,
    "use_mem_rope": True,
    "use_shared_attention_adapter": True,
    "time_step_min": 1e-30,
    "time_step_max": 2.0,
    "time_step_floor": 0.3,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "eos_token_id": None,
}

QWEN4: dict[str, Any] = {
    **{name: value for name, value in sparse().items() if name != "layer_types"},
    "layer_types": ["linear_attention", "qwen_sparse_attention", "linear_attention", "qwen_sparse_attention"],
    "hc_count": 3,
    "hc_lowrank": 6,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24,
    "heads_per_ngram": 3,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 12,
    "split_ngram_parts": 3,
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 24,
    "indexer_compress_ratio": 4,
    "pad_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
}

INKLING: dict[str, Any] = {
    **{name: value for name, value in ATTENTION_ONLY.items() if name != "rope_parameters"},
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "local_layer_ids": [0, 2],
    "sliding_window_size": 20,
    "d_rel": 6,
    "rel_extent": 50,
    "log_scaling_n_floor": 30,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "route_scale": 1.5,
    "logits_mup_width_multiplier": 1.5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
INKLING_TOWERS: dict[str, Any] = {
    "vision_config": {"n_layers": 4, "patch_size": 4, "hidden_size": 16},
    "audio_config": {"n_mel_bins": 2, "mel_vocab_size": 4},
}

INKLING2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 20,
    "d_rel": 6,
    "rel_extent": 50,
    "log_scaling_n_floor": 30,
    "qk_l2_clip_threshold": 2.0,
    "rel_l2_clip_threshold": 2.5,
    "n_layers_per_attn_res_block": 2,
    "mlp_gate_softcap": 2.0,
    "mlp_up_softcap": 3.0,
    "final_logit_softcapping": 20.0,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 3,
    "route_scale": 1.0,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
INKLING2_VISION: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "posemb_grid_size": 4,
        "projection_hidden_dim": 8,
        "text_hidden_size": 32,
    },
}

MROPE = rope(0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)


class Family(NamedTuple):
    """A tiny model: all that tests know of it."""

    architecture: str
    config_class: Callable[..., PretrainedConfig]
    values: dict[str, Any]
    shards: tuple[int, ...] = ()
    """Into how many shards tests divide it: four where heads or groups are fewer than that. First configurations of
    their builders also run on that many ranks of an engine."""
    is_altered: bool = False
    """Whether a test alters each of its tensors in turn: one of each family is."""
    is_quantized: bool = False
    """Whether tests keep it in every format of weights."""
    keeps_e4m3: bool = True
    """Whether keys and values, which are all that it keeps of tokens, may be kept in FP8."""


CONFIGS: dict[str, Family] = {
    "qwen3_5": Family("Qwen3_5ForCausalLM", Qwen3_5TextConfig, dense(), shards=(2,), is_quantized=True),
    "qwen3_5-odd-tied": Family(
        "Qwen3_5ForCausalLM",
        Qwen3_5TextConfig,
        dense(**ODD, tie_word_embeddings=True, rope_parameters=rope(1.0)),
        is_altered=True,
        is_quantized=True,
    ),
    "qwen3_5-gva4": Family(
        "Qwen3_5ForCausalLM",
        Qwen3_5TextConfig,
        dense(linear_num_key_heads=1, num_key_value_heads=4, rope_parameters=rope(0.5)),
    ),
    "qwen3_5-vision": Family(
        "Qwen3_5ForConditionalGeneration",
        Qwen3_5Config,
        {
            "text_config": dense(rope_parameters=MROPE),
            "vision_config": VISION,
            **PICTURE_TOKENS,
            "tie_word_embeddings": True,
        },
        shards=(2,),
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM", Qwen3_5MoeTextConfig, sparse(), shards=(2,), is_altered=True, is_quantized=True
    ),
    "qwen3_5_moe-vision": Family(
        "Qwen3_5MoeForConditionalGeneration",
        Qwen3_5MoeConfig,
        {"text_config": sparse(rope_parameters=MROPE), "vision_config": VISION, **PICTURE_TOKENS},
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", Qwen3NextConfig, dense(**EXPERTS, norm_topk_prob=True), shards=(2,), is_altered=True
    ),
    "qwen3_next-odd": Family(
        "Qwen3NextForCausalLM",
        Qwen3NextConfig,
        dense(**EXPERTS, **ODD, mlp_only_layers=[1], norm_topk_prob=False, tie_word_embeddings=True),
        is_quantized=True,
    ),
    "qwen3_next-gva4": Family(
        "Qwen3NextForCausalLM",
        Qwen3NextConfig,
        dense(**EXPERTS, linear_num_key_heads=1, decoder_sparse_step=2, rope_parameters=rope(0.5)),
    ),
    "qwen4_exp": Family(
        "Qwen4ExpForCausalLM",
        Qwen4ExpTextConfig,
        QWEN4,
        shards=(2,),
        is_altered=True,
        is_quantized=True,
        keeps_e4m3=False,
    ),
    "qwen4_exp-odd": Family(
        "Qwen4ExpForCausalLM",
        Qwen4ExpTextConfig,
        {
            **QWEN4,
            **ODD,
            "layer_types": ["qwen_sparse_attention", "linear_attention", "linear_attention", "linear_attention"],
            "hc_count": 2,
            "ple_layer_ids": [3],
            "ple_conv_kernel_size": 3,
            "ngram_size": 4,
            "heads_per_ngram": 2,
            "indexer_head_dim": 8,
            "indexer_budget": 70,
            "indexer_compress_ratio": 7,
            "output_gate_type": "sigmoid",
            "norm_topk_prob": False,
            "eos_token_id": [5, VOCAB_SIZE - 1],
            "rope_parameters": rope(1.0),
        },
        keeps_e4m3=False,
    ),
    "qwen4_exp-vision": Family(
        "Qwen4ExpForConditionalGeneration",
        Qwen4ExpConfig,
        {"text_config": {**QWEN4, "rope_parameters": MROPE}, "vision_config": VISION, **PICTURE_TOKENS},
        keeps_e4m3=False,
    ),
    "mamba": Family("MambaForCausalLM", MambaConfig, MAMBA),
    "mamba-odd": Family(
        "MambaForCausalLM",
        MambaConfig,
        {
            **MAMBA,
            "expand": 3,
            "state_size": 5,
            "conv_kernel": 3,
            "time_step_rank": 7,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
        },
        shards=(2,),
        is_altered=True,
    ),
    "minimax": Family("MiniMaxForCausalLM", MiniMaxConfig, MINIMAX, shards=(2,), is_altered=True, is_quantized=True),
    "minimax-odd": Family(
        "MiniMaxForCausalLM",
        MiniMaxConfig,
        {
            **{name: value for name, value in MINIMAX.items() if "factor" not in name},
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM", OlmoHybridConfig, OLMO, shards=(2,), is_altered=True, is_quantized=True
    ),
    "olmo_hybrid-odd": Family(
        "OlmoHybridForCausalLM",
        OlmoHybridConfig,
        {
            **OLMO,
            **ODD,
            "head_dim": 12,
            "linear_value_head_dim": 8,
            "linear_allow_neg_eigval": False,
            "rope_parameters": rope(1.0),
            "tie_word_embeddings": True,
        },
    ),
    "falcon_mamba": Family("FalconMambaForCausalLM", FalconMambaConfig, MAMBA, shards=(2,)),
    "jamba": Family("JambaForCausalLM", JambaConfig, JAMBA, shards=(2,), is_altered=True, is_quantized=True),
    "jamba-odd": Family(
        "JambaForCausalLM",
        JambaConfig,
        {
            **JAMBA,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "expert_layer_period": 3,
            "expert_layer_offset": 0,
            "mamba_d_conv": 3,
            "mamba_expand": 1,
            "mamba_dt_rank": 5,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        KimiLinearConfig,
        KIMI,
        shards=(2,),
        is_altered=True,
        is_quantized=True,
        keeps_e4m3=False,
    ),
    "kimi_linear-odd": Family(
        "KimiLinearForCausalLM",
        KimiLinearConfig,
        {
            **KIMI,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "linear_num_heads": 3,
            "linear_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "num_local_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
        keeps_e4m3=False,
    ),
    "glm5_next": Family(
        "Glm5NextForConditionalGeneration",
        Glm5NextConfig,
        {"text_config": GLM5, "vision_config": GLM5_VISION},
        shards=(2,),
        is_altered=True,
        is_quantized=True,
        keeps_e4m3=False,
    ),
    "glm5_next-odd": Family(
        "Glm5NextForConditionalGeneration",
        Glm5NextConfig,
        {
            "text_config": {
                **GLM5,
                "layer_types": ["deepseek_sparse_attention", *["linear_attention"] * 3],
                "indexer_types": ["full", "shared", "full", "full"],
                "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "linear_num_heads": 3,
                "linear_head_dim": 12,
                "linear_conv_kernel_dim": 3,
                "linear_lower_bound": None,
                "n_routed_experts": 6,
                "n_group": 3,
                "topk_group": 2,
                "n_shared_experts": 2,
                "norm_topk_prob": False,
                "index_head_dim": 10,
                "index_topk": 70,
                "index_kpool": 7,
                "hc_mult": 2,
            },
            "vision_config": GLM5_VISION,
            "tie_word_embeddings": True,
        },
        keeps_e4m3=False,
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaForCausalLM", RecurrentGemmaConfig, RECURRENT_GEMMA, shards=(2, 4), is_altered=True
    ),
    "recurrent_gemma-odd": Family(
        "RecurrentGemmaForCausalLM",
        RecurrentGemmaConfig,
        {
            **RECURRENT_GEMMA,
            "block_types": ["attention", "recurrent"],
            "num_key_value_heads": 2,
            "attention_window_size": 70,
            "attention_bias": True,
            "conv1d_width": 3,
            "logits_soft_cap": 5.0,
            "tie_word_embeddings": False,
        },
        shards=(2,),
    ),
    "bailing_hybrid": Family(
        "BailingHybridForCausalLM",
        BailingHybridConfig,
        BAILING,
        shards=(2,),
        is_altered=True,
        is_quantized=True,
        keeps_e4m3=False,
    ),
    "bailing_hybrid-odd": Family(
        "BailingHybridForCausalLM",
        BailingHybridConfig,
        {
            **BAILING,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "q_lora_rank": 14,
            "qk_rope_head_dim": 4,
            "short_conv_kernel_size": 3,
            "kda_safe_gate": False,
            "num_local_experts": 6,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_mtp_layers": 0,
        },
        keeps_e4m3=False,
    ),
    "lara_mini": Family("LaraMiniForCausalLM", LaraMiniConfig, LARA, shards=(2,), is_altered=True, is_quantized=True),
    "lara_mini-odd": Family(
        "LaraMiniForCausalLM",
        LaraMiniConfig,
        {
            **LARA,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "sliding_window": 70,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": Family("Lfm2ForCausalLM", Lfm2Config, LFM2),
    "lfm2-odd": Family(
        "Lfm2ForCausalLM",
        Lfm2Config,
        {
            **LFM2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.3,
            "block_multiple_of": 8,
            "tie_word_embeddings": False,
        },
        shards=(2,),
        is_altered=True,
    ),
    "lfm2-vision": Family(
        "Lfm2VlForConditionalGeneration",
        Lfm2VlConfig,
        {"text_config": {"model_type": "lfm2", **LFM2}, "vision_config": LFM2_VISION, "image_token_id": 96}
        | {"projector_hidden_size": 16},
    ),
    "lfm3": Family("Lfm3ForCausalLM", Lfm3Config, LFM3, shards=(2,), is_altered=True, is_quantized=True),
    "lfm3-odd": Family(
        "Lfm3ForCausalLM",
        Lfm3Config,
        {
            **LFM3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "layer_types": ["full_attention", "conv", "sliding_attention", "sliding_attention"],
            "sliding_window": 70,
            "conv_L_cache": 4,
            "conv_bias": True,
            "attention_bias": True,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3-vision": Family(
        "Lfm3VlForConditionalGeneration",
        Lfm3VlConfig,
        {"text_config": {"model_type": "lfm3", **LFM3}, "vision_config": LFM3_VISION, "projector_hidden_size": 16}
        | {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93},
    ),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", Lfm2MoeConfig, LFM2_MOE, shards=(2,), is_altered=True, is_quantized=True),
    "lfm2_moe-odd": Family(
        "Lfm2MoeForCausalLM",
        Lfm2MoeConfig,
        {
            **LFM2_MOE,
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": False,
        },
    ),
    "bamba": Family("BambaForCausalLM", BambaConfig, BAMBA, shards=(2, 4)),
    "bamba-odd": Family(
        "BambaForCausalLM",
        BambaConfig,
        {
            **BAMBA,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_expand": 3,
            "mamba_d_conv": 3,
            "mamba_n_groups": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attn_layer_indices": [0],
            "time_step_limit": (0.6, 1.2),
        },
        is_altered=True,
    ),
    "falcon_h1": Family("FalconH1ForCausalLM", FalconH1Config, FALCON_H1, shards=(2,), is_quantized=True),
    "falcon_h1-odd": Family(
        "FalconH1ForCausalLM",
        FalconH1Config,
        {
            **FALCON_H1,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "attention_bias": True,
            "mamba_d_ssm": 72,
            "mamba_n_heads": 6,
            "mamba_d_head": 12,
            "mamba_n_groups": 3,
            "mamba_rms_norm": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "time_step_limit": (0.6, 1.2),
            "tie_word_embeddings": True,
        },
        is_altered=True,
    ),
    "inkling": Family(
        "InklingForCausalLM",
        InklingTextConfig,
        INKLING,
        shards=(2, 4),
        is_altered=True,
        is_quantized=True,
    ),
    "inkling-odd": Family(
        "InklingForCausalLM",
        InklingTextConfig,
        {
            **INKLING,
            "vocab_size": VOCAB_SIZE + 5,
            "unpadded_vocab_size": VOCAB_SIZE,
            "swa_num_attention_heads": 3,
            "swa_num_key_value_heads": 1,
            "local_layer_ids": [0, 1, 2],
            "sliding_window_size": 70,
            "conv_kernel_size": 3,
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "n_shared_experts": 1,
        },
    ),
    "inkling-towers": Family(
        "InklingForConditionalGeneration",
        InklingConfig,
        {"text_config": INKLING, **INKLING_TOWERS},
        shards=(2,),
        is_quantized=True,
    ),
    "inkling2": Family(
        "Inkling2ForCausalLM", Inkling2TextConfig, INKLING2, shards=(2, 4), is_altered=True, is_quantized=True
    ),
    "inkling2-odd": Family(
        "Inkling2ForCausalLM",
        Inkling2TextConfig,
        {
            **INKLING2,
            "vocab_size": VOCAB_SIZE + 5,
            "num_hidden_layers": 3,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "swa_head_dim": 16,
            "sliding_window_size": 70,
            "conv_kernel_size": 3,
            "n_layers_per_attn_res_block": 1,
        },
    ),
    "inkling2-vision": Family(
        "Inkling2ForConditionalGeneration",
        Inkling2Config,
        {"text_config": {**INKLING2, "num_experts_per_tok": 4}, **INKLING2_VISION},
    ),
    "gemma3": Family("Gemma3ForCausalLM", Gemma3TextConfig, GEMMA3, shards=(2, 4), is_altered=True, is_quantized=True),
    "gemma3-odd": Family(
        "Gemma3ForCausalLM",
        Gemma3TextConfig,
        {
            **GEMMA3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 70,
            "query_pre_attn_scalar": 24,
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-vision": Family("Gemma3ForConditionalGeneration", Gemma3Config, {"text_config": GEMMA3, **GEMMA3_VISION}),
    "gpt_oss": Family("GptOssForCausalLM", GptOssConfig, GPT_OSS, shards=(2, 4), is_altered=True),
    "gpt_oss-odd": Family(
        "GptOssForCausalLM",
        GptOssConfig,
        {
            **GPT_OSS,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 70,
            "attention_bias": False,
            "swiglu_alpha": 1.3,
            "num_experts_per_tok": 1,
            "rope_parameters": rope(1.0),
            "tie_word_embeddings": True,
        },
    ),
    "granite_hybrid": Family(
        "GraniteMoeHybridForCausalLM", GraniteMoeHybridConfig, GRANITE, shards=(2,), is_altered=True, is_quantized=True
    ),
    "granite_hybrid-dense-tied": Family(
        "GraniteMoeHybridForCausalLM",
        GraniteMoeHybridConfig,
        {
            **GRANITE,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "rope_parameters": rope(1.0),
            "tie_word_embeddings": True,
        },
        shards=(2,),
    ),
    "mamba2": Family("Mamba2ForCausalLM", Mamba2Config, PURE_MAMBA2, shards=(2,)),
    "mamba2-odd": Family(
        "Mamba2ForCausalLM",
        Mamba2Config,
        {
            **PURE_MAMBA2,
            "num_heads": 6,
            "head_dim": 16,
            "expand": 3,
            "n_groups": 3,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_limit": (0.0005, 0.05),
            "tie_word_embeddings": True,
        },
        is_altered=True,
    ),
    "nemotron_h": Family("NemotronHForCausalLM", NemotronHConfig, NEMOTRON, shards=(2, 4), is_quantized=True),
    "nemotron_h-odd": Family(
        "NemotronHForCausalLM",
        NemotronHConfig,
        {
            **NEMOTRON,
            "layers_block_type": ["moe", "attention", "mamba", "mamba", "moe"],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "mamba_num_heads": 6,
            "mamba_head_dim": 12,
            "n_groups": 3,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
            "time_step_min": 0.3,
            "time_step_limit": (0.6, 1.2),
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "moe_latent_size": 24,
        },
        is_altered=True,
        is_quantized=True,
    ),
    "nemotron_omni": Family("NemotronH_Nano_Omni_Reasoning_V3", OmniConfig, NEMOTRON),
    "nemotron_omni-saved": Family("NemotronH_Omni_Reasoning_V3", SavedOmniConfig, NEMOTRON),
    "minicpmv4_6": Family(
        "MiniCPMV4_6ForConditionalGeneration", MiniCPMV4_6Config, {"text_config": QWEN3_5_PART, **MINICPM_VISION}
    ),
    "minicpmv4_7": Family(
        "MiniCPMV4_7ForConditionalGeneration", MiniCPMV4_7Config, {"text_config": QWEN3_5_PART, **MINICPM_VISION}
    ),
    "intern_s2": Family(
        "InternS2PreviewForConditionalGeneration",
        InternS2Config,
        {"text_config": sparse(rope_parameters=MROPE), "vision_config": VISION, **PICTURE_TOKENS},
    ),
    "nemotron_puzzle": Family(
        "NemotronHPuzzleForCausalLM",
        PuzzleConfig,
        {
            **NEMOTRON,
            "layers_block_type": None,
            "block_configs": [
                {"block_type": "mamba"},
                {"block_type": "moe", "moe_intermediate_size": 12, "num_experts_per_tok": 2},
                {"block_type": "attention"},
                {"block_type": "moe", "moe_intermediate_size": 20, "num_experts_per_tok": 1},
            ],
        },
    ),
    "llama": Family(
        "LlamaForCausalLM",
        LlamaConfig,
        {**ATTENTION_ONLY, "rope_parameters": {**LLAMA3_ROPE, "rope_type": "llama3"}},
        shards=(2, 4),
    ),
    "qwen3": Family("Qwen3ForCausalLM", Qwen3Config, ATTENTION_ONLY),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        Qwen3MoeConfig,
        {**ATTENTION_ONLY, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
        shards=(2,),
        is_quantized=True,
    ),
    "zamba2": Family("Zamba2ForCausalLM", Zamba2Config, ZAMBA2, shards=(2, 4), is_altered=True, keeps_e4m3=False),
    "zamba2-odd": Family(
        "Zamba2ForCausalLM",
        Zamba2Config,
        {
            **ZAMBA2,
            "layers_block_type": ["hybrid", "mamba", "mamba", "hybrid", "mamba"],
            "num_attention_heads": 2,
            "n_mamba_heads": 6,
            "mamba_expand": 3,
            "mamba_ngroups": 3,
            "mamba_d_conv": 3,
            "num_mem_blocks": 1,
            "use_mem_rope": False,
            "use_shared_attention_adapter": False,
            "add_bias_linear": True,
        },
        keeps_e4m3=False,
    ),
    "zaya": Family("ZayaForCausalLM", ZayaConfig, ZAYA, is_altered=True, is_quantized=True),
    "zaya-odd": Family(
        "ZayaForCausalLM",
        ZayaConfig,
        {**ZAYA, "num_key_value_heads": 4, "cca_time0": 3, "cca_time1": 1, "tie_word_embeddings": False},
    ),
    "qwen3-odd-tied": Family(
        "Qwen3ForCausalLM",
        Qwen3Config,
        {
            **ATTENTION_ONLY,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


FAMILIES = [
    next(name for name, (architecture, *_) in CONFIGS.items() if ARCHITECTURES[architecture] is builder)
    for builder in dict.fromkeys(ARCHITECTURES.values())
]
"""The first configuration of every builder."""

REPRESENTATIVES = ["glm5_next", "inkling", "jamba", "kimi_linear", "lfm2", "llama", "mamba2", "minimax", "nemotron_h"]
REPRESENTATIVES += ["olmo_hybrid", "qwen4_exp", "recurrent_gemma", "zaya"]
"""One family for each kind of layer, and one without attention."""


def kinds_of_layers(name: str) -> set[str]:
    """Return the operations on sequences that a model's layers consist of."""
    config = model_config(config_of(name))
    operations = ARCHITECTURES[config.architecture](config, Site(torch.float32, "meta")).operations
    return {x.name for x in operations if x.name.endswith(("_prefill", "attention"))}


def config_of(name: str) -> PretrainedConfig:
    architecture, config_class, values, *_ = CONFIGS[name]
    config = config_class(**values)
    config.architectures = [architecture]
    return config


def model_config(config: PretrainedConfig) -> ModelConfig:
    """Return what our reader makes of the file that transformers writes."""
    return parse_model_config(json.loads(config.to_json_string()))


@cache
def oracle(name: str) -> Any:
    """Return transformers' model, float32, with weights large enough that every part of it shows in the logits.

    Not larger: much of a layer's output per input makes rounding errors grow from layer to layer.
    """
    return random_model(config_of(name), len(name))


def random_model(config: Any, seed: int) -> Any:
    """Return transformers' model of a configuration, as ``oracle`` does."""
    torch.manual_seed(seed)
    (architecture,) = config.architectures
    model = getattr(transformers, ORACLES.get(architecture, architecture))(config)
    blocks = getattr(config, "block_configs", ())
    for layer, block in zip(model.base_model.layers if blocks else (), blocks, strict=True):
        if block["block_type"] == "moe":
            own = copy.deepcopy(config)
            own.moe_intermediate_size, own.num_experts_per_tok = list(block.values())[1:]
            layer.mixer = NemotronHMoE(own)
    model = model.eval().requires_grad_(False)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("input.query"):
            parameter.normal_(0, 0.6)
        elif parameter_name.endswith("norm.scale"):
            parameter.normal_(1, 0.3)
        elif parameter.dim() > 1 and not parameter_name.endswith("A_log"):
            scale = 1 if "embed" in parameter_name else 0.8 * parameter.shape[-1] ** -0.5
            parameter.normal_(0, scale)
        elif parameter_name.endswith(("norm.weight", "norm_f.weight", "bias", ".D", "A_log", "s_scale", "l_scale")):
            parameter.add_(torch.randn_like(parameter) * 0.2)
        elif parameter_name.endswith(("norm_key.weight", "norm_query.weight", "norm_conv.weight")):
            parameter.normal_(0, 0.2)
        elif parameter_name.endswith(("_hc.base", "_hc.scale")):
            parameter.normal_(1, 0.5)
        elif parameter_name.endswith("sinks"):
            parameter.normal_(0, 2)
        elif parameter_name.endswith(("qk_norm.temp", "global_scale")):
            parameter.normal_(1, 0.2)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("expert_bias", "correction_bias", "balancing_biases")):
            buffer.normal_(0, 0.2)
    if getattr(config, "tie_word_embeddings", False):
        # The embedding is as large as the residual stream has to be; the logits of it need not be.
        _final_norm(model).weight.sub_(0.9)
    num_streams = getattr(config.get_text_config(), "hc_count", 1)
    for parameter_name, parameter in model.named_parameters():
        if num_streams > 1 and parameter_name.endswith(("mix_weight_down.weight", "inject_weight.weight")):
            parameter.mul_(num_streams)  # which the layer divides their outputs by
        if num_streams > 1 and parameter_name == "lm_head.weight":
            parameter.mul_(4)  # what it reads is a mean of gated streams, less than a norm's result
    end_tokens = config.get_text_config().eos_token_id
    if end_tokens is not None:
        # Their logits are 0, so that answers do not end.
        model.get_output_embeddings().weight[end_tokens] = 0
    _as_published(model, config)
    return choosing_first(model)


class FirstOfEqual(TorchFunctionMode):
    """Let ``topk`` return the first of equal numbers, as our kernels do; torch may return any of them.

    A group's score in an index is exactly 0, whatever the order of sums, if its product with every head's query is
    negative. Several such groups may compete for the last choice: more often in GLM-5, which weighs heads by numbers of
    either sign. Logits then depend on it from that token on: in 2 of 40 random models of ``glm5_next`` and 8 of
    ``glm5_next-odd``, with 300 tokens each, by 0.1 to 1.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_topk if func in (torch.topk, Tensor.topk) else func)(*args, **(kwargs or {}))


def _topk(x: Tensor, k: int, dim: int = -1, *, sorted: bool = True) -> Any:
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def choosing_first(model: Any) -> Any:
    """Run a model's decoder under ``FirstOfEqual`` from now on; return the model."""
    mode = FirstOfEqual()

    def enter(*_: Any) -> None:
        mode.__enter__()

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)

    decoder = model.base_model.get_decoder()
    decoder.register_forward_pre_hook(enter)
    decoder.register_forward_hook(leave, always_call=True)
    return model


def _final_norm(model: Any) -> Any:
    decoder = model.base_model.get_decoder()
    names = ("norm", "embedding_norm", "final_layernorm", "final_norm", "norm_f")
    return next(norm for name in names if (norm := getattr(decoder, name, None)))


def _as_published(model: Any, config: Any) -> None:
    """Give layers what they were published with.

    The gated norm of Mamba-2 is that of ``mamba_ssm``: in some families transformers' own ignores the groups. In others
    transformers limits time steps by another field. Of Inkling with towers, transformers 5.17 normalises embeddings
    twice, which other releases do not; equal weights make that the same.
    """
    if hasattr(model.base_model, "audio_tower"):
        next(module for name, module in model.named_modules() if name.endswith("embed_norm")).weight.fill_(1.2)
    num_groups = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", 1)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(getattr(config, "time_step_limit", (0.0, inf)))
    for name, module in model.named_modules():
        if isinstance(module, UNGROUPED) and num_groups > 1:
            norm = Zamba2RMSNormGated(len(module.weight), len(module.weight) // num_groups, module.variance_epsilon)
            norm.weight = module.weight
            model.get_submodule(name.rpartition(".")[0]).norm = norm


@cache
def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist())


@cache
def oracle_logits(name: str, tokens: tuple[int, ...]) -> Tensor:
    """Return the logits of every token."""
    logits: Tensor = oracle(name)(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def greedy_tokens(name: str, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """Return the token that the oracle prefers in each place of answers to prompts.

    They are the answers themselves if, and only if, these are what it generates greedily. The oracle is not loaded from
    a file: transformers then sets some buffers anew, such as the balancing biases of ZAYA's router.
    """
    return [
        oracle_logits(name, (*prompt, *answer[:-1]))[len(prompt) - 1 :].argmax(-1).tolist()
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def save(name: str, directory: Path, **sizes: int) -> Path:
    """Write the oracle in the published layout.

    Args:
        sizes: other values of those fields of the configuration that it has.
    """
    config = copy.deepcopy(config_of(name))
    text = config.get_text_config()
    for field in vars(text).keys() & sizes:
        setattr(text, field, sizes[field])
    model = random_model(config, len(name)) if sizes else oracle(name)
    model.save_pretrained(directory / name)
    if name == "kimi_linear":
        _name_dense_parts(directory / name / "model.safetensors", config_of(name))
    if CONFIGS[name].architecture in ORACLES:
        _name_as_published(directory / name, config_of(name), RENAMED.get(name, str))
    if name == "olmo_hybrid":
        _split_convolutions(directory / name / "model.safetensors", config_of(name))
    return directory / name


def _name_as_published(directory: Path, config: Any, rename: Callable[[str], str]) -> None:
    """Name the architecture and tensors as files do that transformers has another class for."""
    path = directory / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    (directory / "config.json").write_text(config.to_json_string())


def _name_dense_parts(path: Path, config: Any) -> None:
    """Name dense feed-forward parts as published; transformers saves them under the experts' name."""
    tensors = load_file(path)
    for layer, kind in enumerate(config.mlp_layer_types):
        prefix = f"model.layers.{layer}."
        for part in ("gate", "up", "down") if kind == "dense" else ():
            tensors[f"{prefix}mlp.{part}_proj.weight"] = tensors.pop(f"{prefix}block_sparse_moe.{part}_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})


def _split_convolutions(path: Path, config: Any) -> None:
    """Give queries, keys and values their own channels, as published; transformers saves three equal parts."""
    tensors = load_file(path)
    key_dim = config.linear_num_key_heads * config.linear_key_head_dim
    value_dim = config.linear_num_value_heads * config.linear_value_head_dim
    for layer, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{layer}"
        if kind == "linear_attention":
            names = [f"{prefix}.linear_attn.{x}_conv1d.weight" for x in "qkv"]
            fused = torch.cat([tensors[name] for name in names])
            parts = fused.split([key_dim, key_dim, value_dim])
            tensors.update({name: part.clone() for name, part in zip(names, parts, strict=True)})
        else:
            norm = tensors.pop(f"{prefix}.feedforward_layer_norm.weight")
            tensors[f"{prefix}.post_attention_layernorm.weight"] = norm
    save_file(tensors, path, metadata={"format": "pt"})
