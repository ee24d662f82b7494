"""The text part of Gemma 3: layers with a window, and one without after every few, with frequencies of their own.

Source: ``transformers`` (``gemma3``).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from strandline.config_fields import UNLIMITED_POSITION, Fields, read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, sandwich_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlpConfig, GeluMlp
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.models.layers.streams.residual import PreNorm, SandwichNorm, zero_centered

FULL, SLIDING = "full_attention", "sliding_attention"

Layer = DecoderLayer[Attention, GeluMlp]


def build_gemma3(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    fields.choice("hidden_activation", ["gelu_pytorch_tanh"])
    if fields.value("attn_logit_softcapping") is not None:
        fields.reject("attn_logit_softcapping", "null")
    if fields.flag("use_bidirectional_attention"):
        fields.reject("use_bidirectional_attention", "false")
    layer_types, attention = read_layer_types(fields, (FULL, SLIDING)), _read_attention(fields)
    by_type = {FULL: attention}
    if SLIDING in layer_types:
        window_tokens = fields.size("sliding_window", at_most=UNLIMITED_POSITION)
        by_type[SLIDING] = replace(attention, window_tokens=window_tokens)
    mlp, norm, hidden_size = GatedMlpConfig.read(fields), zero_centered(attention.eps), attention.hidden_size
    max_position = read_max_position(fields)
    rotary, windowed_rotary = (rotary_frequencies(fields, layer_type=kind) for kind in (FULL, SLIDING))
    # Published models were trained with a factor of the dtype of activations.
    multiplier = float(torch.tensor(hidden_size**0.5, dtype=site.dtype))
    embedding = replace(EmbeddingConfig.read(fields), multiplier=multiplier)
    if fields.value("final_logit_softcapping") is not None:
        cap = fields.number("final_logit_softcapping", at_least=1e-3, at_most=1e6)
        embedding = replace(embedding, logits_soft_cap=cap)
    layers = [
        sandwich_layer(Attention(by_type[kind], site), GeluMlp(mlp, site, has_bias=False), norm, hidden_size, site)
        for kind in layer_types
    ]
    ends = PreNorm(norm, hidden_size, site)
    decoder = Decoder(layers, ends, embedding, rotary, site, windowed_rotary=windowed_rotary)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers))


def _read_attention(fields: Fields) -> AttentionConfig:
    scale = fields.number("query_pre_attn_scalar", at_least=1e-3, at_most=1e6) ** -0.5
    return replace(AttentionConfig.read(fields, QueryKeyNorm.ZERO_CENTERED), scale=scale)


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    for index, layer in enumerate(layers):
        prefix, before, after = f"model.layers.{index}.", layer.mixer_residual, layer.mlp_residual
        assert isinstance(before, SandwichNorm)
        assert isinstance(after, SandwichNorm)
        yield f"{prefix}input_layernorm.weight", whole(before.norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(before.out_norm_E)
        yield f"{prefix}pre_feedforward_layernorm.weight", whole(after.norm_E)
        yield f"{prefix}post_feedforward_layernorm.weight", whole(after.out_norm_E)
        yield from layer.mixer.targets(f"{prefix}self_attn.")
        yield from layer.mlp.targets(f"{prefix}mlp.")
