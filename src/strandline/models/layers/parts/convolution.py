"""A depthwise causal convolution over time, in a layer that keeps its last inputs.

The convolution and its window are the same for all filters. A filter is a part of its own, which has the taps as its
parameters or computes them from parameters.

Shape suffixes: T tokens of the step, D those of decodes, R those of prefills, C channels, W taps of the filter,
S slots; of a window's memory R are the rows.
"""

from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.recurrences.conv1d import (
    Activation,
    Convolution,
    causal_conv1d_prefill,
    causal_conv1d_rerun,
    causal_conv1d_update,
)
from strandline.kernels.recurrences.rerun import DraftLog, of_step
from strandline.models.layers.parts.recurrent import mix_parts
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.targets import NamedTargets, Split
from strandline.specs import TensorSpec

MAX_TAPS: Final = 5
"""Maximum taps of a filter whose taps lie side by side: kernels are tested with these, and with 10."""


class Filter(Protocol):
    """What a convolution multiplies its inputs with; a module."""

    @property
    def weight_CW(self) -> Tensor:
        """Taps as kernels read them, the current token's last."""

    @property
    def bias_C(self) -> Tensor | None:
        """What is added to the results; None: nothing."""


FilterT = TypeVar("FilterT", bound=Filter)


class CausalConvolution(nn.Module, Generic[FilterT]):
    """The convolution of one layer, or one of several.

    Args:
        weights: the filter.
        site: its dtype is that of the inputs.
        name: of the window among the layer's states, and of the inputs among what the layer logs of drafts.
    """

    operations = (causal_conv1d_update, causal_conv1d_prefill, causal_conv1d_rerun)

    def __init__(self, weights: FilterT, activation: Activation, site: Site, name: str = "window") -> None:
        super().__init__()
        self.filter, self.activation, self.dtype, self.name = weights, activation, site.dtype, name

    @property
    def window(self) -> TensorSpec:
        """Spec of the window: the last inputs of a sequence."""
        num_channels, num_taps = self.filter.weight_CW.shape
        return TensorSpec(self.name, (num_taps - 1, num_channels), dtype_name(self.dtype))

    @property
    def logged(self) -> TensorSpec:
        """Spec of what is logged of a draft: its inputs."""
        return TensorSpec(self.name, (len(self.filter.weight_CW),), dtype_name(self.dtype))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._convolve_one, self._convolve = kernels[causal_conv1d_update], kernels[causal_conv1d_prefill]
        self._convolve_rerun = kernels[causal_conv1d_rerun]

    @property
    def _operand(self) -> Convolution:
        """The filter and the activation, as kernels take them."""
        return Convolution(self.filter.weight_CW, self.filter.bias_C, self.activation)

    def bind(self, memory: LayerMemory) -> tuple[Tensor, DraftLog]:
        """Return the window and the log, out of a layer's memory, as ``convolve`` takes them."""
        return memory.states[self.name], None if memory.draft_log is None else (memory.draft_log[self.name],)

    def rerun(self, batch: StepBatch, window_SRC: Tensor, log: DraftLog) -> None:
        """Advance the window over logged tokens alone."""
        weight_CW = self.filter.weight_CW
        self.convolve(weight_CW.new_empty(0, len(weight_CW), dtype=self.dtype), batch, window_SRC, log)

    def convolve(self, x_TC: Tensor, batch: StepBatch, window_SRC: Tensor, log: DraftLog) -> Tensor:
        """Convolve the step's tokens, decodes and prefills; return as many, and advance the windows.

        Args:
            log: log of ``x_TC``, where the layer logs nothing else.
        """
        if batch.verified is not None:
            return mix_parts(partial(self.convolve, window_SRC=window_SRC, log=log), (x_TC,), batch)
        num_rows = batch.num_decode_rows
        if num_rows == len(x_TC) > 0:
            return self.decode(x_TC, batch, window_SRC)
        x_DC, x_RC = x_TC.split([num_rows, len(x_TC) - num_rows])
        (y_RC,) = self.prefill((x_RC,), batch, window_SRC, log)
        y_RC = of_step(batch.recurrent.rerun, y_RC)
        return y_RC if num_rows == 0 else torch.cat((self.decode(x_DC, batch, window_SRC), y_RC))

    def decode(self, x_DC: Tensor, batch: StepBatch, window_SRC: Tensor) -> Tensor:
        """Convolve the decodes' tokens."""
        return self._convolve_one(x_DC, self._operand, window_SRC, batch.decode_slots)

    def prefill(
        self, inputs: tuple[Tensor, ...], batch: StepBatch, window_SRC: Tensor, log: DraftLog
    ) -> tuple[Tensor, ...]:
        """Convolve the first of the prefills' inputs; return all, those of rerun tokens before the step's own.

        Args:
            log: log of the inputs.
        """
        recurrent, slots = batch.recurrent, batch.prefill_slots
        if recurrent.rerun is not None and log is not None:
            where = (window_SRC, slots, recurrent.chunks)
            return self._convolve_rerun(inputs, log, recurrent.rerun, self._operand, *where)
        x_RC, *others = inputs
        return self._convolve(x_RC, self._operand, window_SRC, slots, recurrent.chunks), *others


class Taps(nn.Module):
    """A filter whose parameters are as kernels read them."""

    def __init__(self, num_channels: int, num_taps: int, site: Site, *, has_bias: bool = False) -> None:
        super().__init__()
        self.weight_CW = site.parameter(num_channels, num_taps)
        self.bias_C = site.parameter(num_channels) if has_bias else None

    def targets(self, prefix: str, split: Split) -> NamedTargets:
        """Yield the published tensors.

        Args:
            split: how channels are divided among shards.
        """
        yield f"{prefix}weight", split(self.weight_CW.unsqueeze(1))
        if self.bias_C is not None:
            yield f"{prefix}bias", split(self.bias_C)


def unfilled_filter(num_channels: int, num_taps: int, site: Site, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros, for a filter that is computed from parameters: ``use_kernels`` of its module fills it.

    Args:
        dtype: dtype of the filter; None: that of the inputs.
    """
    return torch.zeros(num_channels, num_taps, dtype=dtype or site.dtype, device=site.device)


class ResidualTaps(nn.Module):
    """Taps of a convolution whose inputs are added to its results; float32, whatever the inputs are.

    Args:
        scale: multiplies the sum.
    """

    operations, bias_C = (), None
    weight_CW: Tensor

    def __init__(self, num_channels: int, num_taps: int, site: Site, *, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer(
            "weight_CW", unfilled_filter(num_channels, num_taps, site, torch.float32), persistent=False
        )
        self.scale = scale
        self.taps_CW = site.parameter(num_channels, num_taps, dtype=torch.float32)

    def use_kernels(self, kernels: Kernels) -> None:
        """Fill the filter."""
        del kernels
        self.weight_CW.copy_(self.taps_CW)
        self.weight_CW[:, -1] += 1.0
        self.weight_CW.mul_(self.scale)


class Delays(nn.Module):
    """Delays copies of channels: all by one token, then all by two tokens, and so on."""

    operations, bias_C = (), None
    weight_CW: Tensor

    def __init__(self, num_channels: int, num_delays: int, site: Site) -> None:
        super().__init__()
        filter_CW = unfilled_filter(num_delays * num_channels, num_delays + 1, site)
        self.register_buffer("weight_CW", filter_CW, persistent=False)
        self.num_delays = num_delays

    def use_kernels(self, kernels: Kernels) -> None:
        """Fill the filter."""
        del kernels
        for index, filter_CW in enumerate(self.weight_CW.chunk(self.num_delays)):
            filter_CW[:, -2 - index] = 1.0
