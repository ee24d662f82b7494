"""Which matrices of a model stay quantised, row by row.

A model is built with its large matrices on torch's meta device (``matrices_without_memory``). Which of their rows are
quantised, and in which format, follows from the files.

Experts stay quantised if both matrices of each have one format. What cannot stay is dequantised as it loads: rows in
too many runs, and shards of inputs that cut through what a scale covers.

Shape suffixes: R rows of all matrices of a parameter.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor, nn

from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.projection import GatedProjection, Projection
from strandline.models.layers.parts.targets import Target, base_of
from strandline.models.storage.stored_rows import Rows, StoredFormat, rows_of

MAX_PARTS: Final = 4
"""Runs of rows, quantised or not, that a weight may consist of: each is a product of its own."""


@dataclass(eq=False)
class Matrix:
    """A parameter without memory."""

    owner: nn.Module
    attribute: str
    parameter: Tensor
    format_R: Tensor
    """Each row's format, as a number from 1; 0: it is not quantised."""
    is_mixed: bool = False
    """Whether a published tensor goes to this parameter and to another one."""
    is_cut: bool = False
    """Whether the inputs of some shard begin or end inside of what a scale covers."""

    @classmethod
    def of(cls, owner: nn.Module, attribute: str, parameter: Tensor) -> "Matrix":
        return cls(owner, attribute, parameter, torch.zeros(parameter.shape[:-1].numel(), dtype=torch.uint8))

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        """The number of each run of rows of one format, and its length; from when all formats have been noted."""
        numbers, counts = self.format_R.unique_consecutive(return_counts=True)
        return list(zip(numbers.tolist(), counts.tolist(), strict=True))

    @property
    def formats(self) -> list[int]:
        """Return the numbers of the formats that rows have, of those that are not quantised too."""
        return sorted({number for number, _ in self._runs})

    def num_rows(self, number: int) -> int:
        """Return how many rows have a format."""
        return sum(count for each, count in self._runs if each == number)

    @property
    def runs(self) -> Iterator[tuple[int, slice]]:
        """Yield the runs of rows: their format's number, and which rows of that format they are."""
        starts = dict.fromkeys(self.formats, 0)
        for number, count in self._runs:
            yield number, slice(starts[number], starts[number] + count)
            starts[number] += count

    @property
    def num_runs(self) -> int:
        """Return how many runs of rows there are."""
        return len(self._runs)

    @property
    def is_quantized(self) -> bool:
        """Whether some rows are quantised."""
        return self.formats != [0]

    @property
    def format_of_experts(self) -> tuple[int, ...] | None:
        """Return the number of each expert's format; None: the rows of one have several."""
        rows_of_expert, numbers = self.parameter.shape[1:-1].numel(), list[int]()
        for number, count in self._runs:
            if count % rows_of_expert:
                return None
            numbers += [number] * (count // rows_of_expert)
        return tuple(numbers)

    def index_of(self, rows: Rows) -> Tensor:
        """Return which row of its format each of some rows is."""
        if self.num_runs > 1:
            return self._index_R[rows]
        return torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows

    @cached_property
    def _index_R(self) -> Tensor:
        index_R = torch.zeros(len(self.format_R), dtype=torch.int64)
        for number in self.formats:
            has_format_R = self.format_R == number
            index_R[has_format_R] = torch.arange(int(has_format_R.sum()))
        return index_R

    @property
    def form(self) -> Hashable:
        """What the memory of two matrices that are alike has in common."""
        parameter = self.parameter
        return self.attribute, tuple(parameter.shape), parameter.dtype, tuple(self._runs), self.boundary

    @property
    def boundary(self) -> int:
        """Return the row at which the up projection's rows begin; 0 if there is no gate before them."""
        if isinstance(self.owner, GatedProjection):
            return len(self.format_R) // 2
        is_gated = isinstance(self.owner, Experts) and self.owner.config.is_gated
        return self.parameter.shape[-2] // 2 if is_gated and self.attribute == "up_XFE" else 0


class Matrices:
    """The parameters of a model without memory, and which of them stay quantised. The others get memory for all rows.

    Args:
        targets: targets of the model.
        formats: formats that weights may stay in.
        format_of: index in ``formats`` of the one that each published weight may stay in.
        device: where the matrices go.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, Target],
        formats: Sequence[StoredFormat],
        format_of: Mapping[str, int],
        device: torch.device | str,
    ) -> None:
        self.targets, self.formats, self.format_of, self.device = targets, formats, format_of, device
        self._matrices = {
            id(parameter): Matrix.of(module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.is_meta
        }
        for name, target in targets.items():
            self._note(target, format_of.get(name))
        chosen = self._choose(model)
        self.stored = [matrix for matrix in self._matrices.values() if matrix in chosen]
        for matrix in self._matrices.values():
            if matrix not in chosen:
                _allocate_whole(matrix, device)

    def stored_of(self, target: Target) -> Matrix | None:
        """Return the matrix that a published tensor goes to; None: it does not stay quantised."""
        view = target.view
        matrix = None if view is None else self._matrices.get(id(base_of(view)))
        return matrix if matrix in self.stored else None

    def _note(self, target: Target, number: int | None) -> None:
        """Note the rows that a published tensor goes to, and the number of its format among ``formats``."""
        parts = [part for piece in target.pieces for part in piece.parts]
        bases = {id(base_of(part)) for part in parts}
        for part in parts:
            matrix = self._matrices.get(id(base_of(part)))
            if matrix is not None:
                matrix.is_mixed |= len(bases) > 1
                matrix.is_cut |= any(f.cuts(piece, target) for f in self.formats for piece in target.pieces)
                if number is not None:
                    rows_of(part, matrix.format_R).fill_(number + 1)

    def _choose(self, model: nn.Module) -> set[Matrix]:
        """Return the parameters that stay quantised."""
        stored = {
            matrix
            for matrix in self._matrices.values()
            if isinstance(matrix.owner, Projection)
            and matrix.is_quantized
            and matrix.num_runs <= MAX_PARTS
            and not matrix.is_mixed
            and not matrix.is_cut
        }
        for module in model.modules():
            if not isinstance(module, Experts):
                continue
            experts = [matrix for matrix in self._matrices.values() if matrix.owner is module]
            formats = {matrix.format_of_experts for matrix in experts}
            if len(formats) == 1 and None not in formats and experts[0].num_runs <= MAX_PARTS:
                stored.update(matrix for matrix in experts if matrix.is_quantized)
        return stored


def _allocate_whole(matrix: Matrix, device: torch.device | str) -> None:
    """Give a parameter memory for all its rows; those for which nothing is published are zeros."""
    zeros = torch.zeros(matrix.parameter.shape, dtype=matrix.parameter.dtype, device=device)
    if isinstance(matrix.owner, Projection):
        matrix.owner.allocate(zeros)
    else:
        setattr(matrix.owner, matrix.attribute, nn.Parameter(zeros, requires_grad=False))
