"""Mamba: a short convolution over values, then a selective state space, gated.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensor is
split into it while loading. ``A_log``, ``D`` and ``dt_bias`` are float32.

Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"; ``transformers`` (``mamba``,
``falcon_mamba``, ``jamba``) for the composition.

Shape suffixes: T tokens of the step, E hidden size, V channels, K dimensions of a channel's state, R rank of the time
steps' projection, O rows of a fused projection, S slots; of a window's memory R are the rows, C the channels. ``B`` and
``C`` alone are the state's projections.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.recurrences.mamba1 import Mamba1Inputs, mamba1_decode, mamba1_prefill
from strandline.kernels.recurrences.mamba1_log import mamba1_decode_logged, mamba1_fold, mamba1_log
from strandline.kernels.recurrences.state_recurrence import StateRecurrence
from strandline.kernels.rowwise.norm import rms_norm
from strandline.models.layers.parts.convolution import CausalConvolution, Taps
from strandline.models.layers.parts.projection import Projection, SummedProjection
from strandline.models.layers.parts.recurrent import RecurrentMemory, advance
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, sharded, whole
from strandline.specs import LayerSpec, TensorSpec


class InnerNorm(Enum):
    """How what time steps and state projections are made of is normalised."""

    NONE = "none"
    RMS = "RMS norm without a weight"
    WEIGHTED_RMS = "RMS norm with a weight"


@dataclass(frozen=True, slots=True)
class Mamba1Config:
    """Sizes of the layer."""

    hidden_size: int
    num_channels: int
    state_dim: int
    dt_rank: int
    num_taps: int
    has_bias: bool
    has_conv_bias: bool
    norm: InnerNorm = InnerNorm.NONE
    eps: float = 1e-6
    """Epsilon of the norm."""
    state_dtype: str = "float32"


class Mamba1Layer(nn.Module):
    """The recurrent layer.

    Args:
        site: the shard divides the channels.
    """

    operations = (rms_norm, mamba1_prefill, mamba1_decode, mamba1_decode_logged, mamba1_fold)

    def __init__(self, config: Mamba1Config, site: Site) -> None:
        super().__init__()
        self.config, self.shard = config, site.shard
        hidden_size, has_bias = config.hidden_size, config.has_bias
        size = site.shard.part_of(config.num_channels, "channels of Mamba")
        self.in_proj = Projection(2 * size, hidden_size, site, has_bias=has_bias, shard=site.shard, num_parts=2)
        """Rows: values (x), output gate (z)."""
        self.conv = CausalConvolution(Taps(size, config.num_taps, site, has_bias=config.has_conv_bias), "silu", site)
        self.x_rows = [config.dt_rank, config.state_dim, config.state_dim]
        self.x_proj = SummedProjection(sum(self.x_rows), size, site)
        """Rows: what time steps are made of, input projection (B), output projection (C)."""
        self.dt_proj = Projection(size, config.dt_rank, site, shard=site.shard)
        self.dt_bias_V = site.parameter(size, dtype=torch.float32)
        self.A_log_VK = site.parameter(size, config.state_dim, dtype=torch.float32)
        self.D_V = site.gain(size, dtype=torch.float32)
        self.out_proj = SummedProjection(hidden_size, size, site, has_bias=has_bias)
        self.recurrence = StateRecurrence[Mamba1Inputs](
            (mamba1_prefill, mamba1_decode), (size, config.state_dim), config.state_dtype, mamba1_log(self.A_log_VK)
        )
        self.norms = nn.ParameterList(
            site.gain(num_rows) for num_rows in self.x_rows if config.norm is InnerNorm.WEIGHTED_RMS
        )
        """Gains of the norms of the time step's low-rank input, of B and of C."""

    @property
    def spec(self) -> LayerSpec:
        dtype, (num_channels, state_dim) = dtype_name(self.conv.dtype), self.A_log_VK.shape
        inputs = {"conv": num_channels, "x": num_channels, "z": num_channels, "B": state_dim, "C": state_dim}
        logged = tuple(TensorSpec(name, (size,), dtype) for name, size in (inputs | {"dt": num_channels}).items())
        states = (*map(self.shard.divided, self.recurrence.states), self.shard.divided(self.conv.window, dim=1))
        return LayerSpec(states=states, log=self.recurrence.log, draft_log=logged)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm, self._sum = kernels[rms_norm], kernels.ranks.sum
        self.recurrence = self.recurrence.with_kernels(kernels)

    def bind(self, memory: LayerMemory) -> RecurrentMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return RecurrentMemory.bind(self.recurrence, memory)

    def rerun(self, batch: StepBatch, memory: RecurrentMemory) -> None:
        """Advance the states over logged tokens alone."""
        num_channels, state_dim = self.A_log_VK.shape
        no_x, no_projected = (self.conv.filter.weight_CW.new_empty(0, size) for size in (num_channels, state_dim))
        self.conv.rerun(batch, memory.window_SRC, memory.conv_log)
        self._advance((no_x, no_x, no_projected, no_projected, no_x), batch, memory)

    def forward(self, hidden_TE: Tensor, step: Step, memory: RecurrentMemory) -> Tensor:
        x_TV, z_TV = self.in_proj.multiply(hidden_TE).chunk(2, dim=-1)
        x_TV = self.conv.convolve(x_TV, step.batch, memory.window_SRC, memory.conv_log)
        projected = self._sum(self.x_proj.multiply(x_TV)).split(self.x_rows, dim=-1)
        dt_TR, B_TK, C_TK = projected if self.config.norm is InnerNorm.NONE else self._normed(projected)
        tokens = (x_TV, z_TV, B_TK, C_TK, self.dt_proj.multiply(dt_TR))
        return self.out_proj.multiply(self._advance(tokens, step.batch, memory))

    def _advance(self, tokens: Sequence[Tensor], batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        return advance(self.recurrence, self._inputs, tokens, batch, memory.recurrent, memory.recurrent_log)

    def _normed(self, projected: Sequence[Tensor]) -> list[Tensor]:
        weights = self.norms or [x.new_ones(x.shape[-1]) for x in projected]
        return [self._rms_norm(x, weight, self.config.eps) for x, weight in zip(projected, weights, strict=True)]

    def _inputs(self, x_TV: Tensor, z_TV: Tensor, B_TK: Tensor, C_TK: Tensor, dt_TV: Tensor) -> Mamba1Inputs:
        return Mamba1Inputs(x_TV, z_TV, B_TK, C_TK, dt_TV, self.D_V, self.dt_bias_V, self.A_log_VK)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.in_proj.targets(f"{prefix}in_proj.")
        yield from self.out_proj.targets(f"{prefix}out_proj.")
        yield from self.conv.filter.targets(f"{prefix}conv1d.", partial(sharded, shard=self.shard))
        yield from self.x_proj.targets(f"{prefix}x_proj.")
        yield from self.dt_proj.targets(f"{prefix}dt_proj.")
        yield f"{prefix}dt_proj.bias", sharded(self.dt_bias_V, self.shard)
        yield f"{prefix}A_log", sharded(self.A_log_VK, self.shard)
        yield f"{prefix}D", sharded(self.D_V, self.shard)
        for name, weight in zip(("dt", "b", "c"), self.norms, strict=False):
            yield f"{prefix}{name}_layernorm.weight", whole(weight)
