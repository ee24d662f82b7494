"""Random weights of every format, and what they stand for, number by number: the oracle of products with them."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch import Tensor

from strandline.kernels.gemm import formats
from strandline.kernels.gemm.formats import fp4, mxfp8
from strandline.kernels.gemm.formats.coded import BLOCK_INPUTS, PACKED_SCALES, CodedFormat
from strandline.kernels.gemm.formats.format import Format
from strandline.kernels.gemm.formats.four_bit import FOUR_BIT, GROUPS_FOUR_BIT, SYMMETRIC_ZERO
from strandline.kernels.gemm.weights import CodedWeight, DenseWeight, ScaledWeight
from strandline.kernels.rowwise.quantized_rows import GROUP
from tests.cpu.models import fp8


def all_formats() -> list[Format]:
    """Return the rows of all modules of the formats' folder."""
    names = (module.name for module in iter_modules(formats.__path__) if not module.name.endswith("_triton"))
    modules = [import_module(f"{formats.__name__}.{name}") for name in names]
    return list(dict.fromkeys(x for module in modules for x in vars(module).values() if isinstance(x, Format)))


ALL_FORMATS: Final = all_formats()
ALL_CODED: Final = [format for format in ALL_FORMATS if isinstance(format, CodedFormat)]


def dense_weight(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> DenseWeight:
    return DenseWeight((torch.randn(shape) * shape[-1] ** -0.5).to(device, dtype))


def scaled_weight(*shape: int, rows_per_scale: int = GROUP, device: str = "cpu", **_: Any) -> ScaledWeight:
    """Return random weights whose scales differ; with one row per scale, of channels."""
    num_inputs = shape[-1]
    block = (rows_per_scale, GROUP if rows_per_scale > 1 else num_inputs)
    numbers = torch.randn(shape) * num_inputs**-0.5 * 2.0 ** torch.randint(-3, 4, (*shape[:-1], 1))
    values, scales = fp8.quantize(numbers, block)
    scales = scales.to(device)
    if rows_per_scale == 1:
        scales = scales.expand(*scales.shape[:-1], -(-num_inputs // GROUP))
    return ScaledWeight(values.to(device), scales, rows_per_scale)


def four_bit_weight(
    *shape: int,
    group: int = 128,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    **_: Any,
) -> CodedWeight:
    """Return random weights, whose scales differ."""
    num_inputs = shape[-1]
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    num_groups = -(-num_inputs // BLOCK_INPUTS) * BLOCK_INPUTS // group
    scales = (torch.rand(*shape[:-1], num_groups) + 0.2) * 0.2 * num_inputs**-0.5
    zeros = None if symmetric else torch.randint(0, 16, scales.shape, dtype=torch.uint8).to(device)
    words = FOUR_BIT.pack(codes).to(device)
    return CodedWeight(FOUR_BIT, words, scales.to(device, scale_dtype), num_inputs, group, zeros)


def fp4_weight(*shape: int, group: int = 16, device: str = "cpu", **_: Any) -> CodedWeight:
    """Return random weights whose scales and factors differ, some of them 0."""
    num_inputs = shape[-1]
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    num_groups = -(-num_inputs // BLOCK_INPUTS) * BLOCK_INPUTS // group
    numbers = torch.rand(*shape[:-1], num_groups) * 448
    numbers[..., 0, 0] = 0
    numbers[..., 0, -1] = 2.0**-8  # denormal
    scales = numbers.to(torch.float8_e4m3fn)
    factors = (torch.rand(shape[:-1]) + 0.5) * num_inputs**-0.5 / 1000
    if group == 32:
        scales = torch.randint(115, 121, scales.shape, dtype=torch.uint8)
        factors = torch.full(shape[:-1], num_inputs**-0.5 * 100)
    words, scales, factors = (x.to(device) for x in (*fp4.store(codes, scales), factors))
    if group == 16:
        scales = scales.flatten(0, -2).t().contiguous().t().view(scales.shape)
    return CodedWeight(fp4.FP4, words, scales, num_inputs, group, factors=factors)


def mxfp8_weight(*shape: int, device: str = "cpu", **_: Any) -> CodedWeight:
    """Return random weights of all sizes that e4m3 has, whose scales differ."""
    num_inputs = shape[-1]
    codes = torch.randint(0, 255, shape, dtype=torch.uint8)
    codes[codes == 0x7F] = 0x80
    num_groups = -(-num_inputs // BLOCK_INPUTS) * BLOCK_INPUTS // 32
    scales = (torch.randint(117, 123, (*shape[:-1], num_groups)) - int(num_inputs**0.5).bit_length()).byte()
    return CodedWeight(mxfp8.MXFP8, mxfp8.MXFP8.pack(codes).to(device), scales.to(device), num_inputs, 32)


def exact(weight: Any) -> Tensor:
    """Return what a weight stands for, in float64."""
    if isinstance(weight, DenseWeight):
        return weight.values_OI.double()
    if isinstance(weight, ScaledWeight):
        rows = torch.arange(weight.values.shape[-2], device=weight.values.device) // weight.rows_per_scale
        columns = torch.arange(weight.values.shape[-1], device=weight.values.device) // GROUP
        return weight.values.double() * weight.scales[..., rows, :][..., columns].double()
    column_I = torch.arange(weight.num_inputs, device=weight.words.device)
    if weight.format is FOUR_BIT:
        word_I, bit_I = column_I % 32 // 2, column_I % 128 // 32 * 4 + column_I % 2 * 16
        code = weight.words[..., column_I // 128 * 16 + word_I] >> bit_I & 15
    group_I, scales = column_I // weight.group, weight.scales
    if weight.scales.dtype == PACKED_SCALES:
        scales = scales.contiguous().view(torch.uint8)
        # The second and third of four groups are exchanged.
        group_I = group_I + 1 * (group_I % 4 == 1) - 1 * (group_I % 4 == 2)
    scale = scales[..., group_I]
    if weight.format is mxfp8.MXFP8:
        byte_I = column_I // 64 * 64 + column_I % 32 // 2 * 4 + column_I % 2 * 2 + column_I % 64 // 32
        numbers = weight.words.view(torch.float8_e4m3fn)[..., byte_I].double()
        return numbers * 2 ** (scale.double() - 127)
    if weight.format is FOUR_BIT:
        zeros = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros[..., column_I // weight.group].double()
        return (code.double() - zeros) * scale.double()
    word = weight.words[..., column_I // 128 * 16 + column_I % 32 // 2].long() & 0xFFFFFFFF
    shifted = (word, word >> 4 | word << 28, word << 6, word << 2 ^ word >> 6)
    bits = sum(pairs * (column_I % 128 // 32 == plane) for plane, pairs in enumerate(shifted)) >> column_I % 2 * 16
    exponent, mantissa = (bits >> 7 & 3).double(), (bits >> 6 & 1).double()
    number = torch.where(exponent > 0, (1 + mantissa / 2) * 2 ** (exponent - 1), mantissa / 2)
    if weight.group == 16:
        numbers = (1 + (scale & 7).double() / 8) * 2 ** ((scale >> 3).double() - 21)
    else:
        numbers = 2 ** (scale.double() - 127)
    return torch.where(bits >> 15 & 1 > 0, -number, number) * numbers * weight.factors.double().unsqueeze(-1)


def multiplied(x: Tensor, weight: Any) -> Tensor:
    """Return what is multiplied instead of x, in float64: in FP8 it is quantised, row by row and group by group."""
    if not isinstance(weight, ScaledWeight):
        return x.double()
    out = torch.empty(x.shape, dtype=torch.float64)
    for start in range(0, x.shape[1], GROUP):
        # On the CPU: on a GPU torch divides by multiplying with a rounded reciprocal.
        part = x[:, start : start + GROUP].cpu().float()
        scale = (part.abs().amax(1, keepdim=True) / 448).clamp(min=1e-37)
        out[:, start : start + GROUP] = (part * (1 / scale)).to(torch.float8_e4m3fn).double() * scale.double()
    return out.to(x.device)


def product(x: Tensor, weight: Any, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias`` in float64."""
    out = multiplied(x, weight) @ exact(weight).t()
    return out if bias_O is None else out + bias_O.double()


def gated(product_TO: Tensor) -> Tensor:
    gate, up = product_TO.chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def even_rows(num_rows: int, num_inputs: int) -> Tensor:
    """Return rows with a mean."""
    return torch.randn(num_rows, num_inputs) + 0.3


def uneven_rows(num_rows: int, num_inputs: int) -> Tensor:
    """Return rows whose groups differ in size by orders of magnitude."""
    magnitudes = 10 ** torch.randn(num_rows, -(-num_inputs // GROUP)).repeat_interleave(GROUP, 1)[:, :num_inputs]
    return torch.randn(num_rows, num_inputs) * magnitudes


class Case(NamedTuple):
    """How products with weights of a format are tested."""

    weight: Callable[..., Any]
    """Returns a random weight of a shape."""
    rows: Callable[[int, int], Tensor]
    tolerance: float
    """``|out - expected| / |expected|`` in float32."""

    def make_x(self, num_rows: int, num_inputs: int, dtype: torch.dtype, device: str) -> Tensor:
        """Return rows as a view of wider ones, which are NaN on both sides."""
        wide = torch.full((num_rows, num_inputs + 16), torch.nan, dtype=dtype, device=device)
        view = wide[:, 8 : 8 + num_inputs]
        view.copy_(self.rows(num_rows, num_inputs))
        return view


def _in_fp8(**options: Any) -> Case:
    # Tensor cores add up e4m3 products with 13 places.
    return Case(partial(scaled_weight, **options), uneven_rows, 2e-4)


def _in_codes(weight: Callable[..., Any], **options: Any) -> Case:
    # Sums of few rows have 2,048 times an input too much.
    return Case(partial(weight, **options), even_rows, 1e-4)


DENSE: Final = {"dense": Case(dense_weight, even_rows, 2e-6)}
FP8: Final = {"fp8": _in_fp8(), "fp8-32": _in_fp8(rows_per_scale=32), "fp8-channels": _in_fp8(rows_per_scale=1)}
"""Published blocks; blocks in a fused weight whose parts do not start where blocks do; channels."""
INT4: Final = {
    f"int4-{group}{'' if symmetric else '-zeros'}": _in_codes(four_bit_weight, group=group, symmetric=symmetric)
    for group in GROUPS_FOUR_BIT
    for symmetric in (True, False)
}
FP4: Final = {"nvfp4": _in_codes(fp4_weight), "mxfp4": _in_codes(fp4_weight, group=32)}
MXFP8: Final = {"mxfp8": _in_codes(mxfp8_weight)}
CODED: Final = INT4 | FP4 | MXFP8

CASES: Final = DENSE | FP8 | CODED
FORMATS: Final = {name: CASES[name] for name in ("dense", "fp8", "int4-128-zeros", "nvfp4", "mxfp4", "mxfp8")}
QUANTIZED: Final = {name: case for name, case in FORMATS.items() if name != "dense"}

of_every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
of_every_format = pytest.mark.parametrize("case", FORMATS.values(), ids=FORMATS)
of_quantized_formats = pytest.mark.parametrize("case", QUANTIZED.values(), ids=QUANTIZED)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())
