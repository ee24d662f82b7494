"""Gated DeltaNet: a short convolution over queries, keys and values, then the gated delta rule.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading. ``A_log`` and ``dt_bias`` are float32.

Source: Yang et al., "Gated Delta Networks"; ``transformers`` (``qwen3_next``, ``qwen3_5``, ``olmo_hybrid``) for the
composition.

Shape suffixes: T tokens of the step, D those of decodes, R those of prefills, N sequences, E hidden size, G key heads,
H value heads, K and V channels of a key and of a value head, C channels of the convolution, W its taps, S slots,
O rows of a fused projection; of a window's memory R are the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from strandline.config_fields import DTYPES, MAX_HEAD_DIM, MAX_HEADS, Fields, read_eps
from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences.gdn import GatedDeltaInputs, gdn_decode, gdn_prefill
from strandline.kernels.recurrences.gdn_log import gdn_decode_logged, gdn_fold, gdn_log
from strandline.kernels.recurrences.state_recurrence import StateRecurrence
from strandline.kernels.rowwise.norm import rms_norm_gated, rms_norm_sigmoid_gated
from strandline.kernels.rowwise.quantized_rows import Rows
from strandline.kernels.rowwise.quantizing import with_quantized
from strandline.models.layers.parts.convolution import MAX_TAPS, CausalConvolution, Taps
from strandline.models.layers.parts.projection import PROJECTION_ROWS, FusedProjection, SummedProjection
from strandline.models.layers.parts.recurrent import RecurrentMemory, mix_parts
from strandline.models.layers.parts.shard import Shard
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, sharded, stacked_rows, whole
from strandline.specs import LayerSpec, TensorSpec

RECURRENCE: Final = (gdn_prefill, gdn_decode, gdn_decode_logged, gdn_fold)


@dataclass(frozen=True, slots=True)
class GatedDeltaNetConfig:
    """Sizes of the layer."""

    hidden_size: int
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    eps: float
    state_dtype: str
    max_beta: int = 1
    """Limit of the write strength: 1, or 2 where eigenvalues may be negative."""
    is_sigmoid_gated: bool = False
    """Whether the output gate is a sigmoid; else it is a SiLU."""

    @classmethod
    def read(cls, fields: Fields) -> "GatedDeltaNetConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`."""
        num_key_heads = fields.size("linear_num_key_heads", at_most=MAX_HEADS)
        num_heads = fields.size("linear_num_value_heads", at_most=MAX_HEADS)
        if num_heads % num_key_heads:
            fields.reject("linear_num_value_heads", f"a multiple of linear_num_key_heads, {num_key_heads}")
        return cls(
            hidden_size=fields.size("hidden_size"),
            num_key_heads=num_key_heads,
            num_heads=num_heads,
            key_dim=fields.size("linear_key_head_dim", at_most=MAX_HEAD_DIM),
            value_dim=fields.size("linear_value_head_dim", at_most=MAX_HEAD_DIM),
            num_taps=fields.size("linear_conv_kernel_dim", at_least=2, at_most=MAX_TAPS),
            eps=read_eps(fields),
            state_dtype=fields.choice("mamba_ssm_dtype", DTYPES, default="float32"),
        )

    def of(self, shard: Shard) -> "GatedDeltaNetConfig":
        """Return the sizes of a shard; raises as :class:`strandline.models.layers.parts.shard.Shard`."""
        return replace(
            self,
            num_key_heads=shard.part_of(self.num_key_heads, "key heads of Gated DeltaNet"),
            num_heads=shard.part_of(self.num_heads, "value heads of Gated DeltaNet"),
        )


class GatedDeltaNet(nn.Module):
    """The recurrent layer: a short convolution over queries, keys and values, then the gated delta rule.

    Args:
        site: the shard divides the heads: key heads, each with its value heads.
    """

    operations: tuple[Operation[..., Any], ...] = (*with_quantized(rms_norm_gated), *RECURRENCE)

    def __init__(self, config: GatedDeltaNetConfig, site: Site) -> None:
        super().__init__()
        self.shard, config = site.shard, config.of(site.shard)
        self.num_key_heads, self.num_heads = config.num_key_heads, config.num_heads
        self.key_dim, self.value_dim = config.key_dim, config.value_dim
        self.eps, self.is_sigmoid_gated, self.max_beta = config.eps, config.is_sigmoid_gated, config.max_beta
        if self.is_sigmoid_gated:
            self.operations = (rms_norm_sigmoid_gated, *RECURRENCE)
        log = gdn_log(self.num_key_heads, self.num_heads, self.key_dim, self.value_dim)
        shape = (self.num_heads, self.key_dim, self.value_dim)
        self.recurrence = StateRecurrence[GatedDeltaInputs](RECURRENCE[:2], shape, config.state_dtype, log)
        key_rows, value_rows = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        self.conv_sizes = [key_rows, key_rows, value_rows]
        num_channels = sum(self.conv_sizes)
        rows = (num_channels, value_rows, self.num_heads, self.num_heads)
        self.in_proj = FusedProjection(rows, config.hidden_size, site, multiple=PROJECTION_ROWS)
        """Rows: query, key, value, output gate (z), write strength (b), decay (a), and zeros."""
        self.conv = CausalConvolution(Taps(num_channels, config.num_taps, site), "silu", site)
        self.A_log_H = site.parameter(self.num_heads, dtype=torch.float32)
        self.dt_bias_H = site.parameter(self.num_heads, dtype=torch.float32)
        self.norm_V = site.gain(self.value_dim)
        self.out_proj = SummedProjection(config.hidden_size, value_rows, site)

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.in_proj.takes_quantized

    @property
    def spec(self) -> LayerSpec:
        parts = [(size, self.shard.count) for size in self.conv_sizes]
        states = (*map(self.shard.divided, self.recurrence.states), self.conv.window.divided(*parts, dim=1))
        inputs = {"x": sum(self.conv_sizes), "a": self.num_heads, "b": self.num_heads}
        logged = tuple(TensorSpec(name, (size,), dtype_name(self.conv.dtype)) for name, size in inputs.items())
        return LayerSpec(states=states, log=self.recurrence.log, draft_log=logged)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm_gated: Callable[..., Any] = (
            kernels[rms_norm_sigmoid_gated] if self.is_sigmoid_gated else self.out_proj.fed_by(rms_norm_gated, kernels)
        )
        self.recurrence = self.recurrence.with_kernels(kernels)

    def bind(self, memory: LayerMemory) -> RecurrentMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return RecurrentMemory.bind(self.recurrence, memory)

    def rerun(self, batch: StepBatch, memory: RecurrentMemory) -> None:
        """Advance the states over logged tokens alone."""
        sizes = (sum(self.conv_sizes), self.num_heads)
        no_x, no_heads = (self.conv.filter.weight_CW.new_empty(0, size) for size in sizes)
        self._prefill(no_x, no_heads, no_heads, batch, memory)

    def forward(self, hidden_TE: Rows, step: Step, memory: RecurrentMemory) -> Tensor:
        x_TC, z_TO, b_TH, a_TH, _ = self.in_proj.project(hidden_TE)
        out_THV = mix_parts(partial(self._mix, memory=memory), (x_TC, a_TH, b_TH), step.batch)
        normed = self._rms_norm_gated(out_THV, z_TO.view(out_THV.shape), self.norm_V, self.eps)
        return self.out_proj.multiply(normed.flatten(1) if isinstance(normed, Tensor) else normed)

    def _mix(self, x_TC: Tensor, a_TH: Tensor, b_TH: Tensor, batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        num_rows = batch.num_decode_rows
        if num_rows == len(x_TC):
            return self._decode(x_TC, a_TH, b_TH, batch, memory)
        if num_rows == 0:
            return self._prefill(x_TC, a_TH, b_TH, batch, memory)
        (x_DC, x_RC), (a_DH, a_RH), (b_DH, b_RH) = (x.split([num_rows, len(x) - num_rows]) for x in (x_TC, a_TH, b_TH))
        decoded = self._decode(x_DC, a_DH, b_DH, batch, memory)
        if batch.recurrent.rerun is not None:
            return torch.cat((decoded, self._prefill(x_RC, a_RH, b_RH, batch, memory)))
        out_THV = decoded.new_empty(len(x_TC), *decoded.shape[1:])
        out_THV[:num_rows] = decoded
        self._prefill(x_RC, a_RH, b_RH, batch, memory, out_THV[num_rows:])
        return out_THV

    def _decode(self, x_NC: Tensor, a_NH: Tensor, b_NH: Tensor, batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        y_NC = self.conv.decode(x_NC, batch, memory.window_SRC)
        inputs = GatedDeltaInputs(*self._heads(y_NC), a_NH, b_NH, self.A_log_H, self.dt_bias_H, self.max_beta)
        return self.recurrence.decode(inputs, memory.recurrent, batch.decode_slots, batch.recurrent.log)

    def _prefill(
        self,
        x_TC: Tensor,
        a_TH: Tensor,
        b_TH: Tensor,
        batch: StepBatch,
        memory: RecurrentMemory,
        out_THV: Tensor | None = None,
    ) -> Tensor:
        recurrent = batch.recurrent
        y_TC, a_TH, b_TH = self.conv.prefill((x_TC, a_TH, b_TH), batch, memory.window_SRC, memory.draft_log)
        inputs = GatedDeltaInputs(*self._heads(y_TC), a_TH, b_TH, self.A_log_H, self.dt_bias_H, self.max_beta)
        slots, chunks, rerun = batch.prefill_slots, recurrent.chunks, recurrent.rerun
        return self.recurrence.prefill(inputs, memory.recurrent, slots, chunks, rerun, out_THV)

    def _heads(self, y_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = y_TC.split(self.conv_sizes, dim=-1)
        return (
            q.view(len(y_TC), -1, self.key_dim),
            k.view(len(y_TC), -1, self.key_dim),
            v.view(len(y_TC), -1, self.value_dim),
        )

    def targets(self, prefix: str) -> NamedTargets:
        """Yield Qwen's published tensors, except the input projections, which differ between its generations."""
        split = partial(stacked_rows, sizes=self.conv_sizes, shards=[self.shard] * len(self.conv_sizes))
        yield from self.conv.filter.targets(f"{prefix}conv1d.", split)
        yield f"{prefix}A_log", sharded(self.A_log_H, self.shard)
        yield f"{prefix}dt_bias", sharded(self.dt_bias_H, self.shard)
        yield f"{prefix}norm.weight", whole(self.norm_V)
        yield from self.out_proj.targets(f"{prefix}out_proj.")
