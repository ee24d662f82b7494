"""FP8 weights (e4m3) as files hold them, beside their scales.

Which tensors are quantised is decided by the files, tensor by tensor. The configuration says what one scale covers
(``quantization_config.py``).

Source: the published layouts ``fp8`` (``transformers``, ``finegrained_fp8``) and ``float-quantized`` of
``compressed-tensors``.

Shape suffixes: N rows, K columns, Y and X rows and columns of the grid of scales.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from strandline.errors import WeightsError
from strandline.models.layers.parts.targets import Index, Target
from strandline.models.storage.layouts import EXPONENTS
from strandline.models.storage.published import Holders, check_shape
from strandline.models.storage.quantization_config import TENSOR, Block, Fp8Scheme
from strandline.models.storage.scales import check_scale
from strandline.models.storage.weights_files import WeightsFile

QUANTIZED_DTYPE: Final = "F8_E4M3"
"""What safetensors calls the dtype of quantised weights."""

SCALE_SUFFIXES: Final = ("_scale_inv", "_scale")
"""What follows the name of a weight in that of its scales. Both kinds are multiplied with, whatever the first says."""

ACTIVATION_SCALES: Final = ("input_scale", "activation_scale")
"""Published beside ``weight`` where activations have static scales; products with dequantised weights need none."""

CHUNK_ELEMENTS = 2**22
"""Weights that are dequantised at a time: bounds what float32 takes beside the result."""


def find_fp8(holders: Holders, scheme: Fp8Scheme) -> dict[str, "PublishedFp8"]:
    """Return the weights in FP8, by their names."""
    return {
        name: PublishedFp8(name, scheme, holders)
        for name, file in holders.items()
        if file.dtype(name) == QUANTIZED_DTYPE
    }


@dataclass(frozen=True, slots=True)
class PublishedFp8:
    """A weight in FP8, and its scales."""

    name: str
    scheme: Fp8Scheme
    holders: Holders

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``PublishedWeight``. Activations' scales may be among them."""
        module, _, kind = self.name.rpartition("weight")
        extras = [module + scale for scale in ACTIVATION_SCALES] if kind == "" and module else []
        scale = self._scale
        return (self.name, *([] if scale is None else [scale]), *(extra for extra in extras if extra in self.holders))

    @property
    def _scale(self) -> str | None:
        return next((self.name + suffix for suffix in SCALE_SUFFIXES if self.name + suffix in self.holders), None)

    @property
    def has_own_scales(self) -> bool:
        """See ``PublishedWeight``: where they are exponents, the weight is in MXFP8."""
        return self._scale is None or self.holders[self._scale].dtype(self._scale) not in EXPONENTS

    def check(self, target: Target) -> None:
        """See ``PublishedWeight``."""
        if self._scale is None:
            either = " nor ".join(self.name + suffix for suffix in SCALE_SUFFIXES)
            raise WeightsError(f"{self.name} is stored as {QUANTIZED_DTYPE}, but neither {either} is published")
        check_shape(self.holders[self.name], self.name, target)

    def open(self, target: Target, device: torch.device | str) -> "OpenFp8Weight":
        """See ``PublishedWeight``."""
        _, scale, *activation = self.tensors
        for extra in activation:
            check_activation_scale(extra, self.holders[extra].get(extra), target.shape)
        block, scale_YX = scale_grid(scale, self.holders[scale].get(scale), target.shape, self.scheme)
        return OpenFp8Weight(self.name, self.holders[self.name], block, scale_YX, target.shape, device)


@dataclass(frozen=True, slots=True, eq=False)
class OpenFp8Weight:
    """A weight in FP8 whose numbers are read part by part."""

    name: str
    file: WeightsFile
    block: Block
    """What a scale covers."""
    scale_YX: Tensor
    """``[..., Y, X]`` of the whole tensor, float32, on the host."""
    shape: tuple[int, ...]
    device: torch.device | str

    def numbers(self, index: Index) -> Tensor:
        """Read a part as it is in the file, to the host."""
        return self.file.get(self.name, index)

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """See ``OpenWeight``."""
        scale_YX = self.scale_YX.to(self.device)
        return dequantize(self.numbers(index).to(self.device), self.block, scale_YX, dtype, self.shape, index)


def scale_grid(name: str, scale: Tensor, shape: tuple[int, ...], scheme: Fp8Scheme) -> tuple[Block, Tensor]:
    """Return what each scale of a weight covers, and the scales in float32, as ``[..., Y, X]``.

    Args:
        name: name of the scales, for messages.
        shape: shape of the weight.

    Raises:
        WeightsError: they have another shape or dtype, or are not positive numbers.
    """
    if len(shape) < 2:
        raise WeightsError(f"{name} scales a weight of shape {list(shape)}; only matrices are quantised")
    *outer, rows, columns = shape
    grids = {block: block.grid(rows, columns) for block in scheme.blocks}
    for block, grid in grids.items():
        if tuple(scale.shape) in _scale_shapes(block, (*outer, *grid)):
            return block, check_scale(name, scale).reshape(*outer, *grid)
    wanted = " or ".join(f"{[*outer, *grid]} ({block})" for block, grid in grids.items())
    raise WeightsError(f"{name} has shape {list(scale.shape)}, a weight of {list(shape)} asks for {wanted}")


def _scale_shapes(block: Block, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes that a grid of scales is published in.

    These are its own; those without the last dimensions that such blocks always have once; and for blocks of rows and
    columns that of ModelOpt, with ones in between.
    """
    num_single = (block.rows is None) + (block.columns is None)
    spread = [] if num_single else [(*shape[:-2], shape[-2], 1, shape[-1], 1)]
    return [shape[: len(shape) - left_out] for left_out in range(num_single + 1)] + spread


def check_activation_scale(name: str, scale: Tensor, shape: tuple[int, ...]) -> None:
    """Check the static scale of the activations that a weight of a shape is multiplied with.

    Raises:
        WeightsError: it is not one positive number, or one for each of the matrices.
    """
    outer = shape[:-2]
    if scale.numel() != 1 and tuple(scale.shape) not in _scale_shapes(TENSOR, (*outer, 1, 1)):
        raise WeightsError(f"{name} has shape {list(scale.shape)}; activations of a matrix have one scale")
    check_scale(name, scale)


def dequantize(
    weight: Tensor,
    block: Block,
    scale_YX: Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    index: tuple[slice, ...] = (),
) -> Tensor:
    """Return FP8 weights times their scales, computed in float32, ``CHUNK_ELEMENTS`` at a time.

    Args:
        weight: ``[..., N, K]``, or the part of it that ``index`` is: a range of each of its first dimensions.
        scale_YX: ``[..., Y, X]`` of the whole tensor, float32, on the weight's device.
        dtype: dtype of the result.
        shape: shape of the whole tensor.
    """
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    scale_YX = scale_YX[index[:-2]]
    first_row, first_column = (part.start or 0 for part in index[-2:])
    num_rows, num_columns = weight.shape[-2:]
    weight_NK, per_matrix = weight.flatten(0, -2), scale_YX.shape[-2]
    scale_YX = scale_YX.flatten(0, -2)
    out_NK = torch.empty_like(weight_NK, dtype=dtype)
    row_N = torch.arange(len(weight_NK), device=weight.device)
    in_matrix_N = (first_row + row_N % num_rows) // (block.rows or shape[-2])
    grid_row_N = row_N // num_rows * per_matrix + in_matrix_N
    column_K = torch.arange(first_column, first_column + num_columns, device=weight.device)
    grid_column_K = column_K // (block.columns or shape[-1])
    step = max(1, CHUNK_ELEMENTS // num_columns)
    for start in range(0, len(weight_NK), step):
        rows = slice(start, start + step)
        scale_NK = scale_YX[grid_row_N[rows]][:, grid_column_K]
        out_NK[rows] = weight_NK[rows].float().mul_(scale_NK)
    return out_NK.view(weight.shape)
