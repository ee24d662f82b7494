"""Qwen3.5, dense and mixture of experts: three Gated DeltaNet layers, then one of gated attention, and so on.

Of the models that also see images the text part is built; the vision tower's tensors are recognised and skipped.
Projections into a Gated DeltaNet layer are published one by one.
"""

from typing import Any

import torch

from strandline.models import qwen3_hybrid
from strandline.models.causal_lm import CausalLM
from strandline.models.layers.gated_delta import GatedDeltaNet
from strandline.models.layers.mlp import GatedMlp
from strandline.models.layers.moe import SparseMoe
from strandline.models.targets import NamedTargets, whole


def build_qwen3_5(config: Any, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters: experts in every layer if it counts any.

    Raises:
        ConfigError: a setting is not supported.
    """
    text = config.get_text_config()
    mlps = [build_mlp(text, dtype, device) for _ in text.layer_types]
    is_tied = config.tie_word_embeddings
    return qwen3_hybrid.build(text, mlps, in_proj_targets, dtype, device, is_tied=is_tied)


def build_mlp(text: Any, dtype: torch.dtype, device: torch.device | str) -> GatedMlp | SparseMoe:
    """Return one layer's feed-forward part."""
    if getattr(text, "num_experts", 0):
        return SparseMoe(text, dtype, device, is_normalised=True)
    return GatedMlp(text.hidden_size, text.intermediate_size, dtype, device)


def in_proj_targets(mixer: GatedDeltaNet, prefix: str) -> NamedTargets:
    """Yield the four input projections."""
    qkv, z, b, a = mixer.in_proj.weight_OI.split(mixer.sizes)
    yield f"{prefix}in_proj_qkv.weight", whole(qkv)
    yield f"{prefix}in_proj_z.weight", whole(z)
    yield f"{prefix}in_proj_b.weight", whole(b)
    yield f"{prefix}in_proj_a.weight", whole(a)
