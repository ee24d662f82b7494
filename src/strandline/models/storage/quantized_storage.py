"""The matrices of a model that stay quantised as published.

Each gets the memory that it needs: as an ordinary parameter if no row stays quantised, else for the rows of each format
and for the others apart. While a model loads, memory holds at most one published tensor besides the model, and nothing
of its size in another dtype.

Shape suffixes: R rows of all matrices of a parameter, I inputs.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strandline.kernels.gemm.weights import DenseWeight, QuantizedWeight, StackedWeight
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.projection import Projection
from strandline.models.storage.matrices import Matrices, Matrix
from strandline.models.storage.published import OpenWeight
from strandline.models.storage.random_weights import published_names, seed_of
from strandline.models.storage.stored_rows import StoredFormat, StoredRows, copy_rows, rows_and_sources


@dataclass(eq=False)
class _Memory:
    """The memory of a matrix: of the rows of each format, by its number, and of the others."""

    dense_RI: Tensor
    stored: dict[int, StoredRows] = field(default_factory=dict)


class QuantizedStorage:
    """The memory of the matrices of a model that stay quantised."""

    def __init__(self, matrices: Matrices) -> None:
        self._matrices, self._targets, self._format_of = matrices, matrices.targets, matrices.format_of
        self.device, stored, memory = matrices.device, matrices.stored, dict[Hashable, _Memory]()
        # Without memory, matrices that are alike can have the same: a dry run is to take no time for each layer.
        forms = [matrix.form if torch.device(self.device).type == "meta" else matrix for matrix in stored]
        for form, matrix in zip(forms, stored, strict=True):
            if form not in memory:
                memory[form] = _allocate(matrix, matrices.formats, self.device)
        self._memory = {matrix: memory[form] for form, matrix in zip(forms, stored, strict=True)}
        self.names = frozenset(name for name, target in self._targets.items() if matrices.stored_of(target) is not None)
        """Published weights that ``fill`` takes."""
        self.stored = self.names & self._format_of.keys()
        """Those that stay quantised."""

    def fill(self, name: str, weight: OpenWeight, dtype: torch.dtype) -> None:
        """Copy what is used of a published weight.

        Args:
            dtype: dtype of weights that are dequantised.
        """
        target = self._targets[name]
        matrix = self._matrices.stored_of(target)
        assert matrix is not None
        memory = self._memory[matrix]
        for piece in target.pieces:
            rows_R, source_R = rows_and_sources(piece, target.shape, len(matrix.format_R))
            index_R = matrix.index_of(rows_R)
            if name in self._format_of:
                memory.stored[self._format_of[name] + 1].fill(weight, target, piece, index_R, source_R)
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
                matrix.owner.use_stored(matrix.attribute, parts)
            elif isinstance(matrix.owner, Projection):
                matrix.owner.use_stored(_only_quantized(parts) if len(parts) == 1 else StackedWeight(parts))


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
