"""What the ranks of an engine compute together: sums and concatenations over all of them.

Every rank runs the same steps on its part of the model (tensor and expert parallelism), and calls these functions in
the same order.

Shape suffixes: T rows, E channels.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from strandline.kernels.expert_choices import Part, Summand, added_up


class FewRows(Protocol):
    """Sums and gathers of few rows, faster than those of ``Ranks``. All ranks call alike, in the same order."""

    def can_sum(self, x: Tensor) -> bool:
        """Return whether a tensor of this shape and dtype can be summed here."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors; ``x`` may be overwritten."""

    def add_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, *, is_zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        """Sum over all ranks, then do as ``add_rms_norm`` or ``add_rms_norm_zero_centered``."""

    def can_gather(self, x: Tensor) -> bool:
        """Return whether a matrix of this shape and dtype can be gathered here."""

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' matrices side by side."""


class ManyRows(Protocol):
    """Sums of many rows, faster than those of the backend. All ranks call alike, in the same order."""

    def can_sum(self, x: Part) -> bool:
        """Return whether a tensor of this shape and dtype, or such choices, can be summed here."""

    def sum(self, x: Part) -> Tensor:
        """Return the sum of all ranks' tensors or choices; a tensor may be overwritten."""

    def can_add_norm(self, x_TE: Tensor) -> bool:
        """Return whether rows of this shape and dtype can be summed and normalised here."""

    def add_norm(
        self, x_TE: Part, residual_TE: Tensor, weight_E: Tensor, eps: float, *, is_zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        """Sum over all ranks, then do as ``add_rms_norm`` or ``add_rms_norm_zero_centered``."""


class Ranks(Protocol):
    """The ranks of an engine, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def few_rows(self) -> FewRows | None:
        """Faster sums and gathers of few rows, which ``sum`` and ``gather`` use, too; None: there are none."""

    @property
    def many_rows(self) -> ManyRows | None:
        """Faster sums of other rows, which ``sum`` uses, too; None: there are none."""

    def connect(self) -> None:
        """Wait until all ranks have connected; called once, before all that follows."""

    def sum(self, x: Summand) -> Tensor:
        """Return the sum of all ranks' tensors or choices, which have one shape; a tensor may be overwritten."""

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' matrices, which have one shape, side by side."""

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers; waits for the device."""


class OneRank:
    """The only rank of an engine."""

    rank, size, few_rows, many_rows = 0, 1, None, None

    def connect(self) -> None:
        """Do nothing."""

    def sum(self, x: Summand) -> Tensor:
        """Return ``x``, added up."""
        return added_up(x)

    def gather(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def least(self, number: int) -> int:
        """Return ``number``."""
        return number


ONE_RANK: Final = OneRank()


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of floating-point tensors: added one after the other in float32 or wider, and rounded once.

    So do the kernels of ``FewRows`` and ``ManyRows``, to the same bits.
    """
    first, *others = parts
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)


def columns_of(vocab_size: int, rank: int, size: int) -> range:
    """Return the tokens whose logits a rank has: as many as every other, some of them beyond the vocabulary."""
    num_columns = -(-vocab_size // size)
    return range(rank * num_columns, (rank + 1) * num_columns)
