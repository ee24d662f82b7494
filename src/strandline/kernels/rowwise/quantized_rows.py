"""Activations in FP8 (e4m3), with a scale per row and 128 inputs.

Products take rows as they are and quantise them, or rows that the operation before has quantised
(``quantizing.py``): the numbers are the same to the last bit.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3.

Shape suffixes: T rows, I inputs, O outputs, X groups of inputs, G inputs of a group.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP: Final = 128
"""Inputs that share a scale in FP8; of published weights also the outputs of a block."""

MAX_E4M3: Final = 448.0
"""The largest e4m3 number."""

MIN_SCALE: Final = torch.finfo(torch.float32).tiny
"""The scale of a group of zeros."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Rows in e4m3 and their scales; after the last row there may be more, which hold anything."""

    values_TI: Tensor
    """Contiguous."""
    scale_XT: Tensor
    """float32."""
    num_rows: int
    dtype: torch.dtype
    """The dtype of the rows before quantisation, and of products with them."""
    plain_TI: Tensor | None = None
    """The rows that were quantised, where they are kept."""

    def __len__(self) -> int:
        return self.num_rows

    @property
    def device(self) -> torch.device:
        return self.values_TI.device


Rows = Tensor | QuantizedRows
"""What a product takes: rows that it quantises itself if it has to, or quantised ones."""


def plain_rows(rows: Rows) -> Tensor:
    """Return rows as they were before quantising."""
    if not isinstance(rows, QuantizedRows):
        return rows
    assert rows.plain_TI is not None, "these rows were quantised without keeping them"
    return rows.plain_TI


def flat_rows(x: Rows) -> Rows:
    """Return quantised rows, or a matrix whose inputs lie together."""
    if isinstance(x, QuantizedRows):
        return x
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()


def new_output(rows: Rows, num_outputs: int) -> Tensor:
    """Return the unfilled result of a product."""
    return torch.empty((len(rows), num_outputs), dtype=rows.dtype, device=rows.device)


def shaped(out_TO: Tensor, x: Rows) -> Tensor:
    """Return a result in the shape of its input."""
    return out_TO if isinstance(x, QuantizedRows) else out_TO.view(*x.shape[:-1], out_TO.shape[1])


def quantize(x_TI: Tensor, *, plain_TI: Tensor | None = None) -> QuantizedRows:
    """Return quantised rows. The reference implementation of what kernels do in registers or after other operations.

    Args:
        plain_TI: kept beside them.
    """
    x_TXG, scale_TX = quantize_groups(x_TI)
    values_TI = x_TXG.flatten(1)[:, : x_TI.shape[1]].contiguous()
    return QuantizedRows(values_TI, scale_TX.t(), len(x_TI), x_TI.dtype, plain_TI)


def quantize_groups(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in e4m3 as ``x_TXG``, the last group padded with zeros, and the float32 ``scale_TX`` of each group.

    A group's scale is its largest absolute number, divided by 448; its numbers are multiplied by the scale's reciprocal
    and rounded.
    """
    x_TXG = in_groups(x_TI.float())
    scale_TX = (x_TXG.abs().amax(-1) / MAX_E4M3).clamp_(min=MIN_SCALE)
    return (x_TXG * scale_TX.reciprocal().unsqueeze(-1)).to(torch.float8_e4m3fn), scale_TX


def in_groups(x: Tensor) -> Tensor:
    """Return rows in groups of ``GROUP``, the last one padded with zeros."""
    padded: Tensor = F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    return padded
