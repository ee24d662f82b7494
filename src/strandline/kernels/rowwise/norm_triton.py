"""Norms over the last dimension on a GPU: one launch each, statistics in float32, rounded where ``norm.py`` rounds.

Rows may lie far apart (views of a fused projection); the last dimension must be dense, else it is copied. A kernel is
compiled per function, size and strides: any number of rows runs it.

Shape suffixes: as in ``norm.py``; R rows of a program, Y groups of inputs of all of these, G inputs of a group; of
quantised rows T rows, I inputs, X groups; M rows of a product. Kernels address a row by two indices, ``row // H`` and
``row % H``.
"""
# mypy: ignore-errors

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, Summand, WeighedSum
from strandline.kernels.expert_choices_triton import ChoicesArgument, choices_argument, num_added, sum_of_choices
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise import quantized_rows
from strandline.kernels.rowwise.normed_rows import NormedRows, NormKind
from strandline.kernels.rowwise.quantized_rows import QuantizedRows, Rows
from strandline.kernels.rowwise.quantizing_triton import quantize_groups, quantize_rows, unfilled
from strandline.kernels.sizes import cdiv, next_power_of_2

GROUP = tl.constexpr(quantized_rows.GROUP)

ROW_ELEMENTS = 1024
"""A program takes as many short rows (heads of 128) as make up this many elements: 16 bytes per thread."""

MAX_ROWS_DEFERRED = 4
"""Up to this many rows, products compute norms in their own launch."""

WARPS_SHORT = 4
WARPS_LONG = 8
"""A program with one long row (hidden sizes from 2,048 on) has twice the threads: one row is all that a decode has."""


class NormArgument(NamedTuple):
    """What a norm reads and writes, as a runtime argument."""

    x_ptr: Tensor
    other_ptr: Tensor
    """What is added first, or a gate."""
    weight_ptr: Tensor
    total_ptr: Tensor | None
    """Takes the sum, with the strides of x."""
    out_ptr: Tensor | None
    quantized_ptr: Tensor | None
    scale_ptr: Tensor | None
    heads: int
    """Rows that share a first index."""
    stride_xt: int
    stride_xh: int
    stride_ot: int
    stride_oh: int
    stride_scale: int
    eps: float
    choices: ChoicesArgument | None = None
    """What is added up instead of x."""
    factor: float | None = None
    """Multiplies x."""
    second_ptr: Tensor | None = None
    """What is added to that."""
    stride_second: int | None = None
    second_factor: float | None = None
    """Multiplies what is added."""


class Parts(NamedTuple):
    """What is added to the residual stream where that is no tensor, or the factor of a gate."""

    choices: ExpertChoices | None = None
    weighed: WeighedSum | None = None
    """Its second part and factors; the first is the tensor, or the choices."""
    gate_factor: float = 1.0


class NormConstants(NamedTuple):
    """What is compiled in of a norm."""

    size: int
    block: int
    rows: int
    """Rows that a program normalises."""
    is_zero_centered: bool
    adds: bool
    gate: str
    rounds_product: bool
    is_stored: bool
    is_quantized: bool
    top_k: int = 0
    """Choices of a token; 0: x is a tensor."""
    num_weighed: int = 0
    """Parts with factors that x is the sum of."""
    gate_factor: float = 1.0
    """Multiplies the gate of what is normalised."""


class NormLaunch(NamedTuple):
    """A norm of some rows."""

    argument: NormArgument
    constants: NormConstants
    num_rows: int

    def run(self) -> None:
        """Launch it."""
        if self.num_rows:
            _norm_kernel[(cdiv(self.num_rows, self.constants.rows),)](
                self.argument,
                self.num_rows,
                NORM=self.constants,
                num_warps=WARPS_LONG if self.constants.block >= 2048 else WARPS_SHORT,
                **overlap_options(self.argument.x_ptr),
            )


Use = Literal["", "add", "silu", "sigmoid", "silu before"]


@triton.jit
def norm_rows(program, norm, num_rows, NORM: tl.constexpr, OVERLAPS: tl.constexpr):
    """Write some rows of a norm, and what was added up before it."""
    D: tl.constexpr = NORM.size
    BLOCK_D: tl.constexpr = NORM.block
    ROWS: tl.constexpr = NORM.rows
    TOP_K: tl.constexpr = NORM.top_k
    dtype: tl.constexpr = norm.x_ptr.dtype.element_ty
    row_R = (program * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col_D = tl.arange(0, BLOCK_D)
    mask_RD = (row_R < num_rows)[:, None] & (col_D < D)[None, :]
    token_R = row_R // norm.heads
    head_R = row_R % norm.heads
    x_offset_RD = (token_R * norm.stride_xt + head_R * norm.stride_xh)[:, None] + col_D[None, :]
    other_RD_ptr = norm.other_ptr + (token_R * norm.stride_ot + head_R * norm.stride_oh)[:, None] + col_D[None, :]
    if NORM.gate == "silu before":
        weight_RD_ptr = norm.weight_ptr + (head_R * D)[:, None] + col_D[None, :]
        weight_RD = tl.load(weight_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32)
    else:
        weight_RD = tl.load(norm.weight_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)[None, :]
    # The next kernel, mostly a product, loads weights before it waits: it may start while this one waits, too.
    release_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
    if TOP_K > 0:
        x_RD = sum_of_choices(norm.choices, row_R, col_D, row_R < num_rows, mask_RD, D, TOP_K).to(tl.float32)
    else:
        x_RD = tl.load(norm.x_ptr + x_offset_RD, mask=mask_RD, other=0.0).to(tl.float32)
    if NORM.num_weighed > 0:
        x_RD *= norm.factor
        if NORM.num_weighed > 1:
            second_RD_ptr = norm.second_ptr + (token_R * norm.stride_second)[:, None] + col_D[None, :]
            x_RD += tl.load(second_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32) * norm.second_factor
        x_RD = x_RD.to(dtype).to(tl.float32)
    if NORM.adds:
        total_RD = x_RD + tl.load(other_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32)
        rounded_RD = total_RD.to(dtype)
        tl.store(norm.total_ptr + x_offset_RD, rounded_RD, mask=mask_RD)
        x_RD = rounded_RD.to(tl.float32)
    if NORM.gate != "":
        gate_RD = tl.load(other_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32)
    if NORM.gate == "silu before":
        gate_RD *= NORM.gate_factor
        x_RD = x_RD * (gate_RD * tl.sigmoid(gate_RD))
    rstd_R = tl.rsqrt(tl.sum(x_RD * x_RD, axis=1) / D + norm.eps)
    normed_RD = x_RD * rstd_R[:, None]
    if NORM.gate == "sigmoid":
        out_RD = normed_RD * weight_RD * tl.sigmoid(gate_RD)
    elif NORM.gate == "silu":
        normed_RD = normed_RD.to(dtype).to(tl.float32) * weight_RD
        if NORM.rounds_product:
            normed_RD = normed_RD.to(dtype).to(tl.float32)
        out_RD = normed_RD * (gate_RD * tl.sigmoid(gate_RD))
    else:
        out_RD = apply_weight(normed_RD, weight_RD, NORM.is_zero_centered, dtype)
    rounded_out_RD = out_RD.to(dtype)
    offset_RD = row_R[:, None] * D + col_D[None, :]
    if NORM.is_stored:
        tl.store(norm.out_ptr + offset_RD, rounded_out_RD, mask=mask_RD)
    if NORM.is_quantized:
        GROUPS: tl.constexpr = BLOCK_D // GROUP
        out_YG = tl.reshape(rounded_out_RD.to(tl.float32), [ROWS * GROUPS, GROUP])
        quantized_YG, scale_Y = quantize_groups(out_YG)
        tl.store(norm.quantized_ptr + offset_RD, tl.reshape(quantized_YG, [ROWS, BLOCK_D]), mask=mask_RD)
        index_Y = tl.arange(0, ROWS * GROUPS)
        row_Y = program.to(tl.int64) * ROWS + index_Y // GROUPS
        group_Y = row_Y % norm.heads * (D // GROUP) + index_Y % GROUPS
        is_group_Y = (row_Y < num_rows) & (index_Y % GROUPS * GROUP < D)
        tl.store(norm.scale_ptr + group_Y * norm.stride_scale + row_Y // norm.heads, scale_Y, mask=is_group_Y)


@triton.jit
def inverse_rms(x, norm, row_M, is_row_M, NORM: tl.constexpr):
    """Return the inverse root of the mean square of each row, with what is added to it."""
    col_D = tl.arange(0, NORM.block)
    mask_MD = is_row_M[:, None] & (col_D < NORM.size)[None, :]
    x_MD_ptr = x[0] + (row_M.to(tl.int64) * x[2])[:, None] + col_D[None, :]
    x_MD = tl.load(x_MD_ptr, mask=mask_MD, other=0.0).to(tl.float32)
    x_MD = add_residual(x_MD, norm, row_M.to(tl.int64)[:, None], col_D[None, :], mask_MD, x[0].dtype.element_ty)
    return tl.rsqrt(tl.sum(x_MD * x_MD, axis=1) / NORM.size + norm.eps)


@triton.jit
def normed_inputs(x, norm, rstd, row, col, mask, NORM: tl.constexpr, dtype: tl.constexpr):
    """Return inputs of a product as ``norm_rows`` stores them, in float32; arguments have the shape of x."""
    x = add_residual(x, norm, row, col, mask, dtype)
    weight = tl.load(norm.weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    return apply_weight(x * rstd, weight, NORM.is_zero_centered, dtype).to(dtype).to(tl.float32)


@triton.jit
def add_residual(x, norm, row, col, mask, dtype: tl.constexpr):
    """Return the rounded sum in float32."""
    other = tl.load(norm.other_ptr + row * norm.stride_ot + col, mask=mask, other=0.0).to(tl.float32)
    return (x + other).to(dtype).to(tl.float32)


@triton.jit
def apply_weight(normed, weight, IS_ZERO_CENTERED: tl.constexpr, dtype: tl.constexpr):
    """Return float32 numbers of a norm times its weight, before they are rounded."""
    return normed * (weight + 1.0) if IS_ZERO_CENTERED else normed.to(dtype).to(tl.float32) * weight


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(norm, num_rows, NORM: tl.constexpr, OVERLAPS: tl.constexpr):
    norm_rows(tl.program_id(0), norm, num_rows, NORM, OVERLAPS)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, round to x's dtype, then multiply by the weight."""
    x = _with_dense_rows(x)
    return _launch(x, x, weight_D, eps)


def add_rms_norm(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, round the sum; return it normalised, and itself. A tensor is overwritten.

    Only ``residual`` may have an inner stride: a tensor ``x`` has to be written in place. Choices are added up in the
    same launch.
    """
    total, parts = _total_of(x)
    return _launch(total, _with_dense_rows(residual), weight_D, eps, use="add", parts=parts), total


def rms_norm_zero_centered(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise and multiply by ``1 + weight`` in float32, then round to x's dtype."""
    x = _with_dense_rows(x)
    return _launch(x, x, weight_D, eps, is_zero_centered=True)


def add_rms_norm_zero_centered(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`add_rms_norm`, with the zero-centred norm."""
    total, parts = _total_of(x)
    kind = {"is_zero_centered": True, "use": "add"}
    return _launch(total, _with_dense_rows(residual), weight_D, eps, **kind, parts=parts), total


def deferred_add_norm(
    x: Summand,
    residual: Tensor,
    weight_D: Tensor,
    eps: float,
    kind: NormKind,
    *,
    launches: Launches = Launches.MEASURED,
) -> tuple[Rows | NormedRows, Tensor]:
    """Triton version of :func:`strandline.kernels.rowwise.normed_rows.deferred_add_norm`, deferred for a few rows."""
    is_deferred = launches is Launches.MEASURED and isinstance(x, Tensor) and 0 < len(x) <= MAX_ROWS_DEFERRED
    if not is_deferred or not x.is_contiguous():
        return ADD_NORMS[kind](x, residual, weight_D, eps)
    total, plain = torch.empty_like(x), torch.empty_like(x)
    rows = unfilled(*x.shape, x, plain) if kind.is_quantized else plain
    residual = _with_dense_rows(residual)
    launch = _prepare(x, residual, weight_D, eps, rows, is_zero_centered=kind.is_zero_centered, use="add")
    launch = launch._replace(argument=launch.argument._replace(total_ptr=total))
    return NormedRows(x, rows, launch, _settle), total


def _settle(normed: NormedRows) -> Rows:
    normed.launch.run()
    return normed.rows


def rms_norm_gated(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, round, multiply by the weight, then by ``silu(gate)`` in float32; return x's dtype."""
    return _launch(_with_dense_rows(x), _with_dense_rows(gate), weight_D, eps, use="silu")


def rms_norm_sigmoid_gated(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, multiply by the weight and by ``sigmoid(gate)``, all in float32; return x's dtype."""
    return _launch(_with_dense_rows(x), _with_dense_rows(gate), weight_D, eps, use="sigmoid")


def rms_norm_of_gated(
    x_TD: Tensor, gate_TD: Tensor, weight_D: Tensor, eps: float, num_groups: int, gate_factor: float = 1.0
) -> Tensor:
    """Multiply by ``silu(gate_factor gate)``, normalise each group of channels, round, multiply by the weight."""
    x_TGD, gate_TGD = (_with_dense_rows(x).unflatten(1, (num_groups, -1)) for x in (x_TD, gate_TD))
    return _launch(x_TGD, gate_TGD, weight_D, eps, use="silu before", parts=Parts(gate_factor=gate_factor)).flatten(1)


def rms_norm_quantized(x: Tensor, weight_D: Tensor, eps: float) -> QuantizedRows:
    """As :func:`rms_norm` of rows, quantised in the same launch; the plain result is kept."""
    x = _with_dense_rows(x)
    return _launch_quantized(x, x, weight_D, eps)


def add_rms_norm_quantized(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[QuantizedRows, Tensor]:
    """As :func:`add_rms_norm` of rows, quantised in the same launch; the plain result is kept."""
    total, parts = _total_of(x)
    return _launch_quantized(total, _with_dense_rows(residual), weight_D, eps, parts, use="add"), total


def rms_norm_zero_centered_quantized(x: Tensor, weight_D: Tensor, eps: float) -> QuantizedRows:
    """As :func:`rms_norm_zero_centered` of rows, quantised in the same launch; the plain result is kept."""
    x = _with_dense_rows(x)
    return _launch_quantized(x, x, weight_D, eps, is_zero_centered=True)


def add_rms_norm_zero_centered_quantized(
    x: Summand, residual: Tensor, weight_D: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    """As :func:`add_rms_norm_zero_centered` of rows, quantised in the same launch; the plain result is kept."""
    total, parts = _total_of(x)
    kind = {"is_zero_centered": True, "use": "add"}
    return _launch_quantized(total, _with_dense_rows(residual), weight_D, eps, parts, **kind), total


def rms_norm_gated_quantized(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> QuantizedRows:
    """As :func:`rms_norm_gated` of ``[T, H, D]``, quantised by rows of all heads.

    One launch if no group of inputs has channels of two heads.
    """
    x, gate = _with_dense_rows(x), _with_dense_rows(gate)
    num_tokens, num_heads, num_channels = x.shape
    if num_channels % quantized_rows.GROUP:
        rows = quantize_rows(_launch(x, gate, weight_D, eps, use="silu").flatten(1))
        return replace(rows, plain_TI=None)
    rows = unfilled(num_tokens, num_heads * num_channels, x)
    _launch(x, gate, weight_D, eps, rows, use="silu")
    return rows


ADD_NORMS = {
    NormKind(is_zero_centered=False, is_quantized=False): add_rms_norm,
    NormKind(is_zero_centered=False, is_quantized=True): add_rms_norm_quantized,
    NormKind(is_zero_centered=True, is_quantized=False): add_rms_norm_zero_centered,
    NormKind(is_zero_centered=True, is_quantized=True): add_rms_norm_zero_centered_quantized,
}


def _launch_quantized(
    x: Tensor, other: Tensor, weight_D: Tensor, eps: float, parts: Parts | None = None, **kind: Any
) -> QuantizedRows:
    rows = unfilled(len(x), x.shape[1], x, torch.empty(x.shape, dtype=x.dtype, device=x.device))
    _launch(x, other, weight_D, eps, rows, **kind, parts=parts)
    return rows


def _total_of(x: Summand) -> tuple[Tensor, Parts]:
    """Return where the new residual stream is stored, and what is added to it if that is no tensor."""
    weighed, x = (x, x.first) if isinstance(x, WeighedSum) else (None, x)
    choices = None if isinstance(x, Tensor) else x
    return (x if choices is None else torch.empty_like(x.like_sum)), Parts(choices, weighed)


def _weights_of(weighed: WeighedSum | None) -> tuple[object, ...]:
    """Return the last arguments of a norm."""
    if weighed is None or weighed.second_TD is None:
        return (None if weighed is None else weighed.factor,)
    second_TD = _with_dense_rows(weighed.second_TD)
    return weighed.factor, second_TD, second_TD.stride(0), weighed.second_factor


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and x.dim() <= 3 else x.contiguous()


def _row_strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of a row's two indices; a tensor of more dimensions is dense here."""
    if x.dim() == 3:
        return x.stride(0), x.stride(1)
    return (x.stride(-2), 0) if x.dim() == 2 else (x.shape[-1], 0)


def _launch(
    x: Tensor,
    other: Tensor,
    weight_D: Tensor,
    eps: float,
    quantized: QuantizedRows | None = None,
    *,
    is_zero_centered: bool = False,
    use: Use = "",
    parts: Parts | None = None,
) -> Tensor | None:
    """Return the result, or fill quantised rows, and the plain ones if they are stored, as ``_prepare`` says."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if quantized is None else quantized
    launch = _prepare(x, other, weight_D, eps, result, parts, is_zero_centered=is_zero_centered, use=use)
    launch.run()
    return launch.argument.out_ptr


def _prepare(
    x: Tensor,
    other: Tensor,
    weight_D: Tensor,
    eps: float,
    result: Rows,
    parts: Parts | None = None,
    *,
    is_zero_centered: bool = False,
    use: Use = "",
) -> NormLaunch:
    """Return the launch that fills rows; a sum is stored in x.

    Args:
        other: what is added, or the gate; with neither, it is not read.
        use: how ``other`` is used: added first, or as a gate of the result or of what is normalised.
        weight_D: before a norm of what a gate lets through, one weight for each head, else one for all.
        parts: what is normalised, with ``other`` added, instead of x, which receives their sum; or a gate's factor.
    """
    choices, weighed, gate_factor = parts or Parts()
    num_channels, block = x.shape[-1], next_power_of_2(x.shape[-1])
    out, values, scales, stride_scale = result, None, None, 0
    if isinstance(result, QuantizedRows):
        out, values, scales, stride_scale = (
            result.plain_TI,
            result.values_TI,
            result.scale_XT,
            result.scale_XT.stride(0),
        )
        block = max(quantized_rows.GROUP, block)
    argument = NormArgument(
        x,
        other,
        weight_D,
        x,
        out,
        values,
        scales,
        x.shape[1] if x.dim() == 3 else 1,
        *_row_strides(x),
        *_row_strides(other),
        stride_scale,
        eps,
        choices_argument(choices),
        *_weights_of(weighed),
    )
    constants = NormConstants(
        num_channels,
        block,
        max(1, ROW_ELEMENTS // block),
        is_zero_centered,
        use == "add",
        "" if use == "add" else use,
        weight_D.dtype == x.dtype,
        out is not None,
        values is not None,
        num_added(choices),
        0 if weighed is None else 1 if weighed.second_TD is None else 2,
        gate_factor,
    )
    return NormLaunch(argument, constants, x.numel() // num_channels)
