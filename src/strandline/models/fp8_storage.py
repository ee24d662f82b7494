"""Keeps weights that are published in FP8 as they are: e4m3 on the model's device, and their scales.

A model is built with its large matrices on torch's meta device (``matrices_without_memory``). Which of their rows are
quantised follows from the files; then each gets the memory that it needs: as an ordinary parameter if no row is
quantised, else for its rows in FP8 and for the others apart. Beside the model there is never more than one published
tensor, and nothing of its size in another dtype.

Experts stay in FP8 if all of a layer do. What cannot stay is dequantised as it loads: rows in too many runs, blocks of
other than ``GROUP`` columns, and shards of inputs that are no multiple of it.

Shape suffixes: R rows of all matrices of a parameter, I inputs, X groups of inputs, Y blocks of rows; of experts X
experts, E hidden size, F intermediate size.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from strandline.kernels.quantized_rows import MIN_SCALE
from strandline.kernels.weights import GROUP, DenseWeight, ScaledWeight, StackedWeight
from strandline.models.layers.projection import GatedProjection, Projection
from strandline.models.quantization_config import Block, Quantization
from strandline.models.targets import Piece, Read, Target

MAX_PARTS: Final = 4
"""Runs of rows, in FP8 or not, that a weight may consist of: each is a product of its own."""

CHUNK_ELEMENTS = 2**22
"""Elements that are put in another order at a time."""

RANDOM_SCALE: Final = 96.0
"""Standard deviation of random e4m3 weights; the largest is 448."""


@runtime_checkable
class HoldsExperts(Protocol):
    """A layer whose experts may be kept in FP8.

    It has methods and properties alone: a check at run time does not see a module's parameters.
    """

    @property
    def expert_weights(self) -> tuple[Tensor, Tensor]:
        """Weights of the products before and after the activation, ``[X, F, E]`` and ``[X, E, F]``."""

    def keep_experts(self, gate_up: ScaledWeight, down: ScaledWeight) -> None:
        """Compute with these instead of the parameters, which are freed."""

    @property
    def dense_with_experts(self) -> tuple[Projection, ...]:
        """Projections that must be in FP8 only if the experts are."""


def can_keep(quantization: Quantization) -> bool:
    """Return whether kernels multiply with weights whose scales cover such blocks."""
    return all(block.columns in (None, GROUP) for block in quantization.blocks)


@dataclass(eq=False)
class _Matrix:
    """A parameter without memory; then the memory of its rows."""

    owner: nn.Module
    attribute: str
    parameter: Tensor
    is_fp8_R: Tensor
    is_mixed: bool = False
    """Whether a published tensor goes to this parameter and to another one."""
    is_cut: bool = False
    """Whether ``GROUP`` inputs of some shard lie in two blocks."""
    values_RI: Tensor = field(init=False)
    scales_RX: Tensor = field(init=False)
    """On the host, a scale for every row in FP8."""
    dense_RI: Tensor = field(init=False)

    @property
    def runs(self) -> list[tuple[bool, int]]:
        """Whether rows are in FP8, and how many, run by run."""
        kinds, counts = self.is_fp8_R.unique_consecutive(return_counts=True)
        return list(zip(kinds.tolist(), counts.tolist(), strict=True))

    @property
    def place_R(self) -> Tensor:
        """Return where each row lies among those of its kind."""
        return torch.where(self.is_fp8_R, self.is_fp8_R.cumsum(0), (~self.is_fp8_R).cumsum(0)) - 1

    def allocate(self, device: torch.device | str) -> None:
        num_fp8, num_inputs = int(self.is_fp8_R.sum()), self.parameter.shape[-1]
        options: dict[str, Any] = {"device": device}
        self.values_RI = torch.empty(num_fp8, num_inputs, dtype=torch.float8_e4m3fn, **options)
        self.scales_RX = torch.empty(num_fp8, -(-num_inputs // GROUP))
        self.dense_RI = torch.zeros(len(self.is_fp8_R) - num_fp8, num_inputs, dtype=self.parameter.dtype, **options)


class Fp8Storage:
    """The matrices of a model that stay in FP8.

    Args:
        targets: of the model, which was built without memory for matrices.
        quantized: names of the published tensors in FP8.
        device: where the matrices go. Those that do not stay in FP8 get memory for all their rows.
    """

    def __init__(
        self, model: nn.Module, targets: Mapping[str, Target], quantized: Collection[str], device: torch.device | str
    ) -> None:
        self._matrices = {
            id(parameter): _Matrix(module, name, parameter, torch.zeros(parameter.shape[:-1].numel(), dtype=torch.bool))
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.is_meta
        }
        self._targets = targets
        for name, target in targets.items():
            self._note(target, is_fp8=name in quantized)
        self._kept = self._choose(model)
        for matrix in self._matrices.values():
            if matrix in self._kept:
                matrix.allocate(device)
            else:
                _allocate_whole(matrix, device)
        self.names = frozenset(name for name, target in targets.items() if self._matrix_of(target) in self._kept)
        """Published tensors that ``fill`` takes."""

    @property
    def num_kept(self) -> int:
        """Parameters that stay in FP8, in whole or in part."""
        return len(self._kept)

    def _note(self, target: Target, *, is_fp8: bool) -> None:
        """Note the rows that a published tensor goes to."""
        parts = [part for piece in target.pieces for part in piece.parts]
        bases = {id(_base(part)) for part in parts}
        for part in parts:
            matrix = self._matrices.get(id(_base(part)))
            if matrix is not None:
                matrix.is_mixed |= len(bases) > 1
                matrix.is_cut |= any(_cuts_blocks(piece, target) for piece in target.pieces)
                if is_fp8:
                    _rows_of(part, matrix.is_fp8_R).fill_(True)

    def _matrix_of(self, target: Target) -> _Matrix | None:
        return None if target.place is None else self._matrices.get(id(_base(target.place)))

    def _choose(self, model: nn.Module) -> set[_Matrix]:
        """Return the parameters that stay in FP8."""
        kept = {
            matrix
            for matrix in self._matrices.values()
            if isinstance(matrix.owner, Projection)
            and bool(matrix.is_fp8_R.any())
            and len(matrix.runs) <= MAX_PARTS
            and not matrix.is_mixed
            and not matrix.is_cut
        }
        for module in model.modules():
            if not isinstance(module, HoldsExperts):
                continue
            experts = [self._matrices[id(weights)] for weights in module.expert_weights]
            if all(bool(matrix.is_fp8_R.all()) for matrix in experts):
                kept.update(experts)
            else:
                kept -= {matrix for matrix in kept if matrix.owner in module.dense_with_experts}
        return kept

    def fill(self, name: str, read: Read, scales: tuple[Block, Tensor] | None) -> None:
        """Copy what is used of a published tensor.

        Args:
            scales: what one scale covers, and the scales ``[..., Y, X]`` of the whole tensor; None: it is not in FP8.
        """
        target = self._targets[name]
        matrix = self._matrix_of(target)
        assert matrix is not None
        for piece in target.pieces:
            published = read(piece.index)
            rows_R, source_R = _rows_and_sources(piece, published.shape, len(matrix.is_fp8_R))
            place_R = matrix.place_R[rows_R]
            published_RI = published.reshape(-1, published.shape[-1])
            if scales is None:
                _copy_rows(matrix.dense_RI, place_R, published_RI.to(matrix.dense_RI.dtype), source_R)
                continue
            scales_RX = _scales_of(piece, target, *scales).expand(-1, matrix.scales_RX.shape[1])
            _copy_rows(matrix.values_RI.view(torch.uint8), place_R, published_RI.view(torch.uint8), source_R)
            _copy_rows(matrix.scales_RX, place_R, scales_RX, source_R)

    def fill_randomly(self, seed: int) -> None:
        """Draw random weights, and scales that vary from block to block."""
        for index, matrix in enumerate(self._kept_in_order()):
            generator = torch.Generator(matrix.values_RI.device).manual_seed(seed + index)
            std = matrix.parameter.shape[-1] ** -0.5
            for rows in matrix.values_RI.split(max(1, 2**26 // matrix.parameter.shape[-1])):
                noise = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device).normal_(generator=generator)
                rows.copy_(noise.mul_(RANDOM_SCALE).clamp_(-448, 448))
            matrix.dense_RI.normal_(generator=generator).mul_(std)
            blocks = torch.rand(-(-len(matrix.scales_RX) // GROUP), matrix.scales_RX.shape[1])
            blocks = (blocks + 0.5) * max(std / RANDOM_SCALE, MIN_SCALE)
            matrix.scales_RX = blocks.repeat_interleave(GROUP, 0)[: len(matrix.scales_RX)]

    def _kept_in_order(self) -> list[_Matrix]:
        return [matrix for matrix in self._matrices.values() if matrix in self._kept]

    def finish(self) -> None:
        """Give the filled weights to their layers."""
        experts = dict[nn.Module, dict[str, ScaledWeight]]()
        for matrix in self._kept_in_order():
            if isinstance(matrix.owner, Projection):
                parts = tuple(_parts(matrix))
                whole = parts[0] if len(parts) == 1 else StackedWeight(parts)
                assert not isinstance(whole, DenseWeight)
                matrix.owner.keep(whole)
            else:
                *outer, num_rows, _ = matrix.parameter.shape
                values = matrix.values_RI.view(matrix.parameter.shape)
                scales = matrix.scales_RX.view(*outer, num_rows, -1)
                is_gated = matrix.attribute == "gate_up_XFE"
                weight = _scaled(values, scales, num_rows // 2 if is_gated else 0)
                experts.setdefault(matrix.owner, {})[matrix.attribute] = weight
        for owner, weights in experts.items():
            assert isinstance(owner, HoldsExperts)
            owner.keep_experts(weights["gate_up_XFE"], weights["down_XEF"])


def _parts(matrix: _Matrix) -> Iterator[DenseWeight | ScaledWeight]:
    """Yield the runs of a projection's rows."""
    starts = {True: 0, False: 0}
    is_gated = isinstance(matrix.owner, GatedProjection)
    for is_fp8, count in matrix.runs:
        rows = slice(starts[is_fp8], starts[is_fp8] + count)
        starts[is_fp8] += count
        if is_fp8:
            boundary = len(matrix.is_fp8_R) // 2 if is_gated else 0
            yield _scaled(matrix.values_RI[rows], matrix.scales_RX[rows], boundary)
        else:
            yield DenseWeight(matrix.dense_RI[rows])


def _scaled(values: Tensor, scales: Tensor, boundary: int) -> ScaledWeight:
    """Return a weight with as few scales as say the same.

    Args:
        scales: one for every row and group.
        boundary: a row at which scales must start; 0: anywhere.
    """
    num_rows = scales.shape[-2]
    rows = math.gcd(boundary, GROUP)
    while not torch.equal(scales[..., ::rows, :].repeat_interleave(rows, -2)[..., :num_rows, :], scales):
        rows //= 2
    scales = scales[..., ::rows, :].contiguous()
    num_groups = scales.shape[-1]
    if bool((scales == scales[..., :1]).all()):
        return ScaledWeight(values, scales[..., :1].to(values.device).expand(*scales.shape[:-1], num_groups), rows)
    return ScaledWeight(values, scales.to(values.device), rows)


def _allocate_whole(matrix: _Matrix, device: torch.device | str) -> None:
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


def _range(part: slice, size: int) -> range:
    return range(*part.indices(size))


def _cuts_blocks(piece: Piece, target: Target) -> bool:
    """Return whether ``GROUP`` inputs of a piece, or of another shard's, lie in two blocks of the published tensor."""
    if len(piece.index) < len(target.shape):
        return False
    inputs = _range(piece.index[-1], target.shape[-1])
    return target.shape[-1] > GROUP and len(inputs) % GROUP > 0


def _scales_of(piece: Piece, target: Target, block: Block, scale_YX: Tensor) -> Tensor:
    """Return a scale for every row and group of inputs of a piece; one column if a scale covers whole rows."""
    index = (*piece.index, *[slice(None)] * (len(target.shape) - len(piece.index)))
    rows, inputs = (_range(part, size) for part, size in zip(index[-2:], target.shape[-2:], strict=True))
    row_R = torch.arange(rows.start, rows.stop) // (block.rows or target.shape[-2])
    scales_RX = scale_YX[index[:-2]].float().cpu()[..., row_R, :].flatten(0, -2)
    return scales_RX[:, inputs.start // GROUP : inputs[-1] // GROUP + 1] if block.columns else scales_RX


def _rows_and_sources(piece: Piece, shape: torch.Size, num_rows: int) -> tuple[slice | Tensor, slice | Tensor]:
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


def _copy_rows(to_RI: Tensor, place_R: Tensor, from_RI: Tensor, source_R: slice | Tensor) -> None:
    """Copy rows of one tensor to places in another one, on its device."""
    if isinstance(source_R, slice):
        to_RI[int(place_R[0]) : int(place_R[-1]) + 1].copy_(from_RI)
        return
    place_R, from_RI, source_R = (x.to(to_RI.device) for x in (place_R, from_RI, source_R))
    # Part by part: rows in another order are a copy, and there is to be none of a whole tensor.
    num_rows = max(1, CHUNK_ELEMENTS // from_RI.shape[-1])
    for places, sources in zip(place_R.split(num_rows), source_R.split(num_rows), strict=True):
        to_RI[places] = from_RI[sources]
