"""A few tokens of Gated DeltaNet per sequence in one Triton kernel, one token after the other.

What verifies drafts: logged tokens, the certain token, a cut that stores the state, then drafts. A program owns
``BLOCK_V`` value channels of one head of one sequence, reads its tile of the state once, keeps it in registers over all
tokens, and writes it at cuts and at the end. So the state passes through memory once in each direction however many
drafts there are. ``src`` may be the same sequence's ``dst``, or the slot of one of its cuts.

The rows of a sequence follow each other. While a program computes one token, the next one's inputs are on their way.
Outputs of the step's own tokens are written to their rows among these; those of logged tokens are not stored.

Shape suffixes as in ``gdn.py``; R rows, of logged tokens and the step's own; in the kernel F rows of the step
that a program may have to fill with zeros.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import RerunBatch, Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.recurrences.chunkwise import MIN_LOG_DECAY
from strandline.kernels.recurrences.conv1d_rerun_triton import row_tables
from strandline.kernels.recurrences.gdn import L2_NORM_EPS, GatedDeltaInputs
from strandline.kernels.recurrences.gdn_decode_triton import _log_decay_of
from strandline.kernels.sizes import cdiv, next_power_of_2, strides


class Short(NamedTuple):
    """Launch parameters of the kernel."""

    block_v: int
    num_warps: int
    registers: int | None
    """Most of a thread's; None: as many as the compiler likes."""
    skips_logged: bool
    """Whether a branch spares what only the outputs of logged tokens need; else these are computed and not stored."""


FEW = Short(block_v=16, num_warps=1, registers=168, skips_logged=True)
"""For batches that do not fill the GPU. One warp: sums over K end in shuffles, with no barrier."""

FEW_SEQUENCES = 32

MANY = Short(block_v=16, num_warps=1, registers=128, skips_logged=False)
"""128 registers hold the tile and what is under way without spills, and let 16 programs share a multiprocessor; the
branch would take 168 (benchmarks/kernels, `gdn/verify`)."""


def choose_launch(num_sequences: int) -> Short:
    """Return the launch for a batch."""
    return FEW if num_sequences <= FEW_SEQUENCES else MANY


def gdn_prefill_short(
    inputs: GatedDeltaInputs,
    state_SHKV: Tensor,
    slots: Slots,
    chunks: ChunkTable,
    rerun: RerunBatch | None = None,
    launch: Short | None = None,
) -> Tensor:
    """As ``gdn.gdn_prefill``, fast for a few tokens per sequence; rows outside all chunks are left unwritten.

    Rows of a padded step that belong to no token get zeros.
    """
    *tensors, max_beta = inputs
    q_TGK, k_TGK, v_THV, a_TH, b_TH, _, _ = tensors
    launch = launch or choose_launch(chunks.num_sequences)
    num_rows, num_heads, value_dim = v_THV.shape
    num_key_heads, key_dim = k_TGK.shape[1:]
    if rerun is None:
        num_tokens, source_R, step_rows_T, num_filled = num_rows, None, None, 0
    else:
        num_tokens, source_R, step_rows_T = len(rerun.step_rows_T), row_tables(rerun)[0], rerun.step_rows_T
        num_filled = next_power_of_2(cdiv(num_tokens, chunks.num_sequences)) if rerun.is_padded else 0
    out_THV = torch.empty((num_tokens, num_heads, value_dim), dtype=q_TGK.dtype, device=q_TGK.device)
    block_v = min(launch.block_v, next_power_of_2(value_dim))
    _short_kernel[(cdiv(value_dim, block_v), num_heads, chunks.num_sequences)](
        *tensors,
        state_SHKV,
        *slots,
        chunks.first_chunks_N1,
        chunks.starts_C,
        chunks.lengths_C,
        chunks.cut_slots_C,
        source_R,
        step_rows_T,
        out_THV,
        num_rows,
        num_tokens,
        *strides(q_TGK, k_TGK, v_THV, a_TH, b_TH),
        state_SHKV.stride(0),
        G=num_key_heads,
        H=num_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        SCALE=key_dim**-0.5,
        EPS=L2_NORM_EPS,
        MIN_LOG_DECAY=MIN_LOG_DECAY,
        MAX_BETA=max_beta,
        FILL=num_filled,
        SKIPS_LOGGED=launch.skips_logged and rerun is not None,
        num_warps=launch.num_warps,
        maxnreg=launch.registers,
        **overlap_options(q_TGK),
    )
    return out_THV


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(
    do_not_specialize=["num_rows", "num_step_rows"],
    do_not_specialize_on_alignment=[
        "src_ptr", "dst_ptr", "first_chunks_ptr", "starts_ptr", "lengths_ptr", "cut_slots_ptr", "source_ptr",
        "step_rows_ptr",
    ],
)  # fmt: skip
def _short_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    src_ptr,
    dst_ptr,
    first_chunks_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    source_ptr,
    step_rows_ptr,
    out_ptr,
    num_rows,
    num_step_rows,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    a_row_stride,
    b_row_stride,
    slot_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    MIN_LOG_DECAY: tl.constexpr,
    MAX_BETA: tl.constexpr,
    FILL: tl.constexpr,
    SKIPS_LOGGED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Carry ``BLOCK_V`` value channels of a head through the tokens of a sequence."""
    first_column = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    key_head = head // (H // G)
    row_K = tl.arange(0, BLOCK_K)
    column_V = tl.arange(0, BLOCK_V)
    is_row_K = row_K < K
    is_column_V = first_column + column_V < V
    is_tile_KV = is_row_K[:, None] & is_column_V[None, :]
    tile_KV = row_K[:, None] * V + column_V[None, :]
    tile_ptr = state_ptr + head * (K * V) + first_column

    first_chunk = tl.load(first_chunks_ptr + sequence)
    end_chunk = tl.load(first_chunks_ptr + sequence + 1)
    src = tl.load(src_ptr + sequence)
    dst = tl.load(dst_ptr + sequence)
    state_KV = tl.load(tile_ptr + src * slot_stride + tile_KV, mask=is_tile_KV & (src != 0), other=0.0).to(tl.float32)
    has_rows = first_chunk < end_chunk
    row = tl.load(starts_ptr + first_chunk, mask=has_rows, other=0)
    end = tl.load(starts_ptr + end_chunk - 1, mask=has_rows, other=0)
    end += tl.load(lengths_ptr + end_chunk - 1, mask=has_rows, other=0)
    A_log, dt_bias = tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head)
    # The previous kernel may write inputs, and the table of sources; states and chunks are older.
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    q_ptr += key_head * q_head_stride + row_K
    k_ptr += key_head * k_head_stride + row_K
    v_ptr += head * v_head_stride + first_column + column_V
    a_ptr += head
    b_ptr += head
    out_ptr += head * V + first_column + column_V
    if FILL > 0:
        step_row_F = sequence + tl.arange(0, FILL) * tl.num_programs(2)
        is_row_F = step_row_F < num_step_rows
        is_filler_F = is_row_F & (tl.load(step_rows_ptr + step_row_F, mask=is_row_F, other=0) == num_rows - 1)
        zeros_FV = tl.zeros([FILL, BLOCK_V], dtype=out_ptr.dtype.element_ty)
        filler_ptrs = out_ptr[None, :] + (step_row_F * (H * V))[:, None]
        tl.store(filler_ptrs, zeros_FV, mask=is_filler_F[:, None] & is_column_V[None, :])

    tokens = (q_ptr, k_ptr, v_ptr, a_ptr, b_ptr)
    strides = (q_row_stride, k_row_stride, v_row_stride, a_row_stride, b_row_stride)
    q_K, k_K, v_V, a, b, source = _load_token(source_ptr, *tokens, *strides, row, row < end, is_row_K, is_column_V)
    for chunk in range(first_chunk, end_chunk):
        num_tokens = tl.load(lengths_ptr + chunk)
        cut = tl.load(cut_slots_ptr + chunk)
        for _ in range(num_tokens):
            row += 1
            next_q_K, next_k_K, next_v_V, next_a, next_b, next_source = _load_token(
                source_ptr, *tokens, *strides, row, row < end, is_row_K, is_column_V
            )
            decay = tl.exp(_log_decay_of(a.to(tl.float32), A_log, dt_bias, MIN_LOG_DECAY))
            beta = MAX_BETA / (1.0 + tl.exp(-b.to(tl.float32)))
            k_K = k_K.to(tl.float32)
            k_scale = 1.0 / tl.sqrt(tl.sum(k_K * k_K, 0) + EPS)
            # Both sums are of the state as it was (``gdn_decode_triton.py``); neither waits for the lengths of vectors.
            predicted_V = tl.sum(state_KV * k_K[:, None], 0) * (k_scale * decay)
            written_V = (v_V.to(tl.float32) - predicted_V) * (beta * k_scale)
            output = (out_ptr + source * (H * V), state_KV, q_K.to(tl.float32), k_K, written_V, decay)
            if SKIPS_LOGGED:
                if source >= 0:
                    _store_output(*output, is_column_V, SCALE, EPS)
            else:
                _store_output(*output, is_column_V & (source >= 0), SCALE, EPS)
            state_KV = state_KV * decay + k_K[:, None] * written_V[None, :]
            q_K, k_K, v_V, a, b, source = next_q_K, next_k_K, next_v_V, next_a, next_b, next_source
        cut_ptrs = tile_ptr + cut * slot_stride + tile_KV
        tl.store(cut_ptrs, state_KV.to(state_ptr.dtype.element_ty), mask=is_tile_KV & (cut != 0))
    dst_ptrs = tile_ptr + dst * slot_stride + tile_KV
    tl.store(dst_ptrs, state_KV.to(state_ptr.dtype.element_ty), mask=is_tile_KV & (dst != 0))


@triton.jit
def _load_token(
    source_ptr,
    q_ptrs_K,
    k_ptrs_K,
    v_ptrs_V,
    a_ptr,
    b_ptr,
    q_row_stride,
    k_row_stride,
    v_row_stride,
    a_row_stride,
    b_row_stride,
    row,
    is_row,
    is_row_K,
    is_column_V,
):
    """Load a head's inputs of a row, where it is one, and the row of the step; of a logged token a negative number."""
    q_K = tl.load(q_ptrs_K + row * q_row_stride, mask=is_row_K & is_row, other=0.0)
    k_K = tl.load(k_ptrs_K + row * k_row_stride, mask=is_row_K & is_row, other=0.0)
    v_V = tl.load(v_ptrs_V + row * v_row_stride, mask=is_column_V & is_row, other=0.0)
    a = tl.load(a_ptr + row * a_row_stride, mask=is_row, other=0.0)
    b = tl.load(b_ptr + row * b_row_stride, mask=is_row, other=0.0)
    source = row
    if source_ptr is not None:
        source = tl.load(source_ptr + row, mask=is_row, other=-1)
    return q_K, k_K, v_V, a, b, source


@triton.jit
def _store_output(
    out_ptrs_V, state_KV, q_K, k_K, written_V, decay, is_stored_V, SCALE: tl.constexpr, EPS: tl.constexpr
):
    """Store a token's output, given the state before it and what it writes along the key as it is."""
    q_scale = SCALE / tl.sqrt(tl.sum(q_K * q_K, 0) + EPS)
    read_V = tl.sum(state_KV * q_K[:, None], 0) * decay + tl.sum(q_K * k_K, 0) * written_V
    tl.store(out_ptrs_V, (read_V * q_scale).to(out_ptrs_V.dtype.element_ty), mask=is_stored_V)
