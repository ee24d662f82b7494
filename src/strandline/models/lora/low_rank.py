"""Changes of low rank that an adapter makes to published weights.

Shape suffixes: O outputs, I inputs, R ranks, X experts; the dimensions before the last two are free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strandline.models.layers.parts.targets import Index, Target
from strandline.models.storage.published import OpenWeight, PublishedWeight


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What an adapter adds to a matrix, or to several of one shape: ``up down``. Both are float32, on the host."""

    down_RI: Tensor
    up_OR: Tensor
    """Multiplied by the adapter's scale."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the weight that it is added to."""
        return (*self.up_OR.shape[:-1], self.down_RI.shape[-1])

    @property
    def rank(self) -> int:
        return self.down_RI.shape[-2]

    def read(self, index: Index) -> Tensor:
        """Return a part of the sum's second term, in float32."""
        *outer, rows, columns = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        up, down = self.up_OR[(*outer, rows)], self.down_RI[(*outer, slice(None), columns)]
        return up @ down

    def matrices(self, span: slice) -> "LowRank":
        """Return the changes of some of several matrices."""
        return LowRank(self.down_RI[span], self.up_OR[span])

    def rows(self, span: slice) -> "LowRank":
        """Return the change of some of the outputs."""
        return LowRank(self.down_RI, self.up_OR[..., span, :])

    def embedded(self, start: int, num_outputs: int) -> "LowRank":
        """Return the change of a matrix of ``num_outputs`` that has these outputs from ``start``."""
        up_OR = self.up_OR.new_zeros(*self.up_OR.shape[:-2], num_outputs, self.rank)
        up_OR[..., start : start + self.up_OR.shape[-2], :] = self.up_OR
        return LowRank(self.down_RI, up_OR)


def is_matrix(shape: Sequence[int]) -> bool:
    """Return whether a weight is a matrix, or several: not a norm, nor a convolution of channels by themselves."""
    return len(shape) == 2 or (len(shape) == 3 and shape[1] > 1)


def added(changes: Sequence[LowRank]) -> LowRank:
    """Return the sum of changes of one matrix."""
    return LowRank(torch.cat([x.down_RI for x in changes], -2), torch.cat([x.up_OR for x in changes], -1))


def listed(changes: Sequence[LowRank | None], shape: tuple[int, ...]) -> LowRank:
    """Return changes of several matrices of one shape ``[O, I]`` as one; None: a matrix is not changed."""
    rank = max(change.rank for change in changes if change is not None)
    down_XRI, up_XOR = torch.zeros(len(changes), rank, shape[1]), torch.zeros(len(changes), shape[0], rank)
    for index, change in enumerate(changes):
        if change is not None:
            down_XRI[index, : change.rank], up_XOR[index, :, : change.rank] = change.down_RI, change.up_OR
    return LowRank(down_XRI, up_XOR)


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """A published weight with a change. It is dequantised: the sum would lose in few bits what the change says."""

    weight: PublishedWeight
    change: LowRank

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``PublishedWeight``."""
        return self.weight.tensors

    def check(self, target: Target) -> None:
        """See ``PublishedWeight``."""
        self.weight.check(target)

    def open(self, target: Target, device: torch.device | str) -> "OpenMergedWeight":
        """See ``PublishedWeight``."""
        return OpenMergedWeight(self.weight.open(target, device), self.change)


@dataclass(frozen=True, slots=True)
class OpenMergedWeight:
    """An open weight with a change."""

    weight: OpenWeight
    change: LowRank

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """Read a part of the weight, and add the change in float32."""
        weight = self.weight.read(index, torch.float32).float()
        return weight.add_(self.change.read(index).to(weight.device)).to(dtype)
