"""A gated short convolution (LFM2): ``out(C * conv(B * x))``, with B, C and x projected from the hidden state.

What it keeps of a sequence is the convolution's window alone: a few rows.

Source: ``transformers`` (``lfm2``).

Shape suffixes: T tokens of the step, E hidden size, S slots, R rows of a window's memory,
C channels of the convolution, one for each of the hidden state.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from torch import Tensor, nn

from strandline.config_fields import Fields
from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.recurrences.rerun import DraftLog, draft_log
from strandline.models.layers.parts.convolution import CausalConvolution, Taps
from strandline.models.layers.parts.projection import Projection, SummedProjection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, sharded
from strandline.specs import LayerSpec

MAX_SHORT_TAPS: Final = 7
"""Maximum taps of the filter; kernels are tested with these."""


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Sizes of the layer."""

    hidden_size: int
    num_taps: int
    has_bias: bool

    @classmethod
    def read(cls, fields: Fields) -> "ShortConvConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`."""
        num_taps = fields.size("conv_L_cache", at_least=2, at_most=MAX_SHORT_TAPS)
        return cls(fields.size("hidden_size"), num_taps, fields.flag("conv_bias"))


@dataclass(frozen=True, slots=True)
class ShortConvMemory:
    """A layer's share of all slots and logs."""

    window_SRC: Tensor
    draft_log: DraftLog


class ShortConv(nn.Module):
    """The gated short convolution.

    Its recurrence is None: it keeps a window, which is folded at every step.

    Args:
        site: the shard divides the channels.
    """

    recurrence = None

    def __init__(self, config: ShortConvConfig, site: Site) -> None:
        super().__init__()
        hidden_size, has_bias = config.hidden_size, config.has_bias
        self.shard, size = site.shard, site.shard.part_of(hidden_size, "channels of short convolutions")
        self.in_proj = Projection(3 * size, hidden_size, site, has_bias=has_bias, shard=site.shard, num_parts=3)
        """Rows: the gate before the convolution (B), the gate after it (C), what is convolved (x)."""
        self.conv = CausalConvolution(Taps(size, config.num_taps, site, has_bias=has_bias), None, site)
        self.out_proj = SummedProjection(hidden_size, size, site, has_bias=has_bias)

    @property
    def spec(self) -> LayerSpec:
        logged = replace(self.conv.logged, name="x")
        return LayerSpec(states=(self.shard.divided(self.conv.window, dim=1),), draft_log=(logged,))

    def bind(self, memory: LayerMemory) -> ShortConvMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return ShortConvMemory(memory.states["window"], draft_log(memory))

    def rerun(self, batch: StepBatch, memory: ShortConvMemory) -> None:
        """Advance the window over logged tokens alone."""
        self.conv.rerun(batch, memory.window_SRC, memory.draft_log)

    def forward(self, hidden_TE: Tensor, step: Step, memory: ShortConvMemory) -> Tensor:
        gate_before_TC, gate_behind_TC, x_TC = self.in_proj.multiply(hidden_TE).chunk(3, dim=-1)
        y_TC = self.conv.convolve(gate_before_TC * x_TC, step.batch, memory.window_SRC, memory.draft_log)
        return self.out_proj.multiply(y_TC.mul_(gate_behind_TC))

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.in_proj.targets(f"{prefix}in_proj.")
        yield from self.out_proj.targets(f"{prefix}out_proj.")
        yield from self.conv.filter.targets(f"{prefix}conv.", partial(sharded, shard=self.shard))
