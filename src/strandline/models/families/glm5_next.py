"""GLM-5.3-Flash: three layers of Kimi Delta Attention, then one of indexed latent attention, and so on; mostly experts.

Parts read a mix of several residual streams (``layers/streams/hyper_connections.py``). Attention reads the tokens that
an index chooses (``layers/attention/indexed_latent_attention.py``). Gates and up projections of feed-forward parts are
clamped. No layer embeds positions.

Of multimodal models the text part is built; the vision tower's tensors are recognised and skipped, and so are those of
the layer for multi-token prediction, which transformers does not implement.

Source: ``transformers`` (``glm5_next``).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from strandline.config_fields import Fields, read_layer_kinds, read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.indexed_latent_attention import (
    GroupChoice,
    IndexedLatentAttention,
    IndexedLatentAttentionConfig,
    TokenIndex,
)
from strandline.models.layers.decoder import Decoder, DecoderLayer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig, read_limit
from strandline.models.layers.feed_forward.sigmoid_moe import (
    SigmoidMoe,
    SigmoidMoeConfig,
    build_feed_forward,
    feed_forward_targets,
    read_feed_forwards,
)
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.models.layers.recurrences.kimi_delta import KimiDeltaAttention, KimiDeltaAttentionConfig
from strandline.models.layers.streams.hyper_connections import HyperConnection, HyperConnectionsConfig, StreamMean
from strandline.models.layers.streams.streams import StreamsEnds, StreamsResidual, mix_of

ATTENTION: Final = "indexed_attention"
LAYER_TYPES: Final = (ATTENTION, "linear_attention")
INDEXER_TYPES: Final = ("full", "shared")

Layer = DecoderLayer[KimiDeltaAttention | IndexedLatentAttention, SigmoidMoe | GatedMlp]


def build_glm5_next(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    layer_types, streams = read_layer_types(fields, LAYER_TYPES), HyperConnectionsConfig.read(fields)
    indexer_types = _read_indexer_types(fields, layer_types)
    attention, delta = IndexedLatentAttentionConfig.read(fields), _read_delta(fields)
    limit, choice = read_limit(fields), GroupChoice()
    feed_forwards = [replace(each, limit=limit) for each in read_feed_forwards(fields, len(layer_types))]

    def build_layer(kind: str, feed_forward: GatedMlpConfig | SigmoidMoeConfig, indexer_kind: str) -> Layer:
        mixer: IndexedLatentAttention | KimiDeltaAttention
        if kind == ATTENTION:
            index = TokenIndex(attention, site) if indexer_kind == "full" else None
            mixer = IndexedLatentAttention(attention, index, choice, site)
        else:
            mixer = KimiDeltaAttention(delta, site)
        residuals = (StreamsResidual(HyperConnection(streams, site)) for _ in range(2))
        return DecoderLayer(mixer, build_feed_forward(feed_forward, site), *residuals)

    layers = [build_layer(*kinds) for kinds in zip(layer_types, feed_forwards, indexer_types, strict=True)]
    embedding, last_mix = EmbeddingConfig.read(fields), StreamMean(streams, site)
    ends = StreamsEnds(last_mix, streams.num_streams)
    decoder = Decoder(layers, ends, embedding, None, site)
    published, draft_layer = partial(_published, decoder, last_mix, layers), f"model.layers.{len(layers)}."
    return CausalLM(decoder, read_max_position(fields), published, skipped_prefixes=(draft_layer,))


def _read_indexer_types(fields: Fields, layer_types: Sequence[str]) -> tuple[str, ...]:
    """Return for each layer whether it has an index or shares that of the layer before."""
    types = read_layer_kinds(fields, "indexer_types", INDEXER_TYPES, len(layer_types))
    kinds = list(zip(layer_types, types, strict=True))
    for index, kind in enumerate(kinds):
        if kind == (ATTENTION, "shared") and (index == 0 or kinds[index - 1] != (ATTENTION, "full")):
            fields.reject("indexer_types", f"such that layer {index} shares the index of an attention layer before it")
    return types


def _read_delta(fields: Fields) -> KimiDeltaAttentionConfig:
    is_bounded = fields.value("linear_lower_bound") is not None
    return KimiDeltaAttentionConfig.read(fields, "linear_lower_bound" if is_bounded else None)


def _published(decoder: Decoder, last_mix: StreamMean, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    yield "model.norm.weight", whole(last_mix.norm_E)
    for index, layer in enumerate(layers):
        yield from _published_layer(layer, f"model.layers.{index}.", names)


def _published_layer(layer: Layer, prefix: str, names: frozenset[str]) -> NamedTargets:
    mixer, mlp = layer.mixer, layer.mlp
    norms = {"attn": "input_layernorm", "ffn": "post_attention_layernorm"}
    residuals = layer.mixer_residual, layer.mlp_residual
    for (part, norm), mix in zip(norms.items(), map(mix_of, residuals), strict=True):
        assert isinstance(mix, HyperConnection)
        yield from mix.targets(f"{prefix}hc_{part}_")
        yield f"{prefix}{norm}.weight", whole(mix.norm_E)
    yield from mixer.targets(f"{prefix}self_attn.")
    yield from feed_forward_targets(mlp, f"{prefix}mlp.", names, "gate.e_score_correction_bias")
