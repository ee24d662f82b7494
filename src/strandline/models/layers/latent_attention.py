"""Multi-head latent attention without positions: a token keeps one latent for all heads (Kimi Linear).

The up projections of keys and values are not applied to latents: they are folded into queries and outputs, so that
attention reads latents alone.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Source: DeepSeek-AI, "DeepSeek-V2", section 2.1; ``transformers`` (``kimi_linear``).

Shape suffixes: T tokens of the step, E hidden size, H heads, K channels of a head's key that come from the latent, P
those that all heads share, V channels of a head's value, D channels of a latent and those shared, R channels of the
latent, B blocks, O heads' channels side by side. Of a block, P are its tokens.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.latent_attention import latent_attention
from strandline.kernels.linear import head_linear
from strandline.kernels.norm import rms_norm
from strandline.model_config import MAX_HEAD_DIM, MAX_HEADS, Fields
from strandline.models.layers.parameters import dtype_name, gain, parameter
from strandline.models.layers.projection import Projection, SummedProjection
from strandline.models.layers.rotary import RotaryTable
from strandline.models.shard import WHOLE, Shard
from strandline.models.targets import NamedTargets, interleaved, sharded, whole
from strandline.specs import LayerSpec, TensorSpec

NORM_EPS: Final = 1e-6

MAX_LATENT: Final = 2**12


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """Sizes of the layer."""

    hidden_size: int
    num_heads: int
    latent_dim: int
    key_dim: int
    """Channels of a head's key that come from the latent."""
    shared_dim: int
    """Channels of a key that all heads share."""
    value_dim: int

    @classmethod
    def read(cls, fields: Fields) -> "LatentAttentionConfig":
        """Read a text configuration; raises as :class:`strandline.model_config.Fields`."""
        num_heads = fields.size("num_attention_heads", at_most=MAX_HEADS)
        if fields.value("q_lora_rank") is not None:
            fields.reject("q_lora_rank", "null")
        if fields.size("num_key_value_heads", at_most=MAX_HEADS) != num_heads:
            fields.reject("num_key_value_heads", f"the number of attention heads, {num_heads}")
        if fields.flag("attention_bias"):
            fields.reject("attention_bias", "false")
        return cls(
            hidden_size=fields.size("hidden_size"),
            num_heads=num_heads,
            latent_dim=fields.size("kv_lora_rank", at_most=MAX_LATENT),
            key_dim=fields.size("qk_nope_head_dim", at_most=MAX_HEAD_DIM),
            shared_dim=fields.size("qk_rope_head_dim", at_most=MAX_HEAD_DIM),
            value_dim=fields.size("v_head_dim", at_most=MAX_HEAD_DIM),
        )

    def of(self, shard: Shard) -> "LatentAttentionConfig":
        """Return the sizes of a shard; raises as :class:`strandline.models.shard.Shard`."""
        return replace(self, num_heads=shard.part_of(self.num_heads, "attention heads"))


class LatentAttention(nn.Module):
    """Multi-head latent attention.

    Its recurrence is None: it keeps a stream alone.

    Args:
        dtype: of activations and latents, and of the weights until they are packed.
        shard: of the heads; every rank computes and keeps the latents.
    """

    recurrence = None
    operations = (rms_norm, head_linear, latent_attention)

    def __init__(
        self, config: LatentAttentionConfig, dtype: torch.dtype, device: torch.device | str, shard: Shard = WHOLE
    ) -> None:
        super().__init__()
        self.shard, self.dtype = shard, dtype
        self.config = config = config.of(shard)
        num_heads, hidden_size = config.num_heads, config.hidden_size
        self.query_dims = [config.key_dim, config.shared_dim]
        self.sizes = [num_heads * sum(self.query_dims), config.latent_dim, config.shared_dim]
        self.in_proj = Projection(sum(self.sizes), hidden_size, dtype, device)
        """Rows: query, latent, shared part of the key."""
        self.latent_norm_R = gain(config.latent_dim, dtype=dtype, device=device)
        self.key_up_HKR = parameter(num_heads, config.key_dim, config.latent_dim, dtype=dtype, device=device)
        self.value_up_HVR = parameter(num_heads, config.value_dim, config.latent_dim, dtype=dtype, device=device)
        self.out_proj = SummedProjection(hidden_size, num_heads * config.value_dim, dtype, device, shard)
        self.scale = sum(self.query_dims) ** -0.5

    @property
    def spec(self) -> LayerSpec:
        num_channels = self.config.latent_dim + self.config.shared_dim
        return LayerSpec(streams=(TensorSpec("latent", (num_channels,), dtype_name(self.dtype)),))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm, self._attend = kernels[rms_norm], kernels[latent_attention]
        self._head_linear = kernels[head_linear]

    def bind(self, memory: LayerMemory) -> Tensor:
        """Return the layer's memory as ``forward`` takes it."""
        return memory.streams["latent"]

    def forward(self, hidden_TE: Tensor, rotary: RotaryTable | None, batch: StepBatch, latent_BPD: Tensor) -> Tensor:
        del rotary
        q_TO, latent_TR, shared_TP = self.in_proj.multiply(hidden_TE).split(self.sizes, dim=-1)
        latent_TD = torch.cat((self._rms_norm(latent_TR, self.latent_norm_R, NORM_EPS), shared_TP), dim=-1)
        q_THK, q_THP = q_TO.unflatten(-1, (self.config.num_heads, -1)).split(self.query_dims, dim=-1)
        q_THR = self._head_linear(q_THK, self.key_up_HKR.mT)
        q_THD = torch.cat((q_THR, q_THP), dim=-1)
        steps = (batch.attention, batch.num_decodes)
        out_THR = self._attend(q_THD, latent_TD, latent_BPD, *steps, self.config.latent_dim, scale=self.scale)
        out_THV = self._head_linear(out_THR, self.value_up_HVR)
        return self.out_proj.multiply(out_THV.flatten(1))

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        query, _, _ = self.in_proj.weight_OI.split(self.sizes)
        yield f"{prefix}q_proj.weight", sharded(query, self.shard)
        yield f"{prefix}kv_a_proj_with_mqa.weight", whole(self.in_proj.weight_OI[len(query) :])
        yield f"{prefix}kv_a_layernorm.weight", whole(self.latent_norm_R)
        yield f"{prefix}kv_b_proj.weight", interleaved(self.key_up_HKR, self.value_up_HVR, shard=self.shard)
        yield from self.out_proj.targets(f"{prefix}o_proj.")
