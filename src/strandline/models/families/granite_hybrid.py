"""Granite 4: Mamba-2 layers, with attention in a few configured ones, each with a dense or MoE feed-forward part.

Four multipliers of the configuration apply to embeddings, attention scores, residual additions, and logits. Experts
share a dense part without a gate. Published hybrids embed no positions.

Source: ``transformers`` (``granitemoehybrid``).
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
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.feed_forward.moe import SparseMoe, SparseMoeConfig, build_feed_forward
from strandline.models.layers.parts.rotary import RotaryFrequencies, rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, sharded, spanned, stacked, whole
from strandline.models.layers.recurrences.mamba2 import Mamba2Config, Mamba2Layer, Mamba2Names
from strandline.models.layers.streams.residual import PreNorm, rms

LAYER_TYPES: Final = ("full_attention", "linear_attention")
MAX_MULTIPLIER: Final = 1e4
MIN_DIVISOR: Final = 1e-4

Layer = DecoderLayer[Attention | Mamba2Layer, GatedMlp | SparseMoe]


def build_granite_hybrid(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    scale, residual_multiplier, embedding_multiplier = (
        fields.number(name, at_least=0, at_most=MAX_MULTIPLIER)
        for name in ("attention_multiplier", "residual_multiplier", "embedding_multiplier")
    )
    logits_divisor = fields.number("logits_scaling", at_least=MIN_DIVISOR, at_most=MAX_MULTIPLIER)
    attention = replace(AttentionConfig.read(fields, QueryKeyNorm.NONE), scale=scale)
    mamba2, mlp = Mamba2Config.read(fields, Mamba2Names(), attention.eps), _read_mlp(fields)
    layer_types, rotary = read_layer_types(fields, LAYER_TYPES), _read_rotary(fields)
    embedding = replace(
        EmbeddingConfig.read(fields), multiplier=embedding_multiplier, logits_multiplier=1 / logits_divisor
    )
    max_position = read_max_position(fields)
    norm, hidden_size = rms(attention.eps), attention.hidden_size

    def build_layer(kind: str) -> Layer:
        is_attention = kind == "full_attention"
        return pre_norm_layer(
            Attention(attention, site) if is_attention else Mamba2Layer(mamba2, site),
            build_feed_forward(mlp, site),
            norm,
            hidden_size,
            site,
            multiplier=residual_multiplier,
        )

    layers = [build_layer(kind) for kind in layer_types]
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary, site)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers))


def _read_rotary(fields: Fields) -> RotaryFrequencies | None:
    """Return the frequencies; None: positions are not embedded."""
    kind = fields.choice("position_embedding_type", ["rope", "nope"], default="nope")
    return rotary_frequencies(fields) if kind == "rope" else None


def _read_mlp(fields: Fields) -> GatedMlpConfig | SparseMoeConfig:
    hidden_size, shared_size = fields.size("hidden_size"), fields.size("shared_intermediate_size")
    num_experts = fields.size("num_local_experts", at_least=0, at_most=MAX_EXPERTS)
    if num_experts == 0:
        return GatedMlpConfig(hidden_size, shared_size)
    return SparseMoeConfig(
        hidden_size=hidden_size,
        size=fields.size("intermediate_size"),
        shared_size=shared_size,
        num_experts=num_experts,
        top_k=fields.size("num_experts_per_tok", at_most=num_experts),
        is_normalised=True,
        is_shared_gated=False,
    )


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(layer.mlp_norm_E)
        yield from mixer.targets(f"{prefix}{'self_attn' if isinstance(mixer, Attention) else 'mamba'}.")
        if isinstance(mlp, SparseMoe):
            yield from _moe_targets(mlp, prefix)
            continue
        yield from mlp.gate_up.targets(f"{prefix}shared_mlp.input_linear.")
        yield from mlp.down.targets(f"{prefix}shared_mlp.output_linear.")


def _moe_targets(mlp: SparseMoe, prefix: str) -> NamedTargets:
    """Yield the tensors of the experts, and of their shared part."""
    shared, router, _, _ = mlp.in_proj.weights
    experts = mlp.experts.rows()
    if mlp.shared_down is not None:
        gate_up = (sharded(rows, mlp.shard) for rows in shared.chunk(2))
        yield f"{prefix}shared_mlp.input_linear.weight", stacked(*gate_up)
        yield from mlp.shared_down.targets(f"{prefix}shared_mlp.output_linear.")
    yield f"{prefix}block_sparse_moe.router.layer.weight", whole(router)
    yield f"{prefix}block_sparse_moe.input_linear.weight", spanned(experts.up_XFE, experts.held, experts.num)
    yield f"{prefix}block_sparse_moe.output_linear.weight", spanned(experts.down_XEF, experts.held, experts.num)
