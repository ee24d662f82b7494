"""FP8 weights that stay as they are published: e4m3 on the model's device, and their scales.

Blocks of other than ``GROUP`` columns do not stay.

Shape suffixes: R rows of all matrices of a parameter, I inputs, X groups of inputs, Y blocks of rows, M matrices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from strandline.kernels.gemm.formats.fp8 import FP8
from strandline.kernels.gemm.weights import ScaledWeight
from strandline.kernels.rowwise.quantized_rows import GROUP, MAX_E4M3, MIN_SCALE
from strandline.models.layers.parts.targets import Piece, Target
from strandline.models.storage.fp8 import OpenFp8Weight, PublishedFp8, find_fp8
from strandline.models.storage.published import Holders, OpenWeight
from strandline.models.storage.quantization_config import Block, Fp8Scheme
from strandline.models.storage.stored_rows import Rows, copy_rows, range_of

RANDOM_SCALE: Final = 96.0
"""Standard deviation of random e4m3 weights; the largest is 448."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """See ``WeightFormat``."""

    scheme: Fp8Scheme
    kind: ClassVar[str] = FP8.name
    bits: ClassVar[int] = 8
    has_e4m3: ClassVar[bool] = True

    @property
    def can_stay(self) -> bool:
        """Whether kernels multiply with weights whose scales cover such blocks."""
        return all(block.columns in (None, GROUP) for block in self.scheme.blocks)

    def find(self, holders: Holders) -> Mapping[str, PublishedFp8]:
        """See ``WeightFormat``."""
        return find_fp8(holders, self.scheme)

    def can_store(self, weight: PublishedFp8, target: Target) -> bool:
        """See ``WeightFormat``."""
        return True

    def stored(self, weights: Mapping[str, PublishedFp8]) -> "StoredFp8":
        """See ``WeightFormat``."""
        return StoredFp8(self.scheme.blocks[0])

    def stored_randomly(self, dtype: torch.dtype) -> "StoredFp8":
        """See ``WeightFormat``; scales are float32."""
        return StoredFp8(self.scheme.blocks[0])


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """See ``StoredFormat``."""

    random_block: Block
    """What a scale of random weights covers."""

    def cuts(self, piece: Piece, target: Target) -> bool:
        """Return whether ``GROUP`` inputs of a piece, or of another shard's, are in two blocks of the weight."""
        if len(piece.index) < len(target.shape):
            return False
        inputs = range_of(piece.index[-1], target.shape[-1])
        return target.shape[-1] > GROUP and len(inputs) % GROUP > 0

    def allocate(self, num_rows: int, num_inputs: int, device: torch.device | str) -> "Fp8Rows":
        """See ``StoredFormat``."""
        values_RI = torch.empty(num_rows, num_inputs, dtype=torch.float8_e4m3fn, device=device)
        return Fp8Rows(values_RI, torch.empty(num_rows, -(-num_inputs // GROUP)), self.random_block)


@dataclass(eq=False)
class Fp8Rows:
    """See ``StoredRows``."""

    values_RI: Tensor
    scales_RX: Tensor
    """On the host, a scale for every row and group of inputs."""
    random_block: Block

    def fill(self, weight: OpenWeight, target: Target, piece: Piece, index_R: Tensor, source_R: Rows) -> None:
        """See ``StoredRows``."""
        assert isinstance(weight, OpenFp8Weight)
        published = weight.numbers(piece.index)
        scales_RX = _scales_of(piece, target, weight.block, weight.scale_YX).expand(-1, self.scales_RX.shape[1])
        bytes_RI = published.reshape(-1, published.shape[-1]).view(torch.uint8)
        copy_rows(self.values_RI.view(torch.uint8), index_R, bytes_RI, source_R)
        copy_rows(self.scales_RX, index_R, scales_RX, source_R)

    def fill_randomly(self, generator: torch.Generator | None, std: float, matrix_rows: int) -> None:
        """See ``StoredRows``; scales cover what the configuration says, so that kernels run as for published ones."""
        for rows in self.values_RI.split(max(1, 2**26 // self.values_RI.shape[-1])) if generator is not None else ():
            noise = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device).normal_(generator=generator)
            rows.copy_(noise.mul_(RANDOM_SCALE).clamp_(-MAX_E4M3, MAX_E4M3))
        num_rows, num_groups = self.scales_RX.shape
        grid = self.random_block.grid(matrix_rows, self.values_RI.shape[-1])
        on_host = torch.Generator().manual_seed(0 if generator is None else generator.initial_seed())
        noise_MYX = torch.rand(-(-num_rows // matrix_rows), *grid, generator=on_host)
        scale_MYX = (noise_MYX + 0.5) * max(std / RANDOM_SCALE, MIN_SCALE)
        scale_MRX = scale_MYX.repeat_interleave(self.random_block.rows or matrix_rows, 1)[:, :matrix_rows]
        self.scales_RX.copy_(scale_MRX.flatten(0, 1)[:num_rows].expand(-1, num_groups))

    def weight(self, rows: slice, shape: Sequence[int], boundary: int) -> ScaledWeight:
        """See ``StoredRows``."""
        values, scales = self.values_RI[rows], self.scales_RX[rows]
        return _scaled(values.view(*shape, values.shape[-1]), scales.view(*shape, scales.shape[-1]), boundary)


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


def _scales_of(piece: Piece, target: Target, block: Block, scale_YX: Tensor) -> Tensor:
    """Return a scale for every row and group of inputs of a piece; one column if a scale covers whole rows."""
    index = (*piece.index, *[slice(None)] * (len(target.shape) - len(piece.index)))
    rows, inputs = (range_of(part, size) for part, size in zip(index[-2:], target.shape[-2:], strict=True))
    row_R = torch.arange(rows.start, rows.stop) // (block.rows or target.shape[-2])
    scales_RX = scale_YX[index[:-2]].float().cpu()[..., row_R, :].flatten(0, -2)
    return scales_RX[:, inputs.start // GROUP : inputs[-1] // GROUP + 1] if block.columns else scales_RX
