"""The experts of a few tokens in FP8, in two launches, as ``moe_few_triton.py``.

Inputs are quantised in registers, unless they come quantised; hidden features always are.

Shape suffixes: as in ``moe_few_triton.py`` and ``block_scaled_tile_triton.py``; of quantised rows X groups of inputs.
"""
# mypy: ignore-errors

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.experts.expert_tiles import Few
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import choice_options, choose, choose_nth
from strandline.kernels.gemm.block_scaled_tile_triton import (
    PIECE,
    add_pieces,
    load_pieces,
    piece_columns,
    quantize_pieces,
)
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.activation_triton import silu_times
from strandline.kernels.rowwise.quantized_rows import GROUP, QuantizedRows, Rows
from strandline.kernels.sizes import cdiv, next_power_of_2


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
    first_expert,
    num_held,
    ROUTING: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOP_K: tl.constexpr = ROUTING.top_k
    choice = tl.program_id(1)
    token = (choice // TOP_K).to(tl.int64)
    first_N = tl.program_id(0) * BLOCK_N
    row_N = first_N + tl.arange(0, BLOCK_N)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    token_logits_ptr = logits_ptr + token * stride_logits
    expert = choose_nth(token_logits_ptr, None, E, choice % TOP_K, ROUTING, BLOCK_G, BLOCK_I).to(tl.int64)
    num_rows = F
    if IS_DIVIDED:
        expert = expert - first_expert
        is_held = (expert >= 0) & (expert < num_held)
        num_rows = tl.where(is_held, F, 0)
        expert = tl.where(is_held, expert, 0)
    row_N_ptr = weight_ptr + expert * (2 * F * D) + row_N * D
    gate_scale_ptr = scale_ptr + expert * stride_se + first_N // SCALE_ROWS * stride_sy
    up_scale_ptr = scale_ptr + expert * stride_se + (F + first_N) // SCALE_ROWS * stride_sy
    gate_JRN = tl.zeros([GROUP // PIECE, BLOCK_K // GROUP, BLOCK_N], dtype=tl.float32)
    up_JRN = tl.zeros([GROUP // PIECE, BLOCK_K // GROUP, BLOCK_N], dtype=tl.float32)
    for chunk in tl.static_range(NUM_K):
        col_JR, col_JRP = piece_columns(chunk * BLOCK_K, BLOCK_K, GROUP, PIECE)
        weight_JRNP_ptr = row_N_ptr[None, None, :, None] + col_JRP[:, :, None, :]
        if IS_EVEN:
            gate_JRNP = tl.load(weight_JRNP_ptr, eviction_policy="evict_first")
            up_JRNP = tl.load(weight_JRNP_ptr + F * D, eviction_policy="evict_first")
        else:
            is_JRNP = (row_N < num_rows)[None, None, :, None] & (col_JRP < D)[:, :, None, :]
            gate_JRNP = tl.load(weight_JRNP_ptr, mask=is_JRNP, other=0.0, eviction_policy="evict_first")
            up_JRNP = tl.load(weight_JRNP_ptr + F * D, mask=is_JRNP, other=0.0, eviction_policy="evict_first")
        inputs = (token + tl.arange(0, 1), col_JR, num_tokens, D, stride_x, stride_xs)
        x_JR1P, x_scale_JR1 = load_pieces(x_ptr, x_scale_ptr, *inputs, IS_QUANTIZED, GROUP, PIECE)
        offset_JR1 = (col_JR // GROUP * stride_sx)[:, :, None]
        is_JR1 = (col_JR < D)[:, :, None]
        gate_scale_JR1 = tl.load(gate_scale_ptr + offset_JR1, mask=is_JR1, other=0.0) * x_scale_JR1
        up_scale_JR1 = tl.load(up_scale_ptr + offset_JR1, mask=is_JR1, other=0.0) * x_scale_JR1
        gate_JRN += tl.sum(gate_JRNP.to(tl.float32) * x_JR1P, axis=3) * gate_scale_JR1
        up_JRN += tl.sum(up_JRNP.to(tl.float32) * x_JR1P, axis=3) * up_scale_JR1
    hidden_N = silu_times(add_pieces(gate_JRN), add_pieces(up_JRN), hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + choice.to(tl.int64) * F + row_N, hidden_N, mask=row_N < F)


@triton.jit
def _multiply_shared(
    token_ptr,
    weight_ptr,
    scale_ptr,
    row_N,
    D,
    S,
    stride_sy,
    stride_sx,
    DTYPE: tl.constexpr,
    IS_SCALED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Return what the shared expert makes of a token's projections."""
    col_JR, col_JRP = piece_columns(0, BLOCK_S, GROUP, PIECE)
    is_JRP = col_JRP < S
    is_JRNP = (row_N < D)[None, None, :, None] & is_JRP[:, :, None, :]
    weight_JRNP_ptr = weight_ptr + (row_N * S)[None, None, :, None] + col_JRP[:, :, None, :]
    weight_JRNP = tl.load(weight_JRNP_ptr, mask=is_JRNP, other=0.0, eviction_policy="evict_first").to(tl.float32)
    gate_JRP = tl.load(token_ptr + col_JRP, mask=is_JRP, other=0.0, cache_modifier=".cg").to(tl.float32)
    up_JRP = tl.load(token_ptr + S + col_JRP, mask=is_JRP, other=0.0, cache_modifier=".cg").to(tl.float32)
    hidden_JR1P = silu_times(gate_JRP, up_JRP, DTYPE).to(tl.float32)[:, :, None, :]
    if IS_SCALED:
        scale_ptr += tl.min(row_N, axis=0) // SCALE_ROWS * stride_sy
        scale_JR1_ptr = scale_ptr + (col_JR // GROUP * stride_sx)[:, :, None]
        scale_JR1 = tl.load(scale_JR1_ptr, mask=(col_JR < S)[:, :, None], other=0.0)
        hidden_JR1P, hidden_scale_JR1 = quantize_pieces(hidden_JR1P)
        out_JRN = tl.sum(weight_JRNP * hidden_JR1P, axis=3) * (hidden_scale_JR1 * scale_JR1)
    else:
        out_JRN = tl.sum(weight_JRNP * hidden_JR1P, axis=3)
    return add_pieces(out_JRN)


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
    first_expert,
    num_held,
    ROUTING: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
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
    PIECE: tl.constexpr,
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
    chosen_C, weight_C = choose(logits_ptr + token * stride_logits, None, E, ROUTING, BLOCK_G, BLOCK_I, BLOCK_C)
    expert_C = chosen_C.to(tl.int64)
    if IS_DIVIDED:
        expert_C = expert_C - first_expert
        is_choice_C = is_choice_C & (expert_C >= 0) & (expert_C < num_held)
        expert_C = tl.where(is_choice_C, expert_C, 0)
    col_JR, col_JRP = piece_columns(0, BLOCK_K, GROUP, PIECE)
    mask_JRCP = is_choice_C[None, None, :, None] & (col_JRP < F)[:, :, None, :]
    offset_CN = (expert_C * (D * F))[:, None] + (row_N * F)[None, :]
    weight_JRCNP_ptr = weight_ptr + offset_CN[None, None, :, :, None] + col_JRP[:, :, None, None, :]
    if IS_EVEN:
        weight_JRCNP = tl.load(weight_JRCNP_ptr, eviction_policy="evict_first")
    else:
        mask_JRCNP = mask_JRCP[:, :, :, None, :] & is_row_N[None, None, None, :, None]
        weight_JRCNP = tl.load(weight_JRCNP_ptr, mask=mask_JRCNP, other=0.0, eviction_policy="evict_first")
    scale_ptr += first_N // SCALE_ROWS * stride_sy
    scale_JRC_ptr = scale_ptr + (expert_C * stride_se)[None, None, :] + (col_JR // GROUP * stride_sx)[:, :, None]
    mask_JRC = is_choice_C[None, None, :] & (col_JR < F)[:, :, None]
    scale_JRC = tl.load(scale_JRC_ptr, mask=mask_JRC, other=0.0)
    shared = (shared_ptr + token * stride_shared, shared_weight_ptr, shared_scale_ptr, row_N, D, S)
    strides = (stride_shared_sy, stride_shared_sx)
    shared_N = _multiply_shared(*shared, *strides, dtype, IS_SHARED_SCALED, SHARED_SCALE_ROWS, BLOCK_S, GROUP, PIECE)
    shared_N = shared_N.to(dtype).to(tl.float32)
    if shared_gate_ptr is not None:
        factor = tl.load(shared_gate_ptr + token * stride_gate, cache_modifier=".cg").to(tl.float32)
        shared_N *= tl.sigmoid(factor).to(dtype).to(tl.float32)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    hidden_C_ptr = hidden_ptr + (token * TOP_K + choice_C) * F
    hidden_JRCP = tl.load(hidden_C_ptr[None, None, :, None] + col_JRP[:, :, None, :], mask=mask_JRCP, other=0.0)
    hidden_JRCP, hidden_scale_JRC = quantize_pieces(hidden_JRCP.to(tl.float32))
    out_JRCN = tl.sum(weight_JRCNP.to(tl.float32) * hidden_JRCP[:, :, :, None, :], axis=4)
    out_JRCN *= (hidden_scale_JRC * scale_JRC)[:, :, :, None]
    out_CN = tl.sum(tl.reshape(out_JRCN, [BLOCK_K // PIECE, BLOCK_C, BLOCK_N]), axis=0).to(dtype).to(tl.float32)
    out_CN = tl.where(is_choice_C[:, None], out_CN * weight_C[:, None], 0.0)
    out_N = tl.sum(out_CN, axis=0).to(dtype).to(tl.float32) + shared_N
    tl.store(out_ptr + token * D + row_N, out_N.to(dtype), mask=is_row_N)


def mixture_few(
    x_TD: Rows,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    shared_down: DenseWeight | ScaledWeight,
    routing: Routing,
    few: Few,
    held: range | None = None,
) -> Tensor:
    """Compute ``block_scaled_mixture`` choice by choice."""
    hidden_AF = _hidden(x_TD, logits_TE, gate_up, routing, few, held)
    projected = (shared_gate_up_TS, logits_TE, shared_gate_T1)
    return _sum(hidden_AF, *projected, down, shared_down, routing, few, held)


def _hidden(
    x_TD: Rows, logits_TE: Tensor, gate_up: ScaledWeight, routing: Routing, few: Few, held: range | None
) -> Tensor:
    """Return the hidden features of every choice; of experts that are not held, zeros."""
    num_experts, (num_held, num_rows, num_channels) = logits_TE.shape[1], gate_up.values.shape
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
        0 if held is None else held.start,
        num_held,
        **choice_options(routing, num_experts),
        GROUP=GROUP,
        PIECE=PIECE,
        IS_QUANTIZED=is_quantized,
        IS_DIVIDED=held is not None,
        IS_EVEN=held is None and num_channels % block_k == 0 and size % block_n == 0,
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
    shared_gate_T1: Tensor | None,
    down: ScaledWeight,
    shared_down: DenseWeight | ScaledWeight,
    routing: Routing,
    few: Few,
    held: range | None,
) -> Tensor:
    """Return what the experts make of their hidden features, and the shared one of its projections."""
    (num_tokens, num_experts), (num_held, num_channels, size) = logits_TE.shape, down.values.shape
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
        0 if shared_gate_T1 is None else shared_gate_T1.stride(0),
        *down.scales.stride(),
        *((0, 0) if shared_scales is None else shared_scales.stride()),
        num_channels,
        size,
        shared_DS.shape[1],
        num_experts,
        0 if held is None else held.start,
        num_held,
        **choice,
        IS_DIVIDED=held is not None,
        GROUP=GROUP,
        PIECE=PIECE,
        IS_EVEN=held is None and size == block_f and num_channels % block_n == 0 and routing.top_k == choice["BLOCK_C"],
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
