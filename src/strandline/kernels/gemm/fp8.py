"""GEMMs in FP8, the reference implementation and torch's: weights with a scale per block, activations with one per row
and 128 inputs.

Invariants: a row's result depends on that row alone. Whatever the number of rows, and whatever has quantised them
(``quantized_rows.py``), the same numbers are multiplied, to the last bit; only the order of sums differs. Sums within a
group of inputs are of e4m3 products; the groups are added up in float32.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3 (the scales, and sums per group).

Shape suffixes: T rows, I inputs, O outputs, X groups of inputs, G inputs of a group.
"""

from functools import cache, partial
from typing import Final

import torch
from torch import Tensor

from strandline.kernels.gemm.weights import ScaledWeight
from strandline.kernels.gpu import gpu_of
from strandline.kernels.rowwise.quantized_rows import GROUP, QuantizedRows, Rows, in_groups, quantize

TORCH_INPUTS: Final = 4 * GROUP
"""What inputs are a multiple of, so that torch takes scales as they are stored."""

TORCH_OUTPUTS: Final = 8
"""Outputs in 16 bytes, on which cuBLAS asks each row to begin that it stores after a product in FP8."""

TORCH_CAPABILITY: Final = 9
"""Compute capability, without its minor number, of the GPUs on which torch does."""

TORCH_CUDA: Final = (12, 9)
"""The first CUDA version whose library multiplies with scales of blocks."""


def fp8_linear(x: Rows, weight: ScaledWeight, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias`` in x's dtype: the reference implementation.

    Args:
        x: ``[..., I]``, or quantised rows.
    """
    num_outputs, num_inputs = weight.values.shape
    rows = x if isinstance(x, QuantizedRows) else quantize(x.reshape(-1, num_inputs))
    x_TXG, scale_TX = in_groups(rows.values_TI[: len(rows)].float()), rows.scale_XT.t()[: len(rows)]
    weight_OXG = in_groups(weight.values.float())
    scale_OX = weight.scales.repeat_interleave(weight.rows_per_scale, 0)[:num_outputs]
    out_TO = torch.zeros(len(rows), num_outputs, device=rows.device)
    for group in range(scale_TX.shape[1]):
        product_TO = x_TXG[:, group] @ weight_OXG[:, group].t()
        out_TO += product_TO * (scale_TX[:, group, None] * scale_OX[:, group])
    if bias_O is not None:
        out_TO += bias_O
    out_TO = out_TO.to(rows.dtype)
    return out_TO if isinstance(x, QuantizedRows) else out_TO.view(*x.shape[:-1], num_outputs)


def can_multiply_in_torch(rows: Rows, weight: ScaledWeight) -> bool:
    """Return whether torch multiplies rows with this weight: on Hopper GPUs, with a scale for each whole block."""
    num_outputs, num_inputs = weight.values.shape
    return (
        rows.dtype == torch.bfloat16
        and weight.rows_per_scale == GROUP
        and num_outputs % GROUP == num_inputs % TORCH_INPUTS == 0
        and weight.scales.is_contiguous()
        and gpu_of(weight.values.device).capability[0] == TORCH_CAPABILITY
        and _cuda_version() >= TORCH_CUDA
    )


@cache
def _cuda_version() -> tuple[int, ...]:
    return tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))


def multiply_in_torch(out_TO: Tensor, rows: QuantizedRows, weight: ScaledWeight, bias_O: Tensor | None) -> None:
    """Fill ``out_TO`` with torch's product; only where ``can_multiply_in_torch`` says so."""
    multiply = partial(torch._scaled_mm, scale_a=rows.scale_XT.t(), scale_b=weight.scales.t(), out_dtype=out_TO.dtype)
    is_aligned = out_TO.stride(0) % TORCH_OUTPUTS == out_TO.storage_offset() % TORCH_OUTPUTS == 0
    if is_aligned and len(rows.values_TI) == len(rows):
        multiply(rows.values_TI, weight.values.t(), out=out_TO)
    else:
        out_TO.copy_(multiply(rows.values_TI, weight.values.t())[: len(rows)])
    if bias_O is not None:
        out_TO.add_(bias_O)
