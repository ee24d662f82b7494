"""What kernels that sum over ranks take: the memory of all ranks, and the norm of a sum.

Shape suffixes: T tokens, E channels, N ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """A residual stream to add and a norm to take of the sum."""

    residual_TE: Tensor
    """Contiguous."""
    normed_TE: Tensor
    """As ``residual_TE``; receives the normalised rows."""
    weight_E: Tensor
    eps: float
    is_zero_centered: bool


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """Memory through which this rank exchanges rows with the others."""

    rank: int
    address_N: Tensor
    """int64, the addresses of all ranks' buffers, as this rank's device takes them; the buffers are zero at first."""
    counter: Tensor
    """int32, how often each row or block has been exchanged, as ``counter_shape`` says; zero at first."""
    owned: object = None
    """What keeps the buffers alive."""
