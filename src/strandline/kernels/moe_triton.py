"""The router and the experts on a GPU, without sorting and without waiting for the device.

Few tokens (at most ``MAX_TOKENS_GEMV``): two launches, each a product of matrices with one vector per choice of a
token. More: one launch lists every expert's choices (a choice is one token's k-th expert), then one program per expert
and tile of features walks through that expert's choices, so that an expert's weights are read about once; then the
choices of a token are added up. Grids depend on shapes alone: programs without work leave at once.

Deterministic, only tiles of 64 choices and more are taken, which add in one order (``matmul_triton.py`` says why).

Invariants: a token's result depends on that token alone, though its last bits may differ between the two ways; no
more than ``T K`` choices are listed, and experts that nobody chose are not read.

Shape suffixes: as in ``moe.py``; in kernels M choices, N features, K the dimension that a product sums over, C a
token's choices (``top_k``, padded to a power of two).
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.platform import is_deterministic

MAX_TOKENS_GEMV = 4
"""Beyond, choices of the same expert become so many that reading its weights once per choice costs more than a list."""


class Gemv(NamedTuple):
    """How the products of few tokens are cut up."""

    block_up_n: int
    block_up_k: int
    warps_up: int
    block_down_n: int
    block_down_k: int
    warps_down: int


class Tile(NamedTuple):
    """How one of the two products of many tokens is cut up."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split_m: int = 1
    """Programs among which an expert's choices are dealt out."""


GEMV = Gemv(2, 2048, 4, 2, 512, 8)
"""16 KiB of weights in flight per program and some 2,000 programs: enough to hide the memory's latency."""

TILES_DECODE = (Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4))
"""Few choices per expert: the weights' stream is all; several small programs per multiprocessor keep it full."""

TILES_MIDDLE = (Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4))
"""Tens of choices per expert: weights' stream and arithmetic are near each other."""

TILES_PREFILL = (Tile(128, 128, 64, 8, 4, 2), Tile(128, 256, 64, 8, 3, 2))
"""Hundreds of choices per expert: tiles as large as the registers allow."""

TILES_FLOAT32 = (Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2))
"""Exact products, without tensor cores: for tests."""

CHOICES_PER_EXPERT_MIDDLE = 16
CHOICES_PER_EXPERT_PREFILL = 64
"""From how many choices per expert, on average, the larger tiles pay."""

BLOCK_LIST = 2048
"""Choices that the listing program of an expert looks at together."""

BLOCK_SUM = 512
"""Features of a program that adds up choices."""


@triton.jit
def _route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    stride_t,
    E,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert_E = tl.arange(0, BLOCK_E)
    logit_E = tl.load(logits_ptr + token * stride_t + expert_E, mask=expert_E < E, other=float("-inf"))
    logit_E = logit_E.to(tl.float32)
    # Larger logits have larger keys, and of equal ones the lower index has. Keys are distinct, also among NaN.
    bits_E = tl.where(logit_E == 0.0, 0.0, logit_E).to(tl.int32, bitcast=True)
    bits_E = bits_E ^ ((bits_E >> 31) & 0x7FFFFFFF)
    key_E = (bits_E.to(tl.int64) << 32) + (BLOCK_E - 1 - expert_E).to(tl.int64)
    lowest = -0x7FFFFFFFFFFFFFFF
    key_E = tl.where(expert_E < E, key_E, lowest)
    max_logit = tl.max(logit_E, axis=0)
    total = tl.sum(tl.exp(logit_E - max_logit), axis=0)
    choice_C = tl.arange(0, BLOCK_C)
    chosen_C = tl.zeros([BLOCK_C], dtype=tl.int32)
    logit_C = tl.full([BLOCK_C], float("-inf"), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        key = tl.max(key_E, axis=0)
        key_E = tl.where(key_E == key, lowest, key_E)
        high = (key >> 32).to(tl.int32)
        value = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        chosen_C = tl.where(choice_C == choice, (BLOCK_E - 1 - (key & 0xFFFFFFFF)).to(tl.int32), chosen_C)
        logit_C = tl.where(choice_C == choice, value, logit_C)
    weight_C = tl.exp(logit_C - max_logit) / total
    if IS_NORMALISED:
        weight_C = weight_C / tl.sum(weight_C, axis=0)
    mask_C = choice_C < TOP_K
    tl.store(weights_ptr + token * TOP_K + choice_C, weight_C, mask=mask_C)
    tl.store(experts_ptr + token * TOP_K + choice_C, chosen_C.to(tl.int64), mask=mask_C)


@triton.jit
def _swiglu(gate, up, dtype: tl.constexpr):
    """Round as the reference: both products, the gate's silu, and the result."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    return (silu * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _gemv_up_kernel(
    x_ptr,
    weight_ptr,
    experts_ptr,
    hidden_ptr,
    stride_x,
    D,
    F,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    choice = tl.program_id(1)
    expert = tl.load(experts_ptr + choice).to(tl.int64)
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_K = tl.arange(0, BLOCK_K)
    is_row_N = row_N < F
    gate_NK_ptr = weight_ptr + expert * (2 * F * D) + row_N[:, None].to(tl.int64) * D + col_K[None, :]
    x_K_ptr = x_ptr + (choice // TOP_K).to(tl.int64) * stride_x + col_K
    gate_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, D, BLOCK_K):
        is_col_K = start + col_K < D
        mask_NK = is_row_N[:, None] & is_col_K[None, :]
        x_K = tl.load(x_K_ptr + start, mask=is_col_K, other=0.0).to(tl.float32)
        gate_weight_NK = tl.load(gate_NK_ptr + start, mask=mask_NK, other=0.0)
        up_weight_NK = tl.load(gate_NK_ptr + F * D + start, mask=mask_NK, other=0.0)
        gate_NK += gate_weight_NK.to(tl.float32) * x_K[None, :]
        up_NK += up_weight_NK.to(tl.float32) * x_K[None, :]
    hidden_N = _swiglu(tl.sum(gate_NK, axis=1), tl.sum(up_NK, axis=1), hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + choice.to(tl.int64) * F + row_N, hidden_N, mask=is_row_N)


@triton.jit
def _gemv_down_kernel(
    hidden_ptr,
    weight_ptr,
    weights_ptr,
    experts_ptr,
    shared_ptr,
    shared_gate_ptr,
    out_ptr,
    stride_shared,
    stride_gate,
    D,
    F,
    TOP_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(1)
    choice_C = tl.arange(0, BLOCK_C)
    is_choice_C = choice_C < TOP_K
    expert_C = tl.load(experts_ptr + token * TOP_K + choice_C, mask=is_choice_C, other=0).to(tl.int64)
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_N = row_N < D
    col_K = tl.arange(0, BLOCK_K)
    offset_CN = expert_C[:, None] * (D * F) + row_N[None, :].to(tl.int64) * F
    is_CN = is_choice_C[:, None] & is_row_N[None, :]
    hidden_C = (token * TOP_K + choice_C).to(tl.int64) * F
    out_CN = tl.zeros([BLOCK_C, BLOCK_N], dtype=tl.float32)
    for start in range(0, F, BLOCK_K):
        is_col_K = start + col_K < F
        mask_CNK = is_CN[:, :, None] & is_col_K[None, None, :]
        weight_CNK_ptr = weight_ptr + offset_CN[:, :, None] + (start + col_K)[None, None, :]
        weight_CNK = tl.load(weight_CNK_ptr, mask=mask_CNK, other=0.0).to(tl.float32)
        mask_C1K = is_choice_C[:, None, None] & is_col_K[None, None, :]
        hidden_C1K_ptr = hidden_ptr + hidden_C[:, None, None] + (start + col_K)[None, None, :]
        hidden_C1K = tl.load(hidden_C1K_ptr, mask=mask_C1K, other=0.0).to(tl.float32)
        out_CN += tl.sum(weight_CNK * hidden_C1K, axis=2)
    dtype = out_ptr.dtype.element_ty
    weight_C = tl.load(weights_ptr + token * TOP_K + choice_C, mask=is_choice_C, other=0.0).to(tl.float32)
    out_N = tl.sum(out_CN.to(dtype).to(tl.float32) * weight_C[:, None], axis=0).to(dtype).to(tl.float32)
    shared_N = tl.load(shared_ptr + token.to(tl.int64) * stride_shared + row_N, mask=is_row_N, other=0.0)
    gate = tl.load(shared_gate_ptr + token.to(tl.int64) * stride_gate).to(tl.float32)
    factor = tl.sigmoid(gate).to(dtype).to(tl.float32)
    out_N = out_N + shared_N.to(tl.float32) * factor
    tl.store(out_ptr + token.to(tl.int64) * D + row_N, out_N.to(dtype), mask=is_row_N)


@triton.jit
def _list_kernel(experts_ptr, starts_ptr, choices_ptr, num_choices, BLOCK: tl.constexpr):
    """List one expert's choices, in their order, behind those of the experts before it."""
    expert = tl.program_id(0)
    offset_A = tl.arange(0, BLOCK)
    num_before = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, num_choices, BLOCK):
        expert_A = tl.load(experts_ptr + first + offset_A, mask=first + offset_A < num_choices, other=0x7FFFFFFF)
        num_before += (expert_A < expert).to(tl.int32)
    start = tl.sum(num_before, axis=0)
    tl.store(starts_ptr + expert, start)
    if expert == 0:
        tl.store(starts_ptr + tl.num_programs(0), num_choices)
    for first in range(0, num_choices, BLOCK):
        expert_A = tl.load(experts_ptr + first + offset_A, mask=first + offset_A < num_choices, other=0x7FFFFFFF)
        is_mine_A = (expert_A == expert).to(tl.int32)
        place_A = start + tl.cumsum(is_mine_A, axis=0) - 1
        tl.store(choices_ptr + place_A, first + offset_A, mask=is_mine_A > 0)
        start += tl.sum(is_mine_A, axis=0)


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
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the hidden features of an expert's choices, in the order of the list."""
    expert = tl.program_id(2)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * BLOCK_M
    end = tl.load(starts_ptr + expert + 1)
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col_N = col_N < F
    offset_K = tl.arange(0, BLOCK_K)
    gate_KN_ptr = weight_ptr + expert.to(tl.int64) * (2 * F * D) + offset_K[:, None] + col_N[None, :].to(tl.int64) * D
    up_KN_ptr = gate_KN_ptr + F * D
    dtype = hidden_ptr.dtype.element_ty
    for row in range(first, end, tl.num_programs(1) * BLOCK_M):
        row_M = row + tl.arange(0, BLOCK_M)
        is_row_M = row_M < end
        token_M = tl.load(choices_ptr + row_M, mask=is_row_M, other=0) // TOP_K
        x_MK_ptr = x_ptr + token_M[:, None].to(tl.int64) * stride_x + offset_K[None, :]
        gate_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, D, BLOCK_K):
            if IS_EVEN:
                x_MK = tl.load(x_MK_ptr + start)
                gate_KN = tl.load(gate_KN_ptr + start)
                up_KN = tl.load(up_KN_ptr + start)
            else:
                is_K = start + offset_K < D
                mask_KN = is_K[:, None] & is_col_N[None, :]
                x_MK = tl.load(x_MK_ptr + start, mask=is_K[None, :], other=0.0)
                gate_KN = tl.load(gate_KN_ptr + start, mask=mask_KN, other=0.0)
                up_KN = tl.load(up_KN_ptr + start, mask=mask_KN, other=0.0)
            gate_MN = tl.dot(x_MK, gate_KN, gate_MN, input_precision="ieee")
            up_MN = tl.dot(x_MK, up_KN, up_MN, input_precision="ieee")
        hidden_MN_ptr = hidden_ptr + row_M[:, None].to(tl.int64) * F + col_N[None, :]
        tl.store(hidden_MN_ptr, _swiglu(gate_MN, up_MN, dtype), mask=is_row_M[:, None] & is_col_N[None, :])


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write what an expert makes of its choices, in the order of the tokens."""
    expert = tl.program_id(2)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * BLOCK_M
    end = tl.load(starts_ptr + expert + 1)
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col_N = col_N < D
    offset_K = tl.arange(0, BLOCK_K)
    weight_KN_ptr = weight_ptr + expert.to(tl.int64) * (D * F) + offset_K[:, None] + col_N[None, :].to(tl.int64) * F
    dtype = out_ptr.dtype.element_ty
    for row in range(first, end, tl.num_programs(1) * BLOCK_M):
        row_M = row + tl.arange(0, BLOCK_M)
        is_row_M = row_M < end
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
        tl.store(out_MN_ptr, out_MN.to(dtype), mask=is_row_M[:, None] & is_col_N[None, :])


@triton.jit
def _sum_kernel(
    choice_out_ptr,
    weights_ptr,
    shared_ptr,
    shared_gate_ptr,
    out_ptr,
    stride_shared,
    stride_gate,
    D,
    TOP_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    choice_C = tl.arange(0, BLOCK_C)
    is_choice_C = choice_C < TOP_K
    col_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col_N = col_N < D
    out_CN_ptr = choice_out_ptr + (token * TOP_K + choice_C)[:, None] * D + col_N[None, :]
    out_CN = tl.load(out_CN_ptr, mask=is_choice_C[:, None] & is_col_N[None, :], other=0.0).to(tl.float32)
    weight_C = tl.load(weights_ptr + token * TOP_K + choice_C, mask=is_choice_C, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    out_N = tl.sum(out_CN * weight_C[:, None], axis=0).to(dtype).to(tl.float32)
    shared_N = tl.load(shared_ptr + token * stride_shared + col_N, mask=is_col_N, other=0.0).to(tl.float32)
    gate = tl.load(shared_gate_ptr + token * stride_gate).to(tl.float32)
    out_N = out_N + shared_N * tl.sigmoid(gate).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * D + col_N, out_N.to(dtype), mask=is_col_N)


def route_top_k(logits_TE: Tensor, top_k: int, *, is_normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` most likely experts per token; of equal ones the lower index first."""
    num_tokens, num_experts = logits_TE.shape
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    weights_TK = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits_TE.device)
    _route_kernel[(num_tokens,)](
        logits_TE,
        weights_TK,
        experts_TK,
        logits_TE.stride(0),
        num_experts,
        TOP_K=top_k,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_C=triton.next_power_of_2(top_k),
        IS_NORMALISED=is_normalised,
        num_warps=1,
    )
    return weights_TK, experts_TK


def experts_glu(
    x_TD: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor,
    shared_gate_T1: Tensor,
) -> Tensor:
    """Return the weighted sum of each token's experts, ``down(silu(gate x) * up x)``, in x's dtype.

    Weights, choices and both experts' tensors are dense; the rest may be views with dense rows.
    """
    arguments = (x_TD, gate_up_EFD, down_EDF, weights_TK, experts_TK, shared_TD, shared_gate_T1)
    num_tokens, top_k = experts_TK.shape
    if num_tokens <= MAX_TOKENS_GEMV and not is_deterministic():
        return experts_glu_few(*arguments, GEMV)
    choices_per_expert = num_tokens * top_k // len(gate_up_EFD)
    if x_TD.dtype == torch.float32:
        tiles = TILES_FLOAT32
    elif choices_per_expert >= CHOICES_PER_EXPERT_PREFILL:
        tiles = TILES_PREFILL
    else:
        is_middle = choices_per_expert >= CHOICES_PER_EXPERT_MIDDLE or is_deterministic()
        tiles = TILES_MIDDLE if is_middle else TILES_DECODE
    return experts_glu_many(*arguments, *tiles)


def experts_glu_few(
    x_TD: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor,
    shared_gate_T1: Tensor,
    gemv: Gemv,
) -> Tensor:
    """Compute ``experts_glu`` choice by choice, in two launches."""
    num_tokens, top_k = experts_TK.shape
    num_channels, size = down_EDF.shape[1:]
    hidden_AF = torch.empty((num_tokens * top_k, size), dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty((num_tokens, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    _gemv_up_kernel[(triton.cdiv(size, gemv.block_up_n), num_tokens * top_k)](
        x_TD,
        gate_up_EFD,
        experts_TK,
        hidden_AF,
        x_TD.stride(0),
        num_channels,
        size,
        TOP_K=top_k,
        BLOCK_N=gemv.block_up_n,
        BLOCK_K=min(gemv.block_up_k, triton.next_power_of_2(num_channels)),
        num_warps=gemv.warps_up,
    )
    _gemv_down_kernel[(triton.cdiv(num_channels, gemv.block_down_n), num_tokens)](
        hidden_AF,
        down_EDF,
        weights_TK,
        experts_TK,
        shared_TD,
        shared_gate_T1,
        out_TD,
        shared_TD.stride(0),
        shared_gate_T1.stride(0),
        num_channels,
        size,
        TOP_K=top_k,
        BLOCK_C=triton.next_power_of_2(top_k),
        BLOCK_N=gemv.block_down_n,
        BLOCK_K=min(gemv.block_down_k, triton.next_power_of_2(size)),
        num_warps=gemv.warps_down,
    )
    return out_TD


def experts_glu_many(
    x_TD: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor,
    shared_gate_T1: Tensor,
    up: Tile,
    down: Tile,
) -> Tensor:
    """Compute ``experts_glu`` expert by expert, in four launches."""
    num_tokens, top_k = experts_TK.shape
    num_channels, size = down_EDF.shape[1:]
    starts_E, choices_A = list_choices(experts_TK, len(down_EDF))
    hidden_AF = torch.empty((num_tokens * top_k, size), dtype=x_TD.dtype, device=x_TD.device)
    out_AD = torch.empty((num_tokens * top_k, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty((num_tokens, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    launch_up(x_TD, gate_up_EFD, starts_E, choices_A, hidden_AF, top_k, up)
    launch_down(hidden_AF, down_EDF, starts_E, choices_A, out_AD, down)
    _sum_kernel[(num_tokens, triton.cdiv(num_channels, BLOCK_SUM))](
        out_AD,
        weights_TK,
        shared_TD,
        shared_gate_T1,
        out_TD,
        shared_TD.stride(0),
        shared_gate_T1.stride(0),
        num_channels,
        TOP_K=top_k,
        BLOCK_C=triton.next_power_of_2(top_k),
        BLOCK_N=BLOCK_SUM,
        num_warps=4,
    )
    return out_TD


def launch_up(
    x_TD: Tensor, gate_up_EFD: Tensor, starts_E: Tensor, choices_A: Tensor, hidden_AF: Tensor, top_k: int, tile: Tile
) -> None:
    """Fill ``hidden_AF``, in the order of the list."""
    (num_experts, _, num_channels), size = gate_up_EFD.shape, hidden_AF.shape[1]
    _grouped_up_kernel[(triton.cdiv(size, tile.block_n), tile.split_m, num_experts)](
        x_TD,
        gate_up_EFD,
        starts_E,
        choices_A,
        hidden_AF,
        x_TD.stride(0),
        num_channels,
        size,
        TOP_K=top_k,
        IS_EVEN=num_channels % tile.block_k == 0 and size % tile.block_n == 0,
        **_launch_options(tile),
    )


def launch_down(
    hidden_AF: Tensor, down_EDF: Tensor, starts_E: Tensor, choices_A: Tensor, out_AD: Tensor, tile: Tile
) -> None:
    """Fill ``out_AD``, in the order of the tokens."""
    num_experts, num_channels, size = down_EDF.shape
    _grouped_down_kernel[(triton.cdiv(num_channels, tile.block_n), tile.split_m, num_experts)](
        hidden_AF,
        down_EDF,
        starts_E,
        choices_A,
        out_AD,
        num_channels,
        size,
        IS_EVEN=size % tile.block_k == 0 and num_channels % tile.block_n == 0,
        **_launch_options(tile),
    )


def list_choices(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return ``(starts_E, choices_A)``: expert ``e``'s choices are ``choices_A[starts_E[e] : starts_E[e + 1]]``."""
    num_choices = experts_TK.numel()
    starts_E = torch.empty(num_experts + 1, dtype=torch.int32, device=experts_TK.device)
    choices_A = torch.empty(num_choices, dtype=torch.int32, device=experts_TK.device)
    block = min(BLOCK_LIST, triton.next_power_of_2(num_choices))
    _list_kernel[(num_experts,)](experts_TK, starts_E, choices_A, num_choices, BLOCK=block, num_warps=4)
    return starts_E, choices_A


def _launch_options(tile: Tile) -> dict[str, int]:
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    return {**blocks, "num_warps": tile.warps, "num_stages": tile.stages}
