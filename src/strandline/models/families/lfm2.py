"""LFM2, dense and mixture of experts: gated short convolutions and, every few layers, attention.

The state of a convolution is a window of two rows: a snapshot costs less memory than a token's keys and values.

Source: ``transformers`` (``lfm2``, ``lfm2_moe``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from strandline.config_fields import Fields, read_eps, read_layer_types, read_max_position
from strandline.kernels.experts.router import Routing
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.feed_forward.sigmoid_moe import (
    MAX_SCALE,
    SigmoidMoe,
    SigmoidMoeConfig,
    build_feed_forward,
    feed_forward_targets,
)
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.short_conv import ShortConv, ShortConvConfig
from strandline.models.layers.streams.residual import PreNorm, rms

LAYER_TYPES: Final = ("full_attention", "conv")

ROUTER_EPS: Final = 1e-6

PUBLISHED: Final = {
    "norm": "embedding_norm",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
"""Published names that differ from other families'."""

Layer = DecoderLayer[Attention | ShortConv, SigmoidMoe | GatedMlp]


def build_lfm2(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    mlp = GatedMlpConfig(fields.size("hidden_size"), _read_dense_size(fields))
    return _build(config, [mlp] * len(read_layer_types(fields, LAYER_TYPES)), site)


def build_lfm2_moe(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    num_layers = len(read_layer_types(fields, LAYER_TYPES))
    num_dense = fields.size("num_dense_layers", at_least=0, at_most=num_layers)
    mlps = [GatedMlpConfig.read(fields)] * num_dense + [_read_experts(fields)] * (num_layers - num_dense)
    return _build(config, mlps, site)


def _read_dense_size(fields: Fields) -> int:
    """Return the intermediate size, which may be given as that of a layer without a gate."""
    size = fields.size("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return size
    factor = fields.number("block_ffn_dim_multiplier", at_least=0, at_most=64, default=1.0)
    multiple = fields.size("block_multiple_of")
    return max(1, -(-int(factor * int(2 * size / 3)) // multiple)) * multiple


def _read_experts(fields: Fields) -> SigmoidMoeConfig:
    num_experts = fields.size("num_experts", at_most=MAX_EXPERTS)
    routing = Routing(
        fields.size("num_experts_per_tok", at_most=num_experts),
        fields.flag("norm_topk_prob"),
        "sigmoid",
        ROUTER_EPS,
        fields.number("routed_scaling_factor", at_least=0, at_most=MAX_SCALE),
    )
    return SigmoidMoeConfig(
        hidden_size=fields.size("hidden_size"),
        size=fields.size("moe_intermediate_size"),
        shared_size=0,
        num_experts=num_experts,
        routing=routing,
        has_bias=fields.flag("use_expert_bias"),
    )


def _build(config: ModelConfig, mlps: Sequence[GatedMlpConfig | SigmoidMoeConfig], site: Site) -> CausalLM:
    """Build the model of a configuration, given the feed-forward part of each layer."""
    fields = config.text
    eps = read_eps(fields, "norm_eps")
    attention = AttentionConfig.read(fields, QueryKeyNorm.RMS, eps=eps, has_bias=False)
    conv, norm, hidden_size = ShortConvConfig.read(fields), rms(eps), attention.hidden_size

    def build_layer(kind: str, mlp: GatedMlpConfig | SigmoidMoeConfig) -> Layer:
        return pre_norm_layer(
            Attention(attention, site) if kind == "full_attention" else ShortConv(conv, site),
            build_feed_forward(mlp, site),
            norm,
            hidden_size,
            site,
        )

    layers = [build_layer(*kinds) for kinds in zip(read_layer_types(fields, LAYER_TYPES), mlps, strict=True)]
    embedding = EmbeddingConfig.read(fields)
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary_frequencies(fields), site)
    return CausalLM(decoder, read_max_position(fields), partial(_published, decoder, layers))


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from renamed(decoder.targets("model.", names), PUBLISHED)
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield f"{prefix}operator_norm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}ffn_norm.weight", whole(layer.mlp_norm_E)
        if isinstance(mixer, ShortConv):
            yield from mixer.targets(f"{prefix}conv.")
        else:
            yield from renamed(mixer.targets(f"{prefix}self_attn."), PUBLISHED)
        yield from renamed(feed_forward_targets(mlp, f"{prefix}feed_forward.", names, "expert_bias"), PUBLISHED)
