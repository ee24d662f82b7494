"""Matrices of a model that stay quantised as published, and their rows.

A model is built with its large matrices on torch's meta device (``matrices_without_memory``). Which of their rows are
quantised, and in which format, follows from the files; then each gets the memory that it needs: as an ordinary
parameter if no row stays quantised, else for the rows of each format and for the others apart. Beside the model there
is never more than one published tensor, and nothing of its size in another dtype.

Experts stay quantised if both matrices of each have one format. What cannot stay is dequantised as it loads: rows in
too many runs, and shards of inputs that cut through what a scale covers.

Shape suffixes: X experts, R rows of all matrices of a parameter, I inputs.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from strandline.kernels.gemm.weights import DenseWeight, QuantizedWeight, StackedWeight
from strandline.models.layers.experts import Experts
from strandline.models.layers.projection import GatedProjection, Projection
from strandline.models.layers.targets import Piece, Target, base_of
from strandline.models.storage.published import OpenWeight
from strandline.models.storage.random_weights import published_names, seed_of

MAX_PARTS: Final = 4
"""Runs of rows, quantised or not, that a weight may consist of: each is a product of its own."""

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
        stored: index in ``formats`` of the one that each published weight may stay in.
        device: where the matrices go.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, Target],
        formats: Sequence[StoredFormat],
        stored: Mapping[str, int],
        device: torch.device | str,
    ) -> None:
        self._formats = formats
        self._matrices = {
            id(parameter): Matrix.of(module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.is_meta
        }
        for name, target in targets.items():
            self._note(target, stored.get(name))
        chosen = self._choose(model)
        self.kept = [matrix for matrix in self._matrices.values() if matrix in chosen]
        for matrix in self._matrices.values():
            if matrix not in chosen:
                _allocate_whole(matrix, device)

    def kept_of(self, target: Target) -> Matrix | None:
        """Return the matrix that a published tensor goes to; None: it does not stay quantised."""
        view = target.view
        matrix = None if view is None else self._matrices.get(id(base_of(view)))
        return matrix if matrix in self.kept else None

    def _note(self, target: Target, number: int | None) -> None:
        """Note the rows that a published tensor goes to, and the number of its format among ``formats``."""
        parts = [part for piece in target.pieces for part in piece.parts]
        bases = {id(base_of(part)) for part in parts}
        for part in parts:
            matrix = self._matrices.get(id(base_of(part)))
            if matrix is not None:
                matrix.is_mixed |= len(bases) > 1
                matrix.is_cut |= any(f.cuts(piece, target) for f in self._formats for piece in target.pieces)
                if number is not None:
                    _rows_of(part, matrix.format_R).fill_(number + 1)

    def _choose(self, model: nn.Module) -> set[Matrix]:
        """Return the parameters that stay quantised."""
        kept = {
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
                kept.update(matrix for matrix in experts if matrix.is_quantized)
        return kept


@dataclass(eq=False)
class _Memory:
    """The memory of a matrix: of the rows of each format, by its number, and of the others."""

    dense_RI: Tensor
    stored: dict[int, StoredRows] = field(default_factory=dict)


class QuantizedStorage:
    """The matrices of a model that stay quantised.

    Args:
        targets: targets of the model, which was built without memory for matrices.
        formats: formats that weights may stay in.
        stored: index in ``formats`` of the one that each published weight may stay in.
        device: where the matrices go. Those that do not stay quantised get memory for all their rows.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, Target],
        formats: Sequence[StoredFormat],
        stored: Mapping[str, int],
        device: torch.device | str,
    ) -> None:
        self._targets, self._stored, self.device = targets, stored, device
        self._matrices = Matrices(model, targets, formats, stored, device)
        kept, memory = self._matrices.kept, dict[Hashable, _Memory]()
        # Without memory, matrices that are alike can have the same: a dry run is to take no time for each layer.
        forms = [matrix.form if torch.device(device).type == "meta" else matrix for matrix in kept]
        for form, matrix in zip(forms, kept, strict=True):
            if form not in memory:
                memory[form] = _allocate(matrix, formats, device)
        self._memory = {matrix: memory[form] for form, matrix in zip(forms, kept, strict=True)}
        self.names = frozenset(name for name, target in targets.items() if self._matrices.kept_of(target) is not None)
        """Published weights that ``fill`` takes."""
        self.kept = self.names & self._stored.keys()
        """Those that stay quantised."""

    def fill(self, name: str, weight: OpenWeight, dtype: torch.dtype) -> None:
        """Copy what is used of a published weight.

        Args:
            dtype: dtype of weights that are dequantised.
        """
        target = self._targets[name]
        matrix = self._matrices.kept_of(target)
        assert matrix is not None
        memory = self._memory[matrix]
        for piece in target.pieces:
            rows_R, source_R = rows_and_sources(piece, target.shape, len(matrix.format_R))
            index_R = matrix.index_of(rows_R)
            if name in self._stored:
                memory.stored[self._stored[name] + 1].fill(weight, target, piece, index_R, source_R)
                continue
            published = weight.read(piece.index, dtype)
            dense_RI = published.reshape(-1, published.shape[-1]).to(memory.dense_RI.dtype)
            copy_rows(memory.dense_RI, index_R, dense_RI, source_R)

    def fill_randomly(self, seed: int) -> None:
        """Draw random weights, as ``fill_with_random_weights`` does."""
        names = published_names(self._targets)
        for memory, matrix in {each: matrix for matrix, each in self._memory.items()}.items():
            device = memory.dense_RI.device
            # A device without memory has no generators, and what is drawn there takes seconds for nothing.
            number = seed_of(names.get(id(matrix.parameter), ""), seed)
            generator = None if device.type == "meta" else torch.Generator(device).manual_seed(number)
            std = matrix.parameter.shape[-1] ** -0.5
            for rows in memory.stored.values():
                rows.fill_randomly(generator, std, matrix.boundary or matrix.parameter.shape[-2])
            if generator is not None:
                memory.dense_RI.normal_(generator=generator).mul_(std)

    def finish(self) -> None:
        """Give the filled weights to their layers."""
        parts_of = dict[_Memory, tuple[DenseWeight | QuantizedWeight, ...]]()
        for matrix, memory in self._memory.items():
            if memory not in parts_of:
                parts_of[memory] = tuple(_parts(matrix, memory))
            parts = parts_of[memory]
            if isinstance(matrix.owner, Experts):
                matrix.owner.keep(matrix.attribute, parts)
            elif isinstance(matrix.owner, Projection):
                matrix.owner.keep(_only_quantized(parts) if len(parts) == 1 else StackedWeight(parts))


def _allocate(matrix: Matrix, formats: Sequence[StoredFormat], device: torch.device | str) -> _Memory:
    """Return memory for all rows of a matrix; rows for which nothing is published are zeros."""
    num_inputs = matrix.parameter.shape[-1]
    memory = _Memory(torch.zeros(matrix.num_rows(0), num_inputs, dtype=matrix.parameter.dtype, device=device))
    for number in filter(None, matrix.formats):
        memory.stored[number] = formats[number - 1].allocate(matrix.num_rows(number), num_inputs, device)
    return memory


def _parts(matrix: Matrix, memory: _Memory) -> Iterator[DenseWeight | QuantizedWeight]:
    """Yield the weights of a projection's rows, or of experts, run by run."""
    *_, num_inputs = matrix.parameter.shape
    of_expert = matrix.parameter.shape[1:-1]
    for number, rows in matrix.runs:
        shape = ((rows.stop - rows.start) // of_expert.numel(), *of_expert)
        if number == 0:
            yield DenseWeight(memory.dense_RI[rows].view(*shape, num_inputs))
        else:
            yield memory.stored[number].weight(rows, shape, matrix.boundary)


def _only_quantized(parts: Sequence[DenseWeight | QuantizedWeight]) -> QuantizedWeight:
    (whole,) = parts
    assert not isinstance(whole, DenseWeight)
    return whole


def _allocate_whole(matrix: Matrix, device: torch.device | str) -> None:
    """Give a parameter memory for all its rows; those for which nothing is published are zeros."""
    zeros = torch.zeros(matrix.parameter.shape, dtype=matrix.parameter.dtype, device=device)
    if isinstance(matrix.owner, Projection):
        matrix.owner.allocate(zeros)
    else:
        setattr(matrix.owner, matrix.attribute, nn.Parameter(zeros, requires_grad=False))


def _rows_of(view: Tensor, rows_R: Tensor) -> Tensor:
    """Return, of something of every row of a parameter, that of the rows of a view of it, with its shape."""
    num_inputs = view.shape[-1]
    strides = [stride // num_inputs for stride in view.stride()[:-1]]
    return rows_R.as_strided(view.shape[:-1], strides, view.storage_offset() // num_inputs)


def range_of(part: slice, size: int) -> range:
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
    views = tuple(_rows_of(part, source_R).unsqueeze(-1) for part in piece.parts)
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
