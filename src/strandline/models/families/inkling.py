"""Inkling: layers of attention with a window, then one of full attention, and so on, before dense or sparse parts.

What attention and what the feed-forward part add to the residual stream passes a short convolution each, in addition to
the one inside attention (``layers/attention/relative_attention.py``). Experts that every token takes are weighted with
those that the router chooses: they are experts whose scores no other one can reach.

Of multimodal models the text part is built; the tensors of the vision and audio towers are recognised and skipped. So
are those of layers for multi-token prediction, which keep windows: draft layers have only keys and values.

Source: ``transformers`` (``inkling``).

Shape suffixes: T tokens of the step, E hidden size, X experts, F intermediate size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from strandline.config_fields import (
    Fields,
    read_eps,
    read_layer_types,
    read_max_position,
    read_mlp_layer_types,
    read_vocab_size,
)
from strandline.kernels.experts.router import Routing
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.relative_attention import RelativeAttention, RelativeAttentionConfig
from strandline.models.layers.decoder import Decoder, DecoderLayer, LayerStates
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS, Experts, alternating
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.feed_forward.sigmoid_moe import (
    MAX_SCALE,
    ROUTER_EPS,
    SigmoidMoe,
    SigmoidMoeConfig,
    build_feed_forward,
)
from strandline.models.layers.parts.convolution import MAX_TAPS
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, interleaved, renamed, spanned, whole
from strandline.models.layers.streams.output_convolutions import OutputConvolutions
from strandline.models.layers.streams.residual import PreNorm, ResidualNorm, Stream, rms

SLIDING: Final = "hybrid_sliding"
LAYER_TYPES: Final = (SLIDING, "hybrid")

PUBLISHED: Final = "model.llm."
"""Prefix of the tensors of published models, which have names of their own."""

PUBLISHED_NAMES: Final = {
    "embed_tokens": "embed",
    "lm_head": "unembed",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn": "attn",
    "q_proj": "wq_du",
    "k_proj": "wk_dv",
    "v_proj": "wv_dv",
    "r_proj": "wr_du",
    "o_proj": "wo_ud",
    "down_proj": "w2_md",
    "e_score_correction_bias": "bias",
}
"""Maps a component of the names that transformers has for tensors to that of published models."""


class PreNormLayer(DecoderLayer[RelativeAttention, GatedMlp | SigmoidMoe]):
    """Attention, then a feed-forward part, which is scaled; what each adds to the stream is convolved over time."""

    def __init__(
        self,
        mixer: RelativeAttention,
        mlp: GatedMlp | SigmoidMoe,
        norm: ResidualNorm,
        hidden_size: int,
        num_taps: int,
        site: Site,
    ) -> None:
        norms = PreNorm(norm, hidden_size, site), PreNorm(norm, hidden_size, site)
        convs = OutputConvolutions(hidden_size, num_taps, site)
        super().__init__(mixer, mlp, *norms, stateful=convs)
        self.norms, self.convs = norms, convs
        self.mlp_scale = site.gain(1)

    def forward(self, stream: Stream, step: Step, memory: LayerStates) -> Stream:
        """Return the residual stream after the layer."""
        batch, windows = step.batch, memory.other
        before_mixer, before_mlp = self.norms
        hidden_TE, stream = before_mixer.enter(stream)
        mixed_TE = self.convs.of_mixer(self.mixer(hidden_TE, step, memory.mixer), batch, windows)
        hidden_TE, stream = before_mlp.enter(Stream(stream.residual_TE, mixed_TE))
        fed_TE = self.convs.of_mlp(self.mlp(hidden_TE), batch, windows, self.mlp_scale)
        return Stream(stream.residual_TE, fed_TE)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the tensors of norms, convolutions and the scale, as transformers names them."""
        yield f"{prefix}input_layernorm.weight", whole(self.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(self.mlp_norm_E)
        yield f"{prefix}attn_sconv.conv1d.weight", whole(self.convs.mixer.filter.taps_CW.unsqueeze(1))
        yield f"{prefix}mlp_sconv.conv1d.weight", whole(self.convs.mlp.filter.taps_CW.unsqueeze(1))
        owner = "mlp.gate" if isinstance(self.mlp, SigmoidMoe) else "mlp"
        yield f"{prefix}{owner}.global_scale", whole(self.mlp_scale)


def build_inkling(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    layer_types = read_layer_types(fields, LAYER_TYPES)
    mlp_types = read_mlp_layer_types(fields, len(layer_types))
    attention = {kind: RelativeAttentionConfig.read(fields, is_sliding=kind == SLIDING) for kind in set(layer_types)}
    feed_forward: dict[str, GatedMlpConfig | SigmoidMoeConfig]
    feed_forward = {"dense": GatedMlpConfig.read(fields), "sparse": _read_moe(fields)}
    norm, hidden_size = rms(read_eps(fields)), fields.size("hidden_size")
    num_taps = fields.size("conv_kernel_size", at_least=2, at_most=MAX_TAPS)
    num_published = read_vocab_size(fields)
    vocab_size = fields.size("unpadded_vocab_size", at_most=num_published, default=num_published)
    max_position = read_max_position(fields)
    divisor = fields.number("logits_mup_width_multiplier", at_least=1e-6, at_most=1e6)

    def build_layer(kind: str, mlp_type: str) -> PreNormLayer:
        return PreNormLayer(
            RelativeAttention(attention[kind], site),
            build_feed_forward(feed_forward[mlp_type], site),
            norm,
            hidden_size,
            num_taps,
            site,
        )

    layers = [build_layer(*kinds) for kinds in zip(layer_types, mlp_types, strict=True)]
    embedding = EmbeddingConfig(
        vocab_size,
        hidden_size,
        is_tied=False,
        num_published=num_published,
        norm=norm,
        logits_multiplier=1 / divisor,
    )
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, None, site)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers))


def _read_moe(fields: Fields) -> SigmoidMoeConfig:
    if not fields.flag("shared_expert_sink", default=True):
        fields.reject("shared_expert_sink", "true")
    num_routed = fields.size("n_routed_experts", at_most=MAX_EXPERTS)
    num_shared = fields.size("n_shared_experts", at_most=MAX_EXPERTS - num_routed)
    top_k = fields.size("num_experts_per_tok", at_most=num_routed) + num_shared
    scale = fields.number("route_scale", at_least=0, at_most=MAX_SCALE)
    routing = Routing(top_k, is_normalised=True, scores="sigmoid", eps=ROUTER_EPS, scale=scale)
    size, num_experts = fields.size("moe_intermediate_size"), num_routed + num_shared
    sizes = (fields.size("hidden_size"), size, 0, num_experts)
    return SigmoidMoeConfig(*sizes, routing, has_bias=True, num_always=num_shared)


def _published(decoder: Decoder, layers: Sequence[PreNormLayer], names: frozenset[str]) -> NamedTargets:
    """Yield the tensors as published, or, of the text part alone, as transformers names them."""
    if not any(name.startswith(PUBLISHED) for name in names):
        yield from _targets(decoder, layers, "model.", names)
        return
    for name, target in renamed(_targets(decoder, layers, PUBLISHED, names), PUBLISHED_NAMES):
        yield f"{PUBLISHED}{name}" if name.startswith("unembed.") else name.replace(".conv1d.", "."), target


def _targets(decoder: Decoder, layers: Sequence[PreNormLayer], prefix: str, names: frozenset[str]) -> NamedTargets:
    # Later releases of transformers save the norm as a part of the embedding.
    embed_norm, resaved = f"{prefix}embed_norm.weight", f"{prefix}embed_tokens.embed_norm.weight"
    for name, target in decoder.targets(prefix, names):
        yield resaved if name == embed_norm and resaved in names else name, target
    for index, layer in enumerate(layers):
        of_layer = f"{prefix}layers.{index}."
        yield from layer.targets(of_layer)
        yield from layer.mixer.targets(f"{of_layer}self_attn.")
        yield from _mlp_targets(layer.mlp, f"{of_layer}mlp.", names, is_published=prefix == PUBLISHED)


def _mlp_targets(mlp: GatedMlp | SigmoidMoe, prefix: str, names: frozenset[str], *, is_published: bool) -> NamedTargets:
    if isinstance(mlp, SigmoidMoe):
        assert mlp.bias_X is not None
        yield f"{prefix}gate.weight", whole(mlp.router.weight_OI)
        yield f"{prefix}gate.e_score_correction_bias", whole(mlp.bias_X)
        yield from _experts_targets(mlp.experts, len(mlp.bias_X), prefix, names, is_published=is_published)
    elif is_published:
        gate_up = mlp.gate_up.weight_OI.unsqueeze(1).chunk(2)
        yield f"{prefix}w13_dn.weight", interleaved(*gate_up, shard=mlp.shard)
        yield from mlp.down.targets(f"{prefix}down_proj.")
    else:
        yield from mlp.targets(prefix, names)


def _experts_targets(
    experts: Experts, num_routed: int, prefix: str, names: frozenset[str], *, is_published: bool
) -> NamedTargets:
    """Yield the experts, and those that every token takes. As published, gate and up projections alternate by row."""
    routed, shared = experts.rows(range(num_routed)), experts.rows(range(num_routed, experts.config.num_experts))
    if is_published:
        for kind, rows in {"experts.": routed, "shared_experts.shared_": shared}.items():
            yield f"{prefix}{kind}w13_weight", alternating(rows.up_XFE, rows.held, rows.num)
            yield f"{prefix}{kind}w2_weight", spanned(rows.down_XEF, rows.held, rows.num)
        return
    yield from routed.targets(f"{prefix}experts.", names)
    for name, weights in shared.projections.items():
        yield f"{prefix}shared_experts.{name}", spanned(weights, shared.held, shared.num)
