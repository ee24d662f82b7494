"""What LoRA adapters add to products: each row of a step may have another adapter, or none.

An adapter's factors are in a *slot*. A weight that consists of several published ones has factors for each of these,
its *parts*, whose outputs may be any rows of the weight. An operand of products (``linear.py``), the *term*, says which
rows have which adapter, and holds the factors.

Shape suffixes: T rows of the step, M rows of all tiles, U tiles, I inputs, O outputs, S slots, P parts, R ranks, N rows
of one adapter.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from torch import Tensor

NO_SLOT: Final = -1
"""The slot of rows without an adapter, and of unused tiles."""

NO_ROW: Final = -1
"""Fills up tiles."""

TILE_ROWS: Final = 16
"""As many as the smallest operand of a tensor core has."""


class TiledRows(NamedTuple):
    """The rows of a step that have adapters, in tiles of rows with one adapter each; int64."""

    rows_M: Tensor
    """``TILE_ROWS`` for each tile."""
    slots_U: Tensor
    slots_T: Tensor
    """The slot of every row of the step."""


class AdapterRows:
    """The rows of the step that is being computed which have adapters. All projections of a model share one."""

    def __init__(self) -> None:
        self.tiled: TiledRows | None = None
        """None: no row has an adapter. In a CUDA graph: memory that later steps fill in."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """The changes that adapters make to one weight, by slot."""

    down_SPRI: Tensor
    up_SOR: Tensor
    """Each row holds the factors of its part."""
    rank_SP: Tensor
    """int32 ranks in use; 0: the adapter does not change the part. What the factors hold beyond is not read."""
    part_O: Tensor
    """int32 part of each output; -1: no adapter can change it."""

    def outputs(self, part: int) -> Tensor:
        """Return the rows of the weight that a part consists of."""
        return (self.part_O == part).nonzero().flatten()


class LowRankTerm(NamedTuple):
    """What adapters add to a product in a step."""

    weights: AdapterWeights
    tiled: TiledRows


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """What adapters may change of one weight."""

    weights: AdapterWeights
    rows: AdapterRows

    @property
    def term(self) -> LowRankTerm | None:
        """What they add in the step that is being computed; None: nothing."""
        return None if self.rows.tiled is None else LowRankTerm(self.weights, self.rows.tiled)


def add_low_rank(out_TO: Tensor, x_TI: Tensor, weights: AdapterWeights, tiled: TiledRows) -> Tensor:
    """Add to every row what its adapter changes, in place, computed in float32; return the sum."""
    tiles_U = tiled.rows_M.view(-1, TILE_ROWS)
    for slot in sorted({*tiled.slots_U.tolist()} - {NO_SLOT}):
        rows_N = tiles_U[tiled.slots_U == slot].flatten()
        rows_N = rows_N[rows_N != NO_ROW]
        x_NI, changed_NO = x_TI[rows_N].float(), out_TO[rows_N].float()
        for part, rank in enumerate(weights.rank_SP[slot].tolist()):
            if rank:
                outputs, down_RI = weights.outputs(part), weights.down_SPRI[slot, part, :rank].float()
                up_OR = weights.up_SOR[slot, outputs, :rank].float()
                changed_NO[:, outputs] += x_NI @ down_RI.mT @ up_OR.mT
        out_TO[rows_N] = changed_NO.to(out_TO.dtype)
    return out_TO
