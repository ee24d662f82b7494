"""The experts in 4 bits on a GPU (``four_bit_moe.py``), organised as ``moe_triton.py``.

Few tokens: as ``four_bit_moe_few_triton.py`` says. More: weights are unpacked in registers, in every tile again. To
dequantise all experts first would take five times as many bytes as the experts have in 4 bits.

Invariants: as in ``moe_triton.py``; ``_invariant`` versions multiply in one way of tiling.

Shape suffixes: as in ``moe_many_triton.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, Summand
from strandline.kernels.expert_choices_triton import add_choices
from strandline.kernels.experts.expert_tiles import MAX_TOKENS_FEW, ExpertTile
from strandline.kernels.experts.four_bit_moe_few_triton import mixture_few
from strandline.kernels.experts.four_bit_moe_launches import FEW, choose_expert_tiles, choose_expert_tiles_invariant
from strandline.kernels.experts.moe_list_triton import list_choices
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import route
from strandline.kernels.gemm.four_bit_tile_triton import BLOCK_INPUTS, multiply_tile
from strandline.kernels.gemm.four_bit_triton import four_bit_linear, four_bit_linear_invariant
from strandline.kernels.gemm.linear_triton import linear
from strandline.kernels.gemm.matmul_triton import linear_invariant
from strandline.kernels.gemm.weights import DenseWeight, FourBitWeight
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.activation_triton import silu_times, swiglu
from strandline.kernels.rowwise.quantized_rows import flat_rows
from strandline.kernels.sizes import cdiv


@triton.jit
def _grouped_up_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    starts_ptr,
    choices_ptr,
    hidden_ptr,
    stride_x,
    stride_sn,
    stride_sx,
    num_words,
    D,
    F,
    TOP_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the hidden features of an expert's choices, in the order of the list."""
    expert = tl.program_id(2)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * BLOCK_M
    end = tl.load(starts_ptr + expert + 1)
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_N = expert.to(tl.int64) * (2 * F) + tl.minimum(col_N, F - 1)
    for row in range(first, end, tl.num_programs(1) * BLOCK_M):
        row_M = row + tl.arange(0, BLOCK_M)
        token_M = tl.load(choices_ptr + tl.minimum(row_M, end - 1)) // TOP_K
        gate_NM, up_NM = multiply_tile(
            x_ptr + token_M.to(tl.int64) * stride_x,
            weight_ptr,
            scale_ptr,
            zero_ptr,
            gate_N,
            gate_N + F,
            0,
            tl.cdiv(D, BLOCK_INPUTS),
            D,
            num_words,
            stride_sn,
            stride_sx,
            x_ptr.dtype.element_ty,
            True,
            IS_EVEN,
            BLOCK_M,
            BLOCK_N,
            GROUP,
        )
        hidden_MN = tl.trans(silu_times(gate_NM, up_NM, hidden_ptr.dtype.element_ty))
        hidden_MN_ptr = hidden_ptr + row_M[:, None].to(tl.int64) * F + col_N[None, :]
        tl.store(hidden_MN_ptr, hidden_MN, mask=(row_M < end)[:, None] & (col_N < F)[None, :])


@triton.jit
def _grouped_down_kernel(
    hidden_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    starts_ptr,
    choices_ptr,
    out_ptr,
    stride_sn,
    stride_sx,
    num_words,
    D,
    F,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write what an expert makes of its choices, in the order of the tokens."""
    expert = tl.program_id(2)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * BLOCK_M
    end = tl.load(starts_ptr + expert + 1)
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read_N = expert.to(tl.int64) * D + tl.minimum(col_N, D - 1)
    for row in range(first, end, tl.num_programs(1) * BLOCK_M):
        row_M = row + tl.arange(0, BLOCK_M)
        listed_M = tl.minimum(row_M, end - 1)
        out_NM, _ = multiply_tile(
            hidden_ptr + listed_M.to(tl.int64) * F,
            weight_ptr,
            scale_ptr,
            zero_ptr,
            read_N,
            read_N,
            0,
            tl.cdiv(F, BLOCK_INPUTS),
            F,
            num_words,
            stride_sn,
            stride_sx,
            hidden_ptr.dtype.element_ty,
            False,
            IS_EVEN,
            BLOCK_M,
            BLOCK_N,
            GROUP,
        )
        choice_M = tl.load(choices_ptr + listed_M).to(tl.int64)
        out_MN = tl.trans(out_NM).to(out_ptr.dtype.element_ty)
        out_MN_ptr = out_ptr + choice_M[:, None] * D + col_N[None, :]
        tl.store(out_MN_ptr, out_MN, mask=(row_M < end)[:, None] & (col_N < D)[None, :])


def four_bit_mixture(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    shared_down: DenseWeight | FourBitWeight,
    routing: Routing,
    held: range | None = None,
) -> Summand:
    """Return the weighted sum of each token's experts, and of the shared one behind its gate, in x's dtype."""
    if len(x_TD) <= MAX_TOKENS_FEW:
        projected = (flat_rows(shared_gate_up_TS), logits_TE, shared_gate_T1)
        return mixture_few(flat_rows(x_TD), *projected, gate_up, down, shared_down, routing, FEW, held)
    chosen = route(logits_TE, None, routing)
    if isinstance(shared_down, FourBitWeight):
        shared_TD = four_bit_linear(swiglu(shared_gate_up_TS), shared_down)
    else:
        shared_TD = linear(swiglu(shared_gate_up_TS), shared_down.values_OI)
    tiles = choose_expert_tiles(chosen[1].numel() // down.shape[0], x_TD.dtype)
    return compute_choices(x_TD, gate_up, down, *chosen, shared_TD, shared_gate_T1, *tiles, held)


def four_bit_mixture_invariant(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    shared_down: DenseWeight | FourBitWeight,
    routing: Routing,
    held: range | None = None,
) -> Summand:
    """As :func:`four_bit_mixture`, expert by expert however few tokens there are."""
    chosen = route(logits_TE, None, routing)
    if isinstance(shared_down, FourBitWeight):
        shared_TD = four_bit_linear_invariant(swiglu(shared_gate_up_TS), shared_down)
    else:
        shared_TD = linear_invariant(swiglu(shared_gate_up_TS), shared_down.values_OI)
    tiles = choose_expert_tiles_invariant(x_TD.dtype)
    return compute_choices(x_TD, gate_up, down, *chosen, shared_TD, shared_gate_T1, *tiles, held)


def four_bit_experts_glu(
    x_TD: Tensor,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> ExpertChoices:
    """Compute each token's choices, ``down(silu(gate x) * up x)``."""
    tiles = choose_expert_tiles(experts_TK.numel() // down.shape[0], x_TD.dtype)
    return compute_choices(x_TD, gate_up, down, weights_TK, experts_TK, shared_TD, shared_gate_T1, *tiles, held)


def four_bit_experts_glu_invariant(
    x_TD: Tensor,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> ExpertChoices:
    """As :func:`four_bit_experts_glu`, in one way of tiling."""
    chosen, tiles = (weights_TK, experts_TK), choose_expert_tiles_invariant(x_TD.dtype)
    return compute_choices(x_TD, gate_up, down, *chosen, shared_TD, shared_gate_T1, *tiles, held)


def compute_choices(
    x_TD: Tensor,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    up_tile: ExpertTile,
    down_tile: ExpertTile,
    held: range | None = None,
) -> ExpertChoices:
    """Compute each token's choices with these tiles, in three launches."""
    num_tokens, top_k = experts_TK.shape
    num_held, num_channels, size = down.shape
    listed = list_choices(experts_TK, num_held, 0 if held is None else held.start)
    hidden_AF = torch.empty((num_tokens * top_k, size), dtype=x_TD.dtype, device=x_TD.device)
    out_AD = torch.empty((num_tokens * top_k, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    launch_up(flat_rows(x_TD), gate_up, *listed, hidden_AF, top_k, up_tile)
    launch_down(hidden_AF, down, *listed, out_AD, down_tile)
    return ExpertChoices(out_AD, weights_TK, experts_TK, shared_TD, shared_gate_T1, held, add_choices)


def launch_up(
    x_TD: Tensor,
    gate_up: FourBitWeight,
    starts_E: Tensor,
    choices_A: Tensor,
    hidden_AF: Tensor,
    top_k: int,
    tile: ExpertTile,
) -> None:
    """Fill ``hidden_AF``, in the order of the list."""
    (num_experts, _, num_channels), size = gate_up.shape, hidden_AF.shape[1]
    _grouped_up_kernel[(cdiv(size, tile.block_n), tile.split_m, num_experts)](
        x_TD,
        gate_up.words,
        gate_up.scales,
        gate_up.zeros,
        starts_E,
        choices_A,
        hidden_AF,
        x_TD.stride(0),
        *gate_up.scales.stride()[1:],
        gate_up.words.shape[-1],
        num_channels,
        size,
        TOP_K=top_k,
        IS_EVEN=num_channels % BLOCK_INPUTS.value == 0,
        GROUP=gate_up.group,
        **tile.options(),
        **overlap_options(hidden_AF),
    )


def launch_down(
    hidden_AF: Tensor, down: FourBitWeight, starts_E: Tensor, choices_A: Tensor, out_AD: Tensor, tile: ExpertTile
) -> None:
    """Fill ``out_AD``, in the order of the tokens."""
    num_experts, num_channels, size = down.shape
    _grouped_down_kernel[(cdiv(num_channels, tile.block_n), tile.split_m, num_experts)](
        hidden_AF,
        down.words,
        down.scales,
        down.zeros,
        starts_E,
        choices_A,
        out_AD,
        *down.scales.stride()[1:],
        down.words.shape[-1],
        num_channels,
        size,
        IS_EVEN=size % BLOCK_INPUTS.value == 0,
        GROUP=down.group,
        **tile.options(),
        **overlap_options(out_AD),
    )
