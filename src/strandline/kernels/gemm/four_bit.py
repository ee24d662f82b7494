"""Matrix products with weights in 4 bits and activations as they are.

Invariants: a row's result depends on that row alone. Codes less their zero points are multiplied as whole numbers, and
sums over a group are multiplied by its scale in float32: only the order of sums depends on the number of rows, and, for
many rows, weights are rounded to the dtype of activations.

Source: Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models" (4-bit
weights that are unpacked in registers, on the way to tensor cores).

Shape suffixes: O outputs, I inputs; the dimensions before the inputs are free.
"""

import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.gemm.weights import FourBitWeight


def four_bit_linear(x: Tensor, weight: FourBitWeight, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias`` in x's dtype: the reference implementation."""
    bias = None if bias_O is None else bias_O.float()
    return F.linear(x.float(), weight.dequantize(), bias).to(x.dtype)
