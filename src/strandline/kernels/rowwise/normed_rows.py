"""Rows after a norm that has not been computed yet: a product of a few rows does it in its own launch.

Shape suffixes: T rows, D channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from strandline.kernels.expert_choices import Summand
from strandline.kernels.operation import operation, triton
from strandline.kernels.rowwise.norm import add_rms_norm, add_rms_norm_zero_centered
from strandline.kernels.rowwise.quantized_rows import Rows
from strandline.kernels.rowwise.quantizing import QUANTIZED


@dataclass(frozen=True, slots=True, eq=False)
class NormedRows:
    """Rows after a norm that is launched with the first product that reads them, or else by ``settle``."""

    x_TD: Tensor
    """Before the norm and the sum."""
    rows: Rows
    """After the norm; memory that the launch fills."""
    launch: Any
    """The norm as kernels take it."""
    settle: Callable[["NormedRows"], Rows]

    def __len__(self) -> int:
        return len(self.x_TD)


class NormKind(NamedTuple):
    """Which norm is computed."""

    is_zero_centered: bool
    is_quantized: bool
    """Whether rows are quantised, too."""


@operation(triton("rowwise.norm_triton", takes_launches=True))
def deferred_add_norm(
    x: Summand, residual: Tensor, weight_D: Tensor, eps: float, kind: NormKind
) -> tuple[Rows | NormedRows, Tensor]:
    """As the sum and norm of a kind; both results may be filled only by the product that reads the rows."""
    add_norm = add_rms_norm_zero_centered if kind.is_zero_centered else add_rms_norm
    return (QUANTIZED[add_norm] if kind.is_quantized else add_norm).reference(x, residual, weight_D, eps)


def settled(rows: Rows | NormedRows) -> Rows:
    """Return rows whose norm has been launched."""
    return rows.settle(rows) if isinstance(rows, NormedRows) else rows
