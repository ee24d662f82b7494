"""Routers on a GPU: one launch, a token per program.

A choice takes two reductions of 32-bit integers, each one instruction of a warp, and no sort: for the largest rank, and
for the lowest number that has it.

Shape suffixes: as in ``router.py``; in kernels P columns of experts, group by group, each group padded to I columns
(a power of two), R rows of any X, W warps, C a token's choices (``top_k``, padded to a power of two).
"""
# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.experts.router import Routing
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import next_power_of_2


@triton.jit
def _ordered_bits(value):
    """Return integers that are ordered as the numbers are, above the lowest; both zeros have the same."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x7FFFFFFF)


@triton.jit
def _is_first_of_largest(bits_RX, BLOCK: tl.constexpr):
    """Return, row by row, which number is the largest, and of equal ones has the lowest index."""
    index_1X = tl.arange(0, BLOCK)[None, :]
    is_largest_RX = bits_RX == tl.max(bits_RX, axis=1)[:, None]
    return index_1X == tl.min(tl.where(is_largest_RX, index_1X, BLOCK), axis=1)[:, None]


@triton.jit
def _within_best_groups(bits_P, rank_P, ROUTING: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_I: tl.constexpr):
    """Return the bits with those outside of the best groups, by the sum of their two best ranks, at the lowest."""
    NUM_GROUPS: tl.constexpr = ROUTING.num_groups
    TOP_GROUPS: tl.constexpr = ROUTING.top_groups
    lowest = -0x7FFFFFFF - 1
    bits_GI = tl.reshape(bits_P, [BLOCK_G, BLOCK_I])
    rank_GI = tl.reshape(rank_P, [BLOCK_G, BLOCK_I])
    is_best_GI = _is_first_of_largest(bits_GI, BLOCK_I)
    is_second_GI = _is_first_of_largest(tl.where(is_best_GI, lowest, bits_GI), BLOCK_I)
    total_G = tl.sum(tl.where(is_best_GI | is_second_GI, rank_GI, 0.0), axis=1)
    group_G = tl.arange(0, BLOCK_G)
    group_bits_G = tl.where(group_G < NUM_GROUPS, _ordered_bits(total_G), lowest)
    is_taken_G = tl.zeros([BLOCK_G], dtype=tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        is_largest_G = group_bits_G == tl.max(group_bits_G, axis=0)
        is_next_G = group_G == tl.min(tl.where(is_largest_G, group_G, BLOCK_G), axis=0)
        is_taken_G = is_taken_G | is_next_G
        group_bits_G = tl.where(is_next_G, lowest, group_bits_G)
    return tl.reshape(tl.where(is_taken_G[:, None], bits_GI, lowest), [BLOCK_G * BLOCK_I])


@triton.jit
def _scores(logit_P, ROUTING: tl.constexpr):
    IS_SIGMOID: tl.constexpr = ROUTING.scores == "sigmoid"
    if IS_SIGMOID:
        score_P = tl.sigmoid(logit_P)
    else:
        likelihood_P = tl.exp(logit_P - tl.max(logit_P, axis=0))
        score_P = likelihood_P / tl.sum(likelihood_P, axis=0)
    return score_P


@triton.jit
def _rank(logits_ptr, bias_ptr, E, ROUTING: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_I: tl.constexpr):
    """Return integers that are ordered as one token's experts are ranked, scores, and the experts of a group.

    Instead of scores that keep the order of the logits, these are returned: a kernel computes weights after it has
    loaded what it chose.

    Of narrow ones half of the bits say all: the others are the column, counted from the last one, for one reduction in
    all.
    """
    IS_SIGMOID: tl.constexpr = ROUTING.scores == "sigmoid"
    BLOCK_P: tl.constexpr = BLOCK_G * BLOCK_I
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    column_P = tl.arange(0, BLOCK_P)
    if BLOCK_G == 1:
        group_size = E
        is_expert_P = column_P < E
    else:
        NUM_GROUPS: tl.constexpr = ROUTING.num_groups
        group_size = E // NUM_GROUPS
        is_expert_P = (column_P % BLOCK_I < group_size) & (column_P // BLOCK_I < NUM_GROUPS)
    expert_P = column_P // BLOCK_I * group_size + column_P % BLOCK_I
    logit_P = tl.load(logits_ptr + expert_P, mask=is_expert_P, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    # The softmax keeps the order of the logits.
    RANKS_LOGITS: tl.constexpr = bias_ptr is None and BLOCK_G == 1 and not IS_SIGMOID
    IS_NARROW: tl.constexpr = RANKS_LOGITS and dtype == tl.bfloat16
    lowest = -0x7FFFFFFF - 1
    score_P = logit_P if RANKS_LOGITS else _scores(logit_P, ROUTING)
    rank_P = score_P
    if bias_ptr is not None:
        rank_P += tl.load(bias_ptr + expert_P, mask=is_expert_P, other=0.0)
    bits_P = _ordered_bits(rank_P)
    if IS_NARROW:
        bits_P = (bits_P & -65536) | (BLOCK_P - 1 - column_P)
    bits_P = tl.where(is_expert_P, bits_P, lowest)
    if BLOCK_G > 1:
        bits_P = _within_best_groups(bits_P, rank_P, ROUTING, BLOCK_G, BLOCK_I)
    return bits_P, score_P, group_size


@triton.jit
def _take_best(bits_P, logits_ptr, bias_ptr, ROUTING: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return the column of the largest number, of equal ones the lowest, and the numbers without it."""
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    IS_NARROW: tl.constexpr = bias_ptr is None and BLOCK_G == 1 and ROUTING.scores != "sigmoid" and dtype == tl.bfloat16
    column_P = tl.arange(0, BLOCK_P)
    largest = tl.max(bits_P, axis=0)
    if IS_NARROW:
        column = BLOCK_P - 1 - (largest & 0xFFFF)
    else:
        column = tl.min(tl.where(bits_P == largest, column_P, BLOCK_P), axis=0)
    return column, tl.where(column_P == column, -0x7FFFFFFF - 1, bits_P)


@triton.jit
def choose_experts(
    logits_ptr,
    bias_ptr,
    E,
    ROUTING: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Return the experts of one token, the best first and of equal ones the lower number, and what weighs them.

    The logits bypass the multiprocessor's own cache: a kernel that has not yet waited may read them.
    """
    TOP_K: tl.constexpr = ROUTING.top_k
    bits_P, score_P, group_size = _rank(logits_ptr, bias_ptr, E, ROUTING, BLOCK_G, BLOCK_I)
    choice_C = tl.arange(0, BLOCK_C)
    column_C = tl.zeros([BLOCK_C], dtype=tl.int32)
    for choice in tl.static_range(TOP_K):
        column, bits_P = _take_best(bits_P, logits_ptr, bias_ptr, ROUTING, BLOCK_G, BLOCK_G * BLOCK_I)
        column_C = tl.where(choice_C == choice, column, column_C)
    return column_C // BLOCK_I * group_size + column_C % BLOCK_I, (column_C, score_P)


@triton.jit
def weigh_experts(chosen, bias_ptr, ROUTING: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the weights of experts, given what ``choose_experts`` returned after these."""
    TOP_K: tl.constexpr = ROUTING.top_k
    IS_NORMALISED: tl.constexpr = ROUTING.is_normalised
    EPS: tl.constexpr = ROUTING.eps
    SCALE: tl.constexpr = ROUTING.scale
    column_C, score_P = chosen
    if bias_ptr is None and BLOCK_G == 1 and ROUTING.scores != "sigmoid":
        score_P = _scores(score_P, ROUTING)
    choice_C = tl.arange(0, BLOCK_C)
    weight_C = tl.where(choice_C < TOP_K, tl.gather(score_P, column_C, 0), 0.0)
    if IS_NORMALISED:
        weight_C = weight_C / (tl.sum(weight_C, axis=0) + EPS)
    return weight_C * SCALE


@triton.jit
def choose_nth(logits_ptr, bias_ptr, E, index, ROUTING: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_I: tl.constexpr):
    """Return one of a token's experts as ``choose_experts`` orders them, and look no further."""
    bits_P, _, group_size = _rank(logits_ptr, bias_ptr, E, ROUTING, BLOCK_G, BLOCK_I)
    column, bits_P = _take_best(bits_P, logits_ptr, bias_ptr, ROUTING, BLOCK_G, BLOCK_G * BLOCK_I)
    for _ in range(index):
        column, bits_P = _take_best(bits_P, logits_ptr, bias_ptr, ROUTING, BLOCK_G, BLOCK_G * BLOCK_I)
    return column // BLOCK_I * group_size + column % BLOCK_I


@triton.jit
def choose_nth_by_warp(logits_ptr, E, index, BLOCK_I: tl.constexpr, WARPS: tl.constexpr):
    """As ``choose_nth``, where ``can_choose_by_warp`` says so.

    Each of the program's warps has a row of all logits, and nothing that is reduced passes between warps.
    """
    lowest = -0x7FFFFFFF - 1
    column_WP = tl.zeros([WARPS, 1], dtype=tl.int32) + tl.arange(0, BLOCK_I)[None, :]
    is_expert_WP = column_WP < E
    logit_WP = tl.load(logits_ptr + column_WP, mask=is_expert_WP, other=float("-inf"), cache_modifier=".cg")
    bits_WP = (_ordered_bits(logit_WP.to(tl.float32)) & -65536) | (BLOCK_I - 1 - column_WP)
    bits_WP = tl.where(is_expert_WP, bits_WP, lowest)
    best_W = tl.max(bits_WP, axis=1)
    for _ in range(index):
        bits_WP = tl.where(bits_WP == best_W[:, None], lowest, bits_WP)
        best_W = tl.max(bits_WP, axis=1)
    return BLOCK_I - 1 - (tl.max(best_W, axis=0) & 0xFFFF)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    stride_t,
    E,
    ROUTING: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    logits_row_ptr = logits_ptr + token * stride_t
    expert_C, chosen = choose_experts(logits_row_ptr, bias_ptr, E, ROUTING, BLOCK_G, BLOCK_I, BLOCK_C)
    weight_C = weigh_experts(chosen, bias_ptr, ROUTING, BLOCK_G, BLOCK_C)
    TOP_K: tl.constexpr = ROUTING.top_k
    choice_C = tl.arange(0, BLOCK_C)
    mask_C = choice_C < TOP_K
    tl.store(weights_ptr + token * TOP_K + choice_C, weight_C, mask=mask_C)
    tl.store(experts_ptr + token * TOP_K + choice_C, expert_C.to(tl.int64), mask=mask_C)


def choice_options(routing: Routing, num_experts: int) -> dict[str, Any]:
    """Return the launch arguments of a kernel that calls ``choose_experts``."""
    num_groups = routing.num_groups if routing.is_limited else 1
    return {
        "ROUTING": routing,
        "BLOCK_G": next_power_of_2(num_groups),
        "BLOCK_I": next_power_of_2(num_experts // num_groups),
        "BLOCK_C": next_power_of_2(routing.top_k),
    }


def can_choose_by_warp(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> bool:
    """Return whether kernels may choose by warps: logits are narrow, and rows begin at multiples of 16 bytes."""
    is_narrow = logits_TE.dtype == torch.bfloat16 and bias_E is None
    is_plain = routing.scores != "sigmoid" and not routing.is_limited
    return is_narrow and is_plain and logits_TE.stride(0) % 8 == logits_TE.storage_offset() % 8 == 0


def route(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return each token's experts as ``(weights_TK, experts_TK)``, in float32 and int64."""
    num_tokens, num_experts = logits_TE.shape
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    weights_TK = torch.empty((num_tokens, routing.top_k), dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty((num_tokens, routing.top_k), dtype=torch.int64, device=logits_TE.device)
    _route_kernel[(num_tokens,)](
        logits_TE,
        bias_E,
        weights_TK,
        experts_TK,
        logits_TE.stride(0),
        num_experts,
        **choice_options(routing, num_experts),
        num_warps=1,
        **overlap_options(logits_TE),
    )
    return weights_TK, experts_TK
