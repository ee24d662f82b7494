"""RecurrentGemma: two layers of gated linear recurrent units, then one of sliding-window attention, and so on.

All attention has the same window: no layer reads the keys and values of whole paths.

Source: ``transformers`` (``recurrent_gemma``).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from strandline.config_fields import MAX_HEADS, UNLIMITED_POSITION, Fields, read_eps, read_layer_types
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlpConfig, GeluMlp
from strandline.models.layers.parts.convolution import MAX_TAPS
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.griffin import GriffinConfig, GriffinLayer
from strandline.models.layers.streams.residual import PreNorm, zero_centered

LAYER_TYPES: Final = ("linear_attention", "sliding_attention")

Layer = DecoderLayer[Attention | GriffinLayer, GeluMlp]


def build_recurrent_gemma(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    fields.choice("hidden_activation", ["gelu_pytorch_tanh"])
    layer_types = read_layer_types(fields, LAYER_TYPES)
    window_tokens = fields.size("attention_window_size", at_most=UNLIMITED_POSITION)
    attention = replace(AttentionConfig.read(fields, QueryKeyNorm.NONE), has_out_bias=True, window_tokens=window_tokens)
    norm, hidden_size = zero_centered(read_eps(fields)), attention.hidden_size
    griffin = _read_griffin(fields)
    mlp = GatedMlpConfig(hidden_size, fields.size("intermediate_size", at_least=2) // 2)

    def build_layer(kind: str) -> Layer:
        return pre_norm_layer(
            Attention(attention, site) if kind == "sliding_attention" else GriffinLayer(griffin, site),
            GeluMlp(mlp, site, has_bias=True),
            norm,
            hidden_size,
            site,
        )

    layers = [build_layer(kind) for kind in layer_types]
    embedding = replace(
        EmbeddingConfig.read(fields),
        # Published models were trained with a rounded factor.
        multiplier=float(torch.tensor(hidden_size**0.5, dtype=torch.bfloat16)),
        logits_soft_cap=fields.number("logits_soft_cap", at_least=1e-3, at_most=1e6),
    )
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary_frequencies(fields), site)
    return CausalLM(decoder, UNLIMITED_POSITION, partial(_published, decoder, layers))


def _read_griffin(fields: Fields) -> GriffinConfig:
    num_blocks, size = fields.size("num_attention_heads", at_most=MAX_HEADS), fields.size("lru_width")
    if size % num_blocks:
        fields.reject("lru_width", f"a multiple of num_attention_heads, {num_blocks}")
    num_taps = fields.size("conv1d_width", at_least=2, at_most=MAX_TAPS)
    return GriffinConfig(fields.size("hidden_size"), size, num_blocks, num_taps)


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from renamed(decoder.targets("model.", names), {"norm": "final_norm"})
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield f"{prefix}temporal_pre_norm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}channel_pre_norm.weight", whole(layer.mlp_norm_E)
        yield from mixer.targets(f"{prefix}temporal_block.")
        yield from mlp.targets(f"{prefix}mlp_block.")
