"""Qwen3.5, dense and mixture of experts: three Gated DeltaNet layers, then one of gated attention, and so on.

Of the models that also see images the text part is built; the vision tower's tensors are recognised and skipped.
Published tensors lie under ``model.``, or under ``model.language_model.`` next to a vision tower. Projections into
a Gated DeltaNet layer are published one by one.
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
from strandline.models.targets import NamedTargets, whole


class Qwen3_5ForCausalLM(nn.Module):
    """Qwen3.5. Configurations that count experts have a mixture of them in every layer."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        text = config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.max_position: int = text.max_position_embeddings
        layers = [
            DecoderLayer(text, MIXERS[kind](text, dtype, device), build_mlp(text, dtype, device), dtype, device)
            for kind in text.layer_types
        ]
        self.decoder = Decoder(text, layers, dtype, device, is_tied=config.tie_word_embeddings)
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
        is_nested = any(name.startswith("model.language_model.") for name in names)
        prefix = "model.language_model." if is_nested else "model."
        yield from self.decoder.targets(prefix, names)
        for index, layer in enumerate(self.decoder.layers):
            if isinstance(layer.mixer, GatedDeltaNet):
                yield from in_proj_targets(layer.mixer, f"{prefix}layers.{index}.linear_attn.")


def build_mlp(text: Any, dtype: torch.dtype, device: torch.device | str) -> GatedMlp | SparseMoe:
    """Return one layer's feed-forward part."""
    if getattr(text, "num_experts", 0):
        return SparseMoe(text, dtype, device, is_normalised=True)
    return GatedMlp(text.hidden_size, text.intermediate_size, dtype, device)


def in_proj_targets(mixer: GatedDeltaNet, prefix: str) -> NamedTargets:
    """Yield the four input projections."""
    qkv, z, b, a = mixer.in_proj_OE.split(mixer.sizes)
    yield f"{prefix}in_proj_qkv.weight", whole(qkv)
    yield f"{prefix}in_proj_z.weight", whole(z)
    yield f"{prefix}in_proj_b.weight", whole(b)
    yield f"{prefix}in_proj_a.weight", whole(a)
