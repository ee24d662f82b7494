"""Griffin's recurrent layer (RecurrentGemma).

The recurrent layer: a short convolution, then a real-gated linear recurrent unit, beside a branch of gelu units that
multiplies it. The unit's gates are block-diagonal products of its input.

Source: De et al., "Griffin"; ``transformers`` (``recurrent_gemma``).

Shape suffixes: T tokens of the step, E hidden size, H blocks, W channels of a block, V all channels, F intermediate
size, S slots; of a window's memory R are the rows, C the channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.linear import head_linear
from strandline.kernels.recurrences.rglru import GatedUnitInputs, rglru_decode, rglru_prefill
from strandline.kernels.recurrences.state_recurrence import StateRecurrence
from strandline.models.layers.parts.convolution import CausalConvolution, Taps
from strandline.models.layers.parts.projection import Projection, SummedProjection
from strandline.models.layers.parts.recurrent import RecurrentMemory, advance
from strandline.models.layers.parts.shard import Shard
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, sharded
from strandline.specs import LayerSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class GriffinConfig:
    """Sizes of the recurrent layer."""

    hidden_size: int
    num_channels: int
    num_blocks: int
    num_taps: int
    state_dtype: str = "float32"

    def of(self, shard: Shard) -> "GriffinConfig":
        """Return the sizes of a shard; raises as :class:`strandline.models.layers.parts.shard.Shard`."""
        num_blocks = shard.part_of(self.num_blocks, "blocks of the recurrent unit's gates")
        return replace(self, num_blocks=num_blocks, num_channels=self.num_channels // shard.count)


class GriffinLayer(nn.Module):
    """The recurrent layer.

    Args:
        site: the shard divides the blocks.
    """

    operations = (rglru_prefill, rglru_decode, head_linear)

    def __init__(self, config: GriffinConfig, site: Site) -> None:
        super().__init__()
        self.shard, config = site.shard, config.of(site.shard)
        size, num_blocks = config.num_channels, config.num_blocks
        width = size // num_blocks
        self.recurrence = StateRecurrence[GatedUnitInputs]((rglru_prefill, rglru_decode), (size,), config.state_dtype)
        self.in_proj = Projection(2 * size, config.hidden_size, site, has_bias=True)
        """Rows: the gelu units (y), what is convolved (x)."""
        self.conv = CausalConvolution(Taps(size, config.num_taps, site, has_bias=True), None, site)
        self.input_gate_HWW = site.parameter(num_blocks, width, width)
        self.input_bias_HW = site.parameter(num_blocks, width)
        self.decay_gate_HWW = site.parameter(num_blocks, width, width)
        self.decay_bias_HW = site.parameter(num_blocks, width)
        self.rate_V = site.parameter(size, dtype=torch.float32)
        self.out_proj = SummedProjection(config.hidden_size, size, site, has_bias=True)

    @property
    def spec(self) -> LayerSpec:
        size, dtype = len(self.rate_V), dtype_name(self.conv.dtype)
        inputs = {"conv": size, "x": size, "input_gate": size, "decay_gate": size, "first": 1}
        logged = tuple(TensorSpec(name, (channels,), dtype) for name, channels in inputs.items())
        states = (*map(self.shard.divided, self.recurrence.states), self.shard.divided(self.conv.window, dim=1))
        return LayerSpec(states=states, log=self.recurrence.log, draft_log=logged)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self.recurrence = self.recurrence.with_kernels(kernels)
        self._head_linear = kernels[head_linear]

    def bind(self, memory: LayerMemory) -> RecurrentMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return RecurrentMemory.bind(self.recurrence, memory)

    def rerun(self, batch: StepBatch, memory: RecurrentMemory) -> None:
        """Advance the states over logged tokens alone."""
        no_x, no_first = (self.input_bias_HW.new_empty(0, size) for size in (len(self.rate_V), 1))
        self.conv.rerun(batch, memory.window_SRC, memory.conv_log)
        self._advance((no_x, no_x, no_x, no_first), batch, memory)

    def forward(self, hidden_TE: Tensor, step: Step, memory: RecurrentMemory) -> Tensor:
        y_TV, x_TV = self.in_proj.multiply(hidden_TE).chunk(2, dim=-1)
        x_TV = self.conv.convolve(x_TV, step.batch, memory.window_SRC, memory.conv_log)
        i_TV = self._gate(x_TV, self.input_gate_HWW, self.input_bias_HW)
        r_TV = self._gate(x_TV, self.decay_gate_HWW, self.decay_bias_HW)
        first_T1 = (step.batch.positions_T == 0).to(x_TV.dtype).unsqueeze(-1)
        out_TV = self._advance((x_TV, i_TV, r_TV, first_T1), step.batch, memory)
        return self.out_proj.multiply(out_TV.mul_(F.gelu(y_TV, approximate="tanh")))

    def _gate(self, x_TV: Tensor, weight_HWW: Tensor, bias_HW: Tensor) -> Tensor:
        return (self._head_linear(x_TV.unflatten(-1, bias_HW.shape), weight_HWW.mT) + bias_HW).flatten(1)

    def _advance(self, tokens: Sequence[Tensor], batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        return advance(self.recurrence, self._inputs, tokens, batch, memory.recurrent, memory.recurrent_log)

    def _inputs(self, x_TV: Tensor, i_TV: Tensor, r_TV: Tensor, first_T1: Tensor) -> GatedUnitInputs:
        return GatedUnitInputs(x_TV, i_TV, r_TV, first_T1, self.rate_V)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        assert self.in_proj.bias_O is not None
        for kind, rows in {"weight": self.in_proj.weight_OI, "bias": self.in_proj.bias_O}.items():
            for name, part in zip("yx", rows.chunk(2), strict=True):
                yield f"{prefix}linear_{name}.{kind}", sharded(part, self.shard)
        yield from self.out_proj.targets(f"{prefix}linear_out.")
        yield from self.conv.filter.targets(f"{prefix}conv_1d.", partial(sharded, shard=self.shard))
        by_block = {
            "input_gate_weight": self.input_gate_HWW,
            "input_gate_bias": self.input_bias_HW,
            "recurrent_gate_weight": self.decay_gate_HWW,
            "recurrent_gate_bias": self.decay_bias_HW,
            "recurrent_param": self.rate_V,
        }
        for name, values in by_block.items():
            yield f"{prefix}rg_lru.{name}", sharded(values, self.shard)
