"""The Triton versions of ``rotary_table`` and ``rotary_table_3d``: one launch.

Shape suffixes: as in ``rotary.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2

BLOCK_ROWS = 8


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["position_ptr", "offset_ptr"])
def _table_kernel(
    position_ptr,
    offset_ptr,
    dimension_ptr,
    inv_freq_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    factor,
    F: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    IS_3D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    pair_F = tl.arange(0, BLOCK_F)
    inv_freq_F = tl.load(inv_freq_ptr + pair_F, mask=pair_F < F, other=0.0)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    mask_TF = (row_T < num_rows)[:, None] & (pair_F < F)[None, :]
    position_T = tl.load(position_ptr + row_T, mask=row_T < num_rows, other=0)
    if IS_3D:
        dimension_F = tl.load(dimension_ptr + pair_F, mask=pair_F < F, other=0)
        offset_TF = tl.load(offset_ptr + dimension_F[None, :] * num_rows + row_T[:, None], mask=mask_TF, other=0)
        angle_TF = (position_T[:, None] + offset_TF).to(tl.float32) * inv_freq_F[None, :]
    else:
        angle_TF = position_T.to(tl.float32)[:, None] * inv_freq_F[None, :]
    cos_TF, sin_TF = tl.cos(angle_TF) * factor, tl.sin(angle_TF) * factor
    out_TF = row_T[:, None] * (2 * F) + pair_F[None, :]
    tl.store(cos_ptr + out_TF, cos_TF, mask=mask_TF)
    tl.store(cos_ptr + out_TF + F, cos_TF, mask=mask_TF)
    tl.store(sin_ptr + out_TF, -sin_TF, mask=mask_TF)
    tl.store(sin_ptr + out_TF + F, sin_TF, mask=mask_TF)


def rotary_table(positions_T: Tensor, inv_freq_F: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """As ``rotary.rotary_table``; both tensors are contiguous."""
    return _launch(positions_T, None, None, inv_freq_F, attention_factor)


def rotary_table_3d(
    positions_T: Tensor, offsets_3T: Tensor, dimension_F: Tensor, inv_freq_F: Tensor, attention_factor: float
) -> tuple[Tensor, Tensor]:
    """As ``rotary.rotary_table_3d``; all tensors are contiguous."""
    return _launch(positions_T, offsets_3T, dimension_F, inv_freq_F, attention_factor)


def _launch(
    positions_T: Tensor,
    offsets_3T: Tensor | None,
    dimension_F: Tensor | None,
    inv_freq_F: Tensor,
    attention_factor: float,
) -> tuple[Tensor, Tensor]:
    num_rows, num_pairs = len(positions_T), len(inv_freq_F)
    cos_T12F, sin_T12F = torch.empty((2, num_rows, 1, 2, num_pairs), dtype=torch.float32, device=inv_freq_F.device)
    if num_rows:
        _table_kernel[(cdiv(num_rows, BLOCK_ROWS),)](
            positions_T,
            offsets_3T,
            dimension_F,
            inv_freq_F,
            cos_T12F,
            sin_T12F,
            num_rows,
            float(attention_factor),
            F=num_pairs,
            BLOCK_T=BLOCK_ROWS,
            BLOCK_F=next_power_of_2(num_pairs),
            IS_3D=dimension_F is not None,
            num_warps=1,
            **overlap_options(inv_freq_F),
        )
    return cos_T12F, sin_T12F
