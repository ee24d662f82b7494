"""Experts of many tokens on a GPU, with weights of any format: one program per expert and tile of features.

A program walks through its expert's choices, so that the expert's weights are read about once. Weights in FP8 are
multiplied with tokens in FP8, quantised before; a tile of the first product has the features of one group then, and is
quantised before it is stored. Weights in codes are unpacked in registers, in every tile again. In some formats
(``min_dequantized``), where experts have hundreds of tokens, their numbers are written to memory first and multiplied
as dense ones, some experts at a time.

A shared expert of the others' size and format may be computed in the same launches, as one more expert, whose choices
are all tokens and come after the others' choices.

Invariants: as in ``moe_triton.py``; quantised features are the same to the last bit for any tile.

Shape suffixes: as in ``moe.py``; X groups of features, I inputs of a weight; in kernels M choices, N features, K the
dimension that a matrix product sums over.
"""
# mypy: ignore-errors

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices
from strandline.kernels.expert_choices_triton import add_choices
from strandline.kernels.experts.activation_triton import activate, activation_argument
from strandline.kernels.experts.moe import ExpertsWeight, ExpertWeights, SharedExpert, SharedOutput
from strandline.kernels.experts.moe_list_triton import list_choices
from strandline.kernels.gemm.formats.operand_triton import TRITON_DTYPES, operand, rows_operand
from strandline.kernels.gemm.library_triton import dequantize_into
from strandline.kernels.gemm.weights import CodedWeight, DenseWeight
from strandline.kernels.launch import Launch, Pair
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.quantized_rows import GROUP, QuantizedRows, Rows, flat_rows, plain_rows
from strandline.kernels.rowwise.quantizing_triton import quantize_groups, quantized
from strandline.kernels.sizes import DIVISOR, cdiv, round_up
from strandline.kernels.stages_triton import staged

SCRATCH_BYTES = 1 << 29
"""Memory of weights that are dequantised at a time, unless ``ALIGNED_EXPERTS`` take more."""

ALIGNED_EXPERTS = 16
"""Experts that are dequantised at a time are a multiple of these."""


@triton.jit
def _bias_row(bias_ptr, expert, num_rows, col_N):
    """Return some of the biases of an expert's features, as a row."""
    return tl.load(bias_ptr + expert * num_rows + col_N, mask=col_N < num_rows, other=0.0).to(tl.float32)[None, :]


class Listed(NamedTuple):
    """Choices by expert, as ``list_choices`` returns them."""

    starts_E: Tensor
    choices_A: Tensor
    top_k: int


@triton.jit
def _store_hidden(hidden, activated_MN, row_M, is_row_M, col_N, F):
    """Store hidden features, quantised if ``hidden`` has scales; a tile has the features of one group then."""
    hidden_ptr, scale_ptr, _, stride_scale = hidden
    hidden_MN_ptr = hidden_ptr + row_M[:, None].to(tl.int64) * F + col_N[None, :]
    is_MN = is_row_M[:, None] & (col_N < F)[None, :]
    if scale_ptr is None:
        tl.store(hidden_MN_ptr, activated_MN, mask=is_MN)
    else:
        # Features after the last were computed from its row, without its bias.
        activated_MN = tl.where((col_N < F)[None, :], activated_MN.to(tl.float32), 0.0)
        quantized_MN, scale_M = quantize_groups(activated_MN)
        tl.store(hidden_MN_ptr, quantized_MN, mask=is_MN)
        tl.store(scale_ptr + tl.program_id(0) * stride_scale + row_M, scale_M, mask=is_row_M)


@triton.jit
def _activate_shared(
    shared,
    hidden,
    num_tokens,
    first,
    F,
    ACTIVATE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the hidden features of the shared expert, from row ``first`` on."""
    projected_ptr, stride = shared
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    for row in range(tl.program_id(1) * BLOCK_M, num_tokens, tl.num_programs(1) * BLOCK_M):
        row_M = row + tl.arange(0, BLOCK_M)
        is_row_M = row_M < num_tokens
        is_MN = is_row_M[:, None] & (col_N < F)[None, :]
        projected_MN_ptr = projected_ptr + row_M[:, None].to(tl.int64) * stride + col_N[None, :]
        projected_MN = tl.load(projected_MN_ptr, mask=is_MN, other=0.0).to(tl.float32)
        up_MN = projected_MN
        if ACTIVATE.is_gated:
            up_MN = tl.load(projected_MN_ptr + F, mask=is_MN, other=0.0).to(tl.float32)
        activated_MN = activate(projected_MN, up_MN, ACTIVATE, DTYPE)
        _store_hidden(hidden, activated_MN, (first + row_M).to(tl.int64), is_row_M, col_N, F)


@triton.jit
def _up_tile(
    x,
    weight,
    bias_ptr,
    expert,
    choices_ptr,
    hidden,
    row,
    end,
    D,
    F,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ACTIVATE: tl.constexpr,
    DTYPE: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the hidden features of a tile of choices."""
    row_M = row + tl.arange(0, BLOCK_M)
    is_row_M = row_M < end
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_M = tl.load(choices_ptr + tl.minimum(row_M, end - 1)) // TOP_K
    first_MN, up_MN = TILE(
        x,
        weight,
        expert,
        token_M,
        # Rows after the last read a token again, and features after the last a row of the weight: masks would take
        # registers.
        None,
        tl.minimum(col_N, F - 1),
        0,
        tl.cdiv(D, BLOCK_K),
        F,
        D,
        LAYOUT,
        ACTIVATE.is_gated,
        IS_EVEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if bias_ptr is not None:
        first_MN += _bias_row(bias_ptr, expert * (1 + ACTIVATE.is_gated), F, col_N)
        if ACTIVATE.is_gated:
            up_MN += _bias_row(bias_ptr, expert * 2 + 1, F, col_N)
    activated_MN = activate(first_MN, up_MN, ACTIVATE, DTYPE)
    _store_hidden(hidden, activated_MN, row_M, is_row_M, col_N, F)


@staged
@triton.jit(do_not_specialize=["num_shared"])
def _up_kernel(
    x,
    weight,
    bias_ptr,
    starts_ptr,
    choices_ptr,
    hidden,
    shared,
    num_shared,
    num_experts,
    D,
    F,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ACTIVATE: tl.constexpr,
    DTYPE: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_HALVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the hidden features of an expert's choices, in the order of the list."""
    HAS_SHARED: tl.constexpr = shared is not None
    expert = _program_expert(num_experts, HAS_SHARED)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    if HAS_SHARED and expert == num_experts:
        _activate_shared(shared, hidden, num_shared, num_shared * TOP_K, F, ACTIVATE, DTYPE, BLOCK_M, BLOCK_N)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * BLOCK_M
    end = tl.load(starts_ptr + tl.minimum(expert + 1, num_experts))
    tile = (x, weight, bias_ptr, expert, choices_ptr, hidden)
    for row in range(first, end, tl.num_programs(1) * BLOCK_M):
        if IS_HALVED and end - row <= BLOCK_M // 2:
            _up_tile(
                *tile, row, end, D, F, TILE, LAYOUT, ACTIVATE, DTYPE, TOP_K, IS_EVEN, BLOCK_M // 2, BLOCK_N, BLOCK_K
            )
        else:
            _up_tile(*tile, row, end, D, F, TILE, LAYOUT, ACTIVATE, DTYPE, TOP_K, IS_EVEN, BLOCK_M, BLOCK_N, BLOCK_K)


@triton.jit
def _program_expert(num_experts, HAS_SHARED: tl.constexpr):
    """Return a program's expert: first the shared one, which has most tokens; its number comes after the others'."""
    expert = tl.program_id(2)
    if HAS_SHARED:
        expert = tl.where(expert == 0, num_experts, expert - 1)
    return expert.to(tl.int64)


@triton.jit
def _down_tile(
    hidden,
    weight,
    bias_ptr,
    expert,
    choices_ptr,
    out_ptr,
    row,
    end,
    num_choices,
    is_shared,
    D,
    F,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the outputs of a tile of choices."""
    row_M = row + tl.arange(0, BLOCK_M)
    read_M = tl.minimum(row_M, end - 1)
    is_row_M = row_M < end
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_MN, _ = TILE(
        hidden,
        weight,
        expert,
        read_M,
        is_row_M,
        tl.minimum(col_N, D - 1),
        0,
        tl.cdiv(F, BLOCK_K),
        D,
        F,
        LAYOUT,
        False,
        IS_EVEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if bias_ptr is not None:
        out_MN += _bias_row(bias_ptr, expert, D, col_N)
    if HAS_SHARED:
        choice_M = tl.load(choices_ptr + tl.minimum(read_M, num_choices - 1)).to(tl.int64)
        choice_M = tl.where(is_shared, read_M.to(tl.int64), choice_M)
    else:
        choice_M = tl.load(choices_ptr + read_M).to(tl.int64)
    out_MN_ptr = out_ptr + choice_M[:, None] * D + col_N[None, :]
    tl.store(out_MN_ptr, out_MN.to(out_ptr.dtype.element_ty), mask=is_row_M[:, None] & (col_N < D)[None, :])


@staged
@triton.jit(do_not_specialize=["num_shared", "num_choices"])
def _down_kernel(
    hidden,
    weight,
    bias_ptr,
    starts_ptr,
    choices_ptr,
    out_ptr,
    num_shared,
    num_experts,
    num_choices,
    D,
    F,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_HALVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write each choice's output, in the order of the tokens, and then the shared expert's outputs."""
    expert = _program_expert(num_experts, HAS_SHARED)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    first = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + tl.minimum(expert + 1, num_experts))
    is_shared = expert == num_experts
    if HAS_SHARED:
        # Fewer choices are listed where others are of experts that are not held.
        first = tl.where(is_shared, num_choices, first)
        end = tl.where(is_shared, num_choices + num_shared, end)
    tile = (hidden, weight, bias_ptr, expert, choices_ptr, out_ptr)
    shared = (num_choices, is_shared)
    for row in range(first + tl.program_id(1) * BLOCK_M, end, tl.num_programs(1) * BLOCK_M):
        if IS_HALVED and end - row <= BLOCK_M // 2:
            _down_tile(
                *tile, row, end, *shared, D, F, TILE, LAYOUT, HAS_SHARED, IS_EVEN, BLOCK_M // 2, BLOCK_N, BLOCK_K
            )
        else:
            _down_tile(*tile, row, end, *shared, D, F, TILE, LAYOUT, HAS_SHARED, IS_EVEN, BLOCK_M, BLOCK_N, BLOCK_K)


def compute_choices(
    x_TD: Rows,
    experts: ExpertWeights,
    chosen: tuple[Tensor, Tensor],
    shared: SharedExpert | SharedOutput | None,
    launches: Pair,
) -> ExpertChoices:
    """Compute each token's choices expert by expert, in three launches, or four if tokens must be quantised.

    Args:
        chosen: weights and numbers of each token's experts.
        shared: the shared expert's output, or, to compute it here, its projections; only where ``can_extend`` says so.
    """
    _, experts_TK = chosen
    num_tokens, top_k = experts_TK.shape
    num_held, num_channels, size = experts.down.shape
    num_choices, joined = num_tokens * top_k, shared if isinstance(shared, SharedExpert) else None
    num_rows = num_choices if joined is None else num_choices + num_tokens
    is_quantized = experts.up.format.multiplies_fp8
    rows = flat_rows(x_TD) if is_quantized else flat_rows(plain_rows(x_TD))
    listed = Listed(*list_choices(experts_TK, num_held, 0 if experts.held is None else experts.held.start), top_k)
    hidden = _unfilled(num_rows, size, rows, is_quantized=is_quantized)
    out_AD = torch.empty((num_rows, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    launch_up(quantized(rows) if is_quantized else rows, experts, listed, hidden, launches[0], joined)
    launch_down(hidden, experts, listed, out_AD, launches[1], None if joined is None else joined.down)
    gate_T1 = None if shared is None else shared.gate_T1
    shared_TD = shared.out_TD if isinstance(shared, SharedOutput) else None if joined is None else out_AD[num_choices:]
    return ExpertChoices(out_AD[:num_choices], *chosen, shared_TD, gate_T1, experts.held, add_choices)


def compute_dequantized(
    x_TD: Tensor,
    experts: ExpertWeights,
    chosen: tuple[Tensor, Tensor],
    shared: SharedOutput | None,
    launches: Pair,
) -> ExpertChoices:
    """Return what ``compute_choices`` does with weights in 4 bits, dequantising some experts at a time.

    Args:
        launches: launches of dense weights.
    """
    _, experts_TK = chosen
    num_tokens, top_k = experts_TK.shape
    num_held, num_channels, size = experts.down.shape
    x_TD, num_choices = flat_rows(x_TD), num_tokens * top_k
    listed = Listed(*list_choices(experts_TK, num_held, 0 if experts.held is None else experts.held.start), top_k)
    hidden_AF = torch.empty((num_choices, size), dtype=x_TD.dtype, device=x_TD.device)
    for part, its_listed, up in _dequantized_parts(experts, experts.up, listed, x_TD.dtype):
        launch_up(x_TD, part._replace(up=up), its_listed, hidden_AF, launches[0])
    out_AD = torch.empty((num_choices, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    for part, its_listed, down in _dequantized_parts(experts, experts.down, listed, x_TD.dtype):
        launch_down(hidden_AF, part._replace(down=down), its_listed, out_AD, launches[1])
    shared_TD, gate_T1 = (None, None) if shared is None else shared
    return ExpertChoices(out_AD, *chosen, shared_TD, gate_T1, experts.held, add_choices)


def _dequantized_parts(
    experts: ExpertWeights, weight: CodedWeight, listed: Listed, dtype: torch.dtype
) -> Iterator[tuple[ExpertWeights, Listed, DenseWeight]]:
    """Yield some experts at a time, where the list has them, and one of their weights, whose memory is used again."""
    num_experts, num_outputs, num_inputs = weight.shape
    bytes_per_expert = num_outputs * num_inputs * dtype.itemsize
    # Kernels are compiled once for all parts: starts of parts are aligned as the first one is.
    step = max(ALIGNED_EXPERTS, SCRATCH_BYTES // bytes_per_expert // ALIGNED_EXPERTS * ALIGNED_EXPERTS)
    scratch_EOI = weight.words.new_empty((min(step, num_experts), num_outputs, num_inputs), dtype=dtype)
    for start in range(0, num_experts, step):
        span = slice(start, min(start + step, num_experts))
        values_EOI = scratch_EOI[: span.stop - span.start]
        dequantize_into(values_EOI.flatten(0, 1), weight[span])
        its_listed = listed._replace(starts_E=listed.starts_E[start : span.stop + 1])
        yield experts.part(span), its_listed, DenseWeight(values_EOI)


def _unfilled(num_rows: int, size: int, like: Rows, *, is_quantized: bool) -> Rows:
    """Return the memory of hidden features. Scales have a stride for which kernels are compiled once."""
    if not is_quantized:
        return torch.empty((num_rows, size), dtype=like.dtype, device=like.device)
    values_AF = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=like.device)
    scale_XA = torch.empty((cdiv(size, GROUP), round_up(num_rows, DIVISOR)), dtype=torch.float32, device=like.device)
    return QuantizedRows(values_AF, scale_XA, num_rows, like.dtype)


def launch_up(
    x_TD: Rows,
    experts: ExpertWeights,
    listed: Listed,
    hidden: Rows,
    launch: Launch,
    shared: SharedExpert | None = None,
) -> None:
    """Fill ``hidden`` in the order of the list, and after that with the shared expert's features of all tokens."""
    num_experts, num_channels, size = experts.down.shape
    up, projected_TS = operand(experts.up), None if shared is None else shared.projected_TS
    _up_kernel[(cdiv(size, launch.block_n), launch.splits, num_experts + (shared is not None))](
        rows_operand(x_TD),
        up.data,
        None if experts.biases is None else experts.biases.up_EF,
        listed.starts_E,
        listed.choices_A,
        rows_operand(hidden),
        None if shared is None else (projected_TS, projected_TS.stride(0)),
        0 if shared is None else len(projected_TS),
        num_experts,
        num_channels,
        size,
        TILE=up.functions.tile,
        LAYOUT=up.layout,
        ACTIVATE=activation_argument(experts.activation),
        DTYPE=TRITON_DTYPES[x_TD.dtype],
        TOP_K=listed.top_k,
        IS_EVEN=num_channels % launch.block_k == 0,
        IS_HALVED=launch.is_halved,
        **launch.options(),
        **overlap_options(listed.choices_A),
    )


def launch_down(
    hidden: Rows,
    experts: ExpertWeights,
    listed: Listed,
    out_AD: Tensor,
    launch: Launch,
    shared: ExpertsWeight | None = None,
) -> None:
    """Fill ``out_AD`` in the order of the tokens, and after that with the shared expert's outputs."""
    num_experts, num_channels, size = experts.down.shape
    num_choices, down = len(listed.choices_A), operand(experts.down, shared)
    bias_ED = None if experts.biases is None else experts.biases.down_ED
    _down_kernel[(cdiv(num_channels, launch.block_n), launch.splits, num_experts + (shared is not None))](
        rows_operand(hidden),
        down.data,
        bias_ED,
        listed.starts_E,
        listed.choices_A,
        out_AD,
        len(out_AD) - num_choices,
        num_experts,
        num_choices,
        num_channels,
        size,
        TILE=down.functions.tile,
        LAYOUT=down.layout,
        HAS_SHARED=shared is not None,
        IS_EVEN=size % launch.block_k == 0,
        IS_HALVED=launch.is_halved,
        **launch.options(),
        **overlap_options(out_AD),
    )
