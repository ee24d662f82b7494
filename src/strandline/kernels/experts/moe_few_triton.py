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

from strandline.kernels.experts.expert_tiles import Few
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import choice_options, choose, choose_nth
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.activation_triton import silu_times, squared_relu
from strandline.kernels.sizes import cdiv, next_power_of_2


class Down(NamedTuple):
    """How large a program of the second GEMM is."""

    elements: int
    """Numbers of the experts' weights, and of the shared one's, that it holds if a row of the output has no more."""
    warps: int
    blocks: int = 1
    """Tiles of this size that it computes, one after the other."""


MAX_CHOICES_FEW = 16
"""With more choices of a token, programs that derive them all from the logits take longer than a launch."""

MAX_ELEMENTS_DOWN = 32768
"""Most numbers of a row of the second GEMM: 64 KiB."""

DOWN, DOWN_DIVIDED = Down(16384, 4), Down(16384, 4, 2)
"""32 KiB; for several tokens and some of the experts two of these in turn (benchmarks/kernels, `experts/dense`)."""

UP, UP_RELU = (4, 512, 2), (4, 512, 1)
UP_ONE, UP_ONE_RELU = (2, 1024, 1), (4, 1024, 1)
"""Outputs, inputs at a time and warps of a program of the first GEMM; for one token and all experts."""


@triton.jit
def _multiply_up(
    x_ptr,
    weight_ptr,
    expert,
    row_N,
    D,
    F,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return hidden features of one row of inputs and one expert."""
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    col_K = tl.arange(0, BLOCK_K)
    gate_NK_ptr = weight_ptr + expert * (NUM_PARTS * F * D) + row_N[:, None] * D + col_K[None, :]
    up_NK_ptr = gate_NK_ptr + (NUM_PARTS - 1) * F * D
    gate_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for chunk in tl.static_range(NUM_K):
        start = chunk * BLOCK_K
        if IS_EVEN:
            if IS_GATED:
                gate_weight_NK = tl.load(gate_NK_ptr + start, eviction_policy="evict_first")
            up_weight_NK = tl.load(up_NK_ptr + start, eviction_policy="evict_first")
            x_1K = tl.load(x_ptr + (start + col_K)[None, :]).to(tl.float32)
        else:
            is_1K = (start + col_K < D)[None, :]
            mask_NK = (row_N < F)[:, None] & is_1K
            if IS_GATED:
                gate_weight_NK = tl.load(gate_NK_ptr + start, mask=mask_NK, other=0.0, eviction_policy="evict_first")
            up_weight_NK = tl.load(up_NK_ptr + start, mask=mask_NK, other=0.0, eviction_policy="evict_first")
            x_1K = tl.load(x_ptr + (start + col_K)[None, :], mask=is_1K, other=0.0).to(tl.float32)
        if IS_GATED:
            gate_NK += gate_weight_NK.to(tl.float32) * x_1K
        up_NK += up_weight_NK.to(tl.float32) * x_1K
    if IS_GATED:
        hidden_N = silu_times(tl.sum(gate_NK, axis=1), tl.sum(up_NK, axis=1), DTYPE)
    else:
        hidden_N = squared_relu(tl.sum(up_NK, axis=1), DTYPE)
    return hidden_N


@triton.jit
def _few_up_kernel(
    x_ptr,
    logits_ptr,
    bias_ptr,
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
    IS_GATED: tl.constexpr,
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
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    token_logits_ptr = logits_ptr + token * stride_logits
    expert = choose_nth(token_logits_ptr, bias_ptr, E, choice % TOP_K, ROUTING, BLOCK_G, BLOCK_I).to(tl.int64)
    is_held = True
    if IS_DIVIDED:
        expert = expert - first_expert
        is_held = (expert >= 0) & (expert < num_held)
    if is_held:
        x_token_ptr = x_ptr + token * stride_x
        hidden_N = _multiply_up(
            x_token_ptr,
            weight_ptr,
            expert,
            row_N,
            D,
            F,
            IS_GATED,
            IS_EVEN,
            NUM_K,
            BLOCK_N,
            BLOCK_K,
            hidden_ptr.dtype.element_ty,
        )
        tl.store(hidden_ptr + choice.to(tl.int64) * F + row_N, hidden_N, mask=row_N < F)


@triton.jit
def _load_shared(weight_ptr, row_N, D, S, BLOCK_S: tl.constexpr):
    """Load rows of the shared expert's last weight, ``[N, S]``."""
    col_S = tl.arange(0, BLOCK_S)
    mask_NS = (row_N < D)[:, None] & (col_S < S)[None, :]
    weight_NS_ptr = weight_ptr + row_N[:, None] * S + col_S[None, :]
    return tl.load(weight_NS_ptr, mask=mask_NS, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_chosen(weight_ptr, chosen_C, row_N, D, F, IS_EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load rows of the chosen experts' last weights, ``[C, N, K]``."""
    offset_CN = chosen_C[:, None].to(tl.int64) * (D * F) + (row_N * F)[None, :]
    weight_CNK_ptr = weight_ptr + offset_CN[:, :, None] + tl.arange(0, BLOCK_K)[None, None, :]
    if IS_EVEN:
        weight_CNK = tl.load(weight_CNK_ptr, eviction_policy="evict_first")
    else:
        mask_CNK = (tl.arange(0, BLOCK_K) < F)[None, None, :] & (row_N < D)[None, :, None]
        weight_CNK = tl.load(weight_CNK_ptr, mask=mask_CNK, other=0.0, eviction_policy="evict_first")
    return weight_CNK


@triton.jit
def _multiply_shared(weight_NS, hidden_S, factor, dtype: tl.constexpr):
    """Return what the shared expert makes of its hidden features, times a factor."""
    out_N = tl.sum(weight_NS.to(tl.float32) * hidden_S[None, :], axis=1).to(dtype).to(tl.float32)
    return out_N * factor


@triton.jit
def _few_down_kernel(
    hidden_ptr,
    shared_ptr,
    logits_ptr,
    bias_ptr,
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
    IS_GATED: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOP_K: tl.constexpr = ROUTING.top_k
    token = tl.program_id(1).to(tl.int64)
    row_N = tl.program_id(0) * (BLOCKS * BLOCK_N) + tl.arange(0, BLOCK_N)
    choice_C = tl.arange(0, BLOCK_C)
    is_choice_C = choice_C < TOP_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # What was projected is there already, since the kernel before has waited for it; not so the hidden features.
    if shared_ptr is not None:
        token_ptr = shared_ptr + token * stride_shared
        col_S = tl.arange(0, BLOCK_S)
        is_S = col_S < S
        shared_NS = _load_shared(shared_weight_ptr, row_N, D, S, BLOCK_S)
    chosen_C, weight_C = choose(logits_ptr + token * stride_logits, bias_ptr, E, ROUTING, BLOCK_G, BLOCK_I, BLOCK_C)
    if IS_DIVIDED:
        chosen_C = chosen_C - first_expert
        is_choice_C = is_choice_C & (chosen_C >= 0) & (chosen_C < num_held)
    if IS_DIVIDED or TOP_K < BLOCK_C:
        # Others read again what one of them reads: masks would take half as many registers again.
        chosen_C = tl.where(is_choice_C, chosen_C, tl.max(tl.where(is_choice_C, chosen_C, 0), axis=0))
    col_K = tl.arange(0, BLOCK_K)
    mask_C1K = is_choice_C[:, None, None] & (col_K < F)[None, None, :]
    weight_CNK = _load_chosen(weight_ptr, chosen_C, row_N, D, F, IS_EVEN, BLOCK_K)
    if shared_ptr is not None:
        first_S = tl.load(token_ptr + col_S, mask=is_S, other=0.0, cache_modifier=".cg").to(tl.float32)
        if IS_GATED:
            up_S = tl.load(token_ptr + S + col_S, mask=is_S, other=0.0, cache_modifier=".cg").to(tl.float32)
            shared_hidden_S = silu_times(first_S, up_S, dtype).to(tl.float32)
        else:
            shared_hidden_S = squared_relu(first_S, dtype).to(tl.float32)
        factor = 1.0
        if shared_gate_ptr is not None:
            factor = tl.load(shared_gate_ptr + token * stride_gate, cache_modifier=".cg").to(tl.float32)
            factor = tl.sigmoid(factor).to(dtype).to(tl.float32)
        shared_N = _multiply_shared(shared_NS, shared_hidden_S, factor, dtype)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    hidden_C1K_ptr = hidden_ptr + ((token * TOP_K + choice_C) * F)[:, None, None] + col_K[None, None, :]
    hidden_C1K = tl.load(hidden_C1K_ptr, mask=mask_C1K, other=0.0).to(tl.float32)
    for block in tl.static_range(BLOCKS):
        if block + 1 < BLOCKS:
            next_N = row_N + BLOCK_N
            next_CNK = _load_chosen(weight_ptr, chosen_C, next_N, D, F, IS_EVEN, BLOCK_K)
            if shared_ptr is not None:
                next_NS = _load_shared(shared_weight_ptr, next_N, D, S, BLOCK_S)
        out_CN = tl.sum(weight_CNK.to(tl.float32) * hidden_C1K, axis=2).to(dtype).to(tl.float32)
        out_CN = tl.where(is_choice_C[:, None], out_CN * weight_C[:, None], 0.0)
        out_N = tl.sum(out_CN, axis=0)
        if shared_ptr is not None:
            out_N = out_N.to(dtype).to(tl.float32) + shared_N
        tl.store(out_ptr + token * D + row_N, out_N.to(dtype), mask=row_N < D)
        if block + 1 < BLOCKS:
            row_N, weight_CNK = next_N, next_CNK
            if shared_ptr is not None:
                shared_N = _multiply_shared(next_NS, shared_hidden_S, factor, dtype)


def choose_few(
    num_tokens: int, top_k: int, size: int, shared_size: int, *, is_gated: bool, is_divided: bool = False
) -> Few | None:
    """Return the tiling for experts of a size, and a shared one of another, or 0; None: this way is no faster.

    Programs of the first GEMM hold 4 to 8 KiB at a time.

    Args:
        is_divided: whether other ranks have some of the experts.
    """
    largest = max(next_power_of_2(top_k) * next_power_of_2(size), next_power_of_2(max(1, shared_size)))
    if top_k > MAX_CHOICES_FEW or largest > MAX_ELEMENTS_DOWN:
        return None
    down = DOWN_DIVIDED if is_divided and num_tokens > 1 else DOWN
    block_down_n = min(16, max(1, down.elements // largest))
    warps_down = down.warps * max(1, largest // down.elements)
    up, up_relu = (UP_ONE, UP_ONE_RELU) if num_tokens == 1 and not is_divided else (UP, UP_RELU)
    return Few(*(up if is_gated else up_relu), block_down_n, warps_down, down.blocks)


class Shared(NamedTuple):
    """A shared expert: its projections of the tokens, its gate before the sigmoid, and its last weight."""

    projected_TS: Tensor
    gate_T1: Tensor | None
    down_DS: Tensor


def mixture_few(
    x_TD: Tensor,
    logits_TE: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    shared: Shared | None,
    routing: Routing,
    few: Few,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """Compute ``mixture`` or ``mixture_relu_squared`` choice by choice; experts have a gate if they have its rows."""
    num_tokens, num_experts = logits_TE.shape
    num_held, num_channels, size = down_EDF.shape
    first_expert = 0 if held is None else held.start
    projected_TS, gate_T1, shared_DS = shared or (None, None, None)
    shared_size = 1 if shared_DS is None else shared_DS.shape[1]
    hidden_AF = torch.empty((num_tokens * routing.top_k, size), dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty((num_tokens, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    block_k = min(few.block_up_k, next_power_of_2(num_channels))
    block_f = next_power_of_2(size)
    options = overlap_options(x_TD)
    choice = choice_options(routing, num_experts)
    kind = {"IS_GATED": up_EFD.shape[1] == 2 * size, "IS_DIVIDED": held is not None}
    _few_up_kernel[(cdiv(size, few.block_up_n), num_tokens * routing.top_k)](
        x_TD,
        logits_TE,
        bias_E,
        up_EFD,
        hidden_AF,
        x_TD.stride(0),
        logits_TE.stride(0),
        num_channels,
        size,
        num_experts,
        first_expert,
        num_held,
        **choice,
        **kind,
        IS_EVEN=num_channels % block_k == 0 and size % few.block_up_n == 0,
        NUM_K=cdiv(num_channels, block_k),
        BLOCK_N=few.block_up_n,
        BLOCK_K=block_k,
        num_warps=few.warps_up,
        **options,
    )
    rows_down = few.block_down_n * few.blocks_down
    _few_down_kernel[(cdiv(num_channels, rows_down), num_tokens)](
        hidden_AF,
        projected_TS,
        logits_TE,
        bias_E,
        gate_T1,
        down_EDF,
        shared_DS,
        out_TD,
        0 if projected_TS is None else projected_TS.stride(0),
        logits_TE.stride(0),
        0 if gate_T1 is None else gate_T1.stride(0),
        num_channels,
        size,
        shared_size,
        num_experts,
        first_expert,
        num_held,
        **choice,
        **kind,
        IS_EVEN=size == block_f and num_channels % rows_down == 0,
        BLOCK_N=few.block_down_n,
        BLOCK_K=block_f,
        BLOCK_S=next_power_of_2(shared_size),
        BLOCKS=few.blocks_down,
        num_warps=few.warps_down,
        **options,
    )
    return out_TD
