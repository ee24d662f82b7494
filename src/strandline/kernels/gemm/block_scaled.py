"""Matrix products in FP8: weights with a scale per block, activations with one per row and 128 inputs.

Invariants: a row's result depends on that row alone. Whatever the number of rows, and whatever has quantised them
(``quantized_rows.py``), the same numbers are multiplied, to the last bit; only the order of sums differs. Sums within a
group of inputs are of e4m3 products; the groups are added up in float32.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3 (the scales, and sums per group).

Shape suffixes: T rows, I inputs, O outputs, X groups of inputs, G inputs of a group.
"""

import torch
from torch import Tensor

from strandline.kernels.gemm.weights import ScaledWeight
from strandline.kernels.rowwise.quantized_rows import QuantizedRows, Rows, in_groups, quantize


def block_scaled_linear(x: Rows, weight: ScaledWeight, bias_O: Tensor | None = None) -> Tensor:
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
