"""Keeps weights that are published in 4 bits so, on the model's device: in one layout, whatever the published format.

Which rows stay follows from the files (``kept_rows.py``). Weights whose inputs are not in the order of their groups do
not stay, nor groups of a size that kernels do not take; those of a multiple of 128 inputs are several of 128 with the
same scale.

Shape suffixes: N rows, K inputs of a published weight; R rows of all matrices of a parameter, I inputs, W numbers of
packed inputs, X groups of inputs.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from strandline.kernels.gemm.weights import (
    BLOCK_INPUTS,
    BLOCK_WORDS,
    GROUPS_FOUR_BIT,
    SYMMETRIC_ZERO,
    FourBitWeight,
    pack_codes,
)
from strandline.models.layers.projection import Projection
from strandline.models.layers.targets import Piece, Read, Target
from strandline.models.storage.four_bit import (
    FourBitMatrix,
    Holders,
    PackedMatrix,
    PackedNames,
    group_size,
    is_in_order,
)
from strandline.models.storage.kept_rows import (
    Kept,
    Matrices,
    Matrix,
    Rows,
    copy_rows,
    keep_experts,
    range_of,
    rows_and_sources,
)
from strandline.models.storage.quantization_config import FourBit

CHUNK_ELEMENTS = 2**22
"""Weights that are packed or put in another order at a time."""

RANDOM_STD: Final = 4.6
"""Standard deviation of random codes."""

SCALE_DTYPES: Final = {"F16": torch.float16, "BF16": torch.bfloat16}
"""Scales of several dtypes, or of others, are float32."""


def can_keep_four_bit(quantization: FourBit) -> bool:
    """Return whether kernels multiply with weights of some of these group sizes."""
    return any(map(_is_supported, quantization.group_sizes))


def _is_supported(size: int | None) -> bool:
    return size is None or size in GROUPS_FOUR_BIT or size % BLOCK_INPUTS == 0


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights that stay are laid out."""

    group: int
    """Inputs that share a scale."""
    scale_dtype: torch.dtype
    has_zeros: bool
    has_groups: bool
    """Whether the inputs of a row have several scales; else shards may begin anywhere."""

    @classmethod
    def of(cls, quantization: FourBit, scale_dtype: torch.dtype, *, has_zeros: bool) -> "Scheme":
        """Return a scheme for all supported group sizes; there is one."""
        sizes = [size for size in quantization.group_sizes if _is_supported(size)]
        group = min(size if size in GROUPS_FOUR_BIT else BLOCK_INPUTS for size in sizes)
        return cls(group, scale_dtype, has_zeros, any(size is not None for size in sizes))

    def num_groups(self, num_inputs: int) -> int:
        """Return how many scales a row has, with those of padded inputs."""
        return -(-num_inputs // BLOCK_INPUTS) * BLOCK_INPUTS // self.group

    def cuts(self, piece: Piece, target: Target) -> bool:
        """Return whether a group's inputs lie in two shards."""
        if not self.has_groups or len(piece.index) < len(target.shape):
            return False
        return len(range_of(piece.index[-1], target.shape[-1])) % self.group > 0


def find_keepable(
    packed: Mapping[str, PackedNames],
    holders: Holders,
    quantization: FourBit,
    targets: Mapping[str, Target],
) -> Iterator[str]:
    """Yield the names of the weights that kernels multiply with as they are published."""
    for name in packed.keys() & targets.keys():
        names, shape = packed[name], targets[name].shape
        if len(shape) != 2 or "scales" not in names:
            continue  # reading it will name the fault
        size = group_size(holders[names["scales"]].shape(names["scales"]), shape, quantization)
        if size is None or not (size == shape[1] or _is_supported(size)):
            continue
        if is_in_order(names, size, holders):
            yield name


def scheme_of(
    packed: Mapping[str, PackedNames], kept: Collection[str], holders: Holders, quantization: FourBit
) -> Scheme:
    """Return how the weights of these names are laid out."""
    scales = [packed[name]["scales"] for name in kept]
    dtypes = {SCALE_DTYPES.get(holders[name].dtype(name), torch.float32) for name in scales}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return Scheme.of(quantization, dtype, has_zeros=any("zeros" in packed[name] for name in kept))


@dataclass(eq=False)
class _Memory:
    """The memory of a matrix's rows."""

    words_RW: Tensor
    scales_RX: Tensor
    zeros_RX: Tensor | None
    dense_RI: Tensor

    @classmethod
    def of(cls, matrix: Matrix, scheme: Scheme, device: torch.device | str) -> "_Memory":
        num_rows, num_inputs = matrix.num_quantized, matrix.parameter.shape[-1]
        num_words, num_groups = -(-num_inputs // BLOCK_INPUTS) * BLOCK_WORDS, scheme.num_groups(num_inputs)
        zeros_RX = None
        if scheme.has_zeros:
            zeros_RX = torch.full((num_rows, num_groups), SYMMETRIC_ZERO, dtype=torch.uint8, device=device)
        return cls(
            torch.empty(num_rows, num_words, dtype=torch.int32, device=device),
            torch.zeros(num_rows, num_groups, dtype=scheme.scale_dtype, device=device),
            zeros_RX,
            matrix.allocate_dense(device),
        )


class FourBitStorage:
    """The matrices of a model that stay in 4 bits.

    Args:
        targets: of the model, which was built without memory for matrices.
        kept: names of the published weights that may stay in 4 bits.
        device: where the matrices go. Those that do not stay in 4 bits get memory for all their rows.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, Target],
        kept: Collection[str],
        scheme: Scheme,
        device: torch.device | str,
    ) -> None:
        self._targets, self._scheme = targets, scheme
        self._matrices = Matrices(model, targets, kept, scheme.cuts, device)
        self._memory = {matrix: _Memory.of(matrix, scheme, device) for matrix in self._matrices.kept}
        self.device = device
        self.names = self._matrices.names
        """Published weights that ``fill`` or ``fill_packed`` takes."""
        self.kept = self.names.intersection(kept)
        """Published weights that ``fill_packed`` takes."""

    def fill(self, name: str, read: Read) -> None:
        """Copy what is used of a published weight that does not stay in 4 bits, to a matrix with others that do."""
        target, matrix, memory = self._find(name)
        for piece in target.pieces:
            published = read(piece.index)
            rows_R, source_R = rows_and_sources(piece, published.shape, len(matrix.is_quantized_R))
            dense_RI = published.reshape(-1, published.shape[-1]).to(memory.dense_RI.dtype)
            copy_rows(memory.dense_RI, matrix.place_R[rows_R], dense_RI, source_R, CHUNK_ELEMENTS)

    def fill_packed(self, name: str, weight: PackedMatrix) -> None:
        """Copy what is used of a published weight in 4 bits."""
        target, matrix, memory = self._find(name)
        for piece in target.pieces:
            part = weight.part(piece.index)
            rows_R, source_R = rows_and_sources(piece, part.code_NK.shape, len(matrix.is_quantized_R))
            for places, rows in _chunks(matrix.place_R[rows_R], source_R, *part.code_NK.shape):
                self._copy(memory, places.to(self.device), part, rows.to(self.device))

    def _find(self, name: str) -> tuple[Target, Matrix, _Memory]:
        target = self._targets[name]
        matrix = self._matrices.kept_of(target)
        assert matrix is not None
        return target, matrix, self._memory[matrix]

    def _copy(self, memory: _Memory, place_R: Tensor, part: FourBitMatrix, row_R: Tensor) -> None:
        """Pack rows of a part of a weight, and put them in their places."""
        group_X = part.group_K[:: self._scheme.group]
        columns = slice(0, len(group_X))
        memory.words_RW[place_R] = pack_codes(part.code_NK[row_R])
        memory.scales_RX[place_R, columns] = part.scale_NX[row_R][:, group_X].to(memory.scales_RX.dtype)
        if memory.zeros_RX is not None:
            memory.zeros_RX[place_R, columns] = part.zero_NX[row_R][:, group_X]

    def fill_randomly(self, seed: int) -> None:
        """Draw random codes, and scales that vary from group to group."""
        for index, (matrix, memory) in enumerate(self._memory.items()):
            generator = torch.Generator(memory.words_RW.device).manual_seed(seed + index)
            std = matrix.parameter.shape[-1] ** -0.5
            memory.words_RW.random_(-(2**31), 2**31, generator=generator)
            memory.scales_RX.uniform_(0.5, 1.5, generator=generator).mul_(std / RANDOM_STD)
            memory.dense_RI.normal_(generator=generator).mul_(std)

    def finish(self) -> None:
        """Give the filled weights to their layers."""
        experts = dict[nn.Module, dict[str, Kept]]()
        for matrix, memory in self._memory.items():
            num_inputs = matrix.parameter.shape[-1]
            if isinstance(matrix.owner, Projection):
                matrix.keep(memory.dense_RI, partial(self._weight, memory, num_inputs))
            else:
                whole = self._weight(memory, num_inputs, slice(None), matrix.parameter.shape[:-1])
                experts.setdefault(matrix.owner, {})[matrix.attribute] = whole
        keep_experts(experts)

    def _weight(
        self, memory: _Memory, num_inputs: int, rows: slice, shape: torch.Size | tuple[int, ...] = (-1,)
    ) -> FourBitWeight:
        """Return the weight of a run of rows, without what repeats itself.

        Args:
            shape: of the rows; by default, one dimension.
        """

        def shaped(tensor: Tensor) -> Tensor:
            return tensor[rows].view(*shape, tensor.shape[-1])

        def scaling(tensor: Tensor) -> Tensor:
            whole = shaped(tensor)
            return whole if self._scheme.has_groups else whole[..., :1].contiguous().expand(whole.shape)

        zeros = memory.zeros_RX
        is_symmetric = zeros is None or bool((zeros[rows] == SYMMETRIC_ZERO).all())
        return FourBitWeight(
            shaped(memory.words_RW),
            scaling(memory.scales_RX),
            None if zeros is None or is_symmetric else scaling(zeros),
            num_inputs,
            self._scheme.group,
        )


def _chunks(place_R: Tensor, source_R: Rows, num_rows: int, num_inputs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield places of rows, and which rows these are, some at a time."""
    row_R = torch.arange(num_rows) if isinstance(source_R, slice) else source_R
    step = max(1, CHUNK_ELEMENTS // num_inputs)
    return zip(place_R.split(step), row_R.split(step), strict=True)
