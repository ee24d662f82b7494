"""Mixtures of experts on a GPU, without sorting and without waiting for the device.

Few tokens (at most ``MAX_TOKENS_FEW``): as ``moe_few_triton.py`` says. More: one launch lists every expert's choices
(a choice is one token's k-th expert), then one program per expert and tile of features walks through that expert's
choices, so that an expert's weights are read about once; then the choices of a token are added up. Grids depend on
shapes alone: programs without work leave at once.

Invariants: a token's result depends on that token alone, though its last bits may differ between the two ways; no
more than ``T K`` choices are listed, and experts that no token chose are not read.

Shape suffixes: as in ``moe.py``; in kernels M choices, N features, K the dimension that a matrix product sums over, C a
token's choices (``top_k``, padded to a power of two).
"""
# mypy: ignore-errors

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.activation_triton import relu_squared, squared_relu, swiglu
from strandline.kernels.expert_tiles import MAX_TOKENS_FEW, choose_by_load
from strandline.kernels.linear_triton import linear, silu_times
from strandline.kernels.matmul_triton import linear_invariant
from strandline.kernels.moe_few_triton import Shared, choose_few, mixture_few
from strandline.kernels.moe_list_triton import list_choices
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.router import Routing
from strandline.kernels.router_triton import route
from strandline.kernels.sizes import cdiv
from strandline.kernels.weights import DenseWeight


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

TILES_PREFILL = (Tile(128, 128, 64, 8, 4, 2), Tile(128, 256, 64, 8, 3, 2))
"""Hundreds of choices per expert: tiles as large as the registers allow."""

TILES_FLOAT32 = (Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2))
"""Exact GEMMs, without tensor cores: for tests."""

BLOCK_SUM, WARPS_SUM = 512, 2
"""Features of a program that adds up choices: 16 bytes per thread and choice."""


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
    is_col_N = col_N < F
    offset_K = tl.arange(0, BLOCK_K)
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    first_ptr = weight_ptr + expert.to(tl.int64) * (NUM_PARTS * F * D)
    gate_KN_ptr = first_ptr + offset_K[:, None] + col_N[None, :].to(tl.int64) * D
    up_KN_ptr = gate_KN_ptr + (NUM_PARTS - 1) * F * D
    dtype = hidden_ptr.dtype.element_ty
    for row in range(first, end, tl.num_programs(1) * BLOCK_M):
        row_M = row + tl.arange(0, BLOCK_M)
        is_row_M = row_M < end
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
        hidden_MN_ptr = hidden_ptr + row_M[:, None].to(tl.int64) * F + col_N[None, :]
        hidden_MN = silu_times(gate_MN, up_MN, dtype) if IS_GATED else squared_relu(up_MN, dtype)
        tl.store(hidden_MN_ptr, hidden_MN, mask=is_row_M[:, None] & is_col_N[None, :])


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
    OVERLAPS: tl.constexpr,
):
    """Write what an expert makes of its choices, in the order of the tokens."""
    expert = tl.program_id(2)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
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
    experts_ptr,
    first_expert,
    num_held,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    col_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col_N = col_N < D
    dtype = out_ptr.dtype.element_ty
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    if shared_ptr is not None:
        shared_N = tl.load(shared_ptr + token * stride_shared + col_N, mask=is_col_N, other=0.0).to(tl.float32)
        if shared_gate_ptr is not None:
            gate = tl.load(shared_gate_ptr + token * stride_gate).to(tl.float32)
            shared_N *= tl.sigmoid(gate).to(dtype).to(tl.float32)
    out_N = tl.zeros([BLOCK_N], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + choice).to(tl.float32)
        choice_ptr = choice_out_ptr + (token * TOP_K + choice) * D
        is_added_N = is_col_N
        if IS_DIVIDED:
            expert = tl.load(experts_ptr + token * TOP_K + choice) - first_expert
            is_added_N = is_col_N & (expert >= 0) & (expert < num_held)
        choice_N = tl.load(choice_ptr + col_N, mask=is_added_N, other=0.0, eviction_policy="evict_first")
        out_N += choice_N.to(tl.float32) * weight
    if shared_ptr is not None:
        out_N = out_N.to(dtype).to(tl.float32) + shared_N
    tl.store(out_ptr + token * D + col_N, out_N.to(dtype), mask=is_col_N)


def mixture(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor | None,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down: DenseWeight | None,
    routing: Routing,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, and of the shared one behind its gate, in x's dtype.

    The weights are dense; the other inputs may be views with dense rows.
    """
    shared = _shared(shared_gate_up_TS, shared_gate_T1, shared_down)
    return _mixture(x_TD, gate_up_EFD, down_EDF, shared, swiglu, (logits_TE, bias_E, routing), held)


def mixture_invariant(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor | None,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down: DenseWeight | None,
    routing: Routing,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """As :func:`mixture`, expert by expert however few tokens there are."""
    shared = _shared(shared_gate_up_TS, shared_gate_T1, shared_down)
    return _mixture_invariant(x_TD, gate_up_EFD, down_EDF, shared, swiglu, (logits_TE, bias_E, routing), held)


def mixture_relu_squared(
    x_TD: Tensor,
    shared_up_TS: Tensor | None,
    logits_TE: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down: DenseWeight | None,
    routing: Routing,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """As :func:`mixture`, of experts without a gate; ``shared_up_TS``, which is dense, may be overwritten."""
    shared = _shared(shared_up_TS, None, shared_down)
    return _mixture(x_TD, up_EFD, down_EDF, shared, relu_squared, (logits_TE, bias_E, routing), held)


def mixture_relu_squared_invariant(
    x_TD: Tensor,
    shared_up_TS: Tensor | None,
    logits_TE: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down: DenseWeight | None,
    routing: Routing,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """As :func:`mixture_relu_squared`, expert by expert however few tokens there are."""
    shared = _shared(shared_up_TS, None, shared_down)
    return _mixture_invariant(x_TD, up_EFD, down_EDF, shared, relu_squared, (logits_TE, bias_E, routing), held)


def _shared(projected_TS: Tensor | None, gate_T1: Tensor | None, down: DenseWeight | None) -> Shared | None:
    return None if projected_TS is None or down is None else Shared(projected_TS, gate_T1, down.values_OI)


def _mixture(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    shared: Shared | None,
    activate: Callable[[Tensor], Tensor],
    router: tuple[Tensor, Tensor | None, Routing],
    held: range | None,
) -> Tensor:
    """Compute a mixture, choice by choice or expert by expert.

    Args:
        activate: what the shared expert does to its projections.
        router: arguments of ``route``.
    """
    (logits_TE, bias_E, routing), size = router, down_EDF.shape[2]
    if len(x_TD) <= MAX_TOKENS_FEW:
        shared_size = 0 if shared is None else shared.down_DS.shape[1]
        kind = {"is_gated": up_EFD.shape[1] == 2 * size, "is_divided": held is not None}
        few = choose_few(len(x_TD), routing.top_k, size, shared_size, **kind)
        if few is not None:
            return mixture_few(x_TD, logits_TE, up_EFD, down_EDF, shared, routing, few, bias_E, held)
    chosen = route(*router)
    shared_TD = None if shared is None else linear(activate(shared.projected_TS), shared.down_DS)
    gate_T1 = None if shared is None else shared.gate_T1
    return experts(x_TD, up_EFD, down_EDF, *chosen, shared_TD, gate_T1, held)


def _mixture_invariant(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    shared: Shared | None,
    activate: Callable[[Tensor], Tensor],
    router: tuple[Tensor, Tensor | None, Routing],
    held: range | None,
) -> Tensor:
    """Compute a mixture expert by expert; arguments as above."""
    chosen = route(*router)
    shared_TD = None if shared is None else linear_invariant(activate(shared.projected_TS), shared.down_DS)
    gate_T1 = None if shared is None else shared.gate_T1
    return experts_invariant(x_TD, up_EFD, down_EDF, *chosen, shared_TD, gate_T1, held)


def experts(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None = None,
    shared_gate_T1: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """Return what ``moe.experts_glu`` does, or ``moe.experts_relu_squared`` if there are no rows of gates.

    Weights, choices and both experts' tensors are dense; the rest may be views with dense rows.
    """
    tiles = _tiles(x_TD, experts_TK, up_EFD, TILES_DECODE)
    return experts_many(x_TD, up_EFD, down_EDF, weights_TK, experts_TK, shared_TD, shared_gate_T1, *tiles, held)


def experts_invariant(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None = None,
    shared_gate_T1: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """As :func:`experts`, with tiles that all add in one order."""
    tiles = _tiles(x_TD, experts_TK, up_EFD, TILES_MIDDLE)
    return experts_many(x_TD, up_EFD, down_EDF, weights_TK, experts_TK, shared_TD, shared_gate_T1, *tiles, held)


def _tiles(x_TD: Tensor, experts_TK: Tensor, gate_up_EFD: Tensor, few: tuple[Tile, Tile]) -> tuple[Tile, Tile]:
    """Return the tiles of both GEMMs; ``few`` are those for few choices per expert."""
    if x_TD.dtype == torch.float32:
        return TILES_FLOAT32
    return choose_by_load(experts_TK.numel() // len(gate_up_EFD), few, TILES_MIDDLE, TILES_PREFILL)


def experts_many(
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
) -> Tensor:
    """Compute ``experts`` with these tiles, in four launches."""
    first_expert = 0 if held is None else held.start
    num_tokens, top_k = experts_TK.shape
    num_channels, size = down_EDF.shape[1:]
    starts_E, choices_A = list_choices(experts_TK, len(down_EDF), first_expert)
    hidden_AF = torch.empty((num_tokens * top_k, size), dtype=x_TD.dtype, device=x_TD.device)
    out_AD = torch.empty((num_tokens * top_k, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    launch_up(x_TD, up_EFD, starts_E, choices_A, hidden_AF, top_k, up)
    launch_down(hidden_AF, down_EDF, starts_E, choices_A, out_AD, down)
    return add_choices(out_AD, (weights_TK, experts_TK), shared_TD, shared_gate_T1, held)


def add_choices(
    out_AD: Tensor,
    chosen: tuple[Tensor, Tensor],
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> Tensor:
    """Return the weighted sum of each token's choices, and of the shared expert behind its gate.

    Args:
        out_AD: what experts made of choices, in the order of the tokens.
        chosen: ``weights_TK`` and ``experts_TK``.
        shared_TD: what the shared expert made of each token; None: there is none.
        shared_gate_T1: None: the shared expert's part is added as it is.
        held: as in ``experts_glu``.
    """
    weights_TK, experts_TK = chosen
    (num_tokens, top_k), num_channels = experts_TK.shape, out_AD.shape[1]
    out_TD = torch.empty((num_tokens, num_channels), dtype=out_AD.dtype, device=out_AD.device)
    _sum_kernel[(num_tokens, cdiv(num_channels, BLOCK_SUM))](
        out_AD,
        weights_TK,
        shared_TD,
        shared_gate_T1,
        out_TD,
        0 if shared_TD is None else shared_TD.stride(0),
        0 if shared_gate_T1 is None else shared_gate_T1.stride(0),
        num_channels,
        experts_TK,
        0 if held is None else held.start,
        0 if held is None else len(held),
        TOP_K=top_k,
        BLOCK_N=BLOCK_SUM,
        IS_DIVIDED=held is not None,
        num_warps=WARPS_SUM,
        **overlap_options(out_TD),
    )
    return out_TD


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
    return {**blocks, "num_warps": tile.warps, "num_stages": tile.stages}
