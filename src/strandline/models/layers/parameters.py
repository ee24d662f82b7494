"""Unfilled parameters, and the names that specs use for their dtypes."""

import torch
from torch import nn


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Return an unfilled parameter that takes no gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that specs use for a dtype."""
    return str(dtype).removeprefix("torch.")


class Gain(nn.Parameter):
    """A weight that multiplies and is near 1, as of most norms; random weights keep it there."""


def gain(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Gain:
    """Return an uninitialised gain that needs no gradient."""
    return Gain(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
