"""Softmax attention to a long prefix, in Gluon, for Hopper GPUs.

A prefill after a long context spends most of its time on keys that all of its queries see. This kernel attends to
the whole blocks before the first query: it needs no masks and meets no partly filled block. ``attention_triton.py``
starts from the result and adds the remaining keys, up to the diagonal.

A program has 128 rows (pairs of a token and a query head, as in ``attention_triton.py``) of one key/value head. One
warp copies blocks of keys and values into shared memory, two stages ahead (TMA); two warpgroups of 64 rows each
consume them. A warpgroup computes the next block's scores while it adds up the last block's weighted values, and
computes exponentials during the latter; the GEMMs of the other warpgroup fill the gaps.

Keys and values in e4m3 are widened to bfloat16 first, a span of blocks at a time, which is exact; attention to one span
continues that to the spans before. With thousands of queries, copying keys costs little beside attending to them.

Not for deterministic engines: bits depend on where a step begins.

Source: Shah et al., "FlashAttention-3" (producer and consumer warps, softmax beside products).

Shape suffixes: as in ``attention_triton.py``.
"""
# mypy: ignore-errors

import logging
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.batch import KVMemory
from strandline.kernels.gluon_triton import IS_AVAILABLE
from strandline.kernels.gpu import gpu_of
from strandline.kernels.sizes import cdiv

if IS_AVAILABLE:
    from strandline.kernels.gluon_triton import (
        TensorDescriptor,
        copy_block,
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        thread_barrier,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

LOGGER: Final = logging.getLogger("strandline.kernels")

CAPABILITY = (9, 0)
"""The only compute capability with these instructions."""

HEAD_DIMS = (64, 128, 256)
GROUP_ROWS = 64
"""Rows of a warpgroup."""

STAGES = 2
"""Blocks of keys, and of values, that shared memory holds: with the queries 192 KiB at a head dim of 256."""

SPAN_BLOCKS = 256
"""Blocks in e4m3 that are widened at once: 32 MiB with two key/value heads of 256. Each further span reads and writes
the result once more."""

WIDEN_ELEMENTS = 4096
"""Elements of keys, and of values, that one program widens."""

STAGGER_BLOCKS = 4
"""Blocks between the eight starts at which programs that run together begin, so that they do not all read the same
block of the second-level cache at once."""

CONSUMER_REGISTERS, PRODUCER_REGISTERS, MEAN_REGISTERS = 240, 24, 168
"""Per thread. The mean is over three groups of 128 threads; the producer warp is padded to a group."""


def supports(q_THD: Tensor, memory: KVMemory) -> bool:
    """Whether the device has what this kernel needs, and queries, keys and values are laid out for it."""
    k_BPGD = memory.k_BPGD
    _, _, num_kv_heads, head_dim = k_BPGD.shape
    return (
        q_THD.dtype == torch.bfloat16
        and k_BPGD.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        and head_dim in HEAD_DIMS
        and k_BPGD.stride()[1:] == (num_kv_heads * head_dim, head_dim, 1)
        and k_BPGD.stride(0) % k_BPGD.stride(1) == 0
        and gpu_of(q_THD.device).capability == CAPABILITY
        and _is_available()
    )


@cache
def _is_available() -> bool:
    """Whether Triton has the interface that the kernel is written in; log once if not."""
    if not IS_AVAILABLE:
        LOGGER.warning(
            "long prompts use the slower attention kernel: Triton %s lacks the Gluon interface of the faster one",
            triton.__version__,
        )
    return IS_AVAILABLE


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Convert numbers.

    Those in e4m3 by way of float32, which takes two instructions per number at full rate. On Hopper GPUs, the direct
    way to bfloat16 converts one number at a time, at an eighth of that rate.
    """
    if x.dtype == tl.float8e4nv:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["table_ptr"])
def _widen_kernel(
    k_ptr, v_ptr, table_ptr, wide_k_ptr, wide_v_ptr, stride_block, SIZE: tl.constexpr, ELEMENTS: tl.constexpr
):
    """Write the keys and values of blocks, in the order of a table, in another dtype."""
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(table_ptr + index).to(tl.int64)
    offset = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    dtype = wide_k_ptr.dtype.element_ty
    k = tl.load(k_ptr + block * stride_block + offset, mask=offset < SIZE, other=0.0)
    v = tl.load(v_ptr + block * stride_block + offset, mask=offset < SIZE, other=0.0)
    tl.store(wide_k_ptr + index * SIZE + offset, widened(k, dtype), mask=offset < SIZE)
    tl.store(wide_v_ptr + index * SIZE + offset, widened(v, dtype), mask=offset < SIZE)


if IS_AVAILABLE:

    @gluon.jit
    def _copy_blocks(
        k_desc,
        v_desc,
        k_smem,
        v_smem,
        k_ready,
        k_empty,
        v_ready,
        v_empty,
        table_ptr,
        num_blocks,
        first_block,
        block_rows,
        first_channel,
        STAGES: gl.constexpr,
    ):
        for i in range(num_blocks):
            stage = i % STAGES
            parity = (i // STAGES) & 1 ^ 1
            row = gl.load(table_ptr + (first_block + i) % num_blocks).to(gl.int32) * block_rows
            mbarrier.wait(k_empty.index(stage), parity)
            mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
            copy_block(k_desc, [row, first_channel], k_ready.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), parity)
            mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
            copy_block(v_desc, [row, first_channel], v_ready.index(stage), v_smem.index(stage))

    @gluon.jit
    def _release(barrier):
        """Say that this warpgroup has read a stage; all of its warps must have come here."""
        thread_barrier()
        mbarrier.arrive(barrier, count=1)

    @gluon.jit
    def _result_rows(
        first_row, kv_head, M: gl.constexpr, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr
    ):
        """Return the rows of a warpgroup, and their indices in the result, counted in heads."""
        packed_M = first_row + gl.arange(0, M, layout)
        return packed_M, ((packed_M // GROUP) * NUM_HEADS + kv_head * GROUP + packed_M % GROUP).to(gl.int64)

    @gluon.jit
    def _attend(
        q_smem,
        k_smem,
        v_smem,
        k_ready,
        k_empty,
        v_ready,
        v_empty,
        num_blocks,
        scale_log2,
        out_ptr,
        lse_ptr,
        first_row,
        num_rows,
        kv_head,
        NUM_HEADS: gl.constexpr,
        GROUP: gl.constexpr,
        STAGES: gl.constexpr,
        IS_CONTINUED: gl.constexpr,
    ):
        M: gl.constexpr = q_smem.shape[0]
        D: gl.constexpr = q_smem.shape[1]
        K: gl.constexpr = k_smem.shape[1]
        score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
        acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
        weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, k_width=2)
        row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
        zeros_MK = gl.zeros([M, K], gl.float32, score_layout)
        acc_MD = gl.zeros([M, D], gl.float32, acc_layout)

        mbarrier.wait(k_ready.index(0), 0)
        score_MK = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), zeros_MK, use_acc=False, is_async=True)
        score_MK = warpgroup_mma_wait(0, deps=(score_MK,))
        _release(k_empty.index(0))
        max_M = gl.max(score_MK, 1) * scale_log2
        if IS_CONTINUED:
            score_row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
            packed_M, row_M = _result_rows(first_row, kv_head, M, NUM_HEADS, GROUP, score_row_layout)
            before_M = gl.load(lse_ptr + row_M, mask=packed_M < num_rows, other=0.0)
            max_M = gl.maximum(max_M, before_M)
        exp_MK = gl.exp2(score_MK * scale_log2 - max_M[:, None])
        sum_M = gl.sum(exp_MK, 1)
        if IS_CONTINUED:
            decay_M = gl.exp2(before_M - max_M)
            sum_M += decay_M
            packed_M, row_M = _result_rows(first_row, kv_head, M, NUM_HEADS, GROUP, row_layout)
            out_ptr_MD = out_ptr + (row_M * D)[:, None] + gl.arange(0, D, gl.SliceLayout(0, acc_layout))[None, :]
            acc_MD = gl.load(out_ptr_MD, mask=(packed_M < num_rows)[:, None], other=0.0)
            acc_MD = acc_MD * gl.convert_layout(decay_M, row_layout)[:, None]
        weight_MK = gl.convert_layout(exp_MK.to(q_smem.dtype), weight_layout)
        for i in range(1, num_blocks):
            stage = i % STAGES
            mbarrier.wait(k_ready.index(stage), (i // STAGES) & 1)
            k_DK = k_smem.index(stage).permute((1, 0))
            score_MK = warpgroup_mma(q_smem, k_DK, zeros_MK, use_acc=False, is_async=True)
            last = (i - 1) % STAGES
            mbarrier.wait(v_ready.index(last), ((i - 1) // STAGES) & 1)
            acc_MD = warpgroup_mma(weight_MK, v_smem.index(last), acc_MD, is_async=True)
            score_MK = warpgroup_mma_wait(1, deps=(score_MK,))
            _release(k_empty.index(stage))
            new_max_M = gl.maximum(max_M, gl.max(score_MK, 1) * scale_log2)
            exp_MK = gl.exp2(score_MK * scale_log2 - new_max_M[:, None])
            decay_M = gl.exp2(max_M - new_max_M)
            sum_M = sum_M * decay_M + gl.sum(exp_MK, 1)
            max_M = new_max_M
            acc_MD, weight_MK = warpgroup_mma_wait(0, deps=(acc_MD, weight_MK))
            _release(v_empty.index(last))
            acc_MD = acc_MD * gl.convert_layout(decay_M, row_layout)[:, None]
            weight_MK = gl.convert_layout(exp_MK.to(q_smem.dtype), weight_layout)
        last = (num_blocks - 1) % STAGES
        mbarrier.wait(v_ready.index(last), ((num_blocks - 1) // STAGES) & 1)
        acc_MD = warpgroup_mma(weight_MK, v_smem.index(last), acc_MD, is_async=True)
        acc_MD, weight_MK = warpgroup_mma_wait(0, deps=(acc_MD, weight_MK))

        total_M = gl.convert_layout(sum_M, row_layout)
        packed_M, row_M = _result_rows(first_row, kv_head, M, NUM_HEADS, GROUP, row_layout)
        is_row_M = packed_M < num_rows
        gl.store(lse_ptr + row_M, gl.convert_layout(max_M, row_layout) + gl.log2(total_M), mask=is_row_M)
        channel_D = gl.arange(0, D, gl.SliceLayout(0, acc_layout))
        out_ptr_MD = out_ptr + (row_M * D)[:, None] + channel_D[None, :]
        gl.store(out_ptr_MD, acc_MD / total_M[:, None], mask=is_row_M[:, None])

    @gluon.jit(
        do_not_specialize=["num_rows", "num_blocks"],
        do_not_specialize_on_alignment=["table_ptr"],
    )
    def _prefix_kernel(
        q_ptr,
        k_desc,
        v_desc,
        table_ptr,
        out_ptr,
        lse_ptr,
        scale_log2,
        stride_q_row,
        stride_q_head,
        num_rows,
        num_blocks,
        block_rows,
        NUM_HEADS: gl.constexpr,
        NUM_KV_HEADS: gl.constexpr,
        HEAD_DIM: gl.constexpr,
        ROWS: gl.constexpr,
        STAGES: gl.constexpr,
        STAGGER: gl.constexpr,
        IS_CONTINUED: gl.constexpr,
        CONSUMER_REGISTERS: gl.constexpr,
        PRODUCER_REGISTERS: gl.constexpr,
        num_warps: gl.constexpr,
    ):
        GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
        KEYS: gl.constexpr = k_desc.block_shape[0]
        tile = gl.program_id(0) // NUM_KV_HEADS
        kv_head = gl.program_id(0) % NUM_KV_HEADS
        first_row = tile * (2 * ROWS)
        q_smem = gl.allocate_shared_memory(k_desc.dtype, [2, ROWS, HEAD_DIM], k_desc.layout)
        k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, HEAD_DIM], k_desc.layout)
        v_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, HEAD_DIM], k_desc.layout)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(stage), count=1)
            mbarrier.init(k_empty.index(stage), count=2)
            mbarrier.init(v_ready.index(stage), count=1)
            mbarrier.init(v_empty.index(stage), count=2)
        load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
        channel_D = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, load_layout))
        for half in gl.static_range(2):
            packed_M = first_row + half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, load_layout))
            head_M = kv_head * GROUP + packed_M % GROUP
            q_ptr_M = q_ptr + (packed_M // GROUP).to(gl.int64) * stride_q_row + head_M * stride_q_head
            is_row_MD = (packed_M < num_rows)[:, None]
            q_smem.index(half).store(gl.load(q_ptr_M[:, None] + channel_D[None, :], mask=is_row_MD, other=0.0))
        fence_async_shared()
        thread_barrier()
        # fmt: off
        gl.warp_specialize(
            [
                (_attend, (
                    q_smem.index(0), k_smem, v_smem, k_ready, k_empty, v_ready, v_empty, num_blocks, scale_log2,
                    out_ptr, lse_ptr, first_row, num_rows, kv_head, NUM_HEADS, GROUP, STAGES, IS_CONTINUED,
                )),
                (_attend, (
                    q_smem.index(1), k_smem, v_smem, k_ready, k_empty, v_ready, v_empty, num_blocks, scale_log2,
                    out_ptr, lse_ptr, first_row + ROWS, num_rows, kv_head, NUM_HEADS, GROUP, STAGES, IS_CONTINUED,
                )),
                (_copy_blocks, (
                    k_desc, v_desc, k_smem, v_smem, k_ready, k_empty, v_ready, v_empty, table_ptr, num_blocks,
                    tile % 8 * STAGGER, block_rows, kv_head * HEAD_DIM, STAGES,
                )),
            ],
            [num_warps, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
        # fmt: on


def attend_prefix(
    q_THD: Tensor,
    memory: KVMemory,
    table_M: Tensor,
    num_blocks: int,
    scale_log2: float,
    span_blocks: int = SPAN_BLOCKS,
) -> tuple[Tensor, Tensor]:
    """Attend all queries to all keys of the first blocks of one sequence, one block at least.

    Args:
        scale_log2: scale of scores whose exponentials are powers of two; includes the scale of keys in e4m3.
        span_blocks: how many blocks in e4m3 are widened at once.

    Returns:
        The normalised result, without the scale of values, and the base-2 logarithm of the sum of exponentials, float32
        ``[T, H, D]`` and ``[T, H]``.
    """
    out_THD = torch.empty(q_THD.shape, dtype=torch.float32, device=q_THD.device)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
    if memory.k_BPGD.dtype == q_THD.dtype:
        _attend_blocks(q_THD, memory, table_M, num_blocks, scale_log2, (out_THD, lse_TH), is_continued=False)
        return out_THD, lse_TH
    shape = (min(num_blocks, span_blocks), *memory.k_BPGD.shape[1:])
    wide = KVMemory(*(torch.empty(shape, dtype=q_THD.dtype, device=q_THD.device) for _ in range(2)))
    wide_table_M = torch.arange(len(wide.k_BPGD), dtype=torch.int32, device=q_THD.device)
    for first in range(0, num_blocks, span_blocks):
        span_M = table_M[first : min(first + span_blocks, num_blocks)]
        widen(memory, span_M, wide)
        result = (out_THD, lse_TH)
        _attend_blocks(q_THD, wide, wide_table_M, len(span_M), scale_log2, result, is_continued=first > 0)
    return out_THD, lse_TH


def widen(memory: KVMemory, table_M: Tensor, wide: KVMemory) -> None:
    """Copy the blocks of a table, whose keys lie together, to the first ones of ``wide``, in the dtype of that."""
    size = memory.k_BPGD[0].numel()
    _widen_kernel[(len(table_M), cdiv(size, WIDEN_ELEMENTS))](
        memory.k_BPGD,
        memory.v_BPGD,
        table_M,
        wide.k_BPGD,
        wide.v_BPGD,
        memory.k_BPGD.stride(0),
        SIZE=size,
        ELEMENTS=WIDEN_ELEMENTS,
        num_warps=4,
    )


def _attend_blocks(
    q_THD: Tensor,
    memory: KVMemory,
    table_M: Tensor,
    num_blocks: int,
    scale_log2: float,
    result: tuple[Tensor, Tensor],
    *,
    is_continued: bool,
) -> None:
    """Fill the result; continued, add keys to what it holds."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = memory.k_BPGD.shape[2]
    num_rows = num_tokens * (num_heads // num_kv_heads)
    _prefix_kernel[(cdiv(num_rows, 2 * GROUP_ROWS) * num_kv_heads,)](
        q_THD,
        _descriptor(memory.k_BPGD),
        _descriptor(memory.v_BPGD),
        table_M,
        *result,
        scale_log2,
        q_THD.stride(0),
        q_THD.stride(1),
        num_rows,
        num_blocks,
        memory.k_BPGD.stride(0) // memory.k_BPGD.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROWS=GROUP_ROWS,
        STAGES=STAGES,
        STAGGER=STAGGER_BLOCKS,
        IS_CONTINUED=is_continued,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=MEAN_REGISTERS,
    )


def _descriptor(x_BPGD: Tensor) -> "TensorDescriptor":
    """Describe all blocks of a layer as rows that lie one key apart; most rows belong to other layers."""
    num_blocks, num_keys, num_kv_heads, head_dim = x_BPGD.shape
    stride_block, stride_key = x_BPGD.stride()[:2]
    num_rows = (num_blocks - 1) * (stride_block // stride_key) + num_keys
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK_TOKENS, head_dim], gl.bfloat16)
    rows = x_BPGD.as_strided((num_rows, num_kv_heads * head_dim), (stride_key, 1))
    return TensorDescriptor.from_tensor(rows, [BLOCK_TOKENS, head_dim], layout)
