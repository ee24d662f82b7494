"""Matrix products in FP8: weights with a scale per block, activations with one per row and 128 inputs.

Invariants: a row's result depends on that row alone. Whatever the number of rows, the numbers that are multiplied are
those of ``quantize_groups``, to the last bit; only the order of sums differs. Sums within a group of inputs are of e4m3
products; the groups are added up in float32.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3 (the scales, and sums per group).

Shape suffixes: T rows, I inputs, O outputs, X groups of inputs, G inputs of a group.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.activation import swiglu
from strandline.kernels.operation import operation, triton
from strandline.kernels.qkv import MAX_E4M3
from strandline.kernels.weights import GROUP, ScaledWeight

MIN_SCALE: Final = torch.finfo(torch.float32).tiny
"""Of a group of zeros."""


@operation(triton("block_scaled_triton", invariant="block_scaled_triton"))
def block_scaled_linear(x: Tensor, weight: ScaledWeight, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias`` in x's dtype, with x quantised as by ``quantize_groups``.

    Args:
        x: ``[..., I]``.
    """
    num_outputs, num_inputs = weight.values.shape
    x_TXG, scale_TX = quantize_groups(x.reshape(-1, num_inputs))
    weight_OXG = _groups(weight.values.float())
    scale_OX = weight.scales.repeat_interleave(weight.rows_per_scale, 0)[:num_outputs]
    out_TO = torch.zeros(len(x_TXG), num_outputs, device=x.device)
    for group in range(scale_TX.shape[1]):
        product_TO = x_TXG[:, group].float() @ weight_OXG[:, group].t()
        out_TO += product_TO * (scale_TX[:, group, None] * scale_OX[:, group])
    if bias_O is not None:
        out_TO += bias_O
    return out_TO.to(x.dtype).view(*x.shape[:-1], num_outputs)


@operation(triton("block_scaled_triton", invariant="block_scaled_triton"))
def block_scaled_gated_linear(x: Tensor, gate_up: ScaledWeight) -> Tensor:
    """Return ``silu(gate x) * up x``, the gate's rows before the up projection's, with x quantised."""
    return swiglu.reference(block_scaled_linear.reference(x, gate_up))


def quantize_groups(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in e4m3 as ``x_TXG``, the last group padded with zeros, and the float32 ``scale_TX`` of each group.

    A group's scale is its largest absolute number, divided by 448; its numbers are multiplied by the scale's reciprocal
    and rounded.
    """
    x_TXG = _groups(x_TI.float())
    scale_TX = (x_TXG.abs().amax(-1) / MAX_E4M3).clamp_(min=MIN_SCALE)
    return (x_TXG * scale_TX.reciprocal().unsqueeze(-1)).to(torch.float8_e4m3fn), scale_TX


def _groups(x: Tensor) -> Tensor:
    """Return rows in groups of ``GROUP``, the last one padded with zeros."""
    padded: Tensor = F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    return padded
