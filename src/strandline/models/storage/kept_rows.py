"""Matrices of a model that stay quantised as published, and their rows.

A model is built with its large matrices on torch's meta device (``matrices_without_memory``). Which of their rows are
quantised follows from the files; then each gets the memory that it needs: as an ordinary parameter if no row stays
quantised, else for these rows and for the others apart. Beside the model there is never more than one published tensor,
and nothing of its size in another dtype.

Experts stay quantised if all of a layer do. What cannot stay is dequantised as it loads: rows in too many runs, and
shards of inputs that cut through what a scale covers.

Shape suffixes: R rows of all matrices of a parameter, I inputs; of experts X experts, E hidden size, F intermediate
size.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from strandline.kernels.gemm.weights import DenseWeight, FourBitWeight, ScaledWeight, StackedWeight
from strandline.models.layers.projection import Projection
from strandline.models.layers.targets import Piece, Target

MAX_PARTS: Final = 4
"""Runs of rows, quantised or not, that a weight may consist of: each is a product of its own."""

Kept = ScaledWeight | FourBitWeight

Rows = slice | Tensor
"""Which rows: a range, or a number for each."""


@runtime_checkable
class HoldsExperts(Protocol):
    """A layer whose experts may be kept quantised.

    It has methods and properties alone: a check at run time does not see a module's parameters.
    """

    @property
    def expert_weights(self) -> tuple[Tensor, Tensor]:
        """Weights of the products before and after the activation, ``[X, F, E]`` and ``[X, E, F]``."""

    def keep_experts(self, gate_up: Kept, down: Kept) -> None:
        """Compute with these instead of the parameters, which are freed; both have the same form."""

    @property
    def dense_with_experts(self) -> tuple[Projection, ...]:
        """Projections that must be quantised only if the experts are."""


@dataclass(eq=False)
class Matrix:
    """A parameter without memory."""

    owner: nn.Module
    attribute: str
    parameter: Tensor
    is_quantized_R: Tensor
    is_mixed: bool = False
    """Whether a published tensor goes to this parameter and to another one."""
    is_cut: bool = False
    """Whether the inputs of some shard begin or end inside of what a scale covers."""

    @property
    def num_quantized(self) -> int:
        return int(self.is_quantized_R.sum())

    @property
    def runs(self) -> Iterator[tuple[bool, slice]]:
        """Yield the runs of rows: whether they are quantised, and where they lie among those of their kind."""
        starts = {True: 0, False: 0}
        kinds, counts = self.is_quantized_R.unique_consecutive(return_counts=True)
        for is_quantized, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            yield is_quantized, slice(starts[is_quantized], starts[is_quantized] + count)
            starts[is_quantized] += count

    @property
    def place_R(self) -> Tensor:
        """Return where each row lies among those of its kind."""
        is_quantized_R = self.is_quantized_R
        return torch.where(is_quantized_R, is_quantized_R.cumsum(0), (~is_quantized_R).cumsum(0)) - 1

    def allocate_dense(self, device: torch.device | str) -> Tensor:
        """Return memory, filled with zeros, for the rows that are not quantised."""
        num_dense = len(self.is_quantized_R) - self.num_quantized
        return torch.zeros(num_dense, self.parameter.shape[-1], dtype=self.parameter.dtype, device=device)

    def keep(self, dense_RI: Tensor, quantized: Callable[[slice], Kept]) -> None:
        """Give a projection its weight.

        Args:
            dense_RI: rows that are not quantised.
            quantized: returns the weight of a run of quantised rows.
        """
        assert isinstance(self.owner, Projection)
        parts = tuple(quantized(rows) if kind else DenseWeight(dense_RI[rows]) for kind, rows in self.runs)
        whole = parts[0] if len(parts) == 1 else StackedWeight(parts)
        assert not isinstance(whole, DenseWeight)
        self.owner.keep(whole)


class Matrices:
    """The parameters of a model without memory, and which of them stay quantised. The others get memory for all rows.

    Args:
        targets: of the model.
        quantized: names of the published tensors that may stay quantised.
        cuts: returns whether the inputs of a piece, or of another shard's, cut through what a scale covers.
        device: where the matrices go.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, Target],
        quantized: Collection[str],
        cuts: Callable[[Piece, Target], bool],
        device: torch.device | str,
    ) -> None:
        self._matrices = {
            id(parameter): Matrix(module, name, parameter, torch.zeros(parameter.shape[:-1].numel(), dtype=torch.bool))
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.is_meta
        }
        for name, target in targets.items():
            self._note(target, cuts, is_quantized=name in quantized)
        chosen = self._choose(model)
        self.kept = [matrix for matrix in self._matrices.values() if matrix in chosen]
        for matrix in self._matrices.values():
            if matrix not in chosen:
                _allocate_whole(matrix, device)
        self.names = frozenset(name for name, target in targets.items() if self.kept_of(target) is not None)
        """Published tensors that go to matrices which stay quantised."""

    def kept_of(self, target: Target) -> Matrix | None:
        """Return the matrix that a published tensor goes to; None: it does not stay quantised."""
        matrix = None if target.place is None else self._matrices.get(id(_base(target.place)))
        return matrix if matrix in self.kept else None

    def _note(self, target: Target, cuts: Callable[[Piece, Target], bool], *, is_quantized: bool) -> None:
        """Note the rows that a published tensor goes to."""
        parts = [part for piece in target.pieces for part in piece.parts]
        bases = {id(_base(part)) for part in parts}
        for part in parts:
            matrix = self._matrices.get(id(_base(part)))
            if matrix is not None:
                matrix.is_mixed |= len(bases) > 1
                matrix.is_cut |= any(cuts(piece, target) for piece in target.pieces)
                if is_quantized:
                    _rows_of(part, matrix.is_quantized_R).fill_(True)

    def _choose(self, model: nn.Module) -> set[Matrix]:
        """Return the parameters that stay quantised."""
        kept = {
            matrix
            for matrix in self._matrices.values()
            if isinstance(matrix.owner, Projection)
            and bool(matrix.is_quantized_R.any())
            and len(list(matrix.runs)) <= MAX_PARTS
            and not matrix.is_mixed
            and not matrix.is_cut
        }
        for module in model.modules():
            if not isinstance(module, HoldsExperts):
                continue
            experts = [self._matrices[id(weights)] for weights in module.expert_weights]
            if all(bool(matrix.is_quantized_R.all()) for matrix in experts):
                kept.update(experts)
            else:
                kept -= {matrix for matrix in kept if matrix.owner in module.dense_with_experts}
        return kept


def keep_experts(experts: Mapping[nn.Module, Mapping[str, Kept]]) -> None:
    """Give layers their experts' weights, by the parameters' names."""
    for owner, weights in experts.items():
        assert isinstance(owner, HoldsExperts)
        owner.keep_experts(weights["gate_up_XFE"], weights["down_XEF"])


def is_gate_up(matrix: Matrix) -> bool:
    """Return whether a matrix consists of the gate's and the up projection's rows of experts."""
    return matrix.attribute == "gate_up_XFE"


def _allocate_whole(matrix: Matrix, device: torch.device | str) -> None:
    """Give a parameter memory for all its rows; those for which nothing is published are zeros."""
    zeros = torch.zeros(matrix.parameter.shape, dtype=matrix.parameter.dtype, device=device)
    if isinstance(matrix.owner, Projection):
        matrix.owner.allocate(zeros)
    else:
        setattr(matrix.owner, matrix.attribute, nn.Parameter(zeros, requires_grad=False))


def _base(view: Tensor) -> Tensor:
    """Return the parameter that a tensor is a view of."""
    return view if view._base is None else view._base


def _rows_of(view: Tensor, rows_R: Tensor) -> Tensor:
    """Return, of something of every row of a parameter, that of the rows of a view of it, with its shape."""
    num_inputs = view.shape[-1]
    strides = [stride // num_inputs for stride in view.stride()[:-1]]
    return rows_R.as_strided(view.shape[:-1], strides, view.storage_offset() // num_inputs)


def range_of(part: slice, size: int) -> range:
    return range(*part.indices(size))


def rows_and_sources(piece: Piece, shape: torch.Size, num_rows: int) -> tuple[Rows, Rows]:
    """Return which rows of a parameter a piece of a shape goes to, and which of the piece's rows each of them is."""
    first = piece.parts[0]
    if len(piece.parts) == 1 and first.is_contiguous():
        start = first.storage_offset() // first.shape[-1]
        return slice(start, start + first.shape[:-1].numel()), slice(None)
    published = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1)
    source_R = torch.full((num_rows,), -1)
    views = tuple(_rows_of(part, source_R).unsqueeze(-1) for part in piece.parts)
    Piece((), views).copy_from(published)
    rows = (source_R >= 0).nonzero().flatten()
    return rows, source_R[rows]


def copy_rows(to_RI: Tensor, place_R: Tensor, from_RI: Tensor, source_R: Rows, max_elements: int) -> None:
    """Copy rows of one tensor to places in another one, on its device.

    Args:
        max_elements: that are put in another order at a time.
    """
    if isinstance(source_R, slice):
        to_RI[int(place_R[0]) : int(place_R[-1]) + 1].copy_(from_RI)
        return
    place_R, from_RI, source_R = (x.to(to_RI.device) for x in (place_R, from_RI, source_R))
    # Part by part: rows in another order are a copy, and there is to be none of a whole tensor.
    num_rows = max(1, max_elements // from_RI.shape[-1])
    for places, sources in zip(place_R.split(num_rows), source_R.split(num_rows), strict=True):
        to_RI[places] = from_RI[sources]
