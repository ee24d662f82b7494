"""GEMMs of few rows with a weight in any format, which is streamed through registers: every product is a GEMV.

Every program multiplies the rows with a few of the weight's rows, whole, in float32. A launch may multiply them with a
second weight, which is dense: programs of its own do that, and start first, since they read the most bytes. What
adapters add comes from a launch before (``expansion_triton.py``), whose rows may each have another of several matrices.
The rows may be those before a norm: every program computes their mean squares and normalises what it reads, and further
programs write the normalised rows for other launches.

Shape suffixes: as in ``linear.py``; in kernels M rows of x, N outputs, K the dimension that a matrix product sums over,
C matrices, R ranks of adapters.
"""
# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm.expansion_triton import Expansion, expand, find_factors, load_factors, load_hidden
from strandline.kernels.gemm.formats.few_rows_triton import multiply_few
from strandline.kernels.gemm.formats.operand_triton import Operand, RowFunctions, operand, rows_operand
from strandline.kernels.gemm.weights import DenseWeight, QuantizedWeight
from strandline.kernels.launch import Launch
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.activation_triton import silu_times
from strandline.kernels.rowwise.norm_triton import NormLaunch, inverse_rms, norm_rows
from strandline.kernels.rowwise.normed_rows import NormedRows
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.kernels.sizes import cdiv, next_power_of_2

MIN_REGISTERS, MAX_REGISTERS, MAX_RANKS_LIMITED = 64, 128, 16
"""Range of such limits, and the largest rank at which they spill nothing."""


class Second(NamedTuple):
    """A second product of the same rows, before they are quantised."""

    weight: DenseWeight
    """Contiguous."""
    out_MO: Tensor


class RowMatrices(NamedTuple):
    """A matrix for each row."""

    weight: DenseWeight
    """Several matrices, older than any launch of a step."""
    matrix_T: Tensor
    """Their numbers, older than the first layer of a step; below 0: the row's product may be anything."""


class _SecondArgument(NamedTuple):
    """A second product as a runtime argument."""

    x: tuple
    weight: tuple
    out_ptr: Tensor
    num_outputs: int
    stride_out: int


class _SecondConstants(NamedTuple):
    """What is compiled in of a second product."""

    rows: RowFunctions
    layout: NamedTuple
    programs: int
    num_k: int
    block_n: int
    block_k: int
    is_even: bool

    @property
    def cache_key(self) -> str:
        """See ``RowFunctions``."""
        return f"{self.rows.cache_key}-{tuple(self)[1:]}"


@triton.jit
def _multiply(
    program,
    x,
    weight,
    bias_ptr,
    out_ptr,
    matrix_ptr,
    expansion,
    norm,
    first_output,
    M,
    N,
    K,
    stride_out,
    ROWS: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXPANSION: tl.constexpr,
    NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_TILED: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write a tile of a product: some rows of x with some rows of the weight."""
    first_N = program.to(tl.int64) * BLOCK_N
    row_N = first_N + tl.arange(0, BLOCK_N)
    row_M = tl.arange(0, BLOCK_M)
    if IS_TILED:
        row_M += tl.program_id(1) * BLOCK_M
    matrix_C = tl.zeros([1], dtype=tl.int32)
    if matrix_ptr is not None:
        # The next launch multiplies with the rows' weight: it may load that while this one waits, too.
        release_next(OVERLAPS)
        matrix_C = tl.maximum(tl.load(matrix_ptr + row_M, mask=row_M < M, other=0), 0)
    if EXPANSION is not None:
        output_N = first_output + row_N
        found = find_factors(expansion, row_M, row_M < M, output_N, row_N < N)
        if IS_GATED:
            found_up = find_factors(expansion, row_M, row_M < M, output_N + N, row_N < N)
    loaded = ROWS.load(weight, matrix_C, first_N, 0, N, K, LAYOUT, IS_GATED, IS_EVEN, BLOCK_N, BLOCK_K)
    if EXPANSION is not None:
        factors = load_factors(expansion, found, output_N, 0, EXPANSION)
        if IS_GATED:
            factors_up = load_factors(expansion, found_up, output_N + N, 0, EXPANSION)
    # Weights and their scales are older than any launch of a step.
    wait_for_previous(OVERLAPS)
    if matrix_ptr is None:
        release_next(OVERLAPS)
    of_inputs = None
    if NORM is not None:
        of_inputs = (norm, inverse_rms(x, norm, row_M, row_M < M, NORM))
    if EXPANSION is not None:
        hidden_MNR = load_hidden(expansion, found, row_M, 0, EXPANSION)
        if IS_GATED:
            hidden_up_MNR = load_hidden(expansion, found_up, row_M, 0, EXPANSION)
    out_MN, up_MN = multiply_few(
        loaded,
        x,
        of_inputs,
        row_M,
        row_M < M,
        weight,
        matrix_C,
        first_N,
        N,
        K,
        ROWS,
        LAYOUT,
        NORM,
        IS_GATED,
        IS_EVEN,
        NUM_K,
        BLOCK_N,
        BLOCK_K,
    )
    if bias_ptr is not None:
        out_MN += tl.load(bias_ptr + row_N, mask=row_N < N, other=0.0).to(tl.float32)[None, :]
    if EXPANSION is not None:
        out_MN += expand(expansion, found, factors, hidden_MNR, row_M, output_N, EXPANSION)
        if IS_GATED:
            up_MN += expand(expansion, found_up, factors_up, hidden_up_MNR, row_M, output_N + N, EXPANSION)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if IS_GATED:
        out_MN = silu_times(out_MN, up_MN, dtype)
    out_MN_ptr = out_ptr + row_M.to(tl.int64)[:, None] * stride_out + row_N[None, :]
    tl.store(out_MN_ptr, out_MN.to(dtype), mask=(row_M < M)[:, None] & (row_N < N)[None, :])


@triton.jit
def _gemv_kernel(
    x,
    weight,
    bias_ptr,
    out_ptr,
    second,
    matrix_ptr,
    expansion,
    norm,
    M,
    N,
    K,
    stride_out,
    ROWS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SECOND: tl.constexpr,
    EXPANSION: tl.constexpr,
    NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_TILED: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    SECOND_PROGRAMS: tl.constexpr = 0 if SECOND is None else SECOND.programs
    program = tl.program_id(0)
    if NORM is not None:
        norm_programs = tl.cdiv(M, NORM.rows)
        if program < norm_programs:
            norm_rows(program, norm, M, NORM, OVERLAPS)
            return
        program -= norm_programs
    if SECOND_PROGRAMS > 0 and program < SECOND_PROGRAMS:
        SECOND_ROWS: tl.constexpr = SECOND.rows
        SECOND_LAYOUT: tl.constexpr = SECOND.layout
        _multiply(
            program,
            second.x,
            second.weight,
            None,
            second.out_ptr,
            None,
            expansion,
            norm,
            N,
            M,
            second.num_outputs,
            K,
            second.stride_out,
            SECOND_ROWS,
            SECOND_LAYOUT,
            EXPANSION,
            NORM,
            False,
            SECOND.is_even,
            IS_TILED,
            SECOND.num_k,
            BLOCK_M,
            SECOND.block_n,
            SECOND.block_k,
            OVERLAPS,
        )
    else:
        _multiply(
            program - SECOND_PROGRAMS,
            x,
            weight,
            bias_ptr,
            out_ptr,
            matrix_ptr,
            expansion,
            norm,
            0,
            M,
            N,
            K,
            stride_out,
            ROWS,
            LAYOUT,
            EXPANSION,
            NORM,
            IS_GATED,
            IS_EVEN,
            IS_TILED,
            NUM_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            OVERLAPS,
        )


def launch_rows(
    out_MO: Tensor,
    rows: Rows | NormedRows,
    weight: DenseWeight | QuantizedWeight | RowMatrices,
    bias_O: Tensor | None,
    launch: Launch,
    *,
    is_gated: bool = False,
    second: Second | None = None,
    expansion: Expansion | None = None,
) -> None:
    """Fill ``out_MO``, a matrix with dense rows, with the product of a few rows; gated, ``silu(gate x) * up x``.

    Args:
        rows: where their norm is still to be computed, this launch does it; weights are dense then.
        expansion: is added to the outputs, and to those of the second product after them.
    """
    norm: NormLaunch | None = None
    if isinstance(rows, NormedRows):
        rows, norm = rows.x_TD, rows.launch
    weight, matrix_T = weight if isinstance(weight, RowMatrices) else (weight, None)
    argument = operand(weight)
    taken = rows if weight.format.multiplies_fp8 else plain_rows(rows)
    num_rows, (num_outputs, num_inputs) = len(rows), weight.shape[-2:]
    if is_gated:
        num_outputs //= 2
    block_m = min(launch.block_m, next_power_of_2(num_rows))
    block_n = argument.layout.fit_rows(launch.block_n)
    block_k = min(launch.block_k, max(argument.functions.min_block_k, next_power_of_2(num_inputs)))
    second_argument, constants = None, None
    if second is not None:
        second_argument, constants = _second_arguments(second, rows, weight, block_n, block_k)
    # A dense weight's programs also take one tile of rows from the grid: with masks that are not known to be true, the
    # compiler loads inputs later, and needs fewer registers.
    is_tiled = num_rows > block_m or (second is None and isinstance(weight, DenseWeight))
    programs = cdiv(num_outputs, block_n) + (0 if constants is None else constants.programs)
    if norm is not None:
        programs += cdiv(num_rows, norm.constants.rows)
    _gemv_kernel[(programs, cdiv(num_rows, block_m))](
        rows_operand(taken),
        argument.data,
        bias_O,
        out_MO,
        second_argument,
        matrix_T,
        expansion,
        None if norm is None else norm.argument,
        num_rows,
        num_outputs,
        num_inputs,
        out_MO.stride(0),
        ROWS=argument.functions.rows,
        LAYOUT=argument.layout,
        SECOND=constants,
        EXPANSION=None if expansion is None else expansion.constants,
        NORM=None if norm is None else norm.constants,
        IS_GATED=is_gated,
        IS_EVEN=num_inputs % block_k == 0 and num_outputs % block_n == 0,
        IS_TILED=is_tiled,
        NUM_K=cdiv(num_inputs, block_k),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=launch.warps,
        **_registers(launch, weight, num_rows, expansion, is_gated=is_gated),
        **overlap_options(out_MO),
    )


def _registers(
    launch: Launch,
    weight: DenseWeight | QuantizedWeight,
    num_rows: int,
    expansion: Expansion | None,
    *,
    is_gated: bool,
) -> dict[str, int]:
    """Return the option that limits the registers of a thread, where a product of one row takes more with adapters.

    A few more registers let fewer programs run at once: of a small weight no longer all.
    """
    if expansion is None or num_rows > 1 or not isinstance(weight, DenseWeight):
        return {}
    # A thread's numbers of the weight, two in a register.
    held = cdiv(weight.shape[1], launch.block_k) * launch.block_k * launch.block_n // (64 * launch.warps)
    most = max(MIN_REGISTERS, cdiv(held + (48 if is_gated else 16), 32) * 32)
    has_few_ranks = expansion.constants.block_ranks <= MAX_RANKS_LIMITED
    return {"maxnreg": most} if most <= MAX_REGISTERS and has_few_ranks else {}


def _second_arguments(
    second: Second, rows: Rows, weight: DenseWeight | QuantizedWeight, block_n: int, block_k: int
) -> tuple[_SecondArgument, _SecondConstants]:
    """Return a second product as arguments.

    Its numbers are larger than those of a quantised weight: programs take half as many outputs and inputs at a time.
    """
    argument: Operand = operand(second.weight)
    num_outputs, num_inputs = second.weight.shape
    is_even = num_inputs % block_k == 0 and num_outputs % block_n == 0
    if not isinstance(weight, DenseWeight):
        # With masks, even if none is needed, the compiler loads fewer chunks at once, and needs fewer registers.
        block_n, block_k, is_even = max(1, block_n // 2), block_k // 2, False
    sizes = (cdiv(num_outputs, block_n), cdiv(num_inputs, block_k), block_n, block_k, is_even)
    x = rows_operand(plain_rows(rows))
    return (
        _SecondArgument(x, argument.data, second.out_MO, num_outputs, second.out_MO.stride(0)),
        _SecondConstants(argument.functions.rows, argument.layout, *sizes),
    )
