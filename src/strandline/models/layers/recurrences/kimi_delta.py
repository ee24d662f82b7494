"""Kimi Delta Attention: a short convolution over queries, keys and values, then the delta rule, then a gated norm.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading. ``A_log`` and ``dt_bias`` are float32. The separate convolutions of queries, keys and
values are one here: none mixes channels.

Source: Kimi Team, "Kimi Linear"; ``transformers`` (``kimi_linear``) for the composition.

Shape suffixes: T tokens of the step, E hidden size, H heads, K and V channels of a head, O heads' channels side by
side, R rank of the gates' projections, S slots; of a window's memory R are the rows, C the channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from strandline.config_fields import MAX_HEAD_DIM, MAX_HEADS, Fields, read_eps
from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.recurrences.kda import KimiDeltaInputs, kda_decode, kda_prefill
from strandline.kernels.recurrences.state_recurrence import StateRecurrence
from strandline.kernels.rowwise.norm import rms_norm_sigmoid_gated
from strandline.models.layers.parts.convolution import MAX_TAPS, CausalConvolution, Taps
from strandline.models.layers.parts.projection import FusedProjection, Projection, SummedProjection
from strandline.models.layers.parts.recurrent import RecurrentMemory, advance
from strandline.models.layers.parts.shard import Shard
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, sharded, whole
from strandline.specs import LayerSpec, TensorSpec

MIN_LOWER_BOUND: Final = -100.0
"""Least supported bound of log decays: less leaves nothing of a state."""


@dataclass(frozen=True, slots=True)
class KimiDeltaAttentionConfig:
    """Sizes of the layer."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_taps: int
    eps: float
    lower_bound: float | None = None
    """Least log decay; None: there is no bound."""
    state_dtype: str = "float32"
    is_low_rank: bool = True
    """Whether decays and output gates are made of a few channels that all heads share."""

    @classmethod
    def read(cls, fields: Fields, lower_bound: str | None = None) -> "KimiDeltaAttentionConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`.

        Args:
            lower_bound: the field with the least log decay; None: there is no bound.
        """
        return cls(
            hidden_size=fields.size("hidden_size"),
            num_heads=fields.size("linear_num_heads", at_most=MAX_HEADS),
            head_dim=fields.size("linear_head_dim", at_most=MAX_HEAD_DIM),
            num_taps=fields.size("linear_conv_kernel_dim", at_least=2, at_most=MAX_TAPS),
            eps=read_eps(fields),
            lower_bound=None
            if lower_bound is None
            else fields.number(lower_bound, at_least=MIN_LOWER_BOUND, at_most=0),
        )

    def of(self, shard: Shard) -> "KimiDeltaAttentionConfig":
        """Return the sizes of a shard; raises as :class:`strandline.models.layers.parts.shard.Shard`."""
        return replace(self, num_heads=shard.part_of(self.num_heads, "heads of Kimi Delta Attention"))


class KimiDeltaAttention(nn.Module):
    """The recurrent layer.

    Args:
        site: the shard divides the heads; what decays and gates of all heads are made of is computed on every rank.
    """

    operations = (rms_norm_sigmoid_gated, kda_prefill, kda_decode)

    def __init__(self, config: KimiDeltaAttentionConfig, site: Site) -> None:
        super().__init__()
        self.shard = site.shard
        self.config = config = config.of(site.shard)
        hidden_size, num_heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        size = num_heads * head_dim
        self.recurrence = StateRecurrence[KimiDeltaInputs](
            (kda_prefill, kda_decode), (num_heads, head_dim, head_dim), config.state_dtype
        )
        of_gates = head_dim if config.is_low_rank else size
        self.in_proj = FusedProjection((3 * size, of_gates, of_gates, num_heads), hidden_size, site)
        """Rows: query, key, value; decays (f) and output gates (g), or what they are made of; write strength (b)."""
        self.conv = CausalConvolution(Taps(3 * size, config.num_taps, site), "silu", site)
        self.f_proj = self.g_proj = None
        if config.is_low_rank:
            self.f_proj = Projection(size, head_dim, site, shard=site.shard)
            self.g_proj = Projection(size, head_dim, site, shard=site.shard)
        self.A_log_H = site.parameter(num_heads, dtype=torch.float32)
        self.dt_bias_O = site.parameter(size, dtype=torch.float32)
        self.norm_K = site.gain(head_dim)
        self.out_proj = SummedProjection(hidden_size, size, site)

    @property
    def spec(self) -> LayerSpec:
        dtype, by_head = dtype_name(self.conv.dtype), (self.config.num_heads, self.config.head_dim)
        inputs = {"conv": (3 * by_head[0] * by_head[1],), **dict.fromkeys(("query", "key", "value", "f"), by_head)}
        logged = tuple(TensorSpec(name, shape, dtype) for name, shape in (inputs | {"b": by_head[:1]}).items())
        window = self.conv.window.divided(*[(by_head[0] * by_head[1], self.shard.count)] * 3, dim=1)
        states = tuple(map(self.shard.divided, self.recurrence.states))
        return LayerSpec(states=(*states, window), log=self.recurrence.log, draft_log=logged)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._norm = kernels[rms_norm_sigmoid_gated]
        self.recurrence = self.recurrence.with_kernels(kernels)

    def bind(self, memory: LayerMemory) -> RecurrentMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return RecurrentMemory.bind(self.recurrence, memory)

    def rerun(self, batch: StepBatch, memory: RecurrentMemory) -> None:
        """Advance the states over logged tokens alone."""
        by_head, weight = (self.config.num_heads, self.config.head_dim), self.conv.filter.weight_CW
        no_heads, no_b = weight.new_empty(0, *by_head), weight.new_empty(0, by_head[0])
        self.conv.rerun(batch, memory.window_SRC, memory.conv_log)
        self._advance((no_heads, no_heads, no_heads, no_heads, no_b), batch, memory)

    def forward(self, hidden_TE: Tensor, step: Step, memory: RecurrentMemory) -> Tensor:
        by_head = (self.config.num_heads, self.config.head_dim)
        qkv_TC, f_TR, g_TR, b_TH = self.in_proj.project(hidden_TE)
        qkv_TC = self.conv.convolve(qkv_TC, step.batch, memory.window_SRC, memory.conv_log)
        qkv = (x_TO.unflatten(-1, by_head) for x_TO in qkv_TC.chunk(3, dim=-1))
        gates = ((self.f_proj, f_TR), (self.g_proj, g_TR))
        f_THK, g_THK = ((x_TR if up is None else up.multiply(x_TR)).unflatten(-1, by_head) for up, x_TR in gates)
        out_THK = self._advance((*qkv, f_THK, b_TH), step.batch, memory)
        return self.out_proj.multiply(self._norm(out_THK, g_THK, self.norm_K, self.config.eps).flatten(1))

    def _advance(self, tokens: Sequence[Tensor], batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        return advance(self.recurrence, self._inputs, tokens, batch, memory.recurrent, memory.recurrent_log)

    def _inputs(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, f_THK: Tensor, b_TH: Tensor) -> KimiDeltaInputs:
        dt_bias_HK = self.dt_bias_O.unflatten(0, (self.config.num_heads, -1))
        return KimiDeltaInputs(q_THK, k_THK, v_THK, f_THK, b_TH, self.A_log_H, dt_bias_HK, self.config.lower_bound)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        qkv, f, g, b = self.in_proj.weights
        for name, rows, taps in zip("qkv", qkv.chunk(3), self.conv.filter.weight_CW.chunk(3), strict=True):
            yield f"{prefix}{name}_proj.weight", sharded(rows, self.shard)
            yield f"{prefix}{name}_conv1d.weight", sharded(taps.unsqueeze(1), self.shard)
        yield f"{prefix}b_proj.weight", sharded(b, self.shard)
        for name, rows, up in (("f", f, self.f_proj), ("g", g, self.g_proj)):
            if up is None:
                yield f"{prefix}{name}_proj.weight", sharded(rows, self.shard)
            else:
                yield f"{prefix}{name}_a_proj.weight", whole(rows)
                yield from up.targets(f"{prefix}{name}_b_proj.")
        yield f"{prefix}A_log", sharded(self.A_log_H, self.shard)
        yield f"{prefix}dt_bias", sharded(self.dt_bias_O, self.shard)
        yield f"{prefix}o_norm.weight", whole(self.norm_K)
        yield from self.out_proj.targets(f"{prefix}o_proj.")
