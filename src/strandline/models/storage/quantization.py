"""FP8 weights (e4m3) as files hold them, beside their scales.

Which tensors are quantised is decided by the files, tensor by tensor. The configuration says what one scale covers
(``quantization_config.py``).

Source: the published layouts ``fp8`` (``transformers``, ``finegrained_fp8``) and ``float-quantized`` of
``compressed-tensors``.

Shape suffixes: N rows, K columns, Y and X rows and columns of the grid of scales.
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from strandline.errors import WeightsError
from strandline.models.storage.quantization_config import TENSOR, Block, Quantization

QUANTIZED_DTYPE: Final = "F8_E4M3"
"""What safetensors calls the dtype of quantised weights."""

SCALE_SUFFIXES: Final = ("_scale_inv", "_scale")
"""What follows the name of a weight in that of its scales. Both kinds are multiplied with, whatever the first says."""

ACTIVATION_SCALES: Final = ("input_scale", "activation_scale")
"""Published beside ``weight`` where activations have static scales; products with dequantised weights need none."""

SCALE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

KV_SCALE: Final = re.compile(
    r".*\.layers\.(\d+)\.(?:self_attn|mixer)\.(?:(?:attn\.|[kv]_proj\.)?(kv?|v)_scale|([kv])_proj\.output_scale)"
)
"""Names under which scales of keys and values are published; ``kv_scale`` is that of both."""

KV_SCALED: Final[Mapping[str, tuple[Literal["key", "value"], ...]]] = {
    "k": ("key",),
    "v": ("value",),
    "kv": ("key", "value"),
}

CHUNK_ELEMENTS = 2**22
"""Weights that are dequantised at a time: bounds what float32 takes beside the result."""


@dataclass(frozen=True, slots=True)
class ScaleNames:
    """The names of a quantised tensor's scales."""

    weight: str
    activation: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        return iter((self.weight, *self.activation))


def find_scales(name: str, names: Container[str]) -> ScaleNames:
    """Return the names of a quantised tensor's scales among all published names.

    Raises:
        WeightsError: its weights have none.
    """
    found = next((name + suffix for suffix in SCALE_SUFFIXES if name + suffix in names), None)
    if found is None:
        either = " nor ".join(name + suffix for suffix in SCALE_SUFFIXES)
        raise WeightsError(f"{name} is stored as {QUANTIZED_DTYPE}, but neither {either} is published")
    module, _, kind = name.rpartition("weight")
    extras = [module + scale for scale in ACTIVATION_SCALES] if kind == "" and module else []
    return ScaleNames(found, tuple(extra for extra in extras if extra in names))


def scale_grid(name: str, scale: Tensor, shape: tuple[int, ...], quantization: Quantization) -> tuple[Block, Tensor]:
    """Return what each scale of a weight covers, and the scales in float32, as ``[..., Y, X]``.

    Args:
        name: of the scales, for messages.
        shape: of the weight.

    Raises:
        WeightsError: they have another shape or dtype, or are not positive numbers.
    """
    if len(shape) < 2:
        raise WeightsError(f"{name} scales a weight of shape {list(shape)}; only matrices are quantised")
    *outer, rows, columns = shape
    grids = {block: block.grid(rows, columns) for block in quantization.blocks}
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


def check_scale(name: str, scale: Tensor) -> Tensor:
    """Return scales in float32.

    Raises:
        WeightsError: they have another dtype, or one is not a positive number.
    """
    if scale.dtype not in SCALE_DTYPES:
        raise WeightsError(f"{name} is stored as {scale.dtype}; scales are float32, bfloat16 or float16")
    scale = scale.float()
    wrong = ~(scale.isfinite() & (scale > 0))
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        value = float(scale[tuple(place)])
        raise WeightsError(f"{name}{place if place else ''} is {value}; scales are positive numbers")
    return scale


def find_kv_scale(name: str) -> tuple[int, tuple[Literal["key", "value"], ...]] | None:
    """Return which layer's scale a tensor is, and of what; None: it is none."""
    found = KV_SCALE.fullmatch(name)
    return None if found is None else (int(found[1]), KV_SCALED[found[2] or found[3]])


def read_kv_scale(name: str, scale: Tensor) -> float:
    """Return a scale of keys or values.

    Raises:
        WeightsError: it is not one positive number.
    """
    if scale.numel() != 1:
        raise WeightsError(f"{name} has shape {list(scale.shape)}; keys and values of a layer have one scale each")
    return float(check_scale(name, scale))


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
        dtype: of the result.
        shape: of the whole tensor.
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
