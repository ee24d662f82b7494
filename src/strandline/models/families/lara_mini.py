"""Lara 4 Mini: Gated DeltaNet, attention with a window, and attention that embeds no positions, before experts.

Input projections of a Gated DeltaNet layer are published as one tensor, in the layer's order.

Source: ``transformers`` (``lara_mini``).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from strandline.config_fields import UNLIMITED_POSITION, read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.moe import SparseMoe, SparseMoeConfig
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, stacked_rows, whole
from strandline.models.layers.recurrences.gated_delta import GatedDeltaNet, GatedDeltaNetConfig
from strandline.models.layers.streams.residual import PreNorm, rms

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

Layer = DecoderLayer[Attention | GatedDeltaNet, SparseMoe]


def build_lara_mini(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    layer_types = read_layer_types(fields, (FULL, SLIDING, LINEAR))
    attention = AttentionConfig.read(fields, QueryKeyNorm.RMS)
    by_type = {FULL: replace(attention, is_rotated=False)}
    if SLIDING in layer_types:
        by_type[SLIDING] = replace(attention, window_tokens=fields.size("sliding_window", at_most=UNLIMITED_POSITION))
    gated_delta = GatedDeltaNetConfig.read(fields)
    moe = SparseMoeConfig.read(fields, is_normalised=fields.flag("norm_topk_prob"))
    moe, norm, hidden_size = replace(moe, is_shared_gated=False), rms(attention.eps), attention.hidden_size
    embedding = EmbeddingConfig.read(fields)
    rotary, max_position = rotary_frequencies(fields), read_max_position(fields)

    def build_layer(kind: str) -> Layer:
        mixer = GatedDeltaNet(gated_delta, site) if kind == LINEAR else Attention(by_type[kind], site)
        return pre_norm_layer(mixer, SparseMoe(moe, site), norm, hidden_size, site)

    layers = [build_layer(kind) for kind in layer_types]
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary, site)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers))


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    for index, layer in enumerate(layers):
        prefix, mixer = f"model.layers.{index}.", layer.mixer
        yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(layer.mlp_norm_E)
        yield from layer.mlp.targets(f"{prefix}mlp.", names)
        if isinstance(mixer, Attention):
            yield from mixer.targets(f"{prefix}self_attn.")
            continue
        sizes = [*mixer.conv_sizes, *mixer.in_proj.part_rows[1:-1]]
        rows = stacked_rows(mixer.in_proj.weight_OI[: sum(sizes)], sizes, [mixer.shard] * len(sizes))
        yield f"{prefix}linear_attn.in_proj.weight", rows
        yield from renamed(mixer.targets(f"{prefix}linear_attn."), {"norm": "out_norm"})
