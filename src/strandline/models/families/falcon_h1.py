"""Falcon-H1: attention and a Mamba-2 layer side by side in every layer, then a gated feed-forward part.

The configuration has a multiplier for nearly every activation. The one for keys is folded into the scale of the
attention scores.

Source: ``transformers`` (``falcon_h1``).
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
from strandline.models.layers.feed_forward.mlp import GatedMlpConfig, ScaledGatedMlp
from strandline.models.layers.parallel import Multipliers, ParallelMixer
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.mamba2 import Mamba2Config, Mamba2Layer, Mamba2Names
from strandline.models.layers.recurrences.mamba2 import Multipliers as ProjectedMultipliers
from strandline.models.layers.streams.residual import PreNorm, rms

LAYER_TYPES: Final = ("hybrid",)

MAX_MULTIPLIER: Final = 1e4

Layer = DecoderLayer[ParallelMixer, ScaledGatedMlp]


def build_falcon_h1(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    if fields.flag("mlp_bias"):
        fields.reject("mlp_bias", "false")
    attention, mlp = AttentionConfig.read(fields, QueryKeyNorm.NONE), GatedMlpConfig.read(fields)
    attention = replace(attention, scale=attention.scale * _multiplier(fields, "key_multiplier"))
    mamba2, rotary = _read_mamba2(fields, attention.eps), rotary_frequencies(fields)
    multipliers = Multipliers(
        attention_in=_multiplier(fields, "attention_in_multiplier"),
        attention_out=_multiplier(fields, "attention_out_multiplier"),
        recurrent_in=_multiplier(fields, "ssm_in_multiplier"),
        recurrent_out=_multiplier(fields, "ssm_out_multiplier"),
    )
    attention, mamba2, multipliers = _folded(attention, mamba2, multipliers)
    gate_multiplier, mlp_multiplier = _multipliers(fields, "mlp_multipliers", 2)
    embedding = replace(
        EmbeddingConfig.read(fields),
        multiplier=_multiplier(fields, "embedding_multiplier"),
        logits_multiplier=_multiplier(fields, "lm_head_multiplier"),
    )
    max_position, num_layers = read_max_position(fields), len(read_layer_types(fields, LAYER_TYPES))
    norm, hidden_size = rms(attention.eps), attention.hidden_size

    def build_layer() -> Layer:
        mixers = (Attention(attention, site), Mamba2Layer(mamba2, site))
        part = ScaledGatedMlp(mlp, gate_multiplier, mlp_multiplier, site)
        return pre_norm_layer(ParallelMixer(*mixers, multipliers), part, norm, hidden_size, site)

    layers = [build_layer() for _ in range(num_layers)]
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary, site)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers))


def _folded(
    attention: AttentionConfig, mamba2: Mamba2Config, multipliers: Multipliers
) -> tuple[AttentionConfig, Mamba2Config, Multipliers]:
    """Apply factors of inputs to what projections without biases make of them, where other factors are applied."""
    factor = multipliers.attention_in
    if not attention.has_bias:
        attention = replace(attention, scale=attention.scale * factor**2)
        multipliers = replace(multipliers, attention_in=1.0, attention_out=multipliers.attention_out * factor)
    factor, projected = multipliers.recurrent_in, mamba2.multipliers
    if not mamba2.has_bias and projected is not None:
        mamba2 = replace(mamba2, multipliers=ProjectedMultipliers(*(each * factor for each in projected)))
        multipliers = replace(multipliers, recurrent_in=1.0)
    return attention, mamba2, multipliers


def _read_mamba2(fields: Fields, eps: float) -> Mamba2Config:
    has_norm = fields.flag("mamba_rms_norm")
    if has_norm and fields.flag("mamba_norm_before_gate"):
        fields.reject("mamba_norm_before_gate", "false where mamba_rms_norm is true")
    z, x, B, C, dt = _multipliers(fields, "ssm_multipliers", 5)
    return replace(
        Mamba2Config.read(fields, Mamba2Names(), eps),
        has_out_bias=fields.flag("projectors_bias"),
        has_norm=has_norm,
        multipliers=ProjectedMultipliers(z, x, B, C, dt),
    )


def _multiplier(fields: Fields, name: str) -> float:
    return fields.number(name, at_least=-MAX_MULTIPLIER, at_most=MAX_MULTIPLIER)


def _multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    values = fields.list_of(name, _multiplier)
    if len(values) != count:
        fields.reject(name, f"a list of {count} numbers")
    return values


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from renamed(decoder.targets("model.", names), {"norm": "final_layernorm"})
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}pre_ff_layernorm.weight", whole(layer.mlp_norm_E)
        yield from mixer.attention.targets(f"{prefix}self_attn.")
        yield from mixer.recurrent.targets(f"{prefix}mamba.")
        yield from mlp.targets(f"{prefix}feed_forward.")
