"""Weights in 4 bits that stay so, on the model's device: in one layout, whatever the published format.

Weights whose inputs are not in the order of their groups do not stay, nor groups of a size that kernels do not take;
those of a multiple of 128 inputs are several of 128 with the same scale.

Shape suffixes: N rows, K inputs of a published weight; R rows of all matrices of a parameter, I inputs, W numbers of
packed inputs, X groups of inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from strandline.kernels.gemm.formats.coded import BLOCK_INPUTS
from strandline.kernels.gemm.formats.four_bit import (
    BLOCK_WORDS,
    FOUR_BIT,
    GROUPS_FOUR_BIT,
    SYMMETRIC_ZERO,
    pack_code_pairs,
)
from strandline.kernels.gemm.weights import CodedWeight
from strandline.models.layers.targets import Piece, Target
from strandline.models.storage.four_bit import FourBitMatrix, PackedMatrix, PublishedFourBit, find_four_bit
from strandline.models.storage.published import Holders, OpenWeight
from strandline.models.storage.quantization_config import FourBitScheme
from strandline.models.storage.stored_rows import CHUNK_ELEMENTS, Rows, range_of

RANDOM_STD: Final = 4.2
"""Standard deviation of random codes."""

LOWEST_BITS: Final = 0x11111111
"""The lowest bits of the codes of a word."""

SCALE_DTYPES: Final = {"F16": torch.float16, "BF16": torch.bfloat16}
"""Scales of several dtypes, or of others, are float32."""


def _is_supported(size: int | None) -> bool:
    return size is None or size in GROUPS_FOUR_BIT or size % BLOCK_INPUTS == 0


@dataclass(frozen=True, slots=True)
class FourBitFormat:
    """See ``WeightFormat``."""

    scheme: FourBitScheme
    kind: ClassVar[str] = "4 bits"
    bits: ClassVar[int] = 4
    has_e4m3: ClassVar[bool] = False

    @property
    def can_stay(self) -> bool:
        """Whether kernels multiply with weights of some of these group sizes."""
        return any(map(_is_supported, self.scheme.group_sizes))

    def find(self, holders: Holders) -> Mapping[str, PublishedFourBit]:
        """See ``WeightFormat``."""
        return find_four_bit(holders, self.scheme)

    def can_store(self, weight: PublishedFourBit, target: Target) -> bool:
        """See ``WeightFormat``."""
        size = weight.group_size(target.shape)
        return size is not None and (size == target.shape[-1] or _is_supported(size))

    def stored(self, weights: Mapping[str, PublishedFourBit]) -> "StoredFourBit":
        """See ``WeightFormat``."""
        scales = [(weight.names["scales"], weight.holders) for weight in weights.values()]
        dtypes = {SCALE_DTYPES.get(holders[name].dtype(name), torch.float32) for name, holders in scales}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        return self._stored(dtype, has_zeros=any("zeros" in weight.names for weight in weights.values()))

    def stored_randomly(self, dtype: torch.dtype) -> "StoredFourBit":
        """See ``WeightFormat``."""
        return self._stored(dtype, has_zeros=self.scheme.has_zeros)

    def _stored(self, scale_dtype: torch.dtype, *, has_zeros: bool) -> "StoredFourBit":
        """Return the format for all supported group sizes."""
        sizes = [size for size in self.scheme.group_sizes if _is_supported(size)]
        group = min(size if size in GROUPS_FOUR_BIT else BLOCK_INPUTS for size in sizes)
        return StoredFourBit(group, scale_dtype, has_zeros, any(size is not None for size in sizes))


@dataclass(frozen=True, slots=True)
class StoredFourBit:
    """See ``StoredFormat``."""

    group: int
    """Inputs that share a scale."""
    scale_dtype: torch.dtype
    has_zeros: bool
    has_groups: bool
    """Whether the inputs of a row have several scales; else shards may begin anywhere."""

    def cuts(self, piece: Piece, target: Target) -> bool:
        """Return whether a group's inputs are in two shards."""
        if not self.has_groups or len(piece.index) < len(target.shape):
            return False
        return len(range_of(piece.index[-1], target.shape[-1])) % self.group > 0

    def allocate(self, num_rows: int, num_inputs: int, device: torch.device | str) -> "FourBitRows":
        """See ``StoredFormat``."""
        num_blocks = -(-num_inputs // BLOCK_INPUTS)
        num_groups = num_blocks * BLOCK_INPUTS // self.group
        zeros_RX = None
        if self.has_zeros:
            zeros_RX = torch.full((num_rows, num_groups), SYMMETRIC_ZERO, dtype=torch.uint8, device=device)
        return FourBitRows(
            self,
            num_inputs,
            torch.empty(num_rows, num_blocks * BLOCK_WORDS, dtype=torch.int32, device=device),
            torch.zeros(num_rows, num_groups, dtype=self.scale_dtype, device=device),
            zeros_RX,
        )


@dataclass(frozen=True, slots=True, eq=False)
class FourBitRows:
    """See ``StoredRows``."""

    format: StoredFourBit
    num_inputs: int
    words_RW: Tensor
    scales_RX: Tensor
    zeros_RX: Tensor | None

    def fill(self, weight: OpenWeight, target: Target, piece: Piece, index_R: Tensor, source_R: Rows) -> None:
        """See ``StoredRows``."""
        assert isinstance(weight, PackedMatrix)
        part, device = weight.part(piece.index), self.words_RW.device
        for indices, rows in _chunks(index_R, source_R, *part.code_NK.shape):
            self._copy(indices.to(device), part, rows.to(device))

    def _copy(self, index_R: Tensor, part: FourBitMatrix, row_R: Tensor) -> None:
        """Pack rows of a part of a weight."""
        group_X = part.group_K[:: self.format.group]
        columns = slice(0, len(group_X))
        self.words_RW[index_R] = pack_code_pairs(part.code_NK[row_R])
        self.scales_RX[index_R, columns] = part.scale_NX[row_R][:, group_X].to(self.scales_RX.dtype)
        if self.zeros_RX is not None:
            self.zeros_RX[index_R, columns] = part.zero_NX[row_R][:, group_X]

    def fill_randomly(self, generator: torch.Generator | None, std: float, matrix_rows: int) -> None:
        """See ``StoredRows``.

        The zero point is the mean of the codes: with another mean all hidden states soon have one direction, and a
        router chooses the same experts for all tokens.
        """
        self.words_RW.random_(-(2**31), 2**31, generator=generator)
        _replace_lowest_codes(self.words_RW)
        self.scales_RX.uniform_(0.5, 1.5, generator=generator).mul_(std / RANDOM_STD)

    def weight(self, rows: slice, shape: Sequence[int], boundary: int) -> CodedWeight:
        """See ``StoredRows``."""

        def shaped(tensor: Tensor) -> Tensor:
            return tensor[rows].view(*shape, tensor.shape[-1])

        def scaling(tensor: Tensor) -> Tensor:
            whole = shaped(tensor)
            return whole if self.format.has_groups else whole[..., :1].contiguous().expand(whole.shape)

        zeros = self.zeros_RX
        is_symmetric = zeros is None or bool((zeros[rows] == SYMMETRIC_ZERO).all())
        return CodedWeight(
            FOUR_BIT,
            shaped(self.words_RW),
            scaling(self.scales_RX),
            self.num_inputs,
            self.format.group,
            None if zeros is None or is_symmetric else scaling(zeros),
        )


def _chunks(index_R: Tensor, source_R: Rows, num_rows: int, num_inputs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of the memory, and which rows of a piece these are, some at a time."""
    row_R = torch.arange(num_rows) if isinstance(source_R, slice) else source_R
    step = max(1, CHUNK_ELEMENTS // num_inputs)
    return zip(index_R.split(step), row_R.split(step), strict=True)


def _replace_lowest_codes(words: Tensor) -> None:
    """Replace codes of 0 by 8 in place: the others have a mean of 8."""
    has_bits = words | words >> 1 | words >> 2 | words >> 3
    words |= (~has_bits & LOWEST_BITS) << 3
