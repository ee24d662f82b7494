"""OLMo Hybrid: three Gated DeltaNet layers, then one of attention, and so on, each with a gated feed-forward part.

A Gated DeltaNet layer reads the normalised residual stream; its eigenvalues may be negative. An attention layer reads
the stream itself, and its output is normalised; queries and keys are normalised over all heads at once. Published
models embed no positions. The convolutions of queries, keys and values are fused, since they do not mix channels.

Source: ``transformers`` (``olmo_hybrid``).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from strandline.config_fields import Fields, read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.parts.rotary import RotaryFrequencies, rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, sharded, whole
from strandline.models.layers.recurrences.gated_delta import GatedDeltaNet, GatedDeltaNetConfig
from strandline.models.layers.streams.residual import PostNorm, PreNorm, rms

LAYER_TYPES: Final = ("full_attention", "linear_attention")

OUTPUT_NORM_EPS: Final = 1e-5
"""Epsilon of the gated norm, independent of the other norms'."""

Layer = DecoderLayer[Attention | GatedDeltaNet, GatedMlp]


def build_olmo_hybrid(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    layer_types = read_layer_types(fields, LAYER_TYPES)
    attention, mlp = AttentionConfig.read(fields, QueryKeyNorm.WIDE), GatedMlpConfig.read(fields)
    max_beta = 2 if fields.flag("linear_allow_neg_eigval") else 1
    gated_delta = replace(GatedDeltaNetConfig.read(fields), eps=OUTPUT_NORM_EPS, max_beta=max_beta)
    norm, hidden_size = rms(attention.eps), attention.hidden_size

    def build_layer(kind: str) -> Layer:
        if kind == "full_attention":
            residuals = PostNorm(norm, hidden_size, site), PostNorm(norm, hidden_size, site)
            return DecoderLayer(Attention(attention, site), GatedMlp(mlp, site), *residuals)
        return pre_norm_layer(GatedDeltaNet(gated_delta, site), GatedMlp(mlp, site), norm, hidden_size, site)

    layers = [build_layer(kind) for kind in layer_types]
    embedding = EmbeddingConfig.read(fields)
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, _read_rotary(fields), site)
    max_position = read_max_position(fields)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers))


def _read_rotary(fields: Fields) -> RotaryFrequencies | None:
    """Return the frequencies; None: positions are not embedded."""
    if fields.value("rope_parameters")["rope_theta"] is None:
        return None
    return rotary_frequencies(fields)


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield from mlp.targets(f"{prefix}mlp.", names)
        if isinstance(mixer, GatedDeltaNet):
            yield f"{prefix}attention_layer_norm.weight", whole(layer.mixer_norm_E)
            yield f"{prefix}feedforward_layer_norm.weight", whole(layer.mlp_norm_E)
            yield from _gated_delta_targets(mixer, f"{prefix}linear_attn.")
            continue
        # In models saved by transformers, this norm has the name of the other layer kind's second norm.
        resaved = f"{prefix}feedforward_layer_norm.weight"
        mixer_norm = resaved if resaved in names else f"{prefix}post_attention_layernorm.weight"
        yield mixer_norm, whole(layer.mixer_norm_E)
        yield f"{prefix}post_feedforward_layernorm.weight", whole(layer.mlp_norm_E)
        yield from mixer.targets(f"{prefix}self_attn.")


def _gated_delta_targets(mixer: GatedDeltaNet, prefix: str) -> NamedTargets:
    """Yield the tensors of a Gated DeltaNet layer."""
    qkv, z, b, a, _ = mixer.in_proj.weights
    for name, rows in zip("qkv", qkv.split(mixer.conv_sizes), strict=True):
        yield f"{prefix}{name}_proj.weight", sharded(rows, mixer.shard)
    for name, rows in {"g": z, "b": b, "a": a}.items():
        yield f"{prefix}{name}_proj.weight", sharded(rows, mixer.shard)
    for name, taps in zip("qkv", mixer.conv.filter.weight_CW.split(mixer.conv_sizes), strict=True):
        yield f"{prefix}{name}_conv1d.weight", sharded(taps.unsqueeze(1), mixer.shard)
    yield f"{prefix}A_log", sharded(mixer.A_log_H, mixer.shard)
    yield f"{prefix}dt_bias", sharded(mixer.dt_bias_H, mixer.shard)
    yield f"{prefix}o_norm.weight", whole(mixer.norm_V)
    yield from mixer.out_proj.targets(f"{prefix}o_proj.")
