"""What experts make of many tokens, on a GPU: one program per expert and tile of features walks through its choices.

So an expert's weights are read about once. Invariants: as in ``moe_triton.py``.

Shape suffixes: as in ``moe.py``; in kernels M choices, N features, K the dimension that a matrix product sums over.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices
from strandline.kernels.expert_choices_triton import add_choices
from strandline.kernels.experts.moe_list_triton import list_choices
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.activation_triton import silu_times, squared_relu
from strandline.kernels.sizes import cdiv


class Tile(NamedTuple):
    """How one of the two GEMMs of many tokens is tiled."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split_m: int = 1
    """Programs among which an expert's choices are dealt out."""


TILES_DECODE = (Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4))
"""Few choices per expert: the weights' stream is all; several small programs per multiprocessor keep it full."""

TILES_MIDDLE = (Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4))
"""Tens of choices per expert: weights' stream and arithmetic are near each other."""

TILES_PREFILL = (Tile(128, 128, 64, 8, 4, 4), Tile(128, 256, 64, 8, 3, 2))
"""Hundreds of choices per expert: tiles as large as the registers allow."""

MIN_ROWS_HALVED = 128
"""Tiles of at least this height are halved for an expert's last choices, if these have room in a half: to multiply rows
that do not exist takes as long, and as much power, as to multiply others."""

TILES_FLOAT32 = (Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2))
"""Exact GEMMs, without tensor cores: for tests."""


@triton.jit
def _multiply_up(
    x_ptr,
    gate_KN_ptr,
    up_KN_ptr,
    choices_ptr,
    hidden_ptr,
    row,
    end,
    col_N,
    stride_x,
    D,
    F,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the hidden features of a tile of choices; both weights are the same where experts have no gate."""
    row_M = row + tl.arange(0, BLOCK_M)
    is_row_M = row_M < end
    is_col_N = col_N < F
    offset_K = tl.arange(0, BLOCK_K)
    token_M = tl.load(choices_ptr + row_M, mask=is_row_M, other=0) // TOP_K
    x_MK_ptr = x_ptr + token_M[:, None].to(tl.int64) * stride_x + offset_K[None, :]
    if IS_GATED:
        gate_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, D, BLOCK_K):
        if IS_EVEN:
            x_MK = tl.load(x_MK_ptr + start)
            if IS_GATED:
                gate_KN = tl.load(gate_KN_ptr + start)
            up_KN = tl.load(up_KN_ptr + start)
        else:
            is_K = start + offset_K < D
            mask_KN = is_K[:, None] & is_col_N[None, :]
            x_MK = tl.load(x_MK_ptr + start, mask=is_K[None, :], other=0.0)
            if IS_GATED:
                gate_KN = tl.load(gate_KN_ptr + start, mask=mask_KN, other=0.0)
            up_KN = tl.load(up_KN_ptr + start, mask=mask_KN, other=0.0)
        if IS_GATED:
            gate_MN = tl.dot(x_MK, gate_KN, gate_MN, input_precision="ieee")
        up_MN = tl.dot(x_MK, up_KN, up_MN, input_precision="ieee")
    dtype = hidden_ptr.dtype.element_ty
    hidden_MN_ptr = hidden_ptr + row_M[:, None].to(tl.int64) * F + col_N[None, :]
    hidden_MN = silu_times(gate_MN, up_MN, dtype) if IS_GATED else squared_relu(up_MN, dtype)
    tl.store(hidden_MN_ptr, hidden_MN, mask=is_row_M[:, None] & is_col_N[None, :])


@triton.jit
def _grouped_up_kernel(
    x_ptr,
    weight_ptr,
    starts_ptr,
    choices_ptr,
    hidden_ptr,
    stride_x,
    D,
    F,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_HALVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the hidden features of an expert's choices, by order of the list: gated, or else ``relu(up x) ** 2``."""
    expert = tl.program_id(2)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * BLOCK_M
    end = tl.load(starts_ptr + expert + 1)
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offset_K = tl.arange(0, BLOCK_K)
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    first_ptr = weight_ptr + expert.to(tl.int64) * (NUM_PARTS * F * D)
    gate_KN_ptr = first_ptr + offset_K[:, None] + col_N[None, :].to(tl.int64) * D
    up_KN_ptr = gate_KN_ptr + (NUM_PARTS - 1) * F * D
    for row in range(first, end, tl.num_programs(1) * BLOCK_M):
        operands = (x_ptr, gate_KN_ptr, up_KN_ptr, choices_ptr, hidden_ptr, row, end, col_N, stride_x, D, F)
        if IS_HALVED and end - row <= BLOCK_M // 2:
            _multiply_up(*operands, TOP_K, IS_GATED, IS_EVEN, BLOCK_M // 2, BLOCK_N, BLOCK_K)
        else:
            _multiply_up(*operands, TOP_K, IS_GATED, IS_EVEN, BLOCK_M, BLOCK_N, BLOCK_K)


@triton.jit
def _multiply_down(
    hidden_ptr,
    weight_KN_ptr,
    choices_ptr,
    out_ptr,
    row,
    end,
    col_N,
    D,
    F,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write what an expert makes of a tile of choices."""
    row_M = row + tl.arange(0, BLOCK_M)
    is_row_M = row_M < end
    is_col_N = col_N < D
    offset_K = tl.arange(0, BLOCK_K)
    hidden_MK_ptr = hidden_ptr + row_M[:, None].to(tl.int64) * F + offset_K[None, :]
    out_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, F, BLOCK_K):
        if IS_EVEN:
            hidden_MK = tl.load(hidden_MK_ptr + start, mask=is_row_M[:, None], other=0.0)
            weight_KN = tl.load(weight_KN_ptr + start)
        else:
            is_K = start + offset_K < F
            hidden_MK = tl.load(hidden_MK_ptr + start, mask=is_row_M[:, None] & is_K[None, :], other=0.0)
            weight_KN = tl.load(weight_KN_ptr + start, mask=is_K[:, None] & is_col_N[None, :], other=0.0)
        out_MN = tl.dot(hidden_MK, weight_KN, out_MN, input_precision="ieee")
    choice_M = tl.load(choices_ptr + row_M, mask=is_row_M, other=0).to(tl.int64)
    out_MN_ptr = out_ptr + choice_M[:, None] * D + col_N[None, :]
    tl.store(out_MN_ptr, out_MN.to(out_ptr.dtype.element_ty), mask=is_row_M[:, None] & is_col_N[None, :])


@triton.jit
def _grouped_down_kernel(
    hidden_ptr,
    weight_ptr,
    starts_ptr,
    choices_ptr,
    out_ptr,
    D,
    F,
    IS_EVEN: tl.constexpr,
    IS_HALVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write what an expert makes of its choices, in the order of the tokens."""
    expert = tl.program_id(2)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * BLOCK_M
    end = tl.load(starts_ptr + expert + 1)
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offset_K = tl.arange(0, BLOCK_K)
    weight_KN_ptr = weight_ptr + expert.to(tl.int64) * (D * F) + offset_K[:, None] + col_N[None, :].to(tl.int64) * F
    for row in range(first, end, tl.num_programs(1) * BLOCK_M):
        operands = (hidden_ptr, weight_KN_ptr, choices_ptr, out_ptr, row, end, col_N, D, F)
        if IS_HALVED and end - row <= BLOCK_M // 2:
            _multiply_down(*operands, IS_EVEN, BLOCK_M // 2, BLOCK_N, BLOCK_K)
        else:
            _multiply_down(*operands, IS_EVEN, BLOCK_M, BLOCK_N, BLOCK_K)


def compute_choices(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    up: Tile,
    down: Tile,
    held: range | None = None,
) -> ExpertChoices:
    """Compute each token's choices with these tiles, for ``moe_triton.experts`` to add up, in three launches."""
    first_expert = 0 if held is None else held.start
    num_tokens, top_k = experts_TK.shape
    num_channels, size = down_EDF.shape[1:]
    starts_E, choices_A = list_choices(experts_TK, len(down_EDF), first_expert)
    hidden_AF = torch.empty((num_tokens * top_k, size), dtype=x_TD.dtype, device=x_TD.device)
    out_AD = torch.empty((num_tokens * top_k, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    launch_up(x_TD, up_EFD, starts_E, choices_A, hidden_AF, top_k, up)
    launch_down(hidden_AF, down_EDF, starts_E, choices_A, out_AD, down)
    return ExpertChoices(out_AD, weights_TK, experts_TK, shared_TD, shared_gate_T1, held, add_choices)


def launch_up(
    x_TD: Tensor, gate_up_EFD: Tensor, starts_E: Tensor, choices_A: Tensor, hidden_AF: Tensor, top_k: int, tile: Tile
) -> None:
    """Fill ``hidden_AF``, in the order of the list; experts have a gate if they have rows for it."""
    (num_experts, num_rows, num_channels), size = gate_up_EFD.shape, hidden_AF.shape[1]
    _grouped_up_kernel[(cdiv(size, tile.block_n), tile.split_m, num_experts)](
        x_TD,
        gate_up_EFD,
        starts_E,
        choices_A,
        hidden_AF,
        x_TD.stride(0),
        num_channels,
        size,
        TOP_K=top_k,
        IS_GATED=num_rows == 2 * size,
        IS_EVEN=num_channels % tile.block_k == 0 and size % tile.block_n == 0,
        **_launch_options(tile),
        **overlap_options(x_TD),
    )


def launch_down(
    hidden_AF: Tensor, down_EDF: Tensor, starts_E: Tensor, choices_A: Tensor, out_AD: Tensor, tile: Tile
) -> None:
    """Fill ``out_AD``, in the order of the tokens."""
    num_experts, num_channels, size = down_EDF.shape
    _grouped_down_kernel[(cdiv(num_channels, tile.block_n), tile.split_m, num_experts)](
        hidden_AF,
        down_EDF,
        starts_E,
        choices_A,
        out_AD,
        num_channels,
        size,
        IS_EVEN=size % tile.block_k == 0 and num_channels % tile.block_n == 0,
        **_launch_options(tile),
        **overlap_options(hidden_AF),
    )


def _launch_options(tile: Tile) -> dict[str, int]:
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    is_halved = tile.block_m >= MIN_ROWS_HALVED
    return {**blocks, "IS_HALVED": is_halved, "num_warps": tile.warps, "num_stages": tile.stages}
