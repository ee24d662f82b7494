"""Qwen3-Next: three Gated DeltaNet layers, then one of gated attention, and so on; mostly mixtures of experts.

Projections into a Gated DeltaNet layer are published as two tensors whose rows are grouped by key head; here they
are one, in the order that the layer wants.
"""

from typing import Any

import torch
from torch import Tensor, nn

from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import StepBatch
from strandline.models.layers.decoder import MIXERS, Decoder, DecoderLayer
from strandline.models.layers.gated_delta import GatedDeltaNet
from strandline.models.layers.mlp import GatedMlp
from strandline.models.layers.moe import SparseMoe
from strandline.models.protocol import ModelMemory
from strandline.models.targets import NamedTargets, interleaved


class Qwen3NextForCausalLM(nn.Module):
    """Qwen3-Next."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.vocab_size: int = config.vocab_size
        self.max_position: int = config.max_position_embeddings
        layers = [
            DecoderLayer(
                config, MIXERS[kind](config, dtype, device), build_mlp(config, index, dtype, device), dtype, device
            )
            for index, kind in enumerate(config.layer_types)
        ]
        self.decoder = Decoder(config, layers, dtype, device, is_tied=config.tie_word_embeddings)
        self.spec = self.decoder.spec

    def bind(self, arena: ArenaTensors) -> ModelMemory:
        """Return the arena as ``forward`` takes it."""
        return self.decoder.bind(arena)

    def forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        """Return the final, normalised ``hidden_TE`` of every row of the step, and advance the memory."""
        hidden_TE: Tensor = self.decoder(batch, memory)
        return hidden_TE

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits ``[N, vocabulary]``, in the model's dtype."""
        return self.decoder.logits(hidden_NE)

    def pack(self) -> None:
        """Lay the weights out for fast products; they cannot be loaded or moved afterwards."""
        self.decoder.pack()

    def halve(self) -> None:
        """Keep weights in float16 where that loses nothing."""
        self.decoder.halve()

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield where the tensors go that the published weights, which hold ``names``, must have."""
        yield from self.decoder.targets("model.", names)
        for index, layer in enumerate(self.decoder.layers):
            if isinstance(layer.mixer, GatedDeltaNet):
                yield from in_proj_targets(layer.mixer, f"model.layers.{index}.linear_attn.")


def build_mlp(config: Any, index: int, dtype: torch.dtype, device: torch.device | str) -> GatedMlp | SparseMoe:
    """Return the feed-forward layer of layer ``index``: experts on every ``decoder_sparse_step``-th layer."""
    is_sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
    if is_sparse and index not in config.mlp_only_layers:
        return SparseMoe(config, dtype, device, is_normalised=config.norm_topk_prob)
    return GatedMlp(config.hidden_size, config.intermediate_size, dtype, device)


def in_proj_targets(mixer: GatedDeltaNet, prefix: str) -> NamedTargets:
    """Yield the two input projections: per key head, the rows of q, k, v, z, and those of b, a."""
    qkv, z, b, a = mixer.in_proj_OE.split(mixer.sizes)
    q, k, v = qkv.split(mixer.conv_sizes)
    by_key_head = (mixer.num_key_heads, -1)
    yield f"{prefix}in_proj_qkvz.weight", interleaved(*(x.unflatten(0, by_key_head) for x in (q, k, v, z)))
    yield f"{prefix}in_proj_ba.weight", interleaved(*(x.unflatten(0, by_key_head) for x in (b, a)))
