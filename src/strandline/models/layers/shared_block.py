"""A transformer block that several layers of Mamba-2 share, each with low-rank adapters of its own (Zamba2).

The block reads the residual stream beside the tokens' embeddings. What it makes is projected by a matrix of the layer's
own, and added to what the layer's Mamba-2 part reads, not to the stream.

Source: Glorioso et al., "The Zamba2 Suite", section 2; ``transformers`` (``zamba2``).

Shape suffixes: T tokens of the step, E hidden size, O features of all heads side by side, H query heads, D head dim,
F intermediate size, X the inputs and Y the outputs of a projection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention.attention import paged_attention
from strandline.kernels.attention.qkv import prepare_qkv
from strandline.kernels.batch import KVMemory, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences.recurrence import Recurrence
from strandline.kernels.rowwise.activation import geglu
from strandline.kernels.rowwise.norm import rms_norm
from strandline.models.layers.attention.attention_parts import AttentionConfig, QKVProjection
from strandline.models.layers.parts.projection import Projection, SummedProjection
from strandline.models.layers.parts.recurrent import RecurrentMemory
from strandline.models.layers.parts.shard import Shard
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.models.layers.recurrences.mamba2 import Mamba2Layer
from strandline.models.layers.streams.residual import ResidualNorm
from strandline.specs import LayerSpec, kv_spec


@dataclass(frozen=True, slots=True)
class SharedBlockConfig:
    """Sizes of the block and of its adapters."""

    attention: AttentionConfig
    """Its input is the residual stream and the embeddings, side by side."""
    intermediate_size: int
    has_bias: bool
    """Whether the feed-forward part has one."""
    rank: int
    has_attention_adapters: bool

    def of(self, shard: Shard) -> "SharedBlockConfig":
        """Return the sizes of a shard; raises as :class:`strandline.models.layers.parts.shard.Shard`."""
        size = shard.part_of(self.intermediate_size, "channels between a feed-forward part's projections")
        return replace(self, attention=self.attention.of(shard), intermediate_size=size)


class SharedBlock(nn.Module):
    """The weights of one block.

    Args:
        site: the shard divides the heads, and of the feed-forward part's channels.
    """

    def __init__(self, config: SharedBlockConfig, site: Site) -> None:
        super().__init__()
        self.shard, self.dtype = site.shard, site.dtype
        self.qkv = QKVProjection(config.attention, site)
        self.config = config = config.of(site.shard)
        hidden_size, size, has_bias = config.attention.hidden_size, config.intermediate_size, config.has_bias
        self.norm_X = site.gain(2 * hidden_size)
        self.out_proj = SummedProjection(hidden_size, config.attention.query_rows, site)
        self.mlp_norm_E = site.gain(hidden_size)
        self.gate_up = Projection(2 * size, hidden_size, site, has_bias=has_bias, shard=site.shard, num_parts=2)
        self.down = SummedProjection(hidden_size, size, site, has_bias=has_bias)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield f"{prefix}input_layernorm.weight", whole(self.norm_X)
        yield f"{prefix}pre_ff_layernorm.weight", whole(self.mlp_norm_E)
        yield from self.qkv.targets(f"{prefix}self_attn.")
        yield from self.out_proj.targets(f"{prefix}self_attn.o_proj.")
        yield from self.gate_up.targets(f"{prefix}feed_forward.gate_up_proj.")
        yield from self.down.targets(f"{prefix}feed_forward.down_proj.")


class Adapter(nn.Module):
    """A sum of low-rank products, one for each part of a fused projection's rows.

    Args:
        splits: the parts, as (rows of this shard, their shard, how many equal parts they consist of).
    """

    def __init__(self, num_inputs: int, rank: int, splits: Sequence[tuple[int, Shard, int]], site: Site) -> None:
        super().__init__()
        self.rank = rank
        self.down = Projection(rank * len(splits), num_inputs, site)
        self.ups = nn.ModuleList(
            Projection(size, rank, site, shard=shard, num_parts=num_parts) for size, shard, num_parts in splits
        )

    def add_to(self, y_TY: Tensor, x_TX: Tensor) -> Tensor:
        """Add what the adapter makes of the projection's inputs to its outputs, in place."""
        parts = self.down.multiply(x_TX).split(self.rank, dim=-1)
        return y_TY.add_(torch.cat([up(part) for up, part in zip(self.ups, parts, strict=True)], dim=-1))

    def targets(self, names: Sequence[str]) -> NamedTargets:
        """Yield the published tensors, given the names of the parts."""
        for name, down, up in zip(names, self.down.weight_OI.split(self.rank), self.ups, strict=True):
            assert isinstance(up, Projection)
            yield f"{name}.0.weight", whole(down)
            yield from up.targets(f"{name}.1.")


class SharedBlockUse(nn.Module):
    """A layer's Mamba-2 part, and its use of a shared block.

    Args:
        norm: norm of what the Mamba-2 part reads.
        embed: returns the embeddings of tokens.
    """

    def __init__(
        self,
        block: SharedBlock,
        mamba: Mamba2Layer,
        norm: ResidualNorm,
        embed: Callable[[Tensor], Tensor],
        site: Site,
    ) -> None:
        super().__init__()
        config = block.config
        self.block, self.mamba, self.norm, self.embed = block, mamba, norm, embed
        hidden_size, qkv = config.attention.hidden_size, block.qkv
        self.norm_E = norm.weight(site, hidden_size)
        self.linear = Projection(hidden_size, hidden_size, site)
        gate_up = (2 * config.intermediate_size, block.shard, 2)
        self.mlp_adapter = Adapter(hidden_size, config.rank, [gate_up], site)
        self.attention_adapter = None
        if config.has_attention_adapters:
            shards = (qkv.query_shard, qkv.kv_shard, qkv.kv_shard)
            splits = [(size, shard, 1) for size, shard in zip(qkv.part_rows[:3], shards, strict=True)]
            self.attention_adapter = Adapter(2 * hidden_size, config.rank, splits, site)

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (rms_norm, self.norm.add_norm, prepare_qkv, paged_attention, geglu)

    @property
    def spec(self) -> LayerSpec:
        config, mamba = self.block.config.attention, self.mamba.spec
        dtype, num_shares = dtype_name(self.block.dtype), self.block.qkv.kv_shard.count
        kept = kv_spec(config.num_kv_heads, config.head_dim, dtype, num_shares=num_shares)
        return LayerSpec(kept.streams, mamba.states, mamba.log, mamba.draft_log)

    @property
    def recurrence(self) -> Recurrence[Any, Any]:
        return self.mamba.recurrence

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm, self._geglu, self._add_norm = kernels[rms_norm], kernels[geglu], kernels[self.norm.add_norm]
        self._prepare_qkv, self._attend = kernels[prepare_qkv], kernels[paged_attention]
        self._sum = kernels.ranks.sum

    def bind(self, memory: LayerMemory) -> tuple[KVMemory, RecurrentMemory]:
        """Return the layer's memory as ``forward`` takes it."""
        return KVMemory(memory.streams["key"], memory.streams["value"]), self.mamba.bind(memory)

    def rerun(self, batch: StepBatch, memory: tuple[KVMemory, RecurrentMemory]) -> None:
        """Advance the states over logged tokens alone."""
        self.mamba.rerun(batch, memory[1])

    def forward(self, stream_TE: Tensor, step: Step, memory: tuple[KVMemory, RecurrentMemory]) -> Tensor:
        """Return what the Mamba-2 part makes of the residual stream and the block's output."""
        kv, states = memory
        normed_TE, _ = self._add_norm(self._block(stream_TE, step, kv), stream_TE, self.norm_E, self.norm.eps)
        mixed_TE: Tensor = self.mamba(normed_TE, step, states)
        return mixed_TE

    def _block(self, stream_TE: Tensor, step: Step, memory: KVMemory) -> Tensor:
        """Return what the block makes of the stream, projected."""
        block, eps = self.block, self.block.config.attention.eps
        x_TX = torch.cat((stream_TE, self.embed(step.batch.token_ids_T)), dim=-1)
        attended_TE = self._attention(self._rms_norm(x_TX, block.norm_X, eps), step, memory)
        normed_TE = self._rms_norm(attended_TE, block.mlp_norm_E, eps)
        gate_up_TY = self.mlp_adapter.add_to(block.gate_up.multiply(normed_TE), normed_TE)
        return self.linear.multiply(self._sum(block.down.multiply(self._geglu(gate_up_TY))))

    def _attention(self, x_TX: Tensor, step: Step, memory: KVMemory) -> Tensor:
        block = self.block
        qkv_TY = block.qkv.multiply(x_TX)
        if self.attention_adapter is not None:
            qkv_TY = self.attention_adapter.add_to(qkv_TY, x_TX)
        q_TO, k_TO, v_TO, _ = qkv_TY.split(block.qkv.part_rows, dim=-1)
        q_THD = self._prepare_qkv(q_TO, k_TO, v_TO, None, step.rotary, memory, step.batch.attention)
        scale = block.config.attention.scale
        out_THD = self._attend(q_THD, memory, step.batch.attention, step.batch.num_decodes, scale=scale)
        return self._sum(block.out_proj.multiply(out_THD.flatten(1)))

    def targets(self, prefix: str, block_prefix: str, use: int) -> NamedTargets:
        """Yield the published tensors but for the block's.

        Args:
            block_prefix: prefix of the block, which holds the adapters of all its uses.
            use: number of this layer among those that use a block.
        """
        yield from self.linear.targets(f"{prefix}linear.")
        yield from self.mamba.targets(f"{prefix}mamba_decoder.mamba.")
        yield from self.mlp_adapter.targets([f"{block_prefix}feed_forward.gate_up_proj_adapter_list.{use}"])
        if self.attention_adapter is not None:
            attention = f"{block_prefix}self_attn.linear_"
            yield from self.attention_adapter.targets([f"{attention}{name}_adapter_list.{use}" for name in "qkv"])
