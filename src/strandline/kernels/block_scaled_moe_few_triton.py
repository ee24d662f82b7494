"""The experts of a few tokens in FP8, in two launches, as ``moe_few_triton.py``.

Inputs are quantised in registers, unless they come quantised.

Shape suffixes: as in ``moe_few_triton.py``; of quantised rows X groups of inputs.
"""
# mypy: ignore-errors

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.block_scaled_tile_triton import load_rounded, round_groups
from strandline.kernels.linear_triton import silu_times
from strandline.kernels.moe_few_triton import Few
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.quantized_rows import QuantizedRows, Rows
from strandline.kernels.router import Routing
from strandline.kernels.router_triton import choice_options, choose
from strandline.kernels.sizes import cdiv, next_power_of_2
from strandline.kernels.weights import GROUP, DenseWeight, ScaledWeight


@triton.jit
def _few_up_kernel(
    x_ptr,
    x_scale_ptr,
    logits_ptr,
    weight_ptr,
    scale_ptr,
    hidden_ptr,
    num_tokens,
    stride_x,
    stride_xs,
    stride_logits,
    stride_se,
    stride_sy,
    stride_sx,
    D,
    F,
    E,
    ROUTING: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOP_K: tl.constexpr = ROUTING.top_k
    choice = tl.program_id(1)
    token = (choice // TOP_K).to(tl.int64)
    first_N = tl.program_id(0) * BLOCK_N
    row_N = first_N + tl.arange(0, BLOCK_N)
    col_K = tl.arange(0, BLOCK_K)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    chosen_C, _ = choose(logits_ptr + token * stride_logits, None, E, ROUTING, BLOCK_G, BLOCK_I, BLOCK_C)
    is_mine_C = tl.arange(0, BLOCK_C) == choice % TOP_K
    expert = tl.sum(tl.where(is_mine_C, chosen_C, 0), axis=0).to(tl.int64)
    gate_NK_ptr = weight_ptr + expert * (2 * F * D) + row_N[:, None] * D + col_K[None, :]
    gate_scale_ptr = scale_ptr + expert * stride_se + first_N // SCALE_ROWS * stride_sy
    up_scale_ptr = scale_ptr + expert * stride_se + (F + first_N) // SCALE_ROWS * stride_sy
    gate_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for chunk in tl.static_range(NUM_K):
        start = chunk * BLOCK_K
        is_K = start + col_K < D
        if IS_EVEN:
            gate_weight_NK = tl.load(gate_NK_ptr + start, eviction_policy="evict_first")
            up_weight_NK = tl.load(gate_NK_ptr + F * D + start, eviction_policy="evict_first")
        else:
            mask_NK = (row_N < F)[:, None] & is_K[None, :]
            gate_weight_NK = tl.load(gate_NK_ptr + start, mask=mask_NK, other=0.0, eviction_policy="evict_first")
            up_weight_NK = tl.load(gate_NK_ptr + F * D + start, mask=mask_NK, other=0.0, eviction_policy="evict_first")
        token_1 = token + tl.arange(0, 1)
        layout = (num_tokens, D, stride_x, stride_xs)
        x_1K = load_rounded(x_ptr, x_scale_ptr, token_1, start + col_K, *layout, IS_QUANTIZED, 1, BLOCK_K, GROUP)
        group_K = (start + col_K) // GROUP * stride_sx
        gate_1K = x_1K * tl.load(gate_scale_ptr + group_K, mask=is_K, other=0.0)[None, :]
        up_1K = x_1K * tl.load(up_scale_ptr + group_K, mask=is_K, other=0.0)[None, :]
        gate_NK += gate_weight_NK.to(tl.float32) * gate_1K
        up_NK += up_weight_NK.to(tl.float32) * up_1K
    hidden_N = silu_times(tl.sum(gate_NK, axis=1), tl.sum(up_NK, axis=1), hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + choice.to(tl.int64) * F + row_N, hidden_N, mask=row_N < F)


@triton.jit
def _few_down_kernel(
    hidden_ptr,
    shared_ptr,
    logits_ptr,
    shared_gate_ptr,
    weight_ptr,
    scale_ptr,
    shared_weight_ptr,
    shared_scale_ptr,
    out_ptr,
    stride_shared,
    stride_logits,
    stride_gate,
    stride_se,
    stride_sy,
    stride_sx,
    stride_shared_sy,
    stride_shared_sx,
    D,
    F,
    S,
    E,
    ROUTING: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SHARED_SCALED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SHARED_SCALE_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOP_K: tl.constexpr = ROUTING.top_k
    token = tl.program_id(1).to(tl.int64)
    first_N = tl.program_id(0) * BLOCK_N
    row_N = first_N + tl.arange(0, BLOCK_N)
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
    col_K = tl.arange(0, BLOCK_K)
    expert_C = chosen_C.to(tl.int64)
    offset_CN = expert_C[:, None] * (D * F) + (row_N * F)[None, :]
    mask_CK = is_choice_C[:, None] & (col_K < F)[None, :]
    weight_CNK_ptr = weight_ptr + offset_CN[:, :, None] + col_K[None, None, :]
    if IS_EVEN:
        weight_CNK = tl.load(weight_CNK_ptr, eviction_policy="evict_first")
    else:
        mask_CNK = mask_CK[:, None, :] & is_row_N[None, :, None]
        weight_CNK = tl.load(weight_CNK_ptr, mask=mask_CNK, other=0.0, eviction_policy="evict_first")
    scale_CK_ptr = scale_ptr + (expert_C * stride_se)[:, None] + (col_K // GROUP * stride_sx)[None, :]
    scale_CK = tl.load(scale_CK_ptr + first_N // SCALE_ROWS * stride_sy, mask=mask_CK, other=0.0)
    gate_S = tl.load(token_ptr + col_S, mask=is_S, other=0.0, cache_modifier=".cg").to(tl.float32)
    up_S = tl.load(token_ptr + S + col_S, mask=is_S, other=0.0, cache_modifier=".cg").to(tl.float32)
    factor = tl.load(shared_gate_ptr + token * stride_gate, cache_modifier=".cg").to(tl.float32)
    factor = tl.sigmoid(factor).to(dtype).to(tl.float32)
    shared_1S = silu_times(gate_S, up_S, dtype).to(tl.float32)[None, :]
    if IS_SHARED_SCALED:
        shared_scale_S_ptr = shared_scale_ptr + first_N // SHARED_SCALE_ROWS * stride_shared_sy
        shared_scale_S = tl.load(shared_scale_S_ptr + col_S // GROUP * stride_shared_sx, mask=is_S, other=0.0)
        shared_1S = round_groups(shared_1S, 1, BLOCK_S, GROUP) * shared_scale_S[None, :]
    shared_N = tl.sum(shared_NS.to(tl.float32) * shared_1S, axis=1).to(dtype).to(tl.float32) * factor
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    hidden_CK_ptr = hidden_ptr + ((token * TOP_K + choice_C) * F)[:, None] + col_K[None, :]
    hidden_CK = tl.load(hidden_CK_ptr, mask=mask_CK, other=0.0).to(tl.float32)
    hidden_CK = round_groups(hidden_CK, BLOCK_C, BLOCK_K, GROUP) * scale_CK
    out_CN = tl.sum(weight_CNK.to(tl.float32) * hidden_CK[:, None, :], axis=2).to(dtype).to(tl.float32)
    out_CN = tl.where(is_choice_C[:, None], out_CN * weight_C[:, None], 0.0)
    out_N = tl.sum(out_CN, axis=0).to(dtype).to(tl.float32) + shared_N
    tl.store(out_ptr + token * D + row_N, out_N.to(dtype), mask=is_row_N)


def mixture_few(
    x_TD: Rows,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    shared_down: DenseWeight | ScaledWeight,
    routing: Routing,
    few: Few,
) -> Tensor:
    """Compute ``block_scaled_mixture`` choice by choice."""
    hidden_AF = _hidden(x_TD, logits_TE, gate_up, routing, few)
    projected = (shared_gate_up_TS, logits_TE, shared_gate_T1)
    return _sum(hidden_AF, *projected, down, shared_down, routing, few)


def _hidden(x_TD: Rows, logits_TE: Tensor, gate_up: ScaledWeight, routing: Routing, few: Few) -> Tensor:
    """Return the hidden features of every choice."""
    num_experts, num_rows, num_channels = gate_up.values.shape
    size = num_rows // 2
    hidden_AF = torch.empty((len(x_TD) * routing.top_k, size), dtype=x_TD.dtype, device=x_TD.device)
    is_quantized = isinstance(x_TD, QuantizedRows)
    read_TD, scale_XT = (x_TD.values_TI, x_TD.scale_XT) if is_quantized else (x_TD, None)
    block_n = gcd(few.block_up_n, gate_up.rows_per_scale)
    block_k = max(GROUP, min(few.block_up_k, next_power_of_2(num_channels)))
    _few_up_kernel[(cdiv(size, block_n), len(hidden_AF))](
        read_TD,
        scale_XT,
        logits_TE,
        gate_up.values,
        gate_up.scales,
        hidden_AF,
        len(x_TD),
        read_TD.stride(0),
        scale_XT.stride(0) if is_quantized else 0,
        logits_TE.stride(0),
        *gate_up.scales.stride(),
        num_channels,
        size,
        num_experts,
        **choice_options(routing, num_experts),
        GROUP=GROUP,
        IS_QUANTIZED=is_quantized,
        IS_EVEN=num_channels % block_k == 0 and size % block_n == 0,
        SCALE_ROWS=gate_up.rows_per_scale,
        NUM_K=cdiv(num_channels, block_k),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=few.warps_up,
        **overlap_options(hidden_AF),
    )
    return hidden_AF


def _sum(
    hidden_AF: Tensor,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor,
    down: ScaledWeight,
    shared_down: DenseWeight | ScaledWeight,
    routing: Routing,
    few: Few,
) -> Tensor:
    """Return what the experts make of their hidden features, and the shared one of its projections."""
    num_tokens, (num_experts, num_channels, size) = len(logits_TE), down.values.shape
    if isinstance(shared_down, ScaledWeight):
        shared_DS, shared_scales, shared_rows = shared_down.values, shared_down.scales, shared_down.rows_per_scale
    else:
        shared_DS, shared_scales, shared_rows = shared_down.values_OI, None, GROUP
    block_n = gcd(few.block_down_n, down.rows_per_scale, shared_rows)
    block_f, choice = max(GROUP, next_power_of_2(size)), choice_options(routing, num_experts)
    out_TD = torch.empty((num_tokens, num_channels), dtype=hidden_AF.dtype, device=hidden_AF.device)
    _few_down_kernel[(cdiv(num_channels, block_n), num_tokens)](
        hidden_AF,
        shared_gate_up_TS,
        logits_TE,
        shared_gate_T1,
        down.values,
        down.scales,
        shared_DS,
        shared_scales,
        out_TD,
        shared_gate_up_TS.stride(0),
        logits_TE.stride(0),
        shared_gate_T1.stride(0),
        *down.scales.stride(),
        *((0, 0) if shared_scales is None else shared_scales.stride()),
        num_channels,
        size,
        shared_DS.shape[1],
        num_experts,
        **choice,
        GROUP=GROUP,
        IS_EVEN=size == block_f and num_channels % block_n == 0 and routing.top_k == choice["BLOCK_C"],
        IS_SHARED_SCALED=shared_scales is not None,
        SCALE_ROWS=down.rows_per_scale,
        SHARED_SCALE_ROWS=shared_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_f,
        BLOCK_S=max(GROUP, next_power_of_2(shared_DS.shape[1])),
        num_warps=few.warps_down,
        **overlap_options(hidden_AF),
    )
    return out_TD
