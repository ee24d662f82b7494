"""Bailing's hybrids (Ling 3): Kimi Delta Attention, and gated latent attention every few layers, before experts.

Layers for multi-token prediction are skipped.

Source: ``transformers`` (``bailing_hybrid``).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from strandline.config_fields import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    Fields,
    read_eps,
    read_layer_types,
    read_max_position,
)
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.latent_attention import LatentAttention, LatentAttentionConfig
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.feed_forward.sigmoid_moe import (
    SigmoidMoe,
    SigmoidMoeConfig,
    build_feed_forward,
    feed_forward_targets,
    read_feed_forwards,
)
from strandline.models.layers.parts.rotary import RotaryFrequencies, rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.kimi_delta import KimiDeltaAttention, KimiDeltaAttentionConfig
from strandline.models.layers.streams.residual import PreNorm, rms

FULL, LINEAR = "full_attention", "linear_attention"

PUBLISHED: Final = {"embed_tokens": "word_embeddings", "o_proj": "dense"}
"""Published names that differ from other families'."""

Layer = DecoderLayer[KimiDeltaAttention | LatentAttention, SigmoidMoe | GatedMlp]


def build_bailing_hybrid(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    layer_types = read_layer_types(fields, (FULL, LINEAR))
    delta, latent = _read_delta(fields), _read_latent(fields)
    feed_forwards, rotary = read_feed_forwards(fields, len(layer_types)), _read_rotary(fields)
    norm, hidden_size = rms(read_eps(fields)), latent.hidden_size
    embedding = EmbeddingConfig.read(fields)
    max_position, num_drafting = (
        read_max_position(fields),
        fields.size("num_mtp_layers", at_least=0, at_most=MAX_LAYERS),
    )

    def build_layer(kind: str, feed_forward: GatedMlpConfig | SigmoidMoeConfig) -> Layer:
        mixer = KimiDeltaAttention(delta, site) if kind == LINEAR else LatentAttention(latent, site)
        return pre_norm_layer(mixer, build_feed_forward(feed_forward, site), norm, hidden_size, site)

    layers = [build_layer(*kinds) for kinds in zip(layer_types, feed_forwards, strict=True)]
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary, site)
    drafting = tuple(f"model.layers.{len(layers) + index}." for index in range(num_drafting))
    return CausalLM(decoder, max_position, partial(_published, decoder, layers), skipped_prefixes=drafting)


def _read_delta(fields: Fields) -> KimiDeltaAttentionConfig:
    lower_bound = "kda_lower_bound" if fields.flag("kda_safe_gate") else None
    return replace(KimiDeltaAttentionConfig.read(fields, lower_bound), is_low_rank=False)


def _read_latent(fields: Fields) -> LatentAttentionConfig:
    query_rank = None if fields.value("q_lora_rank") is None else fields.size("q_lora_rank")
    sizes = LatentAttentionConfig.read(fields)
    return replace(sizes, query_rank=query_rank, is_rotated=True, is_gated=True)


def _read_rotary(fields: Fields) -> RotaryFrequencies:
    return rotary_frequencies(fields, rotary_dim=fields.size("qk_rope_head_dim", at_most=MAX_HEAD_DIM))


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from renamed(decoder.targets("model.", names), PUBLISHED)
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(layer.mlp_norm_E)
        yield from renamed(mixer.targets(f"{prefix}attention."), PUBLISHED)
        yield from feed_forward_targets(mlp, f"{prefix}mlp.", names, "gate.expert_bias")
