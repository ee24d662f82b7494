"""LFM3: short convolutions, and attention with a window or without in turn, with a gate for each head.

Source: ``transformers`` (``lfm3``).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from strandline.config_fields import UNLIMITED_POSITION, read_eps, read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.families.lfm2 import PUBLISHED
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, OutputGate, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer, sandwich_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.short_conv import ShortConv, ShortConvConfig
from strandline.models.layers.streams.residual import PreNorm, SandwichNorm, rms

FULL, SLIDING, CONV = "full_attention", "sliding_attention", "conv"

MLP_NAMES = {name: PUBLISHED[name] for name in ("gate_proj", "up_proj", "down_proj")}

Layer = DecoderLayer[Attention | ShortConv, GatedMlp]


def build_lfm3(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    layer_types, eps = read_layer_types(fields, (FULL, SLIDING, CONV)), read_eps(fields, "norm_eps")
    gate = OutputGate.PER_HEAD if fields.flag("use_attention_gate") else OutputGate.NONE
    attention = replace(AttentionConfig.read(fields, QueryKeyNorm.RMS, eps=eps), gate=gate)
    by_type = {FULL: attention}
    if SLIDING in layer_types:
        by_type[SLIDING] = replace(attention, window_tokens=fields.size("sliding_window", at_most=UNLIMITED_POSITION))
    make_layer = sandwich_layer if fields.flag("use_sandwich_norm") else pre_norm_layer
    conv, mlp, norm, hidden_size = (
        ShortConvConfig.read(fields),
        GatedMlpConfig.read(fields),
        rms(eps),
        attention.hidden_size,
    )
    embedding = EmbeddingConfig.read(fields)
    rotary, windowed_rotary = (rotary_frequencies(fields, layer_type=kind) for kind in (FULL, SLIDING))
    max_position = read_max_position(fields)

    def build_layer(kind: str) -> Layer:
        mixer = ShortConv(conv, site) if kind == CONV else Attention(by_type[kind], site)
        return make_layer(mixer, GatedMlp(mlp, site), norm, hidden_size, site)

    layers = [build_layer(kind) for kind in layer_types]
    ends = PreNorm(norm, hidden_size, site)
    decoder = Decoder(layers, ends, embedding, rotary, site, windowed_rotary=windowed_rotary)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers))


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from renamed(decoder.targets("model.", names), PUBLISHED)
    for index, layer in enumerate(layers):
        prefix, mixer = f"model.layers.{index}.", layer.mixer
        yield f"{prefix}operator_norm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}ffn_norm.weight", whole(layer.mlp_norm_E)
        for name, residual in {"operator": layer.mixer_residual, "ffn": layer.mlp_residual}.items():
            if isinstance(residual, SandwichNorm):
                yield f"{prefix}post_{name}_norm.weight", whole(residual.out_norm_E)
        yield from mixer.targets(f"{prefix}{'conv' if isinstance(mixer, ShortConv) else 'self_attn'}.")
        yield from renamed(layer.mlp.targets(f"{prefix}feed_forward.", names), MLP_NAMES)
