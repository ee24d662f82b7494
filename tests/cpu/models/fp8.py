"""Turns saved models into FP8 ones, and back to float32, in loops over blocks: the oracle of what the loader reads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MAX = 448.0
"""The largest e4m3 number."""

Tensors = dict[str, Tensor]


def is_projection(name: str, tensor: Tensor) -> bool:
    """Return whether published models have a tensor in FP8: projections, and experts in one tensor."""
    unconverted = ("embed", "lm_head", "conv1d", "mlp.gate.", "shared_expert_gate", "in_proj_a.", "in_proj_b.")
    return tensor.dim() >= 2 and "_proj" in name and not any(part in name for part in unconverted)


def grid(tensor: Tensor, block: tuple[int, int]) -> list[tuple[int, int, slice, slice]]:
    """Return the blocks of a matrix: place in the grid, rows and columns."""
    (rows, columns), (num_rows, num_columns) = block, tensor.shape[-2:]
    return [
        (y, x, slice(top, top + rows), slice(left, left + columns))
        for y, top in enumerate(range(0, num_rows, rows))
        for x, left in enumerate(range(0, num_columns, columns))
    ]


def quantize(tensor: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return e4m3 weights, and the scales that multiply them."""
    tensor = tensor.float()
    quantized = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    places = grid(tensor, block)
    scale = torch.empty(*tensor.shape[:-2], places[-1][0] + 1, places[-1][1] + 1)
    for y, x, rows, columns in places:
        part = tensor[..., rows, columns]
        scale[..., y, x] = part.abs().amax((-1, -2)) / MAX
        quantized[..., rows, columns] = (part / scale[..., y, x, None, None]).to(torch.float8_e4m3fn)
    return quantized, scale


def dequantize(quantized: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the float32 weights."""
    out = torch.empty(quantized.shape)
    for y, x, rows, columns in grid(quantized, block):
        out[..., rows, columns] = quantized[..., rows, columns].float() * scale[..., y, x, None, None]
    return out


def convert(
    source: Path,
    directory: Path,
    config: dict[str, Any],
    *,
    block: Callable[[Tensor], tuple[int, int]],
    shape_scale: Callable[[Tensor], Tensor] = lambda scale: scale,
    suffix: str = "_scale_inv",
    is_converted: Callable[[str, Tensor], bool] = is_projection,
) -> tuple[Path, Path]:
    """Write a saved model in FP8, and what it stands for in float32; return both directories.

    Args:
        block: the size of a tensor's blocks.
        shape_scale: gives scales their published form.
        suffix: suffix of a scale's name.
    """
    fp8, plain = directory / "fp8", directory / "plain"
    tensors, expected = load_file(source / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if is_converted(name, tensor):
            tensors[name], scale = quantize(tensor, block(tensor))
            tensors[name + suffix] = shape_scale(scale)
            expected[name] = dequantize(tensors[name], scale, block(tensor))
        else:
            expected[name] = tensor
    for model, content in ((fp8, tensors), (plain, expected)):
        shutil.copytree(source, model)
        save_file(content, model / "model.safetensors", metadata={"format": "pt"})
    change_json(fp8 / "config.json", quantization_config=config)
    return fp8, plain


def change_json(path: Path, **values: Any) -> None:
    """Set fields of a JSON object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(directory: Path, change: Callable[[Tensors], object]) -> Path:
    """Change a model's tensors in place."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory
