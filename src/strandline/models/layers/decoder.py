"""The decoder: embedding, layers of a mixer and a feed-forward part, final norm and output head.

Parameters need no gradient.

Shape suffixes: T tokens of the step, N rows whose logits are wanted, E hidden size, F frequencies, Z vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.errors import ConfigError
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import StepBatch
from strandline.kernels.linear import can_halve, can_pack, halve, linear, pack
from strandline.kernels.norm import add_rms_norm_zero_centered, rms_norm_zero_centered
from strandline.kernels.recurrence import bind_folds
from strandline.kernels.rotary import rotary_table
from strandline.models.layers.attention import GatedAttention
from strandline.models.layers.gated_delta import GatedDeltaNet
from strandline.models.layers.mlp import GatedMlp
from strandline.models.layers.moe import SparseMoe
from strandline.models.layers.parameters import dtype_name, parameter
from strandline.models.layers.rotary import RotaryTable, rotary_frequencies
from strandline.models.protocol import ModelMemory
from strandline.models.targets import NamedTargets, whole
from strandline.specs import LayerSpec, ModelSpec

PACKED = ("in_proj_OE", "out_proj_EO", "gate_up_FE", "down_EF", "shared_down_EF", "head_ZE")
"""Parameters that are only ever multiplied with."""

MIXERS: dict[str, type[GatedAttention] | type[GatedDeltaNet]] = {
    "linear_attention": GatedDeltaNet,
    "full_attention": GatedAttention,
}
"""By the names that a configuration's ``layer_types`` has for them."""


class DecoderLayer(nn.Module):
    """A mixer of tokens and a feed-forward layer, each on the normalised residual stream."""

    def __init__(
        self,
        config: Any,
        mixer: GatedAttention | GatedDeltaNet,
        mlp: GatedMlp | SparseMoe,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.mixer = mixer
        self.mlp = mlp
        self.mixer_norm_E = parameter(config.hidden_size, dtype=dtype, device=device)
        self.mlp_norm_E = parameter(config.hidden_size, dtype=dtype, device=device)

    def forward(
        self, normed_TE: Tensor, residual_TE: Tensor, rotary: RotaryTable, batch: StepBatch, memory: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what the layer adds to the residual stream at its end, and the stream without that."""
        mixed_TE = self.mixer(normed_TE, rotary, batch, memory)
        normed_TE, residual_TE = add_rms_norm_zero_centered(mixed_TE, residual_TE, self.mlp_norm_E, self.eps)
        return self.mlp(normed_TE), residual_TE

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors but for those that the mixer leaves to the family."""
        yield f"{prefix}input_layernorm.weight", whole(self.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(self.mlp_norm_E)
        yield from self.mlp.targets(f"{prefix}mlp.", names)
        mixer = "self_attn." if isinstance(self.mixer, GatedAttention) else "linear_attn."
        yield from self.mixer.targets(f"{prefix}{mixer}")


class Decoder(nn.Module):
    """Embedding, layers, final norm and output head.

    Args:
        dtype: of activations, and of the weights until they are packed.
        is_tied: whether the output head is the embedding.
    """

    def __init__(
        self,
        config: Any,
        layers: Sequence[DecoderLayer],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        is_tied: bool,
    ) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ConfigError(f"hidden_act {config.hidden_act!r} is not supported; supported: silu")
        self.eps = config.rms_norm_eps
        self.dtype = dtype
        self.embed_ZE = parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(layers)
        self.norm_E = parameter(config.hidden_size, dtype=dtype, device=device)
        self.is_tied = is_tied
        self.head_ZE = self.embed_ZE if is_tied else parameter(*self.embed_ZE.shape, dtype=dtype, device=device)
        inv_freq_F, self.attention_factor = rotary_frequencies(config)
        self.inv_freq_F = nn.Buffer(inv_freq_F.to(device), persistent=False)

    @property
    def spec(self) -> ModelSpec:
        specs: list[LayerSpec] = [layer.mixer.spec for layer in self._layers()]
        return ModelSpec(tuple(specs), self.embed_ZE.shape[1], dtype_name(self.dtype))

    def bind(self, arena: ArenaTensors) -> ModelMemory:
        """Return the arena as ``forward`` takes it."""
        mixers = [layer.mixer for layer in self._layers()]
        layers = tuple(mixer.bind(memory) for mixer, memory in zip(mixers, arena.layers, strict=True))
        return ModelMemory(layers, bind_folds([mixer.recurrence for mixer in mixers], arena.stacks))

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    @torch.no_grad()
    def forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        """Return the final, normalised hidden state of every row of the step, and advance the memory."""
        residual_TE = F.embedding(batch.token_ids_T, self.embed_ZE)
        rotary = rotary_table(batch.positions_T, self.inv_freq_F, self.attention_factor)
        layers = self._layers()
        norms = [*(layer.mixer_norm_E for layer in layers[1:]), self.norm_E]
        normed_TE = rms_norm_zero_centered(residual_TE, layers[0].mixer_norm_E, self.eps)
        for layer, layer_memory, norm_E in zip(layers, memory.layers, norms, strict=True):
            added_TE, residual_TE = layer(normed_TE, residual_TE, rotary, batch, layer_memory)
            normed_TE, residual_TE = add_rms_norm_zero_centered(added_TE, residual_TE, norm_E, self.eps)
        return normed_TE

    def pack(self) -> None:
        """Lay the weights out for fast products, where that exists; they cannot be loaded or moved afterwards."""
        for module in self.modules():
            for name, weight in module.named_parameters(recurse=False):
                # The embedding is indexed, too: a head tied to it stays as it is.
                if name in PACKED and weight is not self.embed_ZE and can_pack(weight):
                    setattr(module, name, nn.Parameter(pack(weight.data), requires_grad=False))

    def halve(self) -> None:
        """Keep in float16 what of a float32 model on a CPU loses nothing by it (``kernels/linear.py``)."""
        for module in self.modules():
            for name, weight in module.named_parameters(recurse=False):
                if name in PACKED and weight is not self.embed_ZE and can_halve(weight):
                    setattr(module, name, halve(weight.data))

    @torch.no_grad()
    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits ``[N, vocabulary]``, in the model's dtype."""
        return linear(hidden_NE, self.head_ZE)

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors but for those that mixers leave to the family."""
        yield f"{prefix}embed_tokens.weight", whole(self.embed_ZE)
        yield f"{prefix}norm.weight", whole(self.norm_E)
        for index, layer in enumerate(self._layers()):
            yield from layer.targets(f"{prefix}layers.{index}.", names)
        # A tied head may be published all the same: it is the embedding once more.
        if not self.is_tied or "lm_head.weight" in names:
            yield "lm_head.weight", whole(self.head_ZE)
