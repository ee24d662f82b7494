"""Unfilled parameters, and the names that specs use for their dtypes."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch
from torch import nn

_HAVE_NO_MEMORY: Final = ContextVar("matrices have no memory", default=False)


@contextmanager
def matrices_without_memory() -> Iterator[None]:
    """Build layers whose matrices are on torch's meta device, until ``stored_rows.py`` says what they need."""
    token = _HAVE_NO_MEMORY.set(True)
    try:
        yield
    finally:
        _HAVE_NO_MEMORY.reset(token)


def matrix(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Return the unfilled parameter of weights that may stay quantised."""
    return parameter(*shape, dtype=dtype, device="meta" if _HAVE_NO_MEMORY.get() else device)


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
