"""Mamba and Falcon Mamba: a selective state space in every layer, without attention and feed-forward parts.

The state of a context has a fixed size: prefix caching needs only snapshots, and positions have no limit. Falcon Mamba
also normalises the inputs of time steps and state projections.

Source: ``transformers`` (``mamba``, ``falcon_mamba``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from strandline.config_fields import (
    MAX_HEAD_DIM,
    UNLIMITED_POSITION,
    Fields,
    read_eps,
    read_layer_types,
)
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.parts.convolution import MAX_TAPS
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.mamba1 import InnerNorm, Mamba1Config, Mamba1Layer
from strandline.models.layers.streams.residual import PreNorm, rms

LAYER_TYPES: Final = ("linear_attention",)

PUBLISHED: Final = {"embed_tokens": "embeddings", "norm": "norm_f"}
"""Published names that differ from other families'."""

Layer = DecoderLayer[Mamba1Layer, None]


def build_mamba(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    return _build(config.text, InnerNorm.NONE, 1.0, site)


def build_falcon_mamba(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    return _build(fields, InnerNorm.RMS, read_eps(fields, "mixer_rms_eps"), site)


def _build(fields: Fields, norm: InnerNorm, inner_eps: float, site: Site) -> CausalLM:
    fields.choice("hidden_act", ["silu"])
    mamba = Mamba1Config(
        hidden_size=fields.size("hidden_size"),
        num_channels=fields.size("intermediate_size"),
        state_dim=fields.size("state_size", at_most=MAX_HEAD_DIM),
        dt_rank=fields.size("time_step_rank"),
        num_taps=fields.size("conv_kernel", at_least=2, at_most=MAX_TAPS),
        has_bias=fields.flag("use_bias"),
        has_conv_bias=fields.flag("use_conv_bias"),
        norm=norm,
        eps=inner_eps,
    )
    residual_norm, hidden_size = rms(read_eps(fields, "layer_norm_epsilon")), mamba.hidden_size
    layers = [
        pre_norm_layer(Mamba1Layer(mamba, site), None, residual_norm, hidden_size, site)
        for _ in read_layer_types(fields, LAYER_TYPES)
    ]
    embedding = EmbeddingConfig.read(fields)
    decoder = Decoder(layers, PreNorm(residual_norm, hidden_size, site), embedding, None, site)
    return CausalLM(decoder, UNLIMITED_POSITION, partial(_published, decoder, layers))


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from renamed(decoder.targets("backbone.", names), PUBLISHED)
    for index, layer in enumerate(layers):
        prefix, mixer = f"backbone.layers.{index}.", layer.mixer
        yield f"{prefix}norm.weight", whole(layer.mixer_norm_E)
        yield from mixer.targets(f"{prefix}mixer.")
