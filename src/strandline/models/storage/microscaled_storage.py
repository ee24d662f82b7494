"""Weights in microscaling formats (NVFP4, MXFP4, MXFP8) that stay so, on the model's device.

In FP4 every row has the factor of the published matrix that it comes from. Weights that other ranks share stay if their
parts begin and end with groups.

Shape suffixes: R rows of all matrices of a parameter, K inputs of a published weight, W numbers of packed inputs, X
groups of inputs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from strandline.kernels.gemm.formats.coded import BLOCK_INPUTS
from strandline.kernels.gemm.formats.fp4 import FP4
from strandline.kernels.gemm.formats.mxfp8 import MXFP8
from strandline.kernels.gemm.weights import CodedWeight
from strandline.kernels.rowwise.quantized_rows import MAX_E4M3
from strandline.models.layers.targets import Piece, Target
from strandline.models.storage.microscaled import OpenMicroscaledWeight, PublishedMicroscaled, find_microscaled
from strandline.models.storage.published import Holders, OpenWeight
from strandline.models.storage.quantization_config import MicroscaledScheme
from strandline.models.storage.stored_rows import CHUNK_ELEMENTS, Rows, range_of

RANDOM_CODES: Final = {4: 2.9, 8: 96.0}
"""Standard deviation of random numbers, by their bits."""

RANDOM_SCALES: Final = {False: ((0x50, 0x58), 11.5), True: ((126, 128), 0.75)}
"""Random scales, as bytes ``[first, end)``, and their mean: from 8 to 15 in e4m3; 1/2 and 1, where they are
exponents."""


@dataclass(frozen=True, slots=True)
class MicroscaledFormat:
    """See ``WeightFormat``."""

    scheme: MicroscaledScheme
    can_stay: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        """Its name in messages."""
        return "FP4" if self.scheme.bits == 4 else self.scheme.kind

    @property
    def bits(self) -> int:
        """Size of a weight, without scales."""
        return self.scheme.bits

    @property
    def has_e4m3(self) -> bool:
        """Whether GPUs convert scales in e4m3. Kernels shift the bits of numbers in e4m3."""
        return not self.scheme.has_exponents

    def find(self, holders: Holders) -> Mapping[str, PublishedMicroscaled]:
        """See ``WeightFormat``."""
        return find_microscaled(holders, self.scheme)

    def can_store(self, weight: PublishedMicroscaled, target: Target) -> bool:
        """See ``WeightFormat``."""
        return True

    def stored(self, weights: Mapping[str, PublishedMicroscaled]) -> "StoredMicroscaled":
        """See ``WeightFormat``."""
        return StoredMicroscaled(self.scheme)

    def stored_randomly(self, dtype: torch.dtype) -> "StoredMicroscaled":
        """See ``WeightFormat``; scales have their own dtype."""
        return StoredMicroscaled(self.scheme)


@dataclass(frozen=True, slots=True)
class StoredMicroscaled:
    """See ``StoredFormat``."""

    scheme: MicroscaledScheme

    def cuts(self, piece: Piece, target: Target) -> bool:
        """Return whether a group's inputs are in two shards."""
        if len(piece.index) < len(target.shape):
            return False
        return len(range_of(piece.index[-1], target.shape[-1])) % self.scheme.group > 0

    def allocate(self, num_rows: int, num_inputs: int, device: torch.device | str) -> "MicroscaledRows":
        """See ``StoredFormat``; inputs that pad the last block are zeros."""
        num_blocks = -(-num_inputs // BLOCK_INPUTS)
        num_groups = num_blocks * BLOCK_INPUTS // self.scheme.group
        num_words = num_blocks * BLOCK_INPUTS * self.scheme.bits // 32
        return MicroscaledRows(
            self.scheme,
            num_inputs,
            torch.empty(num_rows, num_words, dtype=torch.int32, device=device),
            torch.zeros(num_rows, num_groups, dtype=torch.uint8, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MicroscaledRows:
    """See ``StoredRows``."""

    scheme: MicroscaledScheme
    num_inputs: int
    words_RW: Tensor
    scales_RX: Tensor
    """Bytes."""
    factors_R: Tensor

    def fill(self, weight: OpenWeight, target: Target, piece: Piece, index_R: Tensor, source_R: Rows) -> None:
        """See ``StoredRows``."""
        assert isinstance(weight, OpenMicroscaledWeight)
        code_RK, scale_RX, factor_R = weight.part(piece.index)
        row_R = torch.arange(len(code_RK)) if isinstance(source_R, slice) else source_R
        step, device = max(1, CHUNK_ELEMENTS // code_RK.shape[1]), code_RK.device
        pack = MXFP8.pack if self.scheme.bits == 8 else FP4.pack
        for chunk, sources in zip(index_R.split(step), row_R.split(step), strict=True):
            indices, rows = chunk.to(device), sources.to(device)
            self.words_RW[indices] = pack(code_RK[rows])
            self.scales_RX[indices, : scale_RX.shape[1]] = scale_RX.view(torch.uint8)[rows]
            self.factors_R[indices] = factor_R[rows]

    def fill_randomly(self, generator: torch.Generator | None, std: float, matrix_rows: int) -> None:
        """See ``StoredRows``."""
        (first, end), mean = RANDOM_SCALES[self.scheme.has_exponents]
        factor = std / RANDOM_CODES[self.scheme.bits] / mean
        if self.scheme.bits == 4:
            self.words_RW.random_(-(2**31), 2**31, generator=generator)
            self.factors_R.fill_(factor)
        else:
            self._draw_e4m3(generator)
            shift = round(math.log2(factor))
            first, end = first + shift, end + shift
        self.scales_RX.random_(first, end, generator=generator)

    def _draw_e4m3(self, generator: torch.Generator | None) -> None:
        """Draw numbers, none of them NaN."""
        for rows in self.words_RW.split(max(1, CHUNK_ELEMENTS // self.words_RW.shape[1])):
            noise = torch.empty(rows.shape[0], 4 * rows.shape[1], dtype=torch.bfloat16, device=rows.device)
            noise.normal_(std=RANDOM_CODES[8], generator=generator).clamp_(-MAX_E4M3, MAX_E4M3)
            rows.copy_(noise.to(torch.float8_e4m3fn).view(torch.int32))

    def weight(self, rows: slice, shape: Sequence[int], boundary: int) -> CodedWeight:
        """See ``StoredRows``."""
        words, scales = self.words_RW[rows], self.scales_RX[rows]
        words, scales = words.view(*shape, words.shape[-1]), scales.view(*shape, scales.shape[-1])
        if self.scheme.bits == 8:
            return CodedWeight(MXFP8, words, scales, self.num_inputs, self.scheme.group)
        scales = scales if self.scheme.has_exponents else scales.view(torch.float8_e4m3fn)
        factors = self.factors_R[rows].view(*shape)
        return CodedWeight(FP4, words, scales, self.num_inputs, self.scheme.group, factors=factors)
