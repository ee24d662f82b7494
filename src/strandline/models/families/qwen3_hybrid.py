"""Shared parts of Qwen3-Next and Qwen3.5: Gated DeltaNet layers, and gated attention every few layers.

Source: ``transformers`` (``qwen3_next``, ``qwen3_5``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from strandline.config_fields import Fields, read_layer_types, read_max_position
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, OutputGate, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.feed_forward.moe import SparseMoe, SparseMoeConfig, build_feed_forward
from strandline.models.layers.multi_token import DraftLayer
from strandline.models.layers.parts.rotary import RotaryFrequencies, rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.models.layers.recurrences.gated_delta import GatedDeltaNet, GatedDeltaNetConfig
from strandline.models.layers.streams.residual import PreNorm, ResidualNorm, zero_centered
from strandline.models.vision.tower import tower_builder

LAYER_TYPES: Final = ("full_attention", "linear_attention")

InProjTargets = Callable[[GatedDeltaNet, str], NamedTargets]
"""Yields the input projections of a Gated DeltaNet layer, given the prefix of their names."""


MlpConfig = GatedMlpConfig | SparseMoeConfig

Layer = DecoderLayer[Attention | GatedDeltaNet, GatedMlp | SparseMoe]


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """The settings of both families' text configurations."""

    layer_types: tuple[str, ...]
    embedding: EmbeddingConfig
    max_position: int
    attention: AttentionConfig
    gated_delta: GatedDeltaNetConfig
    rotary: RotaryFrequencies
    has_draft_layer: bool
    """Whether a multi-token prediction layer that shares the embedding may be published."""

    @classmethod
    def read(cls, fields: Fields) -> "HybridConfig":
        """Read a text configuration.

        Raises:
            ConfigError: a setting is not supported, or does not go with another one.
        """
        layer_types = read_layer_types(fields, LAYER_TYPES)
        fields.choice("hidden_act", ["silu"])
        return cls(
            layer_types=layer_types,
            embedding=EmbeddingConfig.read(fields),
            max_position=read_max_position(fields),
            attention=replace(AttentionConfig.read(fields, QueryKeyNorm.ZERO_CENTERED), gate=OutputGate.PER_CHANNEL),
            gated_delta=GatedDeltaNetConfig.read(fields),
            rotary=rotary_frequencies(fields),
            has_draft_layer=fields.size("mtp_num_hidden_layers", at_least=0, default=1) == 1
            and not fields.flag("mtp_use_dedicated_embeddings", default=False),
        )


def build(
    config: HybridConfig,
    mlps: Sequence[MlpConfig],
    in_proj_targets: InProjTargets,
    site: Site,
    *,
    vision: Fields | None = None,
) -> CausalLM:
    """Build the model of a configuration.

    Args:
        mlps: per layer, its feed-forward part.
        in_proj_targets: the family's input projections, which differ in their published order.
        vision: the fields about pictures; None: the model has no vision tower.
    """
    norm = zero_centered(config.attention.eps)
    layers = [_build_layer(config, *kinds, norm, site) for kinds in zip(config.layer_types, mlps, strict=True)]
    hidden_size = config.attention.hidden_size
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), config.embedding, config.rotary, site)

    def build_draft_layer() -> DraftLayer:
        layer = _build_layer(config, "full_attention", mlps[-1], norm, site)
        published = partial(_published_draft_layer, layer, in_proj_targets)
        return DraftLayer(layer, published, norm, hidden_size, site)

    return CausalLM(
        decoder,
        config.max_position,
        partial(_published, decoder, layers, in_proj_targets),
        build_draft_layer if config.has_draft_layer else None,
        build_tower=tower_builder(vision, hidden_size, site),
    )


def _build_layer(config: HybridConfig, kind: str, mlp: MlpConfig, norm: ResidualNorm, site: Site) -> Layer:
    mixer: Attention | GatedDeltaNet
    mixer = Attention(config.attention, site) if kind == "full_attention" else GatedDeltaNet(config.gated_delta, site)
    return pre_norm_layer(mixer, build_feed_forward(mlp, site), norm, config.attention.hidden_size, site)


def _published(
    decoder: Decoder, layers: Sequence[Layer], in_proj_targets: InProjTargets, names: frozenset[str]
) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    for index, layer in enumerate(layers):
        yield from _published_layer(layer, in_proj_targets, f"model.layers.{index}.", names)


def _published_draft_layer(
    layer: Layer, in_proj_targets: InProjTargets, draft: DraftLayer, names: frozenset[str]
) -> NamedTargets:
    """Yield the published tensors of a draft layer, and of the layer in it."""
    yield "mtp.fc.weight", whole(draft.fc.weight_OI)
    yield "mtp.pre_fc_norm_embedding.weight", whole(draft.embedding_norm_E)
    yield "mtp.pre_fc_norm_hidden.weight", whole(draft.hidden_norm_E)
    yield "mtp.norm.weight", whole(draft.final.norm_E)
    yield from _published_layer(layer, in_proj_targets, "mtp.layers.0.", names)


def _published_layer(layer: Layer, in_proj_targets: InProjTargets, prefix: str, names: frozenset[str]) -> NamedTargets:
    mixer = layer.mixer
    yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
    yield f"{prefix}post_attention_layernorm.weight", whole(layer.mlp_norm_E)
    yield from layer.mlp.targets(f"{prefix}mlp.", names)
    if isinstance(mixer, Attention):
        yield from mixer.targets(f"{prefix}self_attn.")
    else:
        yield from mixer.targets(f"{prefix}linear_attn.")
        yield from in_proj_targets(mixer, f"{prefix}linear_attn.")
