"""The experts in FP8 on a GPU (``block_scaled_moe.py``), organised as ``moe_triton.py``.

Few tokens: as ``block_scaled_moe_few_triton.py`` says. More: one launch quantises the tokens, unless the operation
before has done so; a tile of the first product has the features of one group, so that it also quantises what it writes.
A shared expert of the same size, of up to ``MAX_TOKENS_JOINED`` tokens, is one more expert in the same launches: all
tokens are its choices, listed behind the others'.

Invariants: as in ``moe_triton.py``; hidden features in FP8 are the same to the last bit for any tile.

Shape suffixes: as in ``moe_many_triton.py``; X groups of features.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, Summand
from strandline.kernels.expert_choices_triton import add_choices
from strandline.kernels.experts.block_scaled_moe_few_triton import mixture_few
from strandline.kernels.experts.expert_tiles import MAX_TOKENS_FEW, ExpertTile, Few, choose_by_load
from strandline.kernels.experts.moe_list_triton import list_choices
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import route
from strandline.kernels.gemm.block_scaled_tile_triton import MIN_ROWS_HOPPER, TRITON_DTYPES, multiply_tile
from strandline.kernels.gemm.block_scaled_triton import block_scaled_linear, block_scaled_linear_invariant
from strandline.kernels.gemm.linear_triton import linear
from strandline.kernels.gemm.matmul_triton import linear_invariant
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.activation_triton import silu_times, swiglu
from strandline.kernels.rowwise.quantized_rows import GROUP, QuantizedRows, Rows, flat_rows
from strandline.kernels.rowwise.quantizing_triton import quantize_groups, quantized, swiglu_quantized
from strandline.kernels.sizes import cdiv

FEW = (Few(4, 512, 1, 8, 8), Few(4, 512, 1, 8, 4))
"""For one token, and for more (benchmarks/kernels, `experts/fp8`). A program of one warp needs no barrier. Of the
second product of one token every warp has one of eight choices."""

MAX_TOKENS_JOINED = 256
"""With more tokens, a product of its own for the shared expert is faster than the programs of one expert."""


class SharedExpert(NamedTuple):
    """A shared expert that is computed as one more expert."""

    gate_up_TS: Tensor
    """Products with its gate and up projections."""
    down: ScaledWeight


TILES_DECODE = (ExpertTile(16, GROUP, 4, 3), ExpertTile(16, GROUP, 4, 3))
TILES_MIDDLE = (ExpertTile(64, GROUP, 8, 3), ExpertTile(64, GROUP, 4, 4))
TILES_PREFILL = (ExpertTile(128, GROUP, 8, 3, 2), ExpertTile(64, GROUP, 4, 4))
"""The first product always has tiles of ``GROUP`` features, which it quantises together."""


@triton.jit
def _first_of_shared(num_experts, HAS_SHARED: tl.constexpr):
    """Return a program's expert: first the shared one, which has most tokens and whose number is behind the others'."""
    expert = tl.program_id(2)
    if HAS_SHARED:
        expert = tl.where(expert == 0, num_experts, expert - 1)
    return expert.to(tl.int64)


@triton.jit
def _activate_shared(
    shared_ptr,
    hidden_ptr,
    hidden_scale_ptr,
    num_choices,
    num_tokens,
    F,
    stride_shared,
    stride_hs,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the hidden features of the shared expert, quantised, behind those of all choices."""
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    for row in range(tl.program_id(1) * BLOCK_M, num_tokens, tl.num_programs(1) * BLOCK_M):
        row_M = row + tl.arange(0, BLOCK_M)
        is_row_M = row_M < num_tokens
        mask_MN = is_row_M[:, None] & (col_N < F)[None, :]
        gate_MN_ptr = shared_ptr + row_M[:, None].to(tl.int64) * stride_shared + col_N[None, :]
        gate_MN = tl.load(gate_MN_ptr, mask=mask_MN, other=0.0).to(tl.float32)
        up_MN = tl.load(gate_MN_ptr + F, mask=mask_MN, other=0.0).to(tl.float32)
        hidden_MN, scale_M = quantize_groups(silu_times(gate_MN, up_MN, DTYPE).to(tl.float32))
        hidden_row_M = (num_choices + row_M).to(tl.int64)
        tl.store(hidden_ptr + hidden_row_M[:, None] * F + col_N[None, :], hidden_MN, mask=mask_MN)
        tl.store(hidden_scale_ptr + tl.program_id(0) * stride_hs + hidden_row_M, scale_M, mask=is_row_M)


@triton.jit
def _grouped_up_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    starts_ptr,
    choices_ptr,
    hidden_ptr,
    hidden_scale_ptr,
    shared_ptr,
    num_experts,
    num_tokens,
    stride_shared,
    stride_xs,
    stride_hs,
    stride_se,
    stride_sy,
    stride_sx,
    D,
    F,
    DTYPE: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the hidden features of an expert's choices, quantised, in the order of the list."""
    expert = _first_of_shared(num_experts, HAS_SHARED)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    if HAS_SHARED and expert == num_experts:
        sizes = (num_tokens * TOP_K, num_tokens, F, stride_shared, stride_hs)
        _activate_shared(shared_ptr, hidden_ptr, hidden_scale_ptr, *sizes, DTYPE, BLOCK_M, BLOCK_N)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * BLOCK_M
    end = tl.load(starts_ptr + tl.minimum(expert + 1, num_experts))
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    for row in range(first, end, tl.num_programs(1) * BLOCK_M):
        row_M = row + tl.arange(0, BLOCK_M)
        gate, up = multiply_tile(
            x_ptr,
            x_scale_ptr,
            weight_ptr + expert * (2 * F * D),
            scale_ptr + expert * stride_se,
            tl.load(choices_ptr + tl.minimum(row_M, end - 1)) // TOP_K,
            col_N,
            0,
            tl.cdiv(D, GROUP),
            F,
            D,
            stride_xs,
            stride_sy,
            stride_sx,
            True,
            IS_EVEN,
            SCALE_ROWS,
            IS_SWAPPED,
            BLOCK_M,
            BLOCK_N,
            GROUP,
        )
        hidden = silu_times(gate, up, DTYPE).to(tl.float32)
        hidden_MN, hidden_scale_M = quantize_groups(tl.trans(hidden) if IS_SWAPPED else hidden)
        is_row_M = row_M < end
        hidden_MN_ptr = hidden_ptr + row_M[:, None].to(tl.int64) * F + col_N[None, :]
        tl.store(hidden_MN_ptr, hidden_MN, mask=is_row_M[:, None] & (col_N < F)[None, :])
        tl.store(hidden_scale_ptr + tl.program_id(0) * stride_hs + row_M, hidden_scale_M, mask=is_row_M)


@triton.jit
def _grouped_down_kernel(
    hidden_ptr,
    hidden_scale_ptr,
    weight_ptr,
    scale_ptr,
    starts_ptr,
    choices_ptr,
    out_ptr,
    shared_weight_ptr,
    shared_scale_ptr,
    num_experts,
    num_choices,
    num_tokens,
    stride_hs,
    stride_se,
    stride_sy,
    stride_sx,
    D,
    F,
    HAS_SHARED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write what an expert makes of its choices, in the order of the tokens, and behind that the shared one's."""
    expert = _first_of_shared(num_experts, HAS_SHARED)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    first = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + tl.minimum(expert + 1, num_experts))
    weight_ptr += expert * (D * F)
    scale_ptr += expert * stride_se
    if HAS_SHARED:
        is_shared = expert == num_experts
        # Fewer choices are listed where others are of experts that are not held.
        first = tl.where(is_shared, num_choices, first)
        end = tl.where(is_shared, num_choices + num_tokens, end)
        weight_ptr = tl.where(is_shared, shared_weight_ptr, weight_ptr)
        scale_ptr = tl.where(is_shared, shared_scale_ptr, scale_ptr)
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    for row in range(first + tl.program_id(1) * BLOCK_M, end, tl.num_programs(1) * BLOCK_M):
        row_M = row + tl.arange(0, BLOCK_M)
        read_M = tl.minimum(row_M, end - 1)
        out, _ = multiply_tile(
            hidden_ptr,
            hidden_scale_ptr,
            weight_ptr,
            scale_ptr,
            read_M,
            col_N,
            0,
            tl.cdiv(F, GROUP),
            D,
            F,
            stride_hs,
            stride_sy,
            stride_sx,
            False,
            IS_EVEN,
            SCALE_ROWS,
            IS_SWAPPED,
            BLOCK_M,
            BLOCK_N,
            GROUP,
        )
        out_MN = tl.trans(out) if IS_SWAPPED else out
        choice_M = tl.load(choices_ptr + tl.minimum(read_M, num_choices - 1)).to(tl.int64)
        if HAS_SHARED:
            choice_M = tl.where(is_shared, read_M.to(tl.int64), choice_M)
        out_MN_ptr = out_ptr + choice_M[:, None] * D + col_N[None, :]
        tl.store(out_MN_ptr, out_MN.to(out_ptr.dtype.element_ty), mask=(row_M < end)[:, None] & (col_N < D)[None, :])


def block_scaled_mixture(
    x_TD: Rows,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    shared_down: DenseWeight | ScaledWeight,
    routing: Routing,
    held: range | None = None,
) -> Summand:
    """Return the weighted sum of each token's experts, and of the shared one behind its gate, in x's dtype."""
    if len(x_TD) <= MAX_TOKENS_FEW:
        arguments = (x_TD, shared_gate_up_TS, logits_TE, shared_gate_T1, gate_up, down, shared_down, routing)
        return mixture_few(*arguments, FEW[len(x_TD) > 1], held)
    chosen = route(logits_TE, None, routing)
    if len(x_TD) <= MAX_TOKENS_JOINED and can_join(shared_gate_up_TS, shared_down, down):
        shared = SharedExpert(shared_gate_up_TS, shared_down)
    elif isinstance(shared_down, ScaledWeight):
        shared = block_scaled_linear(swiglu_quantized(shared_gate_up_TS), shared_down)
    else:
        shared = linear(swiglu(shared_gate_up_TS), shared_down.values_OI)
    tiles = choose_tiles(chosen[1].numel() // logits_TE.shape[1])
    return compute_choices(x_TD, gate_up, down, *chosen, shared, shared_gate_T1, *tiles, held)


def can_join(gate_up_TS: Tensor, shared_down: DenseWeight | ScaledWeight, down: ScaledWeight) -> bool:
    """Return whether a shared expert's weight is as one of the others', and its projections lie as kernels ask."""
    return (
        isinstance(shared_down, ScaledWeight)
        and shared_down.values.shape == down.values.shape[1:]
        and shared_down.rows_per_scale == down.rows_per_scale
        and shared_down.scales.stride() == down.scales.stride()[1:]
        and gate_up_TS.stride(1) == 1
    )


def block_scaled_mixture_invariant(
    x_TD: Rows,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    shared_down: DenseWeight | ScaledWeight,
    routing: Routing,
    held: range | None = None,
) -> Summand:
    """As :func:`block_scaled_mixture`, expert by expert however few tokens there are."""
    chosen = route(logits_TE, None, routing)
    if isinstance(shared_down, ScaledWeight):
        shared_TD = block_scaled_linear_invariant(swiglu_quantized(shared_gate_up_TS), shared_down)
    else:
        shared_TD = linear_invariant(swiglu(shared_gate_up_TS), shared_down.values_OI)
    tiles = _invariant_tiles(chosen[1], down)
    return compute_choices(x_TD, gate_up, down, *chosen, shared_TD, shared_gate_T1, *tiles, held)


def block_scaled_experts_glu(
    x_TD: Rows,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> ExpertChoices:
    """Compute each token's choices, ``down(silu(gate x) * up x)``."""
    tiles = choose_tiles(experts_TK.numel() // len(down.values))
    return compute_choices(x_TD, gate_up, down, weights_TK, experts_TK, shared_TD, shared_gate_T1, *tiles, held)


def block_scaled_experts_glu_invariant(
    x_TD: Rows,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> ExpertChoices:
    """As :func:`block_scaled_experts_glu`, with tiles that all add in one order."""
    tiles = _invariant_tiles(experts_TK, down)
    return compute_choices(x_TD, gate_up, down, weights_TK, experts_TK, shared_TD, shared_gate_T1, *tiles, held)


def _invariant_tiles(experts_TK: Tensor, down: ScaledWeight) -> tuple[ExpertTile, ExpertTile]:
    return choose_by_load(experts_TK.numel() // len(down.values), TILES_MIDDLE, TILES_MIDDLE, TILES_PREFILL)


def choose_tiles(choices_per_expert: int) -> tuple[ExpertTile, ExpertTile]:
    return choose_by_load(choices_per_expert, TILES_DECODE, TILES_MIDDLE, TILES_PREFILL)


def compute_choices(
    x_TD: Rows,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared: Tensor | SharedExpert | None,
    shared_gate_T1: Tensor | None,
    up_tile: ExpertTile,
    down_tile: ExpertTile,
    held: range | None = None,
) -> ExpertChoices:
    """Compute each token's choices expert by expert, in three launches, or four if tokens come as they are.

    Args:
        shared: what the shared expert made of each token, or what it takes to compute that here; None: there is none.
        held: as in ``experts_glu``.
    """
    num_tokens, top_k = experts_TK.shape
    num_experts, num_channels, size = down.values.shape
    num_choices, device = num_tokens * top_k, x_TD.device
    rows = quantized(flat_rows(x_TD))
    listed = list_choices(experts_TK, num_experts, 0 if held is None else held.start)
    joined = shared if isinstance(shared, SharedExpert) else None
    num_rows = num_choices if joined is None else num_choices + num_tokens
    hidden_AF = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=device)
    hidden_scale_XA = torch.empty((cdiv(size, GROUP), num_rows), dtype=torch.float32, device=device)
    out_AD = torch.empty((num_rows, num_channels), dtype=x_TD.dtype, device=device)
    launch_up(rows, gate_up, listed, (hidden_AF, hidden_scale_XA), top_k, up_tile, joined)
    launch_down((hidden_AF, hidden_scale_XA), down, listed, out_AD, down_tile, joined)
    shared_TD = shared if joined is None else out_AD[num_choices:]
    return ExpertChoices(out_AD[:num_choices], weights_TK, experts_TK, shared_TD, shared_gate_T1, held, add_choices)


def launch_up(
    x: QuantizedRows,
    gate_up: ScaledWeight,
    listed: tuple[Tensor, Tensor],
    hidden: tuple[Tensor, Tensor],
    top_k: int,
    tile: ExpertTile,
    joined: SharedExpert | None = None,
) -> None:
    """Fill the quantised features ``hidden``, rows and scales, in the order of the list; then those of all tokens."""
    (num_experts, _, num_channels), size = gate_up.values.shape, hidden[0].shape[1]
    _grouped_up_kernel[(cdiv(size, GROUP), tile.split_m, num_experts + (joined is not None))](
        x.values_TI,
        x.scale_XT,
        gate_up.values,
        gate_up.scales,
        *listed,
        *hidden,
        None if joined is None else joined.gate_up_TS,
        num_experts,
        len(x),
        0 if joined is None else joined.gate_up_TS.stride(0),
        x.scale_XT.stride(0),
        hidden[1].stride(0),
        *gate_up.scales.stride(),
        num_channels,
        size,
        DTYPE=TRITON_DTYPES[x.dtype],
        TOP_K=top_k,
        HAS_SHARED=joined is not None,
        IS_EVEN=num_channels % GROUP == 0 and size % GROUP == 0,
        SCALE_ROWS=gate_up.rows_per_scale,
        **_launch_options(tile._replace(block_n=GROUP)),
        **overlap_options(x.values_TI),
    )


def launch_down(
    hidden: tuple[Tensor, Tensor],
    down: ScaledWeight,
    listed: tuple[Tensor, Tensor],
    out_AD: Tensor,
    tile: ExpertTile,
    joined: SharedExpert | None = None,
) -> None:
    """Fill ``out_AD``, in the order of the tokens."""
    num_experts, num_channels, size = down.values.shape
    num_choices = len(listed[1])
    _grouped_down_kernel[(cdiv(num_channels, tile.block_n), tile.split_m, num_experts + (joined is not None))](
        *hidden,
        down.values,
        down.scales,
        *listed,
        out_AD,
        *((None, None) if joined is None else (joined.down.values, joined.down.scales)),
        num_experts,
        num_choices,
        len(out_AD) - num_choices,
        hidden[1].stride(0),
        *down.scales.stride(),
        num_channels,
        size,
        HAS_SHARED=joined is not None,
        IS_EVEN=size % GROUP == 0 and num_channels % tile.block_n == 0,
        SCALE_ROWS=down.rows_per_scale,
        **_launch_options(tile),
        **overlap_options(out_AD),
    )


def _launch_options(tile: ExpertTile) -> dict[str, int]:
    return {**tile.options(), "GROUP": GROUP, "IS_SWAPPED": tile.block_m < MIN_ROWS_HOPPER}
