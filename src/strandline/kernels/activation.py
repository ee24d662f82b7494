"""Gated activations of feed-forward layers.

Shape suffixes: F intermediate size; the dimensions before it are free.
"""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of ``[..., 2 F]``, the gate before the up projection."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
