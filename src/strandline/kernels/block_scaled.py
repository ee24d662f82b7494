"""Matrix products in FP8: weights with one scale per block of 128 × 128, activations with one per row and 128 inputs.

No model computes with this operation yet: its kernel has not been measured on a GPU. Until then FP8 weights are
dequantised when they load.

Invariants: a row's result depends on that row alone. Sums within a group of inputs are of e4m3 products; the groups are
added up in float32, in order.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3 (the scales, and sums per group).

Shape suffixes: T rows, I inputs, O outputs, Y blocks of outputs, X groups of inputs, G inputs of a group.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.operation import operation, triton
from strandline.kernels.qkv import MAX_E4M3

GROUP: Final = 128
"""Inputs, and outputs of a weight, that share a scale."""

MIN_SCALE: Final = torch.finfo(torch.float32).tiny
"""Of a group of zeros."""


@operation(triton("block_scaled_triton"))
def block_scaled_linear(x: Tensor, weight_OI: Tensor, scale_YX: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x (weight * scale)^T + bias`` in x's dtype, with x quantised as by ``quantize_groups``.

    Args:
        x: ``[..., I]``.
        weight_OI: e4m3.
        scale_YX: float32, ``[⌈O / GROUP⌉, ⌈I / GROUP⌉]``.
    """
    num_outputs, num_inputs = weight_OI.shape
    x_TXG, scale_TX = quantize_groups(x.reshape(-1, num_inputs))
    weight_OXG = _groups(weight_OI.float())
    scale_OX = scale_YX.repeat_interleave(GROUP, 0)[:num_outputs]
    out_TO = torch.zeros(len(x_TXG), num_outputs, device=x.device)
    for group in range(scale_TX.shape[1]):
        product_TO = x_TXG[:, group].float() @ weight_OXG[:, group].t()
        out_TO += product_TO * (scale_TX[:, group, None] * scale_OX[:, group])
    if bias_O is not None:
        out_TO += bias_O
    return out_TO.to(x.dtype).view(*x.shape[:-1], num_outputs)


def quantize_groups(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in e4m3 as ``x_TXG``, the last group padded with zeros, and the float32 ``scale_TX`` of each group.

    A group's scale is its largest absolute number, divided by 448.
    """
    x_TXG = _groups(x_TI.float())
    scale_TX = (x_TXG.abs().amax(-1) / MAX_E4M3).clamp_(min=MIN_SCALE)
    return (x_TXG / scale_TX.unsqueeze(-1)).to(torch.float8_e4m3fn), scale_TX


def _groups(x: Tensor) -> Tensor:
    """Return rows in groups of ``GROUP``, the last one padded with zeros."""
    padded: Tensor = F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    return padded
