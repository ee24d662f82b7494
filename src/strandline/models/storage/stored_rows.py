"""Rows of a matrix that stay quantised: the interface of formats to them, and copies of published rows.

Shape suffixes: R rows of all matrices of a parameter, I inputs.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from strandline.kernels.gemm.weights import QuantizedWeight
from strandline.models.layers.parts.targets import Piece, Target
from strandline.models.storage.published import OpenWeight

CHUNK_ELEMENTS = 2**22
"""Elements that are put in another order at a time."""

Rows = slice | Tensor
"""Which rows: a range, or a number for each."""


class StoredRows(Protocol):
    """Memory of those rows of a matrix that stay in one format."""

    def fill(self, weight: OpenWeight, target: Target, piece: Piece, index_R: Tensor, source_R: Rows) -> None:
        """Copy a piece of a published weight of this format.

        Args:
            index_R: rows of this memory to write.
            source_R: rows of the piece that are copied there.
        """

    def fill_randomly(self, generator: torch.Generator | None, std: float, matrix_rows: int) -> None:
        """Draw numbers, so that weights have about this standard deviation, and scales that vary.

        Args:
            generator: on the device of the rows.
            matrix_rows: rows of each published matrix; the rows are those of one after another.
        """

    def weight(self, rows: slice, shape: Sequence[int], boundary: int) -> QuantizedWeight:
        """Return the weight of some rows, with as few scales as say the same.

        Args:
            shape: shape of the rows, ``[..., O]``.
            boundary: a row at which another matrix begins; 0: none does.
        """


class StoredFormat(Protocol):
    """How weights stay quantised. One format serves all matrices of a model."""

    def cuts(self, piece: Piece, target: Target) -> bool:
        """Return whether the inputs of a piece, or of another shard's, cut through what a scale covers."""

    def allocate(self, num_rows: int, num_inputs: int, device: torch.device | str) -> StoredRows:
        """Return memory for rows of a matrix."""


def rows_of(view: Tensor, rows_R: Tensor) -> Tensor:
    """Return the entries of a view's rows, in its shape, given an entry for each row of its parameter."""
    num_inputs = view.shape[-1]
    strides = [stride // num_inputs for stride in view.stride()[:-1]]
    return rows_R.as_strided(view.shape[:-1], strides, view.storage_offset() // num_inputs)


def range_of(part: slice, size: int) -> range:
    """Return the indices that a slice selects in a dimension of this size."""
    return range(*part.indices(size))


def rows_and_sources(piece: Piece, shape: Sequence[int], num_rows: int) -> tuple[Rows, Rows]:
    """Return which rows of a parameter a piece goes to, and which of the piece's rows each of them is.

    Args:
        shape: shape of the whole published weight.
        num_rows: number of rows of the parameter.
    """
    first = piece.parts[0]
    if len(piece.parts) == 1 and first.is_contiguous():
        start = first.storage_offset() // first.shape[-1]
        return slice(start, start + first.shape[:-1].numel()), slice(None)
    parts = (*piece.index, *[slice(None)] * (len(shape) - len(piece.index)))
    outer = [len(range_of(part, size)) for part, size in zip(parts[:-1], shape[:-1], strict=True)]
    published = torch.arange(math.prod(outer)).view(*outer, 1)
    source_R = torch.full((num_rows,), -1)
    views = tuple(rows_of(part, source_R).unsqueeze(-1) for part in piece.parts)
    Piece((), views).copy_from(published)
    rows = (source_R >= 0).nonzero().flatten()
    return rows, source_R[rows]


def copy_rows(to_RI: Tensor, index_R: Tensor, from_RI: Tensor, source_R: Rows) -> None:
    """Copy rows ``source_R`` of one tensor to the rows ``index_R`` of another one, on its device."""
    if isinstance(source_R, slice):
        to_RI[int(index_R[0]) : int(index_R[-1]) + 1].copy_(from_RI)
        return
    index_R, from_RI, source_R = (x.to(to_RI.device) for x in (index_R, from_RI, source_R))
    # Part by part: rows in another order are a copy, and there is to be none of a whole tensor.
    num_rows = max(1, CHUNK_ELEMENTS // from_RI.shape[-1])
    for indices, sources in zip(index_R.split(num_rows), source_R.split(num_rows), strict=True):
        to_RI[indices] = from_RI[sources]
