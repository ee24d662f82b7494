"""Jamba: selective state spaces, every few layers attention, and every few layers a mixture of experts.

Attention embeds no positions. The inputs of time steps and state projections are normalised.

Source: ``transformers`` (``jamba``).
"""

from collections.abc import Sequence
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
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.feed_forward.moe import SparseMoe, SparseMoeConfig, build_feed_forward
from strandline.models.layers.parts.convolution import MAX_TAPS
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.mamba1 import InnerNorm, Mamba1Config, Mamba1Layer
from strandline.models.layers.streams.residual import PreNorm, rms

LAYER_TYPES: Final = ("full_attention", "linear_attention")

FINAL_NORM: Final = {"norm": "final_layernorm"}
ROUTER: Final = {"gate": "router"}
"""Published names that differ from other families'."""

Layer = DecoderLayer[Attention | Mamba1Layer, GatedMlp | SparseMoe]


def build_jamba(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    attention = AttentionConfig.read(fields, QueryKeyNorm.NONE, has_bias=False)
    mamba, mlp, moe = _read_mamba(fields), GatedMlpConfig.read(fields), _read_experts(fields)
    norm, hidden_size = rms(attention.eps), attention.hidden_size

    def build_layer(index: int, kind: str) -> Layer:
        feed_forward = moe if _is_sparse(fields, index) and moe.num_experts > 1 else mlp
        mixer = Attention(attention, site) if kind == "full_attention" else Mamba1Layer(mamba, site)
        return pre_norm_layer(mixer, build_feed_forward(feed_forward, site), norm, hidden_size, site)

    layers = [build_layer(index, kind) for index, kind in enumerate(read_layer_types(fields, LAYER_TYPES))]
    embedding = EmbeddingConfig.read(fields)
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, None, site)
    return CausalLM(decoder, read_max_position(fields), partial(_published, decoder, layers))


def _is_sparse(fields: Fields, index: int) -> bool:
    """Return whether a layer has experts."""
    period = fields.size("expert_layer_period", at_most=MAX_LAYERS)
    return index % period == fields.size("expert_layer_offset", at_least=0, at_most=period - 1)


def _read_mamba(fields: Fields) -> Mamba1Config:
    hidden_size = fields.size("hidden_size")
    return Mamba1Config(
        hidden_size=hidden_size,
        num_channels=fields.size("mamba_expand", at_most=64) * hidden_size,
        state_dim=fields.size("mamba_d_state", at_most=MAX_HEAD_DIM),
        dt_rank=fields.size("mamba_dt_rank"),
        num_taps=fields.size("mamba_d_conv", at_least=2, at_most=MAX_TAPS),
        has_bias=fields.flag("mamba_proj_bias"),
        has_conv_bias=fields.flag("mamba_conv_bias"),
        norm=InnerNorm.WEIGHTED_RMS,
        eps=read_eps(fields),
    )


def _read_experts(fields: Fields) -> SparseMoeConfig:
    num_experts = fields.size("num_experts", at_most=MAX_EXPERTS)
    return SparseMoeConfig(
        hidden_size=fields.size("hidden_size"),
        size=fields.size("intermediate_size"),
        shared_size=0,
        num_experts=num_experts,
        top_k=fields.size("num_experts_per_tok", at_most=max(num_experts, 2)),
        is_normalised=False,
    )


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from renamed(decoder.targets("model.", names), FINAL_NORM)
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}pre_ff_layernorm.weight", whole(layer.mlp_norm_E)
        yield from mixer.targets(f"{prefix}{'mamba' if isinstance(mixer, Mamba1Layer) else 'self_attn'}.")
        yield from renamed(mlp.targets(f"{prefix}feed_forward.", names), ROUTER)
