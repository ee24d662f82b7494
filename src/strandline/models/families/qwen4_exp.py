"""Qwen4-Exp: three Gated DeltaNet layers, then one of indexed attention, and so on, each before a mixture of experts.

Parts read a mix of several residual streams (``layers/streams/gated_streams.py``). Some Gated DeltaNet layers first add
features of n-grams to these (``layers/ngram_features.py``). Attention reads the tokens that an index chooses
(``layers/attention/indexed_attention.py``).

Multimodal models also have a vision tower (``vision/tower.py``), whose tensors are skipped where only text is served.
So are always those of the layer for multi-token prediction, which transformers does not implement.

Source: ``transformers`` (``qwen4_exp``).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from strandline.config_fields import Fields, read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.families.qwen3_5 import in_proj_targets
from strandline.models.layers.attention.indexed_attention import IndexedAttention, IndexedAttentionConfig
from strandline.models.layers.decoder import Decoder, DecoderLayer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.moe import SparseMoe, SparseMoeConfig
from strandline.models.layers.ngram_features import FeaturesLayer, NgramFeatures, NgramFeaturesConfig
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets
from strandline.models.layers.recurrences.gated_delta import GatedDeltaNet, GatedDeltaNetConfig
from strandline.models.layers.streams.gated_streams import GatedMix, GatedStreamsConfig, LastGatedMix
from strandline.models.layers.streams.streams import StreamsEnds, StreamsResidual, mix_of
from strandline.models.vision.tower import VisionTower, tower_builder
from strandline.picture_config import PictureConfig

ATTENTION: Final = "indexed_attention"
LAYER_TYPES: Final = (ATTENTION, "linear_attention")

Layer = DecoderLayer[IndexedAttention | GatedDeltaNet, SparseMoe]


def build_qwen4_exp(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields, rotary = config.text, rotary_frequencies(config.text)
    fields.choice("hidden_act", ["silu"])
    layer_types, streams = read_layer_types(fields, LAYER_TYPES), GatedStreamsConfig.read(fields)
    attention, gated_delta = IndexedAttentionConfig.read(fields, rotary), _read_gated_delta(fields)
    moe = SparseMoeConfig.read(fields, is_normalised=fields.flag("norm_topk_prob"))
    ngrams = _read_ngrams(fields, layer_types, streams.num_streams)

    def build_layer(index: int, kind: str) -> Layer:
        mixer: IndexedAttention | GatedDeltaNet
        mixer = IndexedAttention(attention, site) if kind == ATTENTION else GatedDeltaNet(gated_delta, site)
        residuals = StreamsResidual(GatedMix(streams, site)), StreamsResidual(GatedMix(streams, site))
        if index not in ngrams:
            return DecoderLayer(mixer, SparseMoe(moe, site), *residuals)
        return FeaturesLayer(mixer, SparseMoe(moe, site), residuals, NgramFeatures(ngrams[index], site))

    layers = [build_layer(index, kind) for index, kind in enumerate(layer_types)]
    embedding, last_mix = EmbeddingConfig.read(fields), LastGatedMix(streams, site)
    ends = StreamsEnds(last_mix, streams.num_streams)
    decoder = Decoder(layers, ends, embedding, rotary, site)
    published = partial(_published, decoder, last_mix, layers)
    build_tower = tower_builder(config.vision, streams.hidden_size, site)
    if build_tower is None:
        return CausalLM(decoder, read_max_position(fields), published)

    def build_tower_for_layers(pictures: PictureConfig) -> VisionTower:
        decoder.picture_token_id = pictures.image_token_id
        for layer in layers:
            if isinstance(layer.mixer, IndexedAttention):
                layer.mixer.keeps_positions = True
        return build_tower(pictures)

    return CausalLM(decoder, read_max_position(fields), published, build_tower=build_tower_for_layers)


def _read_gated_delta(fields: Fields) -> GatedDeltaNetConfig:
    gate = fields.choice("output_gate_type", ["silu", "sigmoid"])
    return replace(GatedDeltaNetConfig.read(fields), is_sigmoid_gated=gate == "sigmoid")


def _read_ngrams(fields: Fields, layer_types: Sequence[str], num_streams: int) -> dict[int, NgramFeaturesConfig]:
    """Return the features of n-grams, by the layers that have them."""
    ids = fields.list_of(
        "ple_layer_ids", lambda entries, name: entries.size(name, at_least=1, at_most=len(layer_types))
    )
    if any(layer_types[layer - 1] == ATTENTION for layer in ids):
        fields.reject("ple_layer_ids", "numbers of linear_attention layers, from 1")
    layers = [layer - 1 for layer in sorted(set(ids))]
    return {layer: NgramFeaturesConfig.read(fields, num_streams, number) for number, layer in enumerate(layers)}


def _published(
    decoder: Decoder, last_mix: LastGatedMix, layers: Sequence[Layer], names: frozenset[str]
) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    yield from last_mix.targets("model.hyper_connection_mixer.")
    for index, layer in enumerate(layers):
        yield from _published_layer(layer, f"model.layers.{index}.", names)


def _published_layer(layer: Layer, prefix: str, names: frozenset[str]) -> NamedTargets:
    mixer, mlp = layer.mixer, layer.mlp
    residuals = layer.mixer_residual, layer.mlp_residual
    for part, mix in zip(("attn", "mlp"), map(mix_of, residuals), strict=True):
        assert isinstance(mix, GatedMix)
        yield from mix.targets(f"{prefix}{part}_hyper_connection.")
    if isinstance(mixer, IndexedAttention):
        yield from mixer.targets(f"{prefix}self_attn.")
    else:
        yield from mixer.targets(f"{prefix}linear_attn.")
        yield from in_proj_targets(mixer, f"{prefix}linear_attn.")
    yield from mlp.targets(f"{prefix}mlp.", names)
    if isinstance(layer, FeaturesLayer):
        yield from layer.features.targets(f"{prefix}ple.", names)
