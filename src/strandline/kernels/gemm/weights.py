"""Weights as matrix products take them: as loaded, laid out for a CPU's library, or kept in float16 or quantised.

In bfloat16 oneDNN lays an ordinary weight out anew in every call, which costs up to half the time of a small batch. In
float32 MKL multiplies a few rows up to 2.8 times as fast with a weight whose inputs, not outputs, lie apart
(benchmarks/results).

A float32 weight that comes from bfloat16 can also be kept in float16 and multiplied with float32 inputs and sums by
FBGEMM, in a third of MKL's time for a few rows. Float16 holds every bfloat16 number from 2**-17 up to 65,504, and
smaller ones within 2**-25, less than the rounding of a sum of products with ordinary weights.

A weight published in FP8 (e4m3) stays as it is on GPUs, with its scales. One published in codes of a few bits stays so,
in a layout that tensor cores take (``formats/coded.py``). Where only some of the matrices of a fused weight are
published so, it consists of parts.

Shape suffixes: I inputs, O outputs; Y and X rows and columns of scales; W int32 numbers of a row of codes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from strandline.kernels.gemm.formats.coded import CodedFormat
from strandline.kernels.gemm.formats.dense import DENSE
from strandline.kernels.gemm.formats.format import Format
from strandline.kernels.gemm.formats.fp8 import FP8
from strandline.kernels.rowwise.quantized_rows import GROUP

MAX_HALF_ERROR: Final = 2.0**-25
"""Largest difference of a weight kept in float16: half the distance of the smallest float16 numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """An ordinary matrix of any strides, or several of one shape."""

    values_OI: Tensor
    format: ClassVar[Format] = DENSE

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the matrices, ``[..., O, I]``."""
        return tuple(self.values_OI.shape)

    def __getitem__(self, index: int | slice) -> "DenseWeight":
        """Return one of several matrices, or some of them."""
        return DenseWeight(self.values_OI[index])


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix in oneDNN's own layout: its rows cannot be sliced, copied or indexed."""

    packed_OI: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HalfWeight:
    """A matrix in float16, in FBGEMM's layout, for float32 inputs."""

    packed: Any


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """A matrix in e4m3, or several of one shape, and its float32 scales.

    A scale covers ``rows_per_scale`` rows and ``GROUP`` inputs. Scales of whole rows are repeated by a stride of zero.
    """

    values: Tensor
    """``[..., O, I]``, contiguous."""
    scales: Tensor
    """``[..., ⌈O / rows_per_scale⌉, ⌈I / GROUP⌉]``."""
    rows_per_scale: int = GROUP
    """A divisor of ``GROUP``, or ``GROUP``."""
    format: ClassVar[Format] = FP8

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the matrices, ``[..., O, I]``."""
        return tuple(self.values.shape)

    def __getitem__(self, index: int | slice) -> "ScaledWeight":
        """Return one of several matrices, or some of them."""
        return ScaledWeight(self.values[index], self.scales[index], self.rows_per_scale)

    def dequantize(self) -> Tensor:
        """Return the numbers that it stands for, in float32."""
        *_, num_rows, num_inputs = self.values.shape
        scales = self.scales.repeat_interleave(self.rows_per_scale, -2)[..., :num_rows, :]
        return self.values.float() * scales.repeat_interleave(GROUP, -1)[..., :num_inputs]


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A matrix in codes of a few bits, or several of one shape: ``(number - zero) * scale * factor``.

    A row consists of blocks of ``BLOCK_INPUTS`` inputs, the last one padded (``formats/coded.py``).
    """

    format: CodedFormat
    words: Tensor
    """int32 ``[..., O, W]``, contiguous."""
    scales: Tensor
    """``[..., O, X]``, for all groups of all blocks, in the published dtype; uint8: exponents. Scales of whole rows are
    repeated by a stride of zero; others are contiguous. ``PACKED_SCALES``: one number per block."""
    num_inputs: int
    group: int
    """Inputs that share a scale."""
    zeros: Tensor | None = None
    """uint8, shape and strides as of the scales; None: all are the format's."""
    factors: Tensor | None = None
    """float32 ``[..., O]``, contiguous; None: all are 1."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the matrices, ``[..., O, I]``."""
        return (*self.words.shape[:-1], self.num_inputs)

    def __getitem__(self, index: int | slice) -> "CodedWeight":
        """Return one of several matrices, or rows of one."""
        zeros, factors = (None if part is None else part[index] for part in (self.zeros, self.factors))
        return CodedWeight(
            self.format, self.words[index], self.scales[index], self.num_inputs, self.group, zeros, factors
        )

    def dequantize(self) -> Tensor:
        """Return the numbers that it stands for, in float32."""
        zeros = self.format.zero if self.zeros is None else self.zeros.float().repeat_interleave(self.group, -1)
        scales = self.format.scale_numbers(self.scales)
        scales = scales if self.factors is None else scales * self.factors.unsqueeze(-1)
        numbers = self.format.numbers(self.format.unpack(self.words)) - zeros
        return (numbers * scales.repeat_interleave(self.group, -1))[..., : self.num_inputs]


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """Matrices one above the other, each in a format of its own."""

    parts: tuple[DenseWeight | ScaledWeight | CodedWeight, ...]

    @property
    def is_in_fp8(self) -> bool:
        """Whether some of them are in FP8."""
        return any(part.format.multiplies_fp8 for part in self.parts)


QuantizedWeight = ScaledWeight | CodedWeight
"""Weights that stay quantised as published."""

Weight = DenseWeight | PackedWeight | HalfWeight | QuantizedWeight | StackedWeight
"""What linear layers multiply with; experts take some of these."""

Layout = Callable[[Tensor], Weight]
"""Chooses the form of a loaded matrix."""


def lay_out(weight_OI: Tensor) -> Weight:
    """Return a weight in the layout that its device multiplies fastest; where there is no other, as it is."""
    if not can_pack(weight_OI):
        return DenseWeight(weight_OI)
    if weight_OI.dtype == torch.float32:
        return DenseWeight(weight_OI.t().contiguous().t())
    return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight_OI, None))


def lay_out_in_half(weight_OI: Tensor) -> Weight:
    """Return a weight in float16 where that loses nothing and is faster, else as ``lay_out``."""
    if not can_halve(weight_OI):
        return lay_out(weight_OI)
    return HalfWeight(torch.ops.quantized.linear_prepack_fp16(weight_OI.contiguous(), None))


def can_pack(weight_OI: Tensor) -> bool:
    """Return whether the device multiplies faster with another layout of this weight."""
    if weight_OI.device.type != "cpu":
        return False
    if weight_OI.dtype == torch.float32:
        return bool(torch.backends.mkl.is_available())
    if weight_OI.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_halve(weight_OI: Tensor) -> bool:
    """Return whether float16 holds a weight within ``MAX_HALF_ERROR``, and this CPU multiplies with it."""
    if not weight_OI.is_cpu or weight_OI.dtype != torch.float32:
        return False
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    return bool((weight_OI.half().float() - weight_OI).abs().max() <= MAX_HALF_ERROR)
