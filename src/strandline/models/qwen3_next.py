"""Qwen3-Next: three Gated DeltaNet layers, then one of gated attention, and so on; mostly mixtures of experts.

Projections into a Gated DeltaNet layer are published as two tensors whose rows are grouped by key head; here they
are one, in the order that the layer wants.
"""

from typing import Any

import torch

from strandline.models import qwen3_hybrid
from strandline.models.causal_lm import CausalLM
from strandline.models.layers.gated_delta import GatedDeltaNet
from strandline.models.layers.mlp import GatedMlp
from strandline.models.layers.moe import SparseMoe
from strandline.models.targets import NamedTargets, interleaved


def build_qwen3_next(config: Any, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    mlps = [build_mlp(config, index, dtype, device) for index in range(len(config.layer_types))]
    is_tied = config.tie_word_embeddings
    return qwen3_hybrid.build(config, mlps, in_proj_targets, dtype, device, is_tied=is_tied)


def build_mlp(config: Any, index: int, dtype: torch.dtype, device: torch.device | str) -> GatedMlp | SparseMoe:
    """Return the feed-forward layer of layer ``index``: experts on every ``decoder_sparse_step``-th layer."""
    is_sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
    if is_sparse and index not in config.mlp_only_layers:
        return SparseMoe(config, dtype, device, is_normalised=config.norm_topk_prob)
    return GatedMlp(config.hidden_size, config.intermediate_size, dtype, device)


def in_proj_targets(mixer: GatedDeltaNet, prefix: str) -> NamedTargets:
    """Yield the two input projections: per key head, the rows of q, k, v, z, and those of b, a."""
    qkv, z, b, a = mixer.in_proj.weight_OI.split(mixer.sizes)
    q, k, v = qkv.split(mixer.conv_sizes)
    by_key_head = (mixer.num_key_heads, -1)
    yield f"{prefix}in_proj_qkvz.weight", interleaved(*(x.unflatten(0, by_key_head) for x in (q, k, v, z)))
    yield f"{prefix}in_proj_ba.weight", interleaved(*(x.unflatten(0, by_key_head) for x in (b, a)))
