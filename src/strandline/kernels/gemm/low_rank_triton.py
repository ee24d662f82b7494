"""What LoRA adapters add to products, on a GPU (``low_rank.py``): a launch for each of the two factors.

Where our own kernels multiply, the second launch is that of the product itself (``expansion_triton.py``). Torch's
product is followed by both: they read what is older than it: the first its rows and factors, the second its factors.
They take all parts of a weight, all tiles of rows, and whichever adapters these have: tables on the device say
which, so that a CUDA graph serves any.

The sums over inputs are divided into spans, with fixed launches by the number of inputs alone: a row's result depends
on that row alone, to the last bit.

Shape suffixes: as in ``low_rank.py``; X spans, Q ranks of all parts; in kernels M rows of a tile, N outputs, K inputs.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm.expansion_triton import Expansion
from strandline.kernels.gemm.formats.launches import rows_launch
from strandline.kernels.gemm.low_rank import TILE_ROWS, AdapterWeights, LowRankTerm, TiledRows
from strandline.kernels.gemm.rows_triton import RowMatrices, launch_rows
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2
from strandline.kernels.stages_triton import staged

MIN_SPAN = 256
MAX_SPANS = 16
MAX_SPANS_MANY = 2
MAX_TILES_FEW = 8
"""Up to this many tiles, programs have one block of inputs each, so that all wait for memory at once; further tiles are
enough programs, and to add up spans takes longer."""

MAX_SPANS_BEFORE = 4
"""Before a product, each of whose programs reads all spans."""

BLOCK_INPUTS = 256
BLOCK_INPUTS_FLOAT32 = 64
MIN_BLOCK_RANKS, MAX_BLOCK_RANKS = 16, 64
WIDE_OUTPUTS = 8192
"""From here on, programs of 128 outputs are enough to fill a GPU."""

SHRINK_ONE = rows_launch(1, 16384, 8)
SHRINK_SEVERAL = rows_launch(1, 4096, 8)
"""For one row and for several: a program has one rank, and all of its inputs are under way at once."""


@staged
@triton.jit
def _shrink_kernel(
    x_ptr,
    down_ptr,
    rank_ptr,
    rows_ptr,
    slots_ptr,
    out_ptr,
    K,
    span_k,
    stride_x,
    stride_slot,
    stride_rank,
    stride_span,
    stride_hidden,
    MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write a tile of rows times some ranks of a part, over one span of the inputs."""
    tile = tl.program_id(0)
    RANK_BLOCKS: tl.constexpr = (MAX_RANK + BLOCK_R - 1) // BLOCK_R
    part = tl.program_id(1) // RANK_BLOCKS
    rank_R = tl.program_id(1) % RANK_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(slots_ptr + tile)
    row_M = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    if not IS_EARLY:
        wait_for_previous(OVERLAPS)
    # What the next launch reads before it waits for this one is factors, or, if it is the product, the rows, too.
    release_next(OVERLAPS)
    is_used = slot >= 0
    if RANK_BLOCKS > 1:
        rank = tl.load(rank_ptr + slot * stride_rank + part, mask=is_used, other=0)
        is_used = tl.program_id(1) % RANK_BLOCKS * BLOCK_R < rank
    is_row_M = row_M >= 0
    offset_K = tl.arange(0, BLOCK_K)
    x_MK_ptr = x_ptr + (row_M * stride_x)[:, None] + offset_K[None, :]
    down_ptr += tl.maximum(slot, 0) * stride_slot + part.to(tl.int64) * MAX_RANK * K
    down_RK_ptr = down_ptr + (rank_R.to(tl.int64) * K)[:, None] + offset_K[None, :]
    # Ranks that the adapter does not have get sums that are not read: to ask for its rank first would take longer.
    is_rank_R = rank_R < MAX_RANK
    first = tl.program_id(2) * span_k
    end = tl.where(is_used, tl.minimum(first + span_k, K), first)
    acc_MR = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for start in range(first, end, BLOCK_K):
        is_K = start + offset_K < K
        x_MK = tl.load(x_MK_ptr + start, mask=is_row_M[:, None] & is_K[None, :], other=0.0)
        down_RK = tl.load(down_RK_ptr + start, mask=is_rank_R[:, None] & is_K[None, :], other=0.0)
        acc_MR = tl.dot(x_MK, tl.trans(down_RK), acc_MR, input_precision="ieee")
    if IS_EARLY:
        wait_for_previous(OVERLAPS)
    out_M_ptr = out_ptr + tl.program_id(2).to(tl.int64) * stride_span + row_M * stride_hidden + part * MAX_RANK
    # Unused tiles may name any rows.
    mask_MR = (is_row_M & (slot >= 0))[:, None] & is_rank_R[None, :]
    tl.store(out_M_ptr[:, None] + rank_R[None, :], acc_MR, mask=mask_MR)


@triton.jit
def _load_up(
    index,
    first_part,
    up_ptr,
    rank_ptr,
    col_N,
    part_N,
    MAX_RANK: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return the second factors of one part's outputs, and which ranks these are; zeros for other outputs."""
    part = first_part + index // RANK_BLOCKS
    rank_R = index % RANK_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    rank = tl.load(rank_ptr + part)
    up_RN_ptr = up_ptr + (col_N.to(tl.int64) * MAX_RANK)[None, :] + rank_R[:, None]
    up_RN = tl.load(up_RN_ptr, mask=(part_N == part)[None, :] & (rank_R < MAX_RANK)[:, None], other=0.0)
    # Not by the mask above: both loads are under way at once.
    up_RN = tl.where((rank_R < rank)[:, None], up_RN, 0.0)
    return up_RN, part * MAX_RANK + rank_R, rank_R < rank


@staged
@triton.jit
def _expand_kernel(
    hidden_ptr,
    up_ptr,
    rank_ptr,
    part_ptr,
    rows_ptr,
    slots_ptr,
    out_ptr,
    N,
    stride_span,
    stride_hidden,
    stride_slot,
    stride_rank,
    stride_out,
    MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add the product with second factors to a tile of outputs."""
    tile = tl.program_id(0)
    col_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part_N = tl.load(part_ptr + col_N, mask=col_N < N, other=-1)
    first_part = tl.min(tl.where(part_N < 0, PARTS, part_N))
    last_part = tl.max(part_N)
    slot = tl.load(slots_ptr + tile)
    RANK_BLOCKS: tl.constexpr = (MAX_RANK + BLOCK_R - 1) // BLOCK_R
    count = tl.where(slot >= 0, tl.maximum(last_part + 1 - first_part, 0) * RANK_BLOCKS, 0)
    # Where there is nothing to add, the first part of the first slot is read for nothing.
    first_part = tl.where(count > 0, first_part, 0)
    rank_ptr += tl.maximum(slot, 0) * stride_rank
    up_ptr += tl.maximum(slot, 0) * stride_slot
    row_M = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    is_row_M = (row_M >= 0) & (slot >= 0)
    up_RN, rank_R, is_used_R = _load_up(0, first_part, up_ptr, rank_ptr, col_N, part_N, MAX_RANK, RANK_BLOCKS, BLOCK_R)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    out_MN_ptr = out_ptr + (row_M * stride_out)[:, None] + col_N[None, :]
    mask_MN = is_row_M[:, None] & (part_N >= 0)[None, :]
    acc_MN = tl.load(out_MN_ptr, mask=mask_MN, other=0.0).to(tl.float32)
    for index in range(count):
        hidden_MR_ptr = hidden_ptr + (row_M * stride_hidden)[:, None] + rank_R[None, :]
        mask_MR = is_row_M[:, None] & is_used_R[None, :]
        hidden_MR = tl.load(hidden_MR_ptr, mask=mask_MR, other=0.0)
        for span in tl.static_range(1, SPANS):
            hidden_MR += tl.load(hidden_MR_ptr + tl.cast(span, tl.int64) * stride_span, mask=mask_MR, other=0.0)
        acc_MN = tl.dot(hidden_MR.to(up_RN.dtype), up_RN, acc_MN, input_precision="ieee")
        if index + 1 < count:
            up_RN, rank_R, is_used_R = _load_up(
                index + 1, first_part, up_ptr, rank_ptr, col_N, part_N, MAX_RANK, RANK_BLOCKS, BLOCK_R
            )
    tl.store(out_MN_ptr, acc_MN.to(out_ptr.dtype.element_ty), mask=mask_MN)


def shrink_rows(x_TI: Tensor, term: LowRankTerm) -> Expansion:
    """Multiply a few rows with first factors; return what the kernel of few rows is to add to a product of these."""
    down_SQI, slots_T = term.weights.down_SPRI.flatten(1, 2), term.tiled.slots_T
    hidden_TQ = torch.empty((len(x_TI), down_SQI.shape[1]), dtype=torch.float32, device=x_TI.device)
    launch = SHRINK_ONE if len(x_TI) == 1 else SHRINK_SEVERAL
    launch_rows(hidden_TQ, x_TI, RowMatrices(DenseWeight(down_SQI), slots_T), None, launch)
    return Expansion.of(hidden_TQ.unsqueeze(0), term)


def shrink_tiles(x_TI: Tensor, term: LowRankTerm) -> Expansion:
    """Multiply rows with first factors; return what the kernel of tiles is to add to a product of these."""
    return Expansion.of(_shrink(x_TI, *term, max_spans=MAX_SPANS_BEFORE, is_early=False), term)


def _shrink(x_TI: Tensor, weights: AdapterWeights, tiled: TiledRows, *, max_spans: int, is_early: bool) -> Tensor:
    """Return the rows times first factors, ``[X, T, Q]``; those without an adapter are not written.

    Args:
        is_early: the launch just before is not that of ``x``, which may be read before that launch has ended.
    """
    (_, num_parts, max_rank, num_inputs), num_rows = weights.down_SPRI.shape, len(x_TI)
    block_k = BLOCK_INPUTS_FLOAT32 if x_TI.dtype == torch.float32 else BLOCK_INPUTS
    span = max(MIN_SPAN, cdiv(num_inputs, max_spans * BLOCK_INPUTS) * BLOCK_INPUTS)
    spans = cdiv(num_inputs, span)
    block_r = block_ranks(max_rank)
    # Kernels are compiled once for all strides that are multiples of 16.
    padded = cdiv(num_parts * max_rank, 16) * 16
    hidden_XTQ = torch.empty((spans, num_rows, padded), dtype=torch.float32, device=x_TI.device)
    _shrink_kernel[(len(tiled.slots_U), num_parts * cdiv(max_rank, block_r), spans)](
        x_TI,
        weights.down_SPRI,
        weights.rank_SP,
        tiled.rows_M,
        tiled.slots_U,
        hidden_XTQ,
        num_inputs,
        span,
        x_TI.stride(0),
        weights.down_SPRI.stride(0),
        weights.rank_SP.stride(0),
        *hidden_XTQ.stride()[:2],
        IS_EARLY=is_early,
        MAX_RANK=max_rank,
        PARTS=num_parts,
        BLOCK_M=TILE_ROWS,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
        **overlap_options(x_TI),
    )
    return hidden_XTQ


def block_ranks(max_rank: int) -> int:
    """Return how many ranks a program multiplies with at a time."""
    return min(MAX_BLOCK_RANKS, max(MIN_BLOCK_RANKS, next_power_of_2(max_rank)))


def block_outputs(num_outputs: int) -> int:
    """Return how many outputs a program adds to."""
    return 128 if num_outputs >= WIDE_OUTPUTS else 64


def add_low_rank(
    out_TO: Tensor,
    x_TI: Tensor,
    weights: AdapterWeights,
    tiled: TiledRows,
    *,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """Triton version of :func:`strandline.kernels.gemm.low_rank.add_low_rank`. Sums are rounded before they are
    multiplied with the second factors, as those are.

    The launch just before this must be of the product, not of ``x``, which may be read before it has ended.
    """
    (_, num_parts, max_rank, _), num_outputs = weights.down_SPRI.shape, out_TO.shape[1]
    is_early = x_TI.stride(1) == 1
    x_TI = x_TI if is_early else x_TI.contiguous()
    has_many = launches is Launches.MEASURED and len(tiled.slots_U) > MAX_TILES_FEW
    max_spans = MAX_SPANS_MANY if has_many else MAX_SPANS
    hidden_XTQ = _shrink(x_TI, weights, tiled, max_spans=max_spans, is_early=is_early)
    block_n = block_outputs(num_outputs)
    _expand_kernel[(len(tiled.slots_U), cdiv(num_outputs, block_n))](
        hidden_XTQ,
        weights.up_SOR,
        weights.rank_SP,
        weights.part_O,
        tiled.rows_M,
        tiled.slots_U,
        out_TO,
        num_outputs,
        *hidden_XTQ.stride()[:2],
        weights.up_SOR.stride(0),
        weights.rank_SP.stride(0),
        out_TO.stride(0),
        MAX_RANK=max_rank,
        PARTS=num_parts,
        SPANS=len(hidden_XTQ),
        BLOCK_M=TILE_ROWS,
        BLOCK_N=block_n,
        BLOCK_R=block_ranks(max_rank),
        num_warps=4,
        **overlap_options(x_TI),
    )
    return out_TO
