"""What LoRA adapters add to products, on a GPU (``low_rank.py``): a launch for each of the two factors.

Of few rows, the second launch is that of the product itself (``expansion_triton.py``). Of more, both follow it: they
start while the product still runs, and read what is older than it: the first its rows and factors, the second its
factors. They take all parts of a weight, all tiles of rows, and whichever adapters these have: tables on the device say
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
from strandline.kernels.gemm.launches import rows_launch
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
BLOCK_INPUTS = 256
BLOCK_INPUTS_FLOAT32 = 64
MIN_BLOCK_RANKS, MAX_BLOCK_RANKS = 16, 64
WIDE_OUTPUTS = 8192
"""From here on, programs of 128 outputs are enough to fill a GPU."""

SHRINK_ROWS = rows_launch(1, 4096, 8)
"""A program has one rank, and all of its inputs are under way at once."""


@staged
@triton.jit(do_not_specialize=["M"])
def _shrink_kernel(
    x_ptr,
    down_ptr,
    rank_ptr,
    rows_ptr,
    slots_ptr,
    out_ptr,
    M,
    K,
    span_k,
    stride_x,
    stride_slot,
    stride_rank,
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
    if not IS_EARLY:
        wait_for_previous(OVERLAPS)
    # The next launch is the second one, which reads nothing but factors before it waits for this one.
    release_next(OVERLAPS)
    slot = tl.load(slots_ptr + tile)
    is_used = slot >= 0
    if RANK_BLOCKS > 1:
        rank = tl.load(rank_ptr + slot * stride_rank + part, mask=is_used, other=0)
        is_used = tl.program_id(1) % RANK_BLOCKS * BLOCK_R < rank
    offset_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_M = tl.load(rows_ptr + offset_M)
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
    out_M = (tl.program_id(2).to(tl.int64) * M + offset_M) * (PARTS * MAX_RANK) + part * MAX_RANK
    tl.store(out_ptr + out_M[:, None] + rank_R[None, :], acc_MR, mask=is_row_M[:, None] & is_rank_R[None, :])


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
@triton.jit(do_not_specialize=["M"])
def _expand_kernel(
    hidden_ptr,
    up_ptr,
    rank_ptr,
    part_ptr,
    rows_ptr,
    slots_ptr,
    out_ptr,
    M,
    N,
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
    offset_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_M = tl.load(rows_ptr + offset_M)
    is_row_M = (row_M >= 0) & (slot >= 0)
    up_RN, rank_R, is_used_R = _load_up(0, first_part, up_ptr, rank_ptr, col_N, part_N, MAX_RANK, RANK_BLOCKS, BLOCK_R)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    out_MN_ptr = out_ptr + (row_M * stride_out)[:, None] + col_N[None, :]
    mask_MN = is_row_M[:, None] & (part_N >= 0)[None, :]
    acc_MN = tl.load(out_MN_ptr, mask=mask_MN, other=0.0).to(tl.float32)
    for index in range(count):
        hidden_MR_ptr = hidden_ptr + (offset_M.to(tl.int64) * (PARTS * MAX_RANK))[:, None] + rank_R[None, :]
        mask_MR = is_row_M[:, None] & is_used_R[None, :]
        hidden_MR = tl.load(hidden_MR_ptr, mask=mask_MR, other=0.0)
        for span in tl.static_range(1, SPANS):
            span_offset = tl.cast(span, tl.int64) * M * (PARTS * MAX_RANK)
            hidden_MR += tl.load(hidden_MR_ptr + span_offset, mask=mask_MR, other=0.0)
        acc_MN = tl.dot(hidden_MR.to(up_RN.dtype), up_RN, acc_MN, input_precision="ieee")
        if index + 1 < count:
            up_RN, rank_R, is_used_R = _load_up(
                index + 1, first_part, up_ptr, rank_ptr, col_N, part_N, MAX_RANK, RANK_BLOCKS, BLOCK_R
            )
    tl.store(out_MN_ptr, acc_MN.to(out_ptr.dtype.element_ty), mask=mask_MN)


def shrink_rows(x_TI: Tensor, term: LowRankTerm) -> Expansion:
    """Multiply a few rows with first factors; return what a product of the same rows is to add."""
    down_SQI, slots_T = term.weights.down_SPRI.flatten(1, 2), term.tiled.slots_T
    hidden_TQ = torch.empty((len(x_TI), down_SQI.shape[1]), dtype=torch.float32, device=x_TI.device)
    launch_rows(hidden_TQ, x_TI, RowMatrices(DenseWeight(down_SQI), slots_T), None, SHRINK_ROWS)
    return Expansion.of(hidden_TQ, term)


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
    num_tiles, num_rows = len(tiled.slots_U), len(tiled.rows_M)
    (_, num_parts, max_rank, num_inputs), num_outputs = weights.down_SPRI.shape, out_TO.shape[1]
    is_early = x_TI.stride(1) == 1
    x_TI = x_TI if is_early else x_TI.contiguous()
    block_k = BLOCK_INPUTS_FLOAT32 if x_TI.dtype == torch.float32 else BLOCK_INPUTS
    has_many = launches is Launches.MEASURED and num_tiles > MAX_TILES_FEW
    max_spans = MAX_SPANS_MANY if has_many else MAX_SPANS
    span = max(MIN_SPAN, cdiv(num_inputs, max_spans * BLOCK_INPUTS) * BLOCK_INPUTS)
    spans = cdiv(num_inputs, span)
    block_r = min(MAX_BLOCK_RANKS, max(MIN_BLOCK_RANKS, next_power_of_2(max_rank)))
    hidden_XMR = torch.empty((spans, num_rows, num_parts * max_rank), dtype=torch.float32, device=x_TI.device)
    common = {"MAX_RANK": max_rank, "PARTS": num_parts, "BLOCK_M": TILE_ROWS, "BLOCK_R": block_r}
    _shrink_kernel[(num_tiles, num_parts * cdiv(max_rank, block_r), spans)](
        x_TI,
        weights.down_SPRI,
        weights.rank_SP,
        tiled.rows_M,
        tiled.slots_U,
        hidden_XMR,
        num_rows,
        num_inputs,
        span,
        x_TI.stride(0),
        weights.down_SPRI.stride(0),
        weights.rank_SP.stride(0),
        IS_EARLY=is_early,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
        **common,
        **overlap_options(x_TI),
    )
    block_n = block_outputs(num_outputs)
    _expand_kernel[(num_tiles, cdiv(num_outputs, block_n))](
        hidden_XMR,
        weights.up_SOR,
        weights.rank_SP,
        weights.part_O,
        tiled.rows_M,
        tiled.slots_U,
        out_TO,
        num_rows,
        num_outputs,
        weights.up_SOR.stride(0),
        weights.rank_SP.stride(0),
        out_TO.stride(0),
        SPANS=spans,
        BLOCK_N=block_n,
        num_warps=4,
        **common,
        **overlap_options(x_TI),
    )
    return out_TO
