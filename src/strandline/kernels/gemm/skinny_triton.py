"""GEMMs of up to 16 rows with a large dense weight, which is streamed through tensor cores in tiles of outputs.

Shape suffixes: as in ``linear.py``; S spans of the inputs; in kernels M rows of x, N outputs, K inputs.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.launch import Launch
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.activation_triton import silu_times
from strandline.kernels.sizes import cdiv
from strandline.kernels.stages_triton import staged
from strandline.kernels.tile_triton import add_spans, store_tile


@staged
@triton.jit
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    stride_x,
    K,
    N,
    stride_out,
    span_k,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write a tile of the product; split, that of one span of the inputs, in float32."""
    col_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offset_K = tl.arange(0, BLOCK_K)
    row_M = tl.arange(0, BLOCK_M)
    is_row_M = row_M < M
    is_col_N = col_N < N
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x_MK_ptr = x_ptr + row_M.to(tl.int64)[:, None] * stride_x + offset_K[None, :]
    weight_KN_ptr = weight_ptr + (col_N * K)[None, :] + offset_K[:, None]
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc_up_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    first = tl.program_id(1) * span_k
    for start in range(first, tl.minimum(first + span_k, K), BLOCK_K):
        if IS_EVEN:
            x_MK = tl.load(x_MK_ptr + start, mask=is_row_M[:, None], other=0.0)
            weight_KN = tl.load(weight_KN_ptr + start, eviction_policy="evict_first")
        else:
            is_K = start + offset_K < K
            mask_KN = is_K[:, None] & is_col_N[None, :]
            x_MK = tl.load(x_MK_ptr + start, mask=is_row_M[:, None] & is_K[None, :], other=0.0)
            weight_KN = tl.load(weight_KN_ptr + start, mask=mask_KN, other=0.0, eviction_policy="evict_first")
        acc_MN = tl.dot(x_MK, weight_KN, acc_MN, input_precision="ieee")
        if IS_GATED:
            up_KN_ptr = weight_KN_ptr + tl.cast(N, tl.int64) * K + start
            if IS_EVEN:
                up_KN = tl.load(up_KN_ptr, eviction_policy="evict_first")
            else:
                is_K = start + offset_K < K
                mask_KN = is_K[:, None] & is_col_N[None, :]
                up_KN = tl.load(up_KN_ptr, mask=mask_KN, other=0.0, eviction_policy="evict_first")
            acc_up_MN = tl.dot(x_MK, up_KN, acc_up_MN, input_precision="ieee")
    if HAS_BIAS:
        acc_MN += tl.load(bias_ptr + col_N, mask=is_col_N, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        acc_MN = silu_times(acc_MN, acc_up_MN, out_ptr.dtype.element_ty)
    store_tile(out_ptr, acc_MN, row_M, col_N, M, N, stride_out, IS_SPLIT, False)


def launch_skinny(
    out_MO: Tensor, x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, launch: Launch, *, is_gated: bool = False
) -> None:
    """Fill ``out_MO``, whose rows may lie apart, with the product of up to 16 rows.

    Args:
        weight_OI: contiguous.
        is_gated: whether to write ``silu(gate x) * up x``; that cannot be split.
    """
    (num_rows, num_inputs), num_outputs = x_MI.shape, out_MO.shape[1]
    span = cdiv(num_inputs, launch.splits * launch.block_k) * launch.block_k
    spans = cdiv(num_inputs, span)
    part_SMO = out_MO
    if spans > 1:
        part_SMO = torch.empty((spans, num_rows, num_outputs), dtype=torch.float32, device=x_MI.device)
    _skinny_kernel[(cdiv(num_outputs, launch.block_n), spans)](
        x_MI,
        weight_OI,
        bias_O,
        part_SMO,
        num_rows,
        x_MI.stride(0),
        num_inputs,
        num_outputs,
        part_SMO.stride(-2),
        span,
        HAS_BIAS=bias_O is not None and spans == 1,
        IS_GATED=is_gated,
        IS_EVEN=num_inputs % launch.block_k == 0 and num_outputs % launch.block_n == 0,
        IS_SPLIT=spans > 1,
        **launch.options(),
        **overlap_options(x_MI),
    )
    if spans > 1:
        add_spans(part_SMO, bias_O, out_MO)
