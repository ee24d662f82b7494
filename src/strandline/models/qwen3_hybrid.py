"""What Qwen3-Next and Qwen3.5 have in common: Gated DeltaNet layers, and gated attention every few layers.

Source: ``transformers`` (``qwen3_next``, ``qwen3_5``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from strandline.errors import ConfigError
from strandline.models.causal_lm import CausalLM
from strandline.models.layers.attention import GatedAttention
from strandline.models.layers.decoder import Decoder, DecoderLayer, ResidualNorm, zero_centered
from strandline.models.layers.gated_delta import GatedDeltaNet
from strandline.models.layers.mlp import GatedMlp
from strandline.models.layers.moe import SparseMoe
from strandline.models.layers.rotary import rotary_frequencies
from strandline.models.targets import NamedTargets, whole

InProjTargets = Callable[[GatedDeltaNet, str], NamedTargets]
"""Yields the input projections of a Gated DeltaNet layer, given the prefix of their names."""


def build(
    text: Any,
    mlps: Sequence[GatedMlp | SparseMoe],
    in_proj_targets: InProjTargets,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    is_tied: bool,
) -> CausalLM:
    """Build the model of a text configuration.

    Args:
        mlps: per layer, its feed-forward part.
        in_proj_targets: of the family, which publishes them in its own order.
        dtype: of activations, and of the weights until they are packed.

    Raises:
        ConfigError: a setting is not supported.
    """
    if text.hidden_act != "silu":
        raise ConfigError(f"hidden_act {text.hidden_act!r} is not supported; supported: silu")
    norm = zero_centered(text.rms_norm_eps)
    parts = [
        _build_layer(text, kind, mlp, norm, in_proj_targets, dtype, device)
        for kind, mlp in zip(text.layer_types, mlps, strict=True)
    ]
    layers, shape = [part.layer for part in parts], (text.vocab_size, text.hidden_size)
    decoder = Decoder(layers, norm, rotary_frequencies(text), shape, dtype, device, is_tied=is_tied)
    return CausalLM(decoder, text.max_position_embeddings, partial(_published, decoder, parts))


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, and where its published tensors go."""

    layer: DecoderLayer
    mixer_name: str
    mixer_targets: Callable[[str], NamedTargets]
    mlp_targets: Callable[[str, frozenset[str]], NamedTargets]

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        yield f"{prefix}input_layernorm.weight", whole(self.layer.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(self.layer.mlp_norm_E)
        yield from self.mlp_targets(f"{prefix}mlp.", names)
        yield from self.mixer_targets(f"{prefix}{self.mixer_name}.")


def _build_layer(
    text: Any,
    kind: str,
    mlp: GatedMlp | SparseMoe,
    norm: ResidualNorm,
    in_proj_targets: InProjTargets,
    dtype: torch.dtype,
    device: torch.device | str,
) -> _Layer:
    match kind:
        case "full_attention":
            attention = GatedAttention(text, dtype, device)
            layer = DecoderLayer(attention, mlp, norm, text.hidden_size, dtype, device)
            return _Layer(layer, "self_attn", attention.targets, mlp.targets)
        case "linear_attention":
            gated_delta = GatedDeltaNet(text, dtype, device)
            layer = DecoderLayer(gated_delta, mlp, norm, text.hidden_size, dtype, device)
            return _Layer(
                layer,
                "linear_attn",
                lambda prefix: chain(gated_delta.targets(prefix), in_proj_targets(gated_delta, prefix)),
                mlp.targets,
            )
    raise ConfigError(f"layer type {kind!r} is not supported; supported: full_attention, linear_attention")


def _published(decoder: Decoder, layers: Sequence[_Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors: under ``model.``, or next to a vision tower ``model.language_model.``."""
    is_nested = any(name.startswith("model.language_model.") for name in names)
    prefix = "model.language_model." if is_nested else "model."
    yield f"{prefix}embed_tokens.weight", whole(decoder.embed_ZE)
    yield f"{prefix}norm.weight", whole(decoder.norm_E)
    for index, layer in enumerate(layers):
        yield from layer.targets(f"{prefix}layers.{index}.", names)
    # A tied head may be published all the same: it is the embedding once more.
    if decoder.head is not None:
        yield "lm_head.weight", whole(decoder.head.weight_OI)
    elif "lm_head.weight" in names:
        yield "lm_head.weight", whole(decoder.embed_ZE)
