"""Weights in FP4 (NVFP4 and MXFP4) that stay so, on the model's device.

Every row has the factor of the published matrix that it comes from. Weights that other ranks share stay if their parts
begin and end with groups.

Shape suffixes: R rows of all matrices of a parameter, K inputs of a published weight, W numbers of packed inputs, X
groups of inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from strandline.kernels.gemm.weights import BLOCK_INPUTS, BLOCK_WORDS, Fp4Weight, pack_codes
from strandline.models.layers.targets import Piece, Target
from strandline.models.storage.fp4 import OpenFp4Weight, PublishedFp4, find_fp4
from strandline.models.storage.published import Holders, OpenWeight
from strandline.models.storage.quantization_config import Fp4Scheme
from strandline.models.storage.stored_rows import CHUNK_ELEMENTS, Rows, range_of

RANDOM_STD: Final = 2.9
"""Standard deviation of random numbers in FP4."""

RANDOM_SCALES: Final = {torch.float8_e4m3fn: (0x50, 0x58), torch.uint8: (126, 128)}
"""Random scales, as bytes ``[first, end)``: from 8 to 15 in e4m3, 1/2 and 1 as exponents."""

RANDOM_MEANS: Final = {torch.float8_e4m3fn: 11.5, torch.uint8: 0.75}
"""Mean of these scales."""


@dataclass(frozen=True, slots=True)
class Fp4Format:
    """See ``WeightFormat``."""

    scheme: Fp4Scheme
    kind: ClassVar[str] = "FP4"
    bits: ClassVar[int] = 4
    can_stay: ClassVar[bool] = True

    @property
    def has_e4m3(self) -> bool:
        """Whether scales are in e4m3."""
        return not self.scheme.is_mxfp4

    def find(self, holders: Holders) -> Mapping[str, PublishedFp4]:
        """See ``WeightFormat``."""
        return find_fp4(holders, self.scheme)

    def can_store(self, weight: PublishedFp4, target: Target) -> bool:
        """See ``WeightFormat``."""
        return True

    def stored(self, weights: Mapping[str, PublishedFp4]) -> "StoredFp4":
        """See ``WeightFormat``."""
        return StoredFp4(self.scheme)

    def stored_randomly(self, dtype: torch.dtype) -> "StoredFp4":
        """See ``WeightFormat``; scales have their own dtype."""
        return StoredFp4(self.scheme)


@dataclass(frozen=True, slots=True)
class StoredFp4:
    """See ``StoredFormat``."""

    scheme: Fp4Scheme

    def cuts(self, piece: Piece, target: Target) -> bool:
        """Return whether a group's inputs are in two shards."""
        if len(piece.index) < len(target.shape):
            return False
        return len(range_of(piece.index[-1], target.shape[-1])) % self.scheme.group > 0

    def allocate(self, num_rows: int, num_inputs: int, device: torch.device | str) -> "Fp4Rows":
        """See ``StoredFormat``; inputs that pad the last block are zeros."""
        num_blocks = -(-num_inputs // BLOCK_INPUTS)
        num_groups = num_blocks * BLOCK_INPUTS // self.scheme.group
        return Fp4Rows(
            num_inputs,
            torch.uint8 if self.scheme.is_mxfp4 else torch.float8_e4m3fn,
            torch.empty(num_rows, num_blocks * BLOCK_WORDS, dtype=torch.int32, device=device),
            torch.zeros(num_rows, num_groups, dtype=torch.uint8, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Fp4Rows:
    """See ``StoredRows``."""

    num_inputs: int
    scale_dtype: torch.dtype
    words_RW: Tensor
    scales_RX: Tensor
    """Bytes."""
    factors_R: Tensor

    def fill(self, weight: OpenWeight, target: Target, piece: Piece, index_R: Tensor, source_R: Rows) -> None:
        """See ``StoredRows``."""
        assert isinstance(weight, OpenFp4Weight)
        code_RK, scale_RX, factor_R = weight.part(piece.index)
        row_R = torch.arange(len(code_RK)) if isinstance(source_R, slice) else source_R
        step, device = max(1, CHUNK_ELEMENTS // code_RK.shape[1]), code_RK.device
        for chunk, sources in zip(index_R.split(step), row_R.split(step), strict=True):
            indices, rows = chunk.to(device), sources.to(device)
            self.words_RW[indices] = pack_codes(code_RK[rows])
            self.scales_RX[indices, : scale_RX.shape[1]] = scale_RX.view(torch.uint8)[rows]
            self.factors_R[indices] = factor_R[rows]

    def fill_randomly(self, generator: torch.Generator | None, std: float, matrix_rows: int) -> None:
        """See ``StoredRows``."""
        self.words_RW.random_(-(2**31), 2**31, generator=generator)
        self.scales_RX.random_(*RANDOM_SCALES[self.scale_dtype], generator=generator)
        self.factors_R.fill_(std / RANDOM_STD / RANDOM_MEANS[self.scale_dtype])

    def weight(self, rows: slice, shape: Sequence[int], boundary: int) -> Fp4Weight:
        """See ``StoredRows``."""
        words, scales, factors = (tensor[rows] for tensor in (self.words_RW, self.scales_RX, self.factors_R))
        return Fp4Weight(
            words.view(*shape, words.shape[-1]),
            scales.view(self.scale_dtype).view(*shape, scales.shape[-1]),
            factors.view(*shape),
            self.num_inputs,
        )
