"""gpt-oss: attention with sinks, in every other layer with a window, each before a mixture of experts with biases.

Experts come in MXFP4, rows of gates and of up projections in turn, or else transposed.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card"; ``transformers`` (``gpt_oss``).

Shape suffixes: T tokens of the step, E hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from torch import nn

from strandline.config_fields import UNLIMITED_POSITION, Fields, read_layer_types, read_max_position
from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.moe import Activation
from strandline.kernels.experts.router import Routing
from strandline.kernels.rowwise.activation import biased_swiglu
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS, Experts, ExpertsConfig, alternating
from strandline.models.layers.feed_forward.mlp import read_limit
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, Target, spanned, whole
from strandline.models.layers.streams.residual import PreNorm, rms

FULL, SLIDING = "full_attention", "sliding_attention"

MAX_SLOPE: Final = 100.0


class BiasedMoe(nn.Module):
    """A mixture of experts that have biases, as their router has. Experts are divided among shards.

    Args:
        is_transposed: whether experts are published with their inputs before their rows.
    """

    def __init__(self, config: ExpertsConfig, site: Site, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.router = Projection(config.num_experts, config.num_channels, site, has_bias=True)
        self.experts = Experts(config, site)

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.experts.takes_quantized

    def forward(self, hidden_TE: Rows) -> Summand:
        return self.experts.mix(hidden_TE, self.router.multiply(plain_rows(hidden_TE)))

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.router.targets(f"{prefix}router.")
        experts, name = self.experts, f"{prefix}experts."
        assert experts.up_bias_XF is not None
        assert experts.down_bias_XE is not None
        held, num = experts.held, experts.config.num_experts
        yield f"{name}gate_up_proj", alternating(experts.up_XFE, held, num, is_transposed=self.is_transposed)
        yield f"{name}gate_up_proj_bias", alternating(experts.up_bias_XF, held, num)
        down = spanned(experts.down_XEF, held, num)
        yield f"{name}down_proj", _transposed(down) if self.is_transposed else down
        yield f"{name}down_proj_bias", spanned(experts.down_bias_XE, held, num)


def _transposed(target: Target) -> Target:
    """Return the target of the same matrices, published with their inputs before their rows."""
    *outer, rows, inputs = target.shape
    return Target((*outer, inputs, rows), tuple(replace(piece, is_transposed=True) for piece in target.pieces))


Layer = DecoderLayer[Attention, BiasedMoe]


def build_gpt_oss(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    layer_types = read_layer_types(fields, (FULL, SLIDING))
    attention = replace(AttentionConfig.read(fields, QueryKeyNorm.NONE), has_sinks=True)
    by_type = {FULL: attention}
    if SLIDING in layer_types:
        window_tokens = fields.size("sliding_window", at_most=UNLIMITED_POSITION)
        by_type[SLIDING] = replace(attention, window_tokens=window_tokens)
    experts, norm, hidden_size = _read_experts(fields), rms(attention.eps), attention.hidden_size
    is_transposed = not isinstance(config.quantization, Mapping) or config.quantization.get("quant_method") != "mxfp4"
    embedding = EmbeddingConfig.read(fields)
    rotary, max_position = rotary_frequencies(fields), read_max_position(fields)
    layers = [
        pre_norm_layer(
            Attention(by_type[kind], site),
            BiasedMoe(experts, site, is_transposed=is_transposed),
            norm,
            hidden_size,
            site,
        )
        for kind in layer_types
    ]
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary, site)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers))


def _read_experts(fields: Fields) -> ExpertsConfig:
    num_experts = fields.size("num_local_experts", at_most=MAX_EXPERTS)
    # Weights are a softmax over the logits of the chosen: that over all, normalised.
    routing = Routing(fields.size("num_experts_per_tok", at_most=num_experts), is_normalised=True)
    slope = fields.number("swiglu_alpha", at_least=0, at_most=MAX_SLOPE)
    activation = Activation(biased_swiglu, is_gated=True, limit=read_limit(fields), slope=slope)
    sizes = (num_experts, fields.size("hidden_size"), fields.size("intermediate_size"))
    return ExpertsConfig(*sizes, routing, activation, has_biases=True)


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}."
        yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(layer.mlp_norm_E)
        yield from layer.mixer.targets(f"{prefix}self_attn.")
        yield from layer.mlp.targets(f"{prefix}mlp.")
