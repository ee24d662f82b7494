"""Weights in codes that stay so, on the model's device: in the layout of their format, whatever the published one.

Those whose inputs are not in the order of their groups do not stay.

Shape suffixes: R rows of all matrices of a parameter, I inputs, W numbers of packed inputs, X groups of inputs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from strandline.kernels.gemm.formats.coded import BLOCK_INPUTS, PACKED_SCALES, CodedFormat
from strandline.kernels.gemm.weights import CodedWeight
from strandline.models.layers.parts.targets import Piece, Target
from strandline.models.storage.codes import Codes, OpenCodes
from strandline.models.storage.published import OpenWeight
from strandline.models.storage.stored_rows import CHUNK_ELEMENTS, Rows, range_of

RANDOM_SCALES: Final = {PACKED_SCALES: ((0xC0, 0xC8), 11.5), torch.uint8: ((126, 128), 0.75)}
"""Random scales, as bytes ``[first, end)``, and their mean: from 8 to 15 in NVFP4; 1/2 and 1, where they are
exponents."""


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """See ``StoredFormat``."""

    format: CodedFormat
    group: int
    """Inputs that share a scale."""
    scale_dtype: torch.dtype
    has_zeros: bool = False
    has_groups: bool = True
    """Whether the inputs of a row have several scales; else shards may begin anywhere."""

    def cuts(self, piece: Piece, target: Target) -> bool:
        """Return whether a group's inputs are in two shards."""
        if not self.has_groups or len(piece.index) < len(target.shape):
            return False
        return len(range_of(piece.index[-1], target.shape[-1])) % self.group > 0

    def allocate(self, num_rows: int, num_inputs: int, device: torch.device | str) -> "CodedRows":
        """See ``StoredFormat``; scales of inputs that pad the last block are zeros."""
        num_padded = -(-num_inputs // BLOCK_INPUTS) * BLOCK_INPUTS
        shape = num_rows, num_padded // self.group
        zeros_RX = factors_R = None
        if self.scale_dtype == PACKED_SCALES:
            scales_RX = torch.zeros(num_padded // BLOCK_INPUTS, num_rows, dtype=PACKED_SCALES, device=device).t()
        else:
            scales_RX = torch.zeros(shape, dtype=self.scale_dtype, device=device)
        if self.has_zeros:
            zeros_RX = torch.full(shape, self.format.zero, dtype=torch.uint8, device=device)
        if self.format.has_factors:
            factors_R = torch.empty(num_rows, dtype=torch.float32, device=device)
        return CodedRows(
            self,
            num_inputs,
            torch.empty(num_rows, num_padded * self.format.bits // 32, dtype=torch.int32, device=device),
            scales_RX,
            zeros_RX,
            factors_R,
        )


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """See ``StoredRows``."""

    stored: StoredCodes
    num_inputs: int
    words_RW: Tensor
    scales_RX: Tensor
    zeros_RX: Tensor | None
    factors_R: Tensor | None

    def fill(self, weight: OpenWeight, target: Target, piece: Piece, index_R: Tensor, source_R: Rows) -> None:
        """See ``StoredRows``."""
        assert isinstance(weight, OpenCodes)
        part, device = weight.part(piece.index), self.words_RW.device
        for indices, rows in _chunks(index_R, source_R, *part.code_NK.shape):
            self._copy(indices.to(device), part, rows.to(device))

    def _copy(self, index_R: Tensor, part: Codes, row_R: Tensor) -> None:
        """Pack rows of a part of a weight."""
        group_X = part.group_K[:: self.stored.group]
        columns = slice(0, len(group_X))
        code_RI, scale_RX = part.code_NK[row_R], _part_of(part.scale_NX, row_R, group_X)
        if self.stored.format.store is None:
            self.words_RW[index_R] = self.stored.format.pack(code_RI)
            self.scales_RX[index_R, columns] = scale_RX.to(self.stored.scale_dtype)
        else:
            words, scales = self.stored.format.store(code_RI, scale_RX)
            self.words_RW[index_R] = words
            self.scales_RX[index_R, : scales.shape[1]] = scales
        if self.zeros_RX is not None:
            assert part.zero_NX is not None
            self.zeros_RX[index_R, columns] = part.zero_NX[row_R][:, group_X]
        if self.factors_R is not None:
            assert part.factor_N is not None
            self.factors_R[index_R] = part.factor_N[row_R]

    def fill_randomly(self, generator: torch.Generator | None, std: float, matrix_rows: int) -> None:
        """See ``StoredRows``."""
        self.stored.format.draw(self.words_RW, generator)
        scale = std / self.stored.format.random_std
        if self.stored.scale_dtype not in RANDOM_SCALES:
            self.scales_RX.uniform_(0.5, 1.5, generator=generator).mul_(scale)
            return
        (first, end), mean = RANDOM_SCALES[self.stored.scale_dtype]
        shift = 0
        if self.factors_R is None:
            shift = round(math.log2(scale / mean))
        else:
            self.factors_R.fill_(scale / mean)
        memory = self.scales_RX.t() if self.scales_RX.dtype == PACKED_SCALES else self.scales_RX
        memory.view(torch.uint8).random_(first + shift, end + shift, generator=generator)

    def weight(self, rows: slice, shape: Sequence[int], boundary: int) -> CodedWeight:
        """See ``StoredRows``."""

        def shaped(tensor: Tensor) -> Tensor:
            return tensor[rows].view(*shape, *tensor.shape[1:])

        def scaling(tensor: Tensor) -> Tensor:
            whole = shaped(tensor)
            return whole if self.stored.has_groups else whole[..., :1].contiguous().expand(whole.shape)

        zeros = self.zeros_RX
        if zeros is not None and bool((zeros[rows] == self.stored.format.zero).all()):
            zeros = None
        return CodedWeight(
            self.stored.format,
            shaped(self.words_RW),
            scaling(self.scales_RX),
            self.num_inputs,
            self.stored.group,
            None if zeros is None else scaling(zeros),
            None if self.factors_R is None else shaped(self.factors_R),
        )


def _part_of(scale_RX: Tensor, row_R: Tensor, group_X: Tensor) -> Tensor:
    """Return scales of rows and groups: those of 8 bits by way of bytes, since torch indexes no e4m3."""
    indexable = scale_RX.view(torch.uint8) if scale_RX.itemsize == 1 else scale_RX
    return indexable[row_R][:, group_X].view(scale_RX.dtype)


def _chunks(index_R: Tensor, source_R: Rows, num_rows: int, num_inputs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of the memory, and which rows of a piece these are, some at a time."""
    row_R = torch.arange(num_rows) if isinstance(source_R, slice) else source_R
    step = max(1, CHUNK_ELEMENTS // num_inputs)
    return zip(index_R.split(step), row_R.split(step), strict=True)
