"""Quantised weights, as ``config.json`` announces them and as their files hold them: FP8 (e4m3) with scales.

Which tensors are quantised is decided by the files, tensor by tensor: lists of exceptions in configurations are written
for other loaders' module names, and are wrong for some published models. The configuration says what one scale covers.

Source: the published layouts ``fp8`` (``transformers``, ``finegrained_fp8``) and ``float-quantized`` of
``compressed-tensors``.

Shape suffixes: N rows, K columns, Y and X rows and columns of the grid of scales.
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

import torch
from torch import Tensor

from strandline.errors import ConfigError, WeightsError
from strandline.model_config import Fields

SUPPORTED: Final = (
    'quant_method "fp8" (e4m3, one scale per block, channel or tensor), and "compressed-tensors" in format '
    '"float-quantized" with 8-bit float weights'
)

QUANTIZED_DTYPE: Final = "F8_E4M3"
"""What safetensors calls the dtype of quantised weights."""

SCALE_SUFFIXES: Final = ("_scale_inv", "_scale")
"""What follows the name of a weight in that of its scales. Both kinds are multiplied with, whatever the first says."""

ACTIVATION_SCALES: Final = ("input_scale", "activation_scale")
"""Published beside ``weight`` where activations have static scales; products with dequantised weights need none."""

SCALE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

KV_SCALE: Final = re.compile(
    r".*\.layers\.(\d+)\.(?:self_attn|mixer)\.(?:(?:attn\.|[kv]_proj\.)?([kv])_scale|([kv])_proj\.output_scale)"
)
"""Names under which scales of keys and values are published."""

CHUNK_ELEMENTS = 2**22
"""Weights that are dequantised at a time: bounds what float32 takes beside the result."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one scale covers; None: all rows, or all columns."""

    rows: int | None
    columns: int | None

    def __str__(self) -> str:
        if self.rows is None:
            return "one scale per tensor"
        return "one scale per channel" if self.columns is None else f"blocks of {self.rows} × {self.columns}"

    def grid(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return how many scales a matrix has downwards and across."""
        return -(-num_rows // (self.rows or num_rows)), -(-num_columns // (self.columns or num_columns))


TENSOR: Final = Block(None, None)
CHANNEL: Final = Block(1, None)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's FP8 weights are scaled: each in one of these ways."""

    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        return f"FP8 ({', '.join(map(str, self.blocks))})"


def read_quantization(config: Any) -> Quantization | None:
    """Return how the weights of a ``PretrainedConfig`` are quantised; None: they are not.

    Raises:
        ConfigError: they are, in a way that is not supported.
    """
    sources = (config, config.get_text_config())
    values = next((found for x in sources if (found := getattr(x, "quantization_config", None))), None)
    if values is None:
        return None
    if not isinstance(values, Mapping):
        values = values.to_dict() if hasattr(values, "to_dict") else _reject("is no JSON object")
    if values.get("quant_method") == "fp8":
        return _read_fp8(Fields(values, "config.json: quantization_config."))
    if values.get("quant_method") == "compressed-tensors":
        return _read_compressed_tensors(values)
    _reject(f"quant_method {values.get('quant_method')!r} is not supported")


def _reject(fault: str) -> NoReturn:
    raise ConfigError(f"config.json: quantization_config: {fault}; supported: {SUPPORTED}")


def _read_fp8(fields: Fields) -> Quantization:
    fields.choice("fmt", ["e4m3"], default="e4m3")
    fields.choice("activation_scheme", ["dynamic", "static"], default="dynamic")
    if fields.value("weight_block_size") is None:
        return Quantization((CHANNEL, TENSOR))
    return Quantization((_read_block(fields, "weight_block_size"),))


def _read_block(fields: Fields, name: str) -> Block:
    sizes = fields.list_of(name, lambda entries, entry: entries.size(entry))
    if len(sizes) != 2:
        fields.reject(name, "two sizes, rows and columns")
    return Block(*sizes)


def _read_compressed_tensors(values: Mapping[str, Any]) -> Quantization:
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        _reject("config_groups names no group of weights")
    blocks = [_read_group(name, group, values.get("format")) for name, group in groups.items()]
    return Quantization(tuple(dict.fromkeys(blocks)))


def _read_group(name: str, group: Any, default_format: object) -> Block:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        _reject(f"config_groups.{name} names no weights")
    found = (group.get("format") or default_format, weights.get("type"), weights.get("num_bits"))
    if found != ("float-quantized", "float", 8):
        _reject(f"config_groups.{name} has format {found[0]!r} and {found[2]}-bit weights of type {found[1]!r}")
    fields = Fields(weights, f"config.json: quantization_config.config_groups.{name}.weights.")
    strategy = fields.choice("strategy", ["block", "channel", "tensor"], default="tensor")
    if strategy == "block":
        return _read_block(fields, "block_structure")
    return CHANNEL if strategy == "channel" else TENSOR


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
        # Dimensions of size 1 may be left out at the end.
        shapes = [
            (*outer, *grid),
            (*outer, grid[0]) if grid[1] == 1 else None,
            tuple(outer) if grid == (1, 1) else None,
        ]
        if tuple(scale.shape) in shapes:
            return block, check_scale(name, scale).reshape(*outer, *grid)
    wanted = " or ".join(f"{[*outer, *grid]} ({block})" for block, grid in grids.items())
    raise WeightsError(f"{name} has shape {list(scale.shape)}, a weight of {list(shape)} asks for {wanted}")


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


def find_kv_scale(name: str) -> tuple[int, Literal["key", "value"]] | None:
    """Return which layer's scale a tensor is, and of what; None: it is none."""
    found = KV_SCALE.fullmatch(name)
    return None if found is None else (int(found[1]), "key" if "k" in (found[2], found[3]) else "value")


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
