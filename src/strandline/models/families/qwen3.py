"""Qwen3, dense and mixture of experts: Llama with normalised query and key heads.

Source: ``transformers`` (``qwen3``, ``qwen3_moe``).
"""

from typing import Final

from strandline.config_fields import read_layer_types
from strandline.model_config import ModelConfig
from strandline.models.families import llama
from strandline.models.families.causal_lm import CausalLM
from strandline.models.families.qwen3_next import read_mlps
from strandline.models.layers.attention.attention_parts import QueryKeyNorm
from strandline.models.layers.feed_forward.mlp import GatedMlpConfig
from strandline.models.layers.parts.site import Site

LAYER_TYPES: Final = ("full_attention",)


def build_qwen3(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    mlps = [GatedMlpConfig.read(fields)] * len(read_layer_types(fields, LAYER_TYPES))
    return llama.build(config, QueryKeyNorm.RMS, mlps, site)


def build_qwen3_moe(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    if fields.value("use_sliding_window") and fields.value("sliding_window") is not None:
        fields.reject("use_sliding_window", "false")
    mlps = read_mlps(fields, len(read_layer_types(fields, LAYER_TYPES)), is_shared=False)
    return llama.build(config, QueryKeyNorm.RMS, mlps, site)
