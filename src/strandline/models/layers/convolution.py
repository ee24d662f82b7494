"""A depthwise causal convolution over time, in a layer that keeps its last inputs.

Shape suffixes: T tokens of the step, D those of decodes, R those of prefills, C channels, W taps of the filter,
S slots; of a window's memory R are the rows.
"""

from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.recurrences.conv1d import (
    Activation,
    Convolution,
    causal_conv1d_prefill,
    causal_conv1d_replay,
    causal_conv1d_update,
)
from strandline.kernels.recurrences.replay import ReplayLog, of_step
from strandline.models.layers.recurrent import mix_parts
from strandline.models.layers.site import Site, dtype_name
from strandline.models.layers.targets import NamedTargets, Split
from strandline.specs import TensorSpec

MAX_TAPS: Final = 5
"""Maximum taps of a filter whose taps lie side by side: kernels are tested with these, and with 10."""


class CausalConvolution(nn.Module):
    """The filter of one layer.

    Args:
        composed_dtype: dtype of a filter that is no parameter, but composed of others when kernels are chosen; None: it
            is a parameter.
    """

    operations = (causal_conv1d_update, causal_conv1d_prefill, causal_conv1d_replay)
    weight_CW: Tensor

    def __init__(
        self,
        num_channels: int,
        num_taps: int,
        activation: Activation,
        site: Site,
        *,
        has_bias: bool,
        composed_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.dtype = activation, site.dtype
        if composed_dtype is None:
            self.weight_CW = site.parameter(num_channels, num_taps)
        else:
            filter_CW = torch.zeros(num_channels, num_taps, dtype=composed_dtype, device=site.device)
            self.register_buffer("weight_CW", filter_CW, persistent=False)
        self.bias_C = site.parameter(num_channels) if has_bias else None

    @property
    def _convolution(self) -> Convolution:
        return Convolution(self.weight_CW, self.bias_C, self.activation)

    @property
    def window(self) -> TensorSpec:
        """Spec of the window: the last inputs of a sequence."""
        num_channels, num_taps = self.weight_CW.shape
        return TensorSpec("window", (num_taps - 1, num_channels), dtype_name(self.dtype))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._convolve_one, self._convolve = kernels[causal_conv1d_update], kernels[causal_conv1d_prefill]
        self._convolve_replayed = kernels[causal_conv1d_replay]

    def convolve(self, x_TC: Tensor, batch: StepBatch, window_SRC: Tensor, log: ReplayLog) -> Tensor:
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
        y_RC = of_step(batch.recurrent.replay, y_RC)
        return y_RC if num_rows == 0 else torch.cat((self.decode(x_DC, batch, window_SRC), y_RC))

    def decode(self, x_DC: Tensor, batch: StepBatch, window_SRC: Tensor) -> Tensor:
        """Convolve the decodes' tokens."""
        return self._convolve_one(x_DC, self._convolution, window_SRC, batch.decode_slots)

    def prefill(
        self, inputs: tuple[Tensor, ...], batch: StepBatch, window_SRC: Tensor, log: ReplayLog
    ) -> tuple[Tensor, ...]:
        """Convolve the first of the prefills' inputs; return all, those of replayed tokens before the step's own.

        Args:
            log: log of the inputs.
        """
        recurrent, slots = batch.recurrent, batch.prefill_slots
        if recurrent.replay is not None and log is not None:
            where = (window_SRC, slots, recurrent.chunks)
            return self._convolve_replayed(inputs, log, recurrent.replay, self._convolution, *where)
        x_RC, *others = inputs
        return self._convolve(x_RC, self._convolution, window_SRC, slots, recurrent.chunks), *others

    def targets(self, prefix: str, split: Split) -> NamedTargets:
        """Yield the published tensors.

        Args:
            split: how channels are divided among shards.
        """
        yield f"{prefix}weight", split(self.weight_CW.unsqueeze(1))
        if self.bias_C is not None:
            yield f"{prefix}bias", split(self.bias_C)


class ScaledConvolution(CausalConvolution):
    """A convolution of inputs times a factor for each channel, which the filter has: it is float32, as products are.

    Args:
        factor_C: float32.
    """

    factor_C: Tensor

    def __init__(self, factor_C: Tensor, num_taps: int, activation: Activation, site: Site, *, has_bias: bool) -> None:
        size = (len(factor_C), num_taps)
        super().__init__(*size, activation, site, has_bias=has_bias, composed_dtype=torch.float32)
        self.taps_CW = site.parameter(*size)
        self.register_buffer("factor_C", factor_C, persistent=False)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        super().use_kernels(kernels)
        torch.mul(self.taps_CW, self.factor_C.unsqueeze(1), out=self.weight_CW)

    def targets(self, prefix: str, split: Split) -> NamedTargets:
        """Yield the published tensors, as ``CausalConvolution.targets``."""
        yield f"{prefix}weight", split(self.taps_CW.unsqueeze(1))
        if self.bias_C is not None:
            yield f"{prefix}bias", split(self.bias_C)


class ComposedConvolution(CausalConvolution):
    """A convolution with a composed filter, in a layer that has windows of several.

    Args:
        name: name of its window, and of what is logged of drafts.
        filter_dtype: dtype of the filter; None: that of the inputs.
    """

    def __init__(
        self, name: str, num_channels: int, num_taps: int, site: Site, *, filter_dtype: torch.dtype | None = None
    ) -> None:
        dtype = site.dtype if filter_dtype is None else filter_dtype
        super().__init__(num_channels, num_taps, None, site, has_bias=False, composed_dtype=dtype)
        self.name = name

    @property
    def window(self) -> TensorSpec:
        """Spec of the window: the last inputs of a sequence."""
        return replace(super().window, name=self.name)

    @property
    def logged(self) -> TensorSpec:
        """Spec of what is logged of a draft: its inputs."""
        return TensorSpec(self.name, self.weight_CW.shape[:1], dtype_name(self.dtype))

    def bind(self, memory: LayerMemory) -> tuple[Tensor, ReplayLog]:
        """Return the window and the log, of all that the layer keeps, as ``convolve`` takes them."""
        return memory.states[self.name], None if memory.replay is None else (memory.replay[self.name],)

    def replay(self, batch: StepBatch, window_SRC: Tensor, log: ReplayLog) -> None:
        """Advance the window over logged tokens alone."""
        no_x = self.weight_CW.new_empty(0, len(self.weight_CW), dtype=self.dtype)
        self.convolve(no_x, batch, window_SRC, log)


class ResidualConvolution(ComposedConvolution):
    """A convolution whose inputs are added to its results; the filter is float32, whatever the inputs are.

    Args:
        scale: multiplies the sum.
    """

    def __init__(self, name: str, num_channels: int, num_taps: int, site: Site, *, scale: float = 1.0) -> None:
        super().__init__(name, num_channels, num_taps, site, filter_dtype=torch.float32)
        self.scale = scale
        self.taps_CW = site.parameter(num_channels, num_taps, dtype=torch.float32)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        super().use_kernels(kernels)
        self.weight_CW.copy_(self.taps_CW)
        self.weight_CW[:, -1] += 1.0
        self.weight_CW.mul_(self.scale)


class Delays(ComposedConvolution):
    """The inputs of the last tokens before each token: one token before it, and so on, side by side.

    Args:
        num_channels: number of channels of the inputs.
        num_taps: one more than there are delays.
    """

    def __init__(self, name: str, num_channels: int, num_taps: int, site: Site) -> None:
        super().__init__(name, (num_taps - 1) * num_channels, num_taps, site)
        self.num_delays = num_taps - 1

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        super().use_kernels(kernels)
        for index, filter_CW in enumerate(self.weight_CW.chunk(self.num_delays)):
            filter_CW[:, -2 - index] = 1.0

    def delayed(self, x_TC: Tensor, batch: StepBatch, window_SRC: Tensor, log: ReplayLog) -> tuple[Tensor, ...]:
        """Return the inputs of the token before each of the step's tokens, of the one before that, and so on."""
        return self.convolve(x_TC.repeat(1, self.num_delays), batch, window_SRC, log).chunk(self.num_delays, dim=-1)
