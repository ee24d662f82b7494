"""Turns saved models into 4-bit ones of each published format, number by number: the oracle of the loader."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cpu.models.fp8 import Tensors, change_json, is_projection

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns that AWQ packs into an int32, from the lowest four bits on."""


@dataclass(frozen=True)
class Quantized:
    """A matrix in 4 bits: ``(code - zero) * scale``."""

    codes: Tensor
    """``[rows, inputs]``."""
    zeros: Tensor
    """``[rows, groups]``."""
    scales: Tensor
    """``[rows, groups]``."""
    group_of: list[int]
    """The group of each input."""

    def dequantize(self) -> Tensor:
        """Return the float32 weights, column by column."""
        columns = [
            (self.codes[:, column] - self.zeros[:, group]).float() * self.scales[:, group].float()
            for column, group in enumerate(self.group_of)
        ]
        return torch.stack(columns, dim=1)


def quantize(weight: Tensor, size: int, *, symmetric: bool, shuffled: bool, dtype: torch.dtype) -> Quantized:
    """Round weights to the nearest of 16 numbers per group; ``size`` -1: all inputs are one group."""
    num_inputs = weight.shape[1]
    size = num_inputs if size == -1 else size
    group_of = [column // size for column in range(num_inputs)]
    if shuffled:
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs)).tolist()
        group_of = [group_of[column] for column in order]
    codes, zeros, scales = torch.zeros(weight.shape, dtype=torch.int64), [], []
    for group in range(max(group_of) + 1):
        columns = [column for column, other in enumerate(group_of) if other == group]
        part = weight[:, columns].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scale, zero = torch.maximum(-low, high) / 7.5, torch.full_like(low, 8)
        else:
            scale = (high - low) / 15
            zero = (-low / scale).round()
        scale = scale.clamp(min=1e-4).to(dtype)
        codes[:, columns] = (part / scale.float()[:, None] + zero[:, None]).round().clamp(0, 15).long()
        zeros.append(zero.long())
        scales.append(scale)
    return Quantized(codes, torch.stack(zeros, 1), torch.stack(scales, 1), group_of)


def pack(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight numbers of a row into an int32, the first of ``order`` into the lowest bits; pads with zeros."""
    rows = []
    for row in codes.tolist():
        padded = row + [0] * (-len(row) % 8)
        numbers = [
            sum(padded[start + column] << (4 * index) for index, column in enumerate(order))
            for start in range(0, len(row), 8)
        ]
        rows.append([number - 2**32 if number >= 2**31 else number for number in numbers])
    return torch.tensor(rows, dtype=torch.int32)


def compressed_tensors(weight: Quantized, prefix: str, *, zeros: bool, groups: bool) -> Tensors:
    out = {
        "weight_packed": pack(weight.codes),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if zeros:
        out["weight_zero_point"] = pack(weight.zeros.t()).t()
    if groups:
        out["weight_g_idx"] = torch.tensor(weight.group_of, dtype=torch.int32)
    return {prefix + name: tensor.contiguous() for name, tensor in out.items()}


def gptq(weight: Quantized, prefix: str, *, offset: int, groups: bool = True) -> Tensors:
    out = {
        "qweight": pack(weight.codes).t(),
        "scales": weight.scales.t(),
        "qzeros": pack((weight.zeros.t() - offset) % 16),
    }
    if groups:
        out["g_idx"] = torch.tensor(weight.group_of, dtype=torch.int32)
    return {prefix + name: tensor.contiguous() for name, tensor in out.items()}


def awq(weight: Quantized, prefix: str) -> Tensors:
    out = {
        "qweight": pack(weight.codes.t(), AWQ_ORDER),
        "scales": weight.scales.t(),
        "qzeros": pack(weight.zeros.t(), AWQ_ORDER),
    }
    return {prefix + name: tensor.contiguous() for name, tensor in out.items()}


def compressed_config(size: int, *, symmetric: bool = True, **weights: Any) -> dict[str, Any]:
    values = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": size, **weights}
    if size == -1:
        values["strategy"] = "channel"
    group = {"weights": values, "targets": ["Linear"], "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def gptq_config(size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": False, "sym": False, **more}


def awq_config(size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm", **more}


@dataclass(frozen=True)
class Scheme:
    """One published format."""

    config: dict[str, Any]
    size: int
    write: Callable[[Quantized, str], Tensors]
    symmetric: bool = False
    shuffled: bool = False
    dtype: torch.dtype = torch.float16

    @property
    def takes_stacks(self) -> bool:
        """Whether experts may be in one tensor."""
        return self.symmetric and self.config["quant_method"] == "compressed-tensors"


def write_stack(matrices: list[Quantized], name: str) -> Tensors:
    """As compressed-tensors writes experts in one tensor."""
    return {
        f"{name}_packed": torch.stack([pack(matrix.codes) for matrix in matrices]),
        f"{name}_scale": torch.stack([matrix.scales for matrix in matrices]),
        f"{name}_shape": torch.tensor([len(matrices), *matrices[0].codes.shape]),
    }


def convert(
    source: Path,
    directory: Path,
    scheme: Scheme,
    is_converted: Callable[[str, Tensor], bool] = is_projection,
) -> tuple[Path, Path]:
    """Write a saved model in 4 bits, and what it stands for in float32; return both directories."""
    packed, plain = directory / "packed", directory / "plain"
    tensors, expected = load_file(source / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        expected[name] = tensor
        if scheme.takes_stacks and tensor.dim() == 3 and is_converted(name, tensor):
            options = {"symmetric": True, "shuffled": False, "dtype": scheme.dtype}
            matrices = [quantize(matrix, scheme.size, **options) for matrix in tensor]
            del tensors[name]
            tensors |= write_stack(matrices, name)
            expected[name] = torch.stack([matrix.dequantize() for matrix in matrices])
        elif name.endswith(".weight") and tensor.dim() == 2 and is_converted(name, tensor):
            quantized = quantize(
                tensor, scheme.size, symmetric=scheme.symmetric, shuffled=scheme.shuffled, dtype=scheme.dtype
            )
            del tensors[name]
            tensors |= scheme.write(quantized, name.removesuffix("weight"))
            expected[name] = quantized.dequantize()
    for model, content in ((packed, tensors), (plain, expected)):
        shutil.copytree(source, model)
        save_file(content, model / "model.safetensors", metadata={"format": "pt"})
    change_json(packed / "config.json", quantization_config=scheme.config)
    return packed, plain


def _schemes() -> dict[str, Scheme]:
    def ct(zeros: bool = False, groups: bool = False) -> Callable[[Quantized, str], Tensors]:
        return lambda weight, prefix: compressed_tensors(weight, prefix, zeros=zeros, groups=groups)

    def v1(weight: Quantized, prefix: str) -> Tensors:
        return gptq(weight, prefix, offset=1)

    def v2(weight: Quantized, prefix: str) -> Tensors:
        return gptq(weight, prefix, offset=0, groups=False)

    return {
        "compressed": Scheme(compressed_config(16), 16, ct(), symmetric=True, dtype=torch.bfloat16),
        "compressed channels": Scheme(compressed_config(-1), -1, ct(), symmetric=True),
        "compressed partial groups": Scheme(compressed_config(24), 24, ct(), symmetric=True),
        "compressed asymmetric": Scheme(compressed_config(8, symmetric=False), 8, ct(zeros=True)),
        "compressed act-order": Scheme(
            compressed_config(16, symmetric=False, actorder="group"), 16, ct(zeros=True, groups=True), shuffled=True
        ),
        "gptq": Scheme(gptq_config(16), 16, v1),
        "gptq act-order": Scheme(gptq_config(16, desc_act=True), 16, v1, shuffled=True),
        "gptq channels": Scheme(gptq_config(-1, sym=True), -1, v1, symmetric=True),
        "gptq v2": Scheme(gptq_config(16, checkpoint_format="gptq_v2"), 16, v2),
        "awq": Scheme(awq_config(16), 16, awq),
    }


SCHEMES = _schemes()
