"""MiniMax: lightning attention, every few layers softmax attention, and a mixture of experts in every layer.

Each part adds its output to its normalised input rather than to the residual stream; both are scaled.

Source: ``transformers`` (``minimax``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from strandline.config_fields import Fields, read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS
from strandline.models.layers.feed_forward.moe import SparseMoe, SparseMoeConfig
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.lightning import LightningAttention, LightningConfig
from strandline.models.layers.streams.residual import NormedStream, PreNorm, StreamScale, rms

LAYER_TYPES: Final = ("full_attention", "linear_attention")

PUBLISHED: Final = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Published names that differ from other families'."""

MAX_BLOCK_SIZE: Final = 2**14
MAX_FACTOR: Final = 1e4

Layer = DecoderLayer[Attention | LightningAttention, SparseMoe]


def build_minimax(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    if fields.value("sliding_window") is not None:
        fields.reject("sliding_window", "null")
    layer_types = read_layer_types(fields, LAYER_TYPES)
    attention = AttentionConfig.read(fields, QueryKeyNorm.NONE, has_bias=False)
    moe, mlp_scale = _read_experts(fields), _read_scale(fields, "mlp")
    norm, hidden_size = rms(attention.eps), attention.hidden_size
    # Rotated channels of a head: published configurations have a separate field for them.
    has_rotary_dim = fields.value("rotary_dim") is not None
    rotary_dim = fields.size("rotary_dim", at_least=2, at_most=attention.head_dim) if has_rotary_dim else None
    rotary = rotary_frequencies(fields, rotary_dim=rotary_dim)

    def build_layer(index: int, kind: str) -> Layer:
        is_linear = kind == "linear_attention"
        lightning = _read_lightning(fields, attention, index / (len(layer_types) - 1 + 1e-5))
        mixer_scale = _read_scale(fields, "linear_attn" if is_linear else "full_attn")
        return DecoderLayer(
            LightningAttention(lightning, site) if is_linear else Attention(attention, site),
            SparseMoe(moe, site),
            NormedStream(norm, hidden_size, site, mixer_scale),
            NormedStream(norm, hidden_size, site, mlp_scale),
        )

    layers = [build_layer(index, kind) for index, kind in enumerate(layer_types)]
    embedding = EmbeddingConfig.read(fields)
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary, site)
    return CausalLM(decoder, read_max_position(fields), partial(_published, decoder, layers))


def _read_lightning(fields: Fields, attention: AttentionConfig, depth: float) -> LightningConfig:
    return LightningConfig(
        hidden_size=attention.hidden_size,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        depth=depth,
        block_size=fields.size("block_size", at_most=MAX_BLOCK_SIZE),
    )


def _read_scale(fields: Fields, part: str) -> StreamScale:
    def factor(name: str) -> float:
        return fields.number(f"{part}_{name}_factor", at_least=-MAX_FACTOR, at_most=MAX_FACTOR)

    return StreamScale(factor("alpha"), factor("beta"))


def _read_experts(fields: Fields) -> SparseMoeConfig:
    num_experts = fields.size("num_local_experts", at_most=MAX_EXPERTS)
    return SparseMoeConfig(
        hidden_size=fields.size("hidden_size"),
        size=fields.size("intermediate_size"),
        shared_size=0,
        num_experts=num_experts,
        top_k=fields.size("num_experts_per_tok", at_most=num_experts),
        is_normalised=True,
    )


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(layer.mlp_norm_E)
        if isinstance(mixer, LightningAttention):
            yield from mixer.targets(f"{prefix}self_attn.", names)
        else:
            yield from mixer.targets(f"{prefix}self_attn.")
        yield from renamed(mlp.targets(f"{prefix}block_sparse_moe.", names), PUBLISHED)
