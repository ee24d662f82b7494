"""The experts of a few tokens in 4 bits, in two launches, as ``moe_few_triton.py``.

Shape suffixes: as in ``moe_few_triton.py`` and ``four_bit_tile_triton.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.experts.expert_tiles import Few
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import choice_options, choose, choose_nth
from strandline.kernels.gemm.four_bit_tile_triton import (
    BLOCK_INPUTS,
    BLOCK_WORDS,
    MAGIC,
    PIECE_INPUTS,
    PIECE_WORDS,
    add_planes,
    load_words,
    multiply_pieces,
    plane_columns,
    scaled_sums,
)
from strandline.kernels.gemm.weights import DenseWeight, FourBitWeight
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.activation_triton import silu_times
from strandline.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def _few_up_kernel(
    x_ptr,
    logits_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    hidden_ptr,
    stride_x,
    stride_logits,
    stride_sn,
    stride_sx,
    num_words,
    num_groups,
    D,
    F,
    E,
    first_expert,
    num_held,
    magic,
    ROUTING: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    NUM_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOP_K: tl.constexpr = ROUTING.top_k
    PIECES: tl.constexpr = BLOCK_K // PIECE_INPUTS
    choice = tl.program_id(1)
    token = (choice // TOP_K).to(tl.int64)
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
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
    gate_1N = (expert * (2 * F) + row_N)[None, :]
    up_1N = gate_1N + F
    is_1N = (row_N < num_rows)[None, :]
    gate_J1N = tl.zeros([PIECES, 1, BLOCK_N], dtype=tl.float32)
    up_J1N = tl.zeros([PIECES, 1, BLOCK_N], dtype=tl.float32)
    for chunk in tl.static_range(NUM_K):
        piece_J = chunk * PIECES + tl.arange(0, PIECES)
        part_gate_J1N, part_up_J1N = multiply_pieces(
            load_words(weight_ptr, gate_1N, is_1N, piece_J, num_words, IS_EVEN),
            load_words(weight_ptr, up_1N, is_1N, piece_J, num_words, IS_EVEN),
            x_ptr + token * stride_x,
            tl.arange(0, 1),
            piece_J,
            1,
            D,
            0,
            scale_ptr,
            zero_ptr,
            gate_1N,
            up_1N,
            is_1N,
            num_groups,
            stride_sn,
            stride_sx,
            magic,
            True,
            IS_EVEN,
            GROUP,
        )
        gate_J1N += part_gate_J1N
        up_J1N += part_up_J1N
    hidden_1N = silu_times(tl.sum(gate_J1N, axis=0), tl.sum(up_J1N, axis=0), hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + choice.to(tl.int64) * F + row_N[None, :], hidden_1N, mask=(row_N < F)[None, :])


@triton.jit
def _load_shared_plane(token_ptr, piece_J, S, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    """Return hidden features of the shared expert, ``[J, 1, W]``, from its projections."""
    col_JW = plane_columns(piece_J, PLANE)
    gate_JW = tl.load(token_ptr + col_JW, mask=col_JW < S, other=0.0, cache_modifier=".cg").to(tl.float32)
    up_JW = tl.load(token_ptr + S + col_JW, mask=col_JW < S, other=0.0, cache_modifier=".cg").to(tl.float32)
    return silu_times(gate_JW, up_JW, DTYPE).to(tl.float32)[:, None, :]


@triton.jit
def _multiply_shared_packed(
    token_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    row_N,
    D,
    S,
    num_words,
    num_groups,
    stride_sn,
    stride_sx,
    magic,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Return what a shared expert in 4 bits makes of a token's projections."""
    PAIRS: tl.constexpr = GROUP // (2 * BLOCK_WORDS)
    GROUPS: tl.constexpr = BLOCK_INPUTS // GROUP
    J: tl.constexpr = BLOCK_S // PIECE_INPUTS
    N: tl.constexpr = row_N.shape[0]
    piece_J = tl.arange(0, J)
    row_1N = row_N[None, :]
    is_1N = row_1N < D
    words_J1NW = load_words(weight_ptr, row_1N, is_1N, piece_J, num_words, False)
    out_J1N = tl.zeros([J, 1, N], dtype=tl.float32)
    for group in tl.static_range(GROUPS):
        acc_J1NW = tl.zeros([J, 1, N, PIECE_WORDS], dtype=tl.float32)
        sum_low_J1W = tl.zeros([J, 1, PIECE_WORDS], dtype=tl.float32)
        sum_high_J1W = tl.zeros([J, 1, PIECE_WORDS], dtype=tl.float32)
        for pair in tl.static_range(group * PAIRS, (group + 1) * PAIRS):
            low_J1W = _load_shared_plane(token_ptr, piece_J, S, 2 * pair, DTYPE)
            high_J1W = _load_shared_plane(token_ptr, piece_J, S, 2 * pair + 1, DTYPE)
            sum_low_J1W += low_J1W
            sum_high_J1W += high_J1W
            acc_J1NW = add_planes(acc_J1NW, words_J1NW, low_J1W, high_J1W, pair, magic)
        sums = (sum_low_J1W, sum_high_J1W, scale_ptr, zero_ptr, row_1N, is_1N)
        sizes = (piece_J // 4 * GROUPS + group, num_groups, stride_sn, stride_sx)
        out_J1N += scaled_sums(acc_J1NW, *sums, *sizes, False)
    return tl.sum(tl.sum(out_J1N, axis=0), axis=0)


@triton.jit
def _multiply_shared_dense(token_ptr, weight_ptr, row_N, D, S, DTYPE: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return what an ordinary shared expert makes of a token's projections."""
    col_S = tl.arange(0, BLOCK_S)
    mask_NS = (row_N < D)[:, None] & (col_S < S)[None, :]
    weight_NS_ptr = weight_ptr + (row_N * S)[:, None] + col_S[None, :]
    weight_NS = tl.load(weight_NS_ptr, mask=mask_NS, other=0.0, eviction_policy="evict_first")
    gate_S = tl.load(token_ptr + col_S, mask=col_S < S, other=0.0, cache_modifier=".cg").to(tl.float32)
    up_S = tl.load(token_ptr + S + col_S, mask=col_S < S, other=0.0, cache_modifier=".cg").to(tl.float32)
    hidden_S = silu_times(gate_S, up_S, DTYPE).to(tl.float32)
    return tl.sum(weight_NS.to(tl.float32) * hidden_S[None, :], axis=1)


@triton.jit
def _few_down_kernel(
    hidden_ptr,
    shared_ptr,
    logits_ptr,
    shared_gate_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    shared_weight_ptr,
    shared_scale_ptr,
    shared_zero_ptr,
    out_ptr,
    stride_shared,
    stride_logits,
    stride_gate,
    stride_sn,
    stride_sx,
    stride_shared_sn,
    stride_shared_sx,
    num_words,
    num_groups,
    num_shared_words,
    num_shared_groups,
    D,
    F,
    S,
    E,
    first_expert,
    num_held,
    magic,
    ROUTING: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SHARED_PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED_GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOP_K: tl.constexpr = ROUTING.top_k
    PIECES: tl.constexpr = BLOCK_K // PIECE_INPUTS
    token = tl.program_id(1).to(tl.int64)
    row_N = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
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
    row_CN = expert_C[:, None] * D + row_N[None, :]
    is_CN = is_choice_C[:, None] & (row_N < D)[None, :]
    piece_J = tl.arange(0, PIECES)
    words_JCNW = load_words(weight_ptr, row_CN, is_CN, piece_J, num_words, IS_EVEN)
    token_ptr = shared_ptr + token * stride_shared
    if IS_SHARED_PACKED:
        shared_N = _multiply_shared_packed(
            token_ptr,
            shared_weight_ptr,
            shared_scale_ptr,
            shared_zero_ptr,
            row_N,
            D,
            S,
            num_shared_words,
            num_shared_groups,
            stride_shared_sn,
            stride_shared_sx,
            magic,
            dtype,
            SHARED_GROUP,
            BLOCK_S,
        )
    else:
        shared_N = _multiply_shared_dense(token_ptr, shared_weight_ptr, row_N, D, S, dtype, BLOCK_S)
    shared_N = shared_N.to(dtype).to(tl.float32)
    if shared_gate_ptr is not None:
        factor = tl.load(shared_gate_ptr + token * stride_gate, cache_modifier=".cg").to(tl.float32)
        shared_N *= tl.sigmoid(factor).to(dtype).to(tl.float32)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    out_JCN, _ = multiply_pieces(
        words_JCNW,
        words_JCNW,
        hidden_ptr + token * TOP_K * F,
        choice_C,
        piece_J,
        TOP_K,
        F,
        F,
        scale_ptr,
        zero_ptr,
        row_CN,
        row_CN,
        is_CN,
        num_groups,
        stride_sn,
        stride_sx,
        magic,
        False,
        IS_EVEN,
        GROUP,
    )
    out_CN = tl.sum(out_JCN, axis=0).to(dtype).to(tl.float32)
    out_CN = tl.where(is_choice_C[:, None], out_CN * weight_C[:, None], 0.0)
    out_N = tl.sum(out_CN, axis=0).to(dtype).to(tl.float32) + shared_N
    tl.store(out_ptr + token * D + row_N, out_N.to(dtype), mask=row_N < D)


def mixture_few(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    shared_down: DenseWeight | FourBitWeight,
    routing: Routing,
    few: Few,
    held: range | None = None,
) -> Tensor:
    """Compute ``four_bit_mixture`` choice by choice."""
    hidden_AF = _hidden(x_TD, logits_TE, gate_up, routing, few, held)
    projected = (shared_gate_up_TS, logits_TE, shared_gate_T1)
    return _sum(hidden_AF, *projected, down, shared_down, routing, few, held)


def _hidden(
    x_TD: Tensor, logits_TE: Tensor, gate_up: FourBitWeight, routing: Routing, few: Few, held: range | None
) -> Tensor:
    """Return the hidden features of every choice; of experts that are not held, zeros."""
    num_experts, (num_held, num_rows, num_channels) = logits_TE.shape[1], gate_up.shape
    size = num_rows // 2
    hidden_AF = torch.empty((len(x_TD) * routing.top_k, size), dtype=x_TD.dtype, device=x_TD.device)
    block_k = min(few.block_up_k, max(BLOCK_INPUTS.value, next_power_of_2(num_channels)))
    _few_up_kernel[(cdiv(size, few.block_up_n), len(hidden_AF))](
        x_TD,
        logits_TE,
        gate_up.words,
        gate_up.scales,
        gate_up.zeros,
        hidden_AF,
        x_TD.stride(0),
        logits_TE.stride(0),
        *gate_up.scales.stride()[1:],
        gate_up.words.shape[-1],
        gate_up.scales.shape[-1],
        num_channels,
        size,
        num_experts,
        0 if held is None else held.start,
        num_held,
        MAGIC,
        **choice_options(routing, num_experts),
        IS_DIVIDED=held is not None,
        IS_EVEN=held is None and num_channels % block_k == 0 and size % few.block_up_n == 0,
        NUM_K=cdiv(num_channels, block_k),
        GROUP=gate_up.group,
        BLOCK_N=few.block_up_n,
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
    down: FourBitWeight,
    shared_down: DenseWeight | FourBitWeight,
    routing: Routing,
    few: Few,
    held: range | None,
) -> Tensor:
    """Return what the experts make of their hidden features, and the shared one of its projections."""
    (num_tokens, num_experts), (num_held, num_channels, size) = logits_TE.shape, down.shape
    is_packed = isinstance(shared_down, FourBitWeight)
    shared = (shared_down.words, shared_down.scales, shared_down.zeros) if is_packed else (shared_down.values_OI,)
    shared_size = shared_down.num_inputs if is_packed else shared_down.values_OI.shape[1]
    block_f, choice = max(BLOCK_INPUTS.value, next_power_of_2(size)), choice_options(routing, num_experts)
    is_even = size == block_f and num_channels % few.block_down_n == 0 and routing.top_k == choice["BLOCK_C"]
    out_TD = torch.empty((num_tokens, num_channels), dtype=hidden_AF.dtype, device=hidden_AF.device)
    _few_down_kernel[(cdiv(num_channels, few.block_down_n), num_tokens)](
        hidden_AF,
        shared_gate_up_TS,
        logits_TE,
        shared_gate_T1,
        down.words,
        down.scales,
        down.zeros,
        *(*shared, None, None)[:3],
        out_TD,
        shared_gate_up_TS.stride(0),
        logits_TE.stride(0),
        0 if shared_gate_T1 is None else shared_gate_T1.stride(0),
        *down.scales.stride()[1:],
        *(shared_down.scales.stride() if is_packed else (0, 0)),
        down.words.shape[-1],
        down.scales.shape[-1],
        shared_down.words.shape[-1] if is_packed else 0,
        shared_down.scales.shape[-1] if is_packed else 0,
        num_channels,
        size,
        shared_size,
        num_experts,
        0 if held is None else held.start,
        num_held,
        MAGIC,
        **choice,
        IS_DIVIDED=held is not None,
        IS_EVEN=held is None and is_even,
        IS_SHARED_PACKED=is_packed,
        GROUP=down.group,
        SHARED_GROUP=shared_down.group if is_packed else 0,
        BLOCK_N=few.block_down_n,
        BLOCK_K=block_f,
        BLOCK_S=max(BLOCK_INPUTS.value, next_power_of_2(shared_size)),
        num_warps=few.warps_down,
        **overlap_options(hidden_AF),
    )
    return out_TD
