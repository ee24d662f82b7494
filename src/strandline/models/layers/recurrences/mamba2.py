"""Mamba-2: a short convolution over values and state projections, then the state space model, then a gated norm.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensor is
split into it while loading. ``A_log``, ``D`` and ``dt_bias`` are float32.

The gated norm works on each group of channels by itself, as in ``mamba_ssm``, whose models these are.

Source: Dao and Gu, "Transformers are SSMs"; ``transformers`` (``bamba``, ``nemotron_h``) for the composition.

Shape suffixes: T tokens of the step, D those of decodes, R those of prefills, N sequences, E hidden size, G groups,
H heads, K channels of the state, V channels of a head, C channels of the convolution, W its taps, S slots, O rows of
a fused projection or all heads' channels side by side; of a window's memory R are the rows.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.config_fields import MAX_HEAD_DIM, MAX_HEADS, Fields
from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.recurrences.gdn_log import gdn_fold
from strandline.kernels.recurrences.mamba2 import Mamba2Inputs, mamba2_decode, mamba2_prefill
from strandline.kernels.recurrences.mamba2_log import mamba2_decode_logged, mamba2_log
from strandline.kernels.recurrences.rerun import of_step
from strandline.kernels.recurrences.state_recurrence import StateRecurrence
from strandline.kernels.rowwise.activation import silu_gate
from strandline.kernels.rowwise.norm import rms_norm_of_gated
from strandline.models.layers.parts.convolution import MAX_TAPS, CausalConvolution, Taps, unfilled_filter
from strandline.models.layers.parts.projection import FusedProjection, SummedProjection
from strandline.models.layers.parts.recurrent import RecurrentMemory, mix_parts
from strandline.models.layers.parts.shard import Shard
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, Split, Target, sharded, stacked, stacked_rows
from strandline.models.layers.parts.wide_norm import bind_mean_square
from strandline.specs import LayerSpec, TensorSpec

GROUPS: Final = "groups of Mamba-2"


class Mamba2Names(NamedTuple):
    """What a family calls the fields of its configuration."""

    num_heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    state_dim: str = "mamba_d_state"
    num_groups: str = "mamba_n_groups"
    num_taps: str = "mamba_d_conv"
    has_bias: str = "mamba_proj_bias"
    has_conv_bias: str = "mamba_conv_bias"


class Multipliers(NamedTuple):
    """Factors of the input projection's outputs."""

    gate: float = 1.0
    x: float = 1.0
    B: float = 1.0
    C: float = 1.0
    dt: float = 1.0


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Sizes of the layer."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    num_taps: int
    has_bias: bool
    """Whether the input projection has a bias."""
    has_out_bias: bool
    has_conv_bias: bool
    dt_limit: tuple[float, float]
    eps: float
    state_dtype: str = "float32"
    has_norm: bool = True
    """Whether what the gate lets through is normalised."""
    multipliers: Multipliers | None = None
    """Factors of the input projection's outputs, which what reads them applies; None: all are 1."""

    @classmethod
    def read(cls, fields: Fields, names: Mamba2Names, eps: float) -> "Mamba2Config":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`."""
        num_groups = fields.size(names.num_groups, at_most=MAX_HEADS)
        num_heads = fields.size(names.num_heads, at_most=MAX_HEADS)
        if num_heads % num_groups:
            fields.reject(names.num_heads, f"a multiple of {names.num_groups}, {num_groups}")
        return cls(
            hidden_size=fields.size("hidden_size"),
            num_heads=num_heads,
            head_dim=fields.size(names.head_dim, at_most=MAX_HEAD_DIM),
            state_dim=fields.size(names.state_dim, at_most=MAX_HEAD_DIM),
            num_groups=num_groups,
            num_taps=fields.size(names.num_taps, at_least=2, at_most=MAX_TAPS),
            has_bias=fields.flag(names.has_bias),
            has_out_bias=fields.flag(names.has_bias),
            has_conv_bias=fields.flag(names.has_conv_bias),
            dt_limit=_read_dt_limit(fields),
            eps=eps,
        )

    def of(self, shard: Shard) -> "Mamba2Config":
        """Return the sizes of a shard; raises as :class:`strandline.models.layers.parts.shard.Shard`."""
        num_groups = shard.shared(self.num_groups, GROUPS).part_of(self.num_groups, GROUPS)
        return replace(self, num_heads=shard.part_of(self.num_heads, "heads of Mamba-2"), num_groups=num_groups)


def _read_dt_limit(fields: Fields) -> tuple[float, float]:
    def step(entries: Fields, name: str) -> float:
        return entries.number(name, at_least=0, at_most=inf)

    if fields.value("time_step_limit") is None:
        return 0.0, inf
    limit = fields.list_of("time_step_limit", step)
    if len(limit) != 2 or limit[0] > limit[1]:
        fields.reject("time_step_limit", "the least and the largest time step")
    return limit[0], limit[1]


class ScaledTaps(nn.Module):
    """Taps times a factor of each channel's inputs: float32, as products are.

    Args:
        factor_C: float32.
    """

    operations = ()
    weight_CW: Tensor
    factor_C: Tensor

    def __init__(self, factor_C: Tensor, num_taps: int, site: Site, *, has_bias: bool) -> None:
        super().__init__()
        self.register_buffer(
            "weight_CW", unfilled_filter(len(factor_C), num_taps, site, torch.float32), persistent=False
        )
        self.taps_CW = site.parameter(len(factor_C), num_taps)
        self.bias_C = site.parameter(len(factor_C)) if has_bias else None
        self.register_buffer("factor_C", factor_C, persistent=False)

    def use_kernels(self, kernels: Kernels) -> None:
        """Fill the filter."""
        del kernels
        torch.mul(self.taps_CW, self.factor_C.unsqueeze(1), out=self.weight_CW)

    def targets(self, prefix: str, split: Split) -> NamedTargets:
        """Yield the published tensors, as ``Taps.targets``."""
        yield f"{prefix}weight", split(self.taps_CW.unsqueeze(1))
        if self.bias_C is not None:
            yield f"{prefix}bias", split(self.bias_C)


class Mamba2Layer(nn.Module):
    """The recurrent layer.

    Args:
        site: the shard divides the heads; where there are fewer groups than shards, several hold the same.
    """

    operations = (rms_norm_of_gated, silu_gate, mamba2_prefill, mamba2_decode, mamba2_decode_logged, gdn_fold)

    def __init__(self, config: Mamba2Config, site: Site) -> None:
        super().__init__()
        self.shard, self.group_shard = site.shard, site.shard.shared(config.num_groups, GROUPS)
        self.config = config = config.of(site.shard)
        num_heads, head_dim, state_dim = config.num_heads, config.head_dim, config.state_dim
        shape, log = (num_heads, state_dim, head_dim), mamba2_log(config.num_groups, num_heads, state_dim, head_dim)
        self.recurrence = StateRecurrence[Mamba2Inputs]((mamba2_prefill, mamba2_decode), shape, config.state_dtype, log)
        inner_rows, state_rows = num_heads * head_dim, config.num_groups * state_dim
        self.conv_sizes = [inner_rows, state_rows, state_rows]
        rows = (sum(self.conv_sizes), inner_rows, num_heads)
        self.in_proj = FusedProjection(rows, config.hidden_size, site, has_bias=config.has_bias)
        """Rows: values (x), input projection (B), output projection (C), output gate (z), time step (dt)."""
        self.multipliers = config.multipliers or Multipliers()
        self.conv = CausalConvolution(self._filter(site), "silu", site)
        self.A_log_H = site.parameter(num_heads, dtype=torch.float32)
        self.dt_bias_H = site.parameter(num_heads, dtype=torch.float32)
        self.D_H = site.gain(num_heads, dtype=torch.float32)
        self.norm_O = site.gain(inner_rows) if config.has_norm else None
        self.out_proj = SummedProjection(config.hidden_size, inner_rows, site, has_bias=config.has_out_bias)

    def _filter(self, site: Site) -> "Taps | ScaledTaps":
        config, (_, *factors, _) = self.config, self.multipliers
        if factors == [1.0] * 3:
            return Taps(sum(self.conv_sizes), config.num_taps, site, has_bias=config.has_conv_bias)
        factor_C = torch.tensor(factors).repeat_interleave(torch.tensor(self.conv_sizes)).to(site.device)
        return ScaledTaps(factor_C, config.num_taps, site, has_bias=config.has_conv_bias)

    @property
    def spec(self) -> LayerSpec:
        dtype = dtype_name(self.conv.dtype)
        inputs = {"x": sum(self.conv_sizes), "dt": self.config.num_heads}
        logged = tuple(TensorSpec(name, (size,), dtype) for name, size in inputs.items())
        num_shares = (self.shard.count, self.group_shard.count, self.group_shard.count)
        window = self.conv.window.divided(*zip(self.conv_sizes, num_shares, strict=True), dim=1)
        states = tuple(map(self.shard.divided, self.recurrence.states))
        return LayerSpec(states=(*states, window), log=self.recurrence.log, draft_log=logged)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm_of_gated, self._silu_gate = kernels[rms_norm_of_gated], kernels[silu_gate]
        self._mean_square = bind_mean_square(kernels, self.group_shard)
        self.recurrence = self.recurrence.with_kernels(kernels)

    def bind(self, memory: LayerMemory) -> RecurrentMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return RecurrentMemory.bind(self.recurrence, memory)

    def rerun(self, batch: StepBatch, memory: RecurrentMemory) -> None:
        """Advance the states over logged tokens alone."""
        sizes, dtype = (sum(self.conv_sizes), self.config.num_heads), self.conv.dtype
        no_x, no_dt = (self.conv.filter.weight_CW.new_empty(0, size, dtype=dtype) for size in sizes)
        self._prefill(no_x, no_dt, batch, memory)

    def forward(self, hidden_TE: Tensor, step: Step, memory: RecurrentMemory) -> Tensor:
        x_TC, z_TO, dt_TH = self.in_proj.project(hidden_TE)
        out_THV = mix_parts(partial(self._mix, memory=memory), (x_TC, dt_TH), step.batch)
        return self.out_proj.multiply(self._gated(out_THV.flatten(1), z_TO))

    def _mix(self, x_TC: Tensor, dt_TH: Tensor, batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        num_rows = batch.num_decode_rows
        if num_rows == len(x_TC):
            return self._decode(x_TC, dt_TH, batch, memory)
        if num_rows == 0:
            return self._prefill(x_TC, dt_TH, batch, memory)
        (x_DC, x_RC), (dt_DH, dt_RH) = (x.split([num_rows, len(x) - num_rows]) for x in (x_TC, dt_TH))
        return torch.cat((self._decode(x_DC, dt_DH, batch, memory), self._prefill(x_RC, dt_RH, batch, memory)))

    def _gated(self, out_TO: Tensor, z_TO: Tensor) -> Tensor:
        if self.norm_O is None:
            return self._silu_gate(out_TO, z_TO, self.multipliers.gate)
        if self.group_shard != self.shard:
            gated_TO = F.silu(z_TO.float() * self.multipliers.gate).mul_(out_TO)
            scale_T1 = self._mean_square(gated_TO).add_(self.config.eps).rsqrt_()
            return gated_TO.mul_(scale_T1).to(out_TO.dtype) * self.norm_O
        norm = (self.norm_O, self.config.eps, self.config.num_groups)
        return self._rms_norm_of_gated(out_TO, z_TO, *norm, self.multipliers.gate)

    def _decode(self, x_DC: Tensor, dt_DH: Tensor, batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        inputs = self._inputs(self.conv.decode(x_DC, batch, memory.window_SRC), dt_DH)
        return self.recurrence.decode(inputs, memory.recurrent, batch.decode_slots, batch.recurrent.log)

    def _prefill(self, x_RC: Tensor, dt_RH: Tensor, batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        recurrent = batch.recurrent
        inputs = self._inputs(*self.conv.prefill((x_RC, dt_RH), batch, memory.window_SRC, memory.draft_log))
        out_RHV = self.recurrence.prefill(inputs, memory.recurrent, batch.prefill_slots, recurrent.chunks)
        return of_step(recurrent.rerun, out_RHV)

    def _inputs(self, y_TC: Tensor, dt_TH: Tensor) -> Mamba2Inputs:
        config = self.config
        x_TO, B_TO, C_TO = y_TC.split(self.conv_sizes, dim=-1)
        x_THV = x_TO.unflatten(-1, (config.num_heads, config.head_dim))
        B_TGK, C_TGK = (x.unflatten(-1, (config.num_groups, config.state_dim)) for x in (B_TO, C_TO))
        dt = (config.dt_limit, self.multipliers.dt)
        return Mamba2Inputs(x_THV, B_TGK, C_TGK, dt_TH, self.A_log_H, self.D_H, self.dt_bias_H, *dt)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors; the published input projection has the output gate's rows first."""
        for kind, fused in {"weight": self.in_proj.weight_OI, "bias": self.in_proj.bias_O}.items():
            if fused is not None:
                xBC, z, dt = fused.split(self.in_proj.part_rows)
                z_target, dt_target = (sharded(rows, self.shard) for rows in (z, dt))
                yield f"{prefix}in_proj.{kind}", stacked(z_target, self._conv_target(xBC), dt_target)
        yield from self.out_proj.targets(f"{prefix}out_proj.")
        yield from self.conv.filter.targets(f"{prefix}conv1d.", self._conv_target)
        for name, values in {"A_log": self.A_log_H, "D": self.D_H, "dt_bias": self.dt_bias_H}.items():
            yield f"{prefix}{name}", sharded(values, self.shard)
        if self.norm_O is not None:
            yield f"{prefix}norm.weight", sharded(self.norm_O, self.shard)

    def _conv_target(self, rows: Tensor) -> Target:
        """Return the target of what the convolution's channels have a row of each: values by head, B and C by group."""
        return stacked_rows(rows, self.conv_sizes, [self.shard, self.group_shard, self.group_shard])
