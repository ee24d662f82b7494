"""What a model is built with, and its unfilled parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from strandline.models.layers.parts.shard import WHOLE, Shard

_HAVE_NO_MEMORY: Final = ContextVar("matrices have no memory", default=False)


@contextmanager
def matrices_without_memory() -> Iterator[None]:
    """Build layers whose matrices are on torch's meta device, until ``storage/matrices.py`` says what they need."""
    token = _HAVE_NO_MEMORY.set(True)
    try:
        yield
    finally:
        _HAVE_NO_MEMORY.reset(token)


class Gain(nn.Parameter):
    """A weight that multiplies and is near 1, as of most norms; random weights keep it there."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the layers of a model are built with, and what creates their parameters."""

    dtype: torch.dtype
    """Dtype of activations, of what layers keep, and of the weights until they are laid out."""
    device: torch.device | str
    shard: Shard = WHOLE
    """The share of this rank."""

    def in_dtype(self, dtype: torch.dtype) -> "Site":
        """Return the same with another dtype."""
        return replace(self, dtype=dtype)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return an unfilled parameter that takes no gradient."""
        return nn.Parameter(torch.empty(*shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)

    def gain(self, *shape: int, dtype: torch.dtype | None = None) -> Gain:
        """Return an unfilled gain that takes no gradient."""
        return Gain(torch.empty(*shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)

    def matrix(self, *shape: int) -> nn.Parameter:
        """Return the unfilled parameter of weights that may stay quantised."""
        device = "meta" if _HAVE_NO_MEMORY.get() else self.device
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=device), requires_grad=False)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that specs use for a dtype."""
    return str(dtype).removeprefix("torch.")
