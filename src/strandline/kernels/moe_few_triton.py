"""The experts of a few tokens on a GPU, in two launches: every product is a matrix-vector product.

Both kernels take each token's experts from the router's logits by themselves, which costs less than a launch between
would; the second also computes the shared expert's part. It reads the experts' weights before the first has ended:
only the hidden features depend on that.

Invariants: as in ``moe_triton.py``.

Shape suffixes: as in ``moe.py``; in kernels M rows of x, N features, K the dimension that a product sums over, C a
token's choices (``top_k``, padded to a power of two).
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.linear_triton import silu_times
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.router import Routing
from strandline.kernels.router_triton import choice_options, choose
from strandline.kernels.sizes import cdiv, next_power_of_2


class Few(NamedTuple):
    """How the two matrix products are tiled."""

    block_up_n: int
    block_up_k: int
    warps_up: int
    block_down_n: int
    warps_down: int


@triton.jit
def _few_up_kernel(
    x_ptr,
    logits_ptr,
    weight_ptr,
    hidden_ptr,
    stride_x,
    stride_logits,
    D,
    F,
    E,
    first_expert,
    num_held,
    ROUTING: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOP_K: tl.constexpr = ROUTING.top_k
    choice = tl.program_id(1)
    token = (choice // TOP_K).to(tl.int64)
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_K = tl.arange(0, BLOCK_K)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    chosen_C, _ = choose(logits_ptr + token * stride_logits, None, E, ROUTING, BLOCK_G, BLOCK_I, BLOCK_C)
    is_mine_C = tl.arange(0, BLOCK_C) == choice % TOP_K
    expert = tl.sum(tl.where(is_mine_C, chosen_C, 0), axis=0).to(tl.int64)
    num_rows = F
    if IS_DIVIDED:
        expert = expert - first_expert
        num_rows = tl.where((expert >= 0) & (expert < num_held), F, 0)
    gate_NK_ptr = weight_ptr + expert * (2 * F * D) + row_N[:, None] * D + col_K[None, :]
    x_1K_ptr = x_ptr + token * stride_x + col_K[None, :]
    gate_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for chunk in tl.static_range(NUM_K):
        start = chunk * BLOCK_K
        if IS_EVEN:
            gate_weight_NK = tl.load(gate_NK_ptr + start, eviction_policy="evict_first")
            up_weight_NK = tl.load(gate_NK_ptr + F * D + start, eviction_policy="evict_first")
            x_1K = tl.load(x_1K_ptr + start).to(tl.float32)
        else:
            is_1K = (start + col_K < D)[None, :]
            mask_NK = (row_N < num_rows)[:, None] & is_1K
            gate_weight_NK = tl.load(gate_NK_ptr + start, mask=mask_NK, other=0.0, eviction_policy="evict_first")
            up_weight_NK = tl.load(gate_NK_ptr + F * D + start, mask=mask_NK, other=0.0, eviction_policy="evict_first")
            x_1K = tl.load(x_1K_ptr + start, mask=is_1K, other=0.0).to(tl.float32)
        gate_NK += gate_weight_NK.to(tl.float32) * x_1K
        up_NK += up_weight_NK.to(tl.float32) * x_1K
    hidden_N = silu_times(tl.sum(gate_NK, axis=1), tl.sum(up_NK, axis=1), hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + choice.to(tl.int64) * F + row_N, hidden_N, mask=row_N < num_rows)


@triton.jit
def _few_down_kernel(
    hidden_ptr,
    shared_ptr,
    logits_ptr,
    shared_gate_ptr,
    weight_ptr,
    shared_weight_ptr,
    out_ptr,
    stride_shared,
    stride_logits,
    stride_gate,
    D,
    F,
    S,
    E,
    first_expert,
    num_held,
    ROUTING: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOP_K: tl.constexpr = ROUTING.top_k
    token = tl.program_id(1).to(tl.int64)
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_N = row_N < D
    choice_C = tl.arange(0, BLOCK_C)
    is_choice_C = choice_C < TOP_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # What was projected is there already, since the kernel before has waited for it; not so the hidden features.
    token_ptr = shared_ptr + token * stride_shared
    col_S = tl.arange(0, BLOCK_S)
    is_S = col_S < S
    shared_mask_NS = is_row_N[:, None] & is_S[None, :]
    shared_NS_ptr = shared_weight_ptr + row_N[:, None] * S + col_S[None, :]
    shared_NS = tl.load(shared_NS_ptr, mask=shared_mask_NS, other=0.0, eviction_policy="evict_first")
    chosen_C, weight_C = choose(logits_ptr + token * stride_logits, None, E, ROUTING, BLOCK_G, BLOCK_I, BLOCK_C)
    if IS_DIVIDED:
        chosen_C = chosen_C - first_expert
        is_choice_C = is_choice_C & (chosen_C >= 0) & (chosen_C < num_held)
    col_K = tl.arange(0, BLOCK_K)
    offset_CN = chosen_C[:, None].to(tl.int64) * (D * F) + (row_N * F)[None, :]
    mask_C1K = is_choice_C[:, None, None] & (col_K < F)[None, None, :]
    weight_CNK_ptr = weight_ptr + offset_CN[:, :, None] + col_K[None, None, :]
    if IS_EVEN:
        weight_CNK = tl.load(weight_CNK_ptr, eviction_policy="evict_first")
    else:
        mask_CNK = mask_C1K & is_row_N[None, :, None]
        weight_CNK = tl.load(weight_CNK_ptr, mask=mask_CNK, other=0.0, eviction_policy="evict_first")
    gate_S = tl.load(token_ptr + col_S, mask=is_S, other=0.0, cache_modifier=".cg").to(tl.float32)
    up_S = tl.load(token_ptr + S + col_S, mask=is_S, other=0.0, cache_modifier=".cg").to(tl.float32)
    factor = tl.load(shared_gate_ptr + token * stride_gate, cache_modifier=".cg").to(tl.float32)
    factor = tl.sigmoid(factor).to(dtype).to(tl.float32)
    shared_hidden_S = silu_times(gate_S, up_S, dtype).to(tl.float32)
    shared_N = tl.sum(shared_NS.to(tl.float32) * shared_hidden_S[None, :], axis=1).to(dtype).to(tl.float32) * factor
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    hidden_C1K_ptr = hidden_ptr + ((token * TOP_K + choice_C) * F)[:, None, None] + col_K[None, None, :]
    hidden_C1K = tl.load(hidden_C1K_ptr, mask=mask_C1K, other=0.0).to(tl.float32)
    out_CN = tl.sum(weight_CNK.to(tl.float32) * hidden_C1K, axis=2).to(dtype).to(tl.float32)
    out_CN = tl.where(is_choice_C[:, None], out_CN * weight_C[:, None], 0.0)
    out_N = tl.sum(out_CN, axis=0).to(dtype).to(tl.float32) + shared_N
    tl.store(out_ptr + token * D + row_N, out_N.to(dtype), mask=is_row_N)


def mixture_few(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down_DS: Tensor,
    routing: Routing,
    few: Few,
    held: range | None = None,
) -> Tensor:
    """Compute ``mixture`` choice by choice."""
    num_tokens, num_experts = logits_TE.shape
    num_held, num_channels, size = down_EDF.shape
    first_expert, is_whole = 0 if held is None else held.start, held is None
    shared_size = shared_down_DS.shape[1]
    hidden_AF = torch.empty((num_tokens * routing.top_k, size), dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty((num_tokens, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    block_k = min(few.block_up_k, next_power_of_2(num_channels))
    block_f = next_power_of_2(size)
    options = overlap_options(x_TD)
    choice = choice_options(routing, num_experts)
    _few_up_kernel[(cdiv(size, few.block_up_n), num_tokens * routing.top_k)](
        x_TD,
        logits_TE,
        gate_up_EFD,
        hidden_AF,
        x_TD.stride(0),
        logits_TE.stride(0),
        num_channels,
        size,
        num_experts,
        first_expert,
        num_held,
        **choice,
        IS_DIVIDED=not is_whole,
        IS_EVEN=is_whole and num_channels % block_k == 0 and size % few.block_up_n == 0,
        NUM_K=cdiv(num_channels, block_k),
        BLOCK_N=few.block_up_n,
        BLOCK_K=block_k,
        num_warps=few.warps_up,
        **options,
    )
    _few_down_kernel[(cdiv(num_channels, few.block_down_n), num_tokens)](
        hidden_AF,
        shared_gate_up_TS,
        logits_TE,
        shared_gate_T1,
        down_EDF,
        shared_down_DS,
        out_TD,
        shared_gate_up_TS.stride(0),
        logits_TE.stride(0),
        shared_gate_T1.stride(0),
        num_channels,
        size,
        shared_size,
        num_experts,
        first_expert,
        num_held,
        **choice,
        IS_DIVIDED=not is_whole,
        IS_EVEN=is_whole
        and size == block_f
        and num_channels % few.block_down_n == 0
        and routing.top_k == choice["BLOCK_C"],
        BLOCK_N=few.block_down_n,
        BLOCK_K=block_f,
        BLOCK_S=next_power_of_2(shared_size),
        num_warps=few.warps_down,
        **options,
    )
    return out_TD
