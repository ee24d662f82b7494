"""Logits of many rows in bfloat16, with a router in float32, in tensor cores.

A number in float32 is the sum of three in bfloat16, 8 bits each, and products of two numbers in bfloat16 are exact in
float32: three products add up what one in float32 does, in another order.

Shape suffixes: as in ``linear.py``; T rows, E experts; in kernels M rows of x, N experts, K inputs.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.launch import Launch
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv
from strandline.kernels.stages_triton import staged
from strandline.kernels.tile_triton import store_tile


@staged
@triton.jit
def _logits_kernel(
    x_ptr,
    router_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_x,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the logits of a tile of rows and experts."""
    row_M = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offset_K = tl.arange(0, BLOCK_K)
    x_MK_ptr = x_ptr + (tl.minimum(row_M, M - 1) * stride_x)[:, None] + offset_K[None, :]
    router_KN_ptr = router_ptr + (tl.minimum(expert_N, N - 1) * K)[None, :] + offset_K[:, None]
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    for start in range(0, K, BLOCK_K):
        if IS_EVEN:
            x_MK = tl.load(x_MK_ptr + start)
            router_KN = tl.load(router_KN_ptr + start)
        else:
            is_K = start + offset_K < K
            x_MK = tl.load(x_MK_ptr + start, mask=is_K[None, :], other=0.0)
            router_KN = tl.load(router_KN_ptr + start, mask=is_K[:, None], other=0.0)
        high_KN = router_KN.to(tl.bfloat16)
        remainder_KN = router_KN - high_KN.to(tl.float32)
        middle_KN = remainder_KN.to(tl.bfloat16)
        low_KN = (remainder_KN - middle_KN.to(tl.float32)).to(tl.bfloat16)
        # Tensor cores cut sums off, where additions round: only those of a few inputs are theirs.
        part_MN = tl.dot(x_MK, low_KN)
        part_MN = tl.dot(x_MK, middle_KN, part_MN)
        acc_MN += tl.dot(x_MK, high_KN, part_MN)
    store_tile(out_ptr, acc_MN, row_M, expert_N, M, N, N, False, False)


def logits_of_many(x_TI: Tensor, router_EI: Tensor, launch: Launch) -> Tensor:
    """Return ``x router^T`` in float32.

    Args:
        x_TI: bfloat16; rows may lie apart.
        router_EI: float32, contiguous.
    """
    (num_rows, num_inputs), num_experts = x_TI.shape, len(router_EI)
    logits_TE = torch.empty((num_rows, num_experts), dtype=torch.float32, device=x_TI.device)
    _logits_kernel[(cdiv(num_rows, launch.block_m), cdiv(num_experts, launch.block_n))](
        x_TI,
        router_EI,
        logits_TE,
        num_rows,
        num_experts,
        num_inputs,
        x_TI.stride(0),
        IS_EVEN=num_inputs % launch.block_k == 0,
        **launch.options(),
        **overlap_options(x_TI),
    )
    return logits_TE
