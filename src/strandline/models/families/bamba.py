"""Bamba: Mamba-2 layers, with attention in a few configured ones, each with a gated feed-forward part.

Source: ``transformers`` (``bamba``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from strandline.config_fields import read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.mamba2 import Mamba2Config, Mamba2Layer, Mamba2Names
from strandline.models.layers.streams.residual import PreNorm, rms

LAYER_TYPES: Final = ("full_attention", "linear_attention")

Layer = DecoderLayer[Attention | Mamba2Layer, GatedMlp]


def build_bamba(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    if fields.flag("mlp_bias"):
        fields.reject("mlp_bias", "false")
    attention, mlp = AttentionConfig.read(fields, QueryKeyNorm.NONE), GatedMlpConfig.read(fields)
    mamba2 = Mamba2Config.read(fields, Mamba2Names(), attention.eps)
    layer_types, rotary = read_layer_types(fields, LAYER_TYPES), rotary_frequencies(fields)
    embedding = EmbeddingConfig.read(fields)
    max_position = read_max_position(fields)
    norm, hidden_size = rms(attention.eps), attention.hidden_size

    def build_layer(kind: str) -> Layer:
        is_attention = kind == "full_attention"
        mixer = Attention(attention, site) if is_attention else Mamba2Layer(mamba2, site)
        return pre_norm_layer(mixer, GatedMlp(mlp, site), norm, hidden_size, site)

    layers = [build_layer(kind) for kind in layer_types]
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary, site)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers))


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from renamed(decoder.targets("model.", names), {"norm": "final_layernorm"})
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}pre_ff_layernorm.weight", whole(layer.mlp_norm_E)
        yield from mixer.targets(f"{prefix}{'self_attn' if isinstance(mixer, Attention) else 'mamba'}.")
        yield from mlp.targets(f"{prefix}feed_forward.", names)
