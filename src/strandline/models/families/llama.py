"""Llama: attention and a feed-forward part in every layer, without recurrence. Other families reuse ``build``.

Source: ``transformers`` (``llama``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from strandline.config_fields import read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.feed_forward.moe import SparseMoe, SparseMoeConfig, build_feed_forward
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.models.layers.streams.residual import PreNorm, rms

LAYER_TYPES: Final = ("full_attention",)

Layer = DecoderLayer[Attention, GatedMlp | SparseMoe]


def build_llama(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    if fields.flag("mlp_bias"):
        fields.reject("mlp_bias", "false")
    mlps = [GatedMlpConfig.read(fields)] * len(read_layer_types(fields, LAYER_TYPES))
    return build(config, QueryKeyNorm.NONE, mlps, site)


def build(
    config: ModelConfig, norm: QueryKeyNorm, mlps: Sequence[GatedMlpConfig | SparseMoeConfig], site: Site
) -> CausalLM:
    """Build the model of a configuration with Llama's field names.

    Args:
        mlps: per layer, its feed-forward part.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    attention, embedding = AttentionConfig.read(fields, norm), EmbeddingConfig.read(fields)
    rotary, max_position = rotary_frequencies(fields), read_max_position(fields)
    residual_norm, hidden_size = rms(attention.eps), attention.hidden_size
    layers = [
        pre_norm_layer(
            Attention(attention, site),
            build_feed_forward(mlp, site),
            residual_norm,
            hidden_size,
            site,
        )
        for mlp in mlps
    ]
    decoder = Decoder(layers, PreNorm(residual_norm, hidden_size, site), embedding, rotary, site)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers))


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(layer.mlp_norm_E)
        yield from mixer.targets(f"{prefix}self_attn.")
        yield from mlp.targets(f"{prefix}mlp.", names)
