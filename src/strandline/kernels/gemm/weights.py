"""Weights as matrix products take them: as loaded, laid out for a CPU's library, or kept in float16 or quantised.

In bfloat16 oneDNN lays an ordinary weight out anew in every call, which costs up to half the time of a small batch. In
float32 MKL multiplies a few rows up to 2.8 times as fast with a weight whose inputs, not outputs, lie apart
(benchmarks/results).

A float32 weight that comes from bfloat16 can also be kept in float16 and multiplied with float32 inputs and sums by
FBGEMM, in a third of MKL's time for a few rows. Float16 holds every bfloat16 number from 2**-17 up to 65,504, and
smaller ones within 2**-25, less than the rounding of a sum of products with ordinary weights.

A weight published in FP8 (e4m3) stays as it is on GPUs, with its scales. One published in 4 bits, FP4 or MXFP8 stays
so, in a layout that tensor cores take. Where only some of the matrices of a fused weight are published so, it consists
of parts.

Shape suffixes: I inputs, O outputs; Y and X rows and columns of scales; W int32 numbers of a row of codes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.rowwise.quantized_rows import GROUP

BLOCK_INPUTS: Final = 128
"""Inputs whose codes lie together: in 64 bytes in 4 bits, in 128 in MXFP8. Rows are padded to a multiple."""

BLOCK_WORDS: Final = 16
"""Int32 numbers of a block in 4 bits."""

CODES_PER_WORD: Final = 8

GROUPS_FOUR_BIT: Final = (32, 64, 128)
"""Inputs that may share a scale in 4 bits."""

SYMMETRIC_ZERO: Final = 8
"""The zero point of weights in 4 bits that are published without."""

MAX_HALF_ERROR: Final = 2.0**-25
"""Largest difference of a weight kept in float16: half the distance of the smallest float16 numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """An ordinary matrix of any strides, or several of one shape."""

    values_OI: Tensor

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
class FourBitWeight:
    """A matrix in 4 bits, or several of one shape: ``(code - zero) * scale``.

    A row consists of blocks of 128 inputs, the last one padded. Number ``w`` of a block holds inputs ``32 j + 2 w`` in
    bits ``[4 j, 4 j + 4)`` and inputs ``32 j + 2 w + 1`` in bits ``[4 j + 16, 4 j + 20)``, for ``j`` from 0 to 3: one
    mask gives two neighbouring inputs as halves of a register, as tensor cores take them.
    """

    words: Tensor
    """int32 ``[..., O, W]``, contiguous."""
    scales: Tensor
    """``[..., O, X]``, for all groups of all blocks, in the published dtype; of whole rows, repeated by a stride of
    zero."""
    zeros: Tensor | None
    """uint8, shape and strides as of the scales; None: all are 8."""
    num_inputs: int
    group: int
    """Inputs that share a scale, one of ``GROUPS_FOUR_BIT``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the matrices, ``[..., O, I]``."""
        return (*self.words.shape[:-1], self.num_inputs)

    def __getitem__(self, index: int | slice) -> "FourBitWeight":
        """Return one of several matrices, or rows of one."""
        zeros = None if self.zeros is None else self.zeros[index]
        return FourBitWeight(self.words[index], self.scales[index], zeros, self.num_inputs, self.group)

    def dequantize(self) -> Tensor:
        """Return the numbers that it stands for, in float32."""
        zeros = SYMMETRIC_ZERO if self.zeros is None else self.zeros.float().repeat_interleave(self.group, -1)
        scales = self.scales.float().repeat_interleave(self.group, -1)
        return ((unpack_code_pairs(self.words).float() - zeros) * scales)[..., : self.num_inputs]


def pack_code_pairs(codes: Tensor) -> Tensor:
    """Return uint8 codes ``[..., O, I]`` as the int32 ``words`` of a ``FourBitWeight``, padded with zeros."""
    # Inputs of a block by j // 2, j % 2, w, and whether they are odd; two codes whose j differ by one are a byte.
    low, high = _padded(codes).unflatten(-1, (-1, 2, 2, BLOCK_WORDS, 2)).unbind(-3)
    pairs: Tensor = low | high << 4
    return pairs.movedim(-3, -1).flatten(-2).contiguous().view(torch.int32).flatten(-3)


def unpack_code_pairs(words: Tensor) -> Tensor:
    """Return the uint8 codes of a ``FourBitWeight``, with those that pad the last block."""
    pairs = words.view(torch.uint8).unflatten(-1, (-1, BLOCK_WORDS, 2, 2)).movedim(-1, -3)
    return torch.stack((pairs & 15, pairs >> 4), dim=-3).flatten(-5)


CODE_BITS: Final = ((6, 7, 8, 15), (10, 11, 12, 19), (0, 1, 2, 9), (4, 5, 14, 13))
"""Bits of a word of an ``Fp4Weight`` that hold four of its codes, the lowest bit of a code first. Those of the codes of
the next inputs are 16 further, modulo 32.

Two numbers in bfloat16 have the bits of two codes at 6 to 8 and 15 of both halves. A mask gives the first two codes, a
rotation or shift and a mask the next four, two of each the last two.
"""


def pack_codes(codes: Tensor) -> Tensor:
    """Return uint8 codes ``[..., O, I]`` as the int32 ``words`` of an ``Fp4Weight``, padded with zeros."""
    codes = _padded(codes).unflatten(-1, (-1, 4, 4, 2)).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    words = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=codes.device)
    for i, position_8 in enumerate(_bit_positions(codes.device)):
        words |= ((codes >> i & 1).int() << position_8).sum(-1, dtype=torch.int32)
    return words


def unpack_codes(words: Tensor) -> Tensor:
    """Return the uint8 codes of an ``Fp4Weight``, with those that pad the last block."""
    codes = torch.zeros((*words.shape, CODES_PER_WORD), dtype=torch.uint8, device=words.device)
    for i, position_8 in enumerate(_bit_positions(words.device)):
        codes |= (words.unsqueeze(-1) >> position_8 & 1).byte() << i
    in_order: Tensor = codes.unflatten(-1, (4, 2)).unflatten(-3, (-1, 4)).transpose(-2, -3)
    return in_order.flatten(-4)


def _bit_positions(device: torch.device) -> Tensor:
    """Return where a word has each of the four bits of its eight codes, ``[4, 8]``."""
    even = torch.tensor(CODE_BITS, dtype=torch.int32, device=device).t()
    return torch.stack((even, (even + 16) % 32), dim=2).flatten(1)


def pack_bytes(codes: Tensor) -> Tensor:
    """Return uint8 codes ``[..., O, I]`` as the int32 ``words`` of an ``Mxfp8Weight``, padded with zeros."""
    # Inputs of 64 by j, w, and whether they are odd.
    of_words = _padded(codes).unflatten(-1, (-1, 2, 16, 2)).movedim(-3, -1).flatten(-2)
    words: Tensor = of_words.contiguous().view(torch.int32).flatten(-3)
    return words


def unpack_bytes(words: Tensor) -> Tensor:
    """Return the uint8 codes of an ``Mxfp8Weight``, with those that pad the last block."""
    codes: Tensor = words.view(torch.uint8).unflatten(-1, (-1, 16, 2, 2)).movedim(-1, -3).flatten(-4)
    return codes


def _padded(codes: Tensor) -> Tensor:
    return F.pad(codes, (0, -codes.shape[-1] % BLOCK_INPUTS))


E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers in FP4 by the lower three bits of a code; the fourth is the sign."""

E8M0_BIAS: Final = 127
"""A byte ``s`` is the scale ``2 ** (s - 127)`` in MXFP4 and MXFP8."""

E8M0_GROUP: Final = 32
"""Inputs that share such a scale."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp4Weight:
    """A matrix in FP4 (e2m1), or several of one shape: ``number * scale * factor``.

    A row consists of blocks of 128 inputs, the last one padded. Word ``w`` of four holds inputs ``8 j + 2 w`` of 32 and
    the next ones, for ``j`` from 0 to 3 (``CODE_BITS``).
    """

    words: Tensor
    """int32 ``[..., O, W]``, contiguous."""
    scales: Tensor
    """``[..., O, X]``, contiguous, for all groups of all blocks: e4m3, none of them negative, or uint8 exponents
    (``E8M0_BIAS``)."""
    factors: Tensor
    """float32 ``[..., O]``, contiguous."""
    num_inputs: int

    @property
    def group(self) -> int:
        """Inputs that share a scale: 16 of those in e4m3, 32 of exponents."""
        return self.words.shape[-1] * CODES_PER_WORD // self.scales.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the matrices, ``[..., O, I]``."""
        return (*self.words.shape[:-1], self.num_inputs)

    def __getitem__(self, index: int | slice) -> "Fp4Weight":
        """Return one of several matrices, or rows of one."""
        return Fp4Weight(self.words[index], self.scales[index], self.factors[index], self.num_inputs)

    def dequantize(self) -> Tensor:
        """Return the numbers that it stands for, in float32."""
        table = torch.tensor((*E2M1, *(-number for number in E2M1)), device=self.words.device)
        scales = scale_numbers(self.scales) * self.factors.unsqueeze(-1)
        numbers = table[unpack_codes(self.words).int()] * scales.repeat_interleave(self.group, -1)
        return numbers[..., : self.num_inputs]


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp8Weight:
    """A matrix in MXFP8 (e4m3, scales of 32 inputs), or several of one shape: ``number * scale``.

    A row consists of blocks of 128 inputs, the last one padded. Word ``w`` of 16 holds inputs ``32 j + 2 w`` of 64, as
    byte ``j``, and the next ones, as byte ``j + 2``, for ``j`` 0 and 1.
    """

    words: Tensor
    """int32 ``[..., O, W]``, contiguous."""
    scales: Tensor
    """uint8 exponents ``[..., O, X]`` (``E8M0_BIAS``), contiguous, for all groups of all blocks."""
    num_inputs: int
    group: ClassVar[int] = E8M0_GROUP

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the matrices, ``[..., O, I]``."""
        return (*self.words.shape[:-1], self.num_inputs)

    def __getitem__(self, index: int | slice) -> "Mxfp8Weight":
        """Return one of several matrices, or rows of one."""
        return Mxfp8Weight(self.words[index], self.scales[index], self.num_inputs)

    def dequantize(self) -> Tensor:
        """Return the numbers that it stands for, in float32."""
        numbers = unpack_bytes(self.words).view(torch.float8_e4m3fn).float()
        scales = scale_numbers(self.scales).repeat_interleave(E8M0_GROUP, -1)
        return (numbers * scales)[..., : self.num_inputs]


def scale_numbers(scales: Tensor) -> Tensor:
    """Return the scales of weights in FP4 and MXFP8 in float32."""
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - E8M0_BIAS)


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """Matrices one above the other, each in a format of its own."""

    parts: "tuple[DenseWeight | ScaledWeight | CodedWeight, ...]"

    @property
    def is_in_fp8(self) -> bool:
        """Whether some of them are in FP8."""
        return any(isinstance(part, ScaledWeight) for part in self.parts)


CodedWeight = FourBitWeight | Fp4Weight | Mxfp8Weight
"""Weights whose ``words`` hold codes, in blocks of ``BLOCK_INPUTS``. Their activations are not quantised."""

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
