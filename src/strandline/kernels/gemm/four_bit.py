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
from strandline.kernels.operation import operation, triton
from strandline.kernels.rowwise.activation import swiglu


@operation(triton("gemm.four_bit_triton", invariant="gemm.four_bit_triton"))
def four_bit_linear(x: Tensor, weight: FourBitWeight, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias`` in x's dtype."""
    bias = None if bias_O is None else bias_O.float()
    return F.linear(x.float(), weight.dequantize(), bias).to(x.dtype)


@operation(triton("gemm.four_bit_triton", invariant="gemm.four_bit_triton"))
def four_bit_gated_linear(x: Tensor, gate_up: FourBitWeight) -> Tensor:
    """Return ``silu(gate x) * up x``, the gate's rows before the up projection's."""
    return swiglu.reference(four_bit_linear.reference(x, gate_up))
