"""Turns saved models into ones in FP4 or MXFP8, and back to float32, number by number: the oracle of the loader."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cpu.models.fp8 import Tensors, is_projection

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

Convert = Callable[[str, Tensor, Tensors], Tensor]
"""Adds the published tensors of a weight, and returns the numbers that they stand for."""


def nearest_codes(x: Tensor) -> Tensor:
    """Return the codes of the nearest numbers."""
    code = (x.abs().unsqueeze(-1) - NUMBERS).abs().argmin(-1)
    return (code | (x < 0).long() << 3).to(torch.uint8)


def pack(code: Tensor) -> Tensor:
    return code[..., 0::2] | code[..., 1::2] << 4


def numbers_of(code: Tensor) -> Tensor:
    return torch.where(code >= 8, -1.0, 1.0) * NUMBERS[(code & 7).long()]


def _nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scales in e4m3, the factor of each matrix, and the numbers."""
    groups = weight.float().unflatten(-1, (-1, 16))
    factor = weight.float().abs().amax((-2, -1)) / (6 * 448)
    scale = (groups.abs().amax(-1) / 6 / factor[..., None, None]).to(torch.float8_e4m3fn)
    scaled = scale.float() * factor[..., None, None]
    code = nearest_codes(groups / scaled.clamp(min=1e-30)[..., None])
    return code.flatten(-2), scale, factor, (numbers_of(code) * scaled[..., None]).flatten(-2)


def modelopt(name: str, weight: Tensor, tensors: Tensors) -> Tensor:
    """As ModelOpt writes NVFP4."""
    code, scale, factor, numbers = _nvfp4(weight)
    tensors |= {name: pack(code), f"{name}_scale": scale, f"{name}_scale_2": factor}
    if name.endswith(".weight"):
        tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    return numbers


def compressed(name: str, weight: Tensor, tensors: Tensors) -> Tensor:
    """As compressed-tensors writes NVFP4."""
    code, scale, factor, _ = _nvfp4(weight)
    tensors |= {f"{name}_packed": pack(code), f"{name}_scale": scale}
    tensors[f"{name}_global_scale"] = (1 / factor).reshape(-1)
    scaled = scale.float() * (1 / tensors[f"{name}_global_scale"]).view(factor.shape)[..., None, None]
    return (numbers_of(code).unflatten(-1, (-1, 16)) * scaled[..., None]).flatten(-2)


def inkling(name: str, weight: Tensor, tensors: Tensors) -> Tensor:
    """As ModelOpt writes experts in one tensor whose name ends in ``weight``."""
    code, scale, factor, numbers = _nvfp4(weight)
    tensors |= {name: pack(code), f"{name}.scale": scale, f"{name}.scale2": factor}
    tensors |= {f"{name}.input_amax": torch.tensor([3.0]), f"{name}.original_shape": torch.tensor(weight.shape)}
    return numbers


def inkling_compressed(name: str, weight: Tensor, tensors: Tensors) -> Tensor:
    """As compressed-tensors writes such experts."""
    written = Tensors()
    numbers = compressed(name, weight, written)
    tensors |= {f"{name}.weight{part.removeprefix(name)}": tensor for part, tensor in written.items()}
    tensors[f"{name}.input_global_scale"] = torch.ones(len(weight))
    return numbers


def mxfp4(name: str, weight: Tensor, tensors: Tensors) -> Tensor:
    """As compressed-tensors writes MXFP4."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-30))) - 2
    code = nearest_codes(groups / torch.exp2(exponent)[..., None])
    tensors |= {f"{name}_packed": pack(code.flatten(-2)), f"{name}_scale": (exponent + 127).to(torch.uint8)}
    return (numbers_of(code) * torch.exp2(exponent)[..., None]).flatten(-2)


def mxfp8(name: str, weight: Tensor, tensors: Tensors, suffix: str = "_scale") -> Tensor:
    """As ModelOpt and compressed-tensors write MXFP8."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-30))) - 8
    numbers = (groups / torch.exp2(exponent)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors |= {name: numbers.flatten(-2), f"{name}{suffix}": (exponent + 127).to(torch.uint8)}
    return (numbers.float() * torch.exp2(exponent)[..., None]).flatten(-2)


def mxfp8_inverse(name: str, weight: Tensor, tensors: Tensors) -> Tensor:
    """As other tools write it, with a dtype for exponents."""
    numbers = mxfp8(name, weight, tensors, "_scale_inv")
    tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].view(torch.float8_e8m0fnu)
    return numbers


def inkling_mxfp8(name: str, weight: Tensor, tensors: Tensors) -> Tensor:
    """As ModelOpt writes experts in one tensor whose name ends in ``weight``."""
    return mxfp8(name, weight, tensors, ".scale")


def gpt_oss(name: str, weight: Tensor, tensors: Tensors) -> Tensor:
    """As gpt-oss has its experts, which are transposed where they are not quantised."""
    written = Tensors()
    numbers = mxfp4(name, weight.mT, written)
    tensors[f"{name}_blocks"] = written[f"{name}_packed"].unflatten(-1, (-1, 16))
    tensors[f"{name}_scales"] = written[f"{name}_scale"]
    return numbers.mT


WAYS: dict[str, tuple[Convert, dict[str, Any]]] = {
    "modelopt": (modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    "compressed": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4, "group_size": 16}}},
        },
    ),
    "mxfp4": (
        mxfp4,
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4, "group_size": 32}}},
        },
    ),
    "mxfp8": (mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}),
    "mxfp8-compressed": (
        mxfp8,
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized",
            "config_groups": {
                "group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32}}
            },
        },
    ),
    "mxfp8-inverse": (mxfp8_inverse, {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}),
}
"""How weights are written, and the configuration."""

OWN_WAYS = {
    "inkling": (inkling, WAYS["modelopt"][1]),
    "inkling-compressed": (inkling_compressed, WAYS["compressed"][1]),
    "inkling-mxfp8": (inkling_mxfp8, WAYS["mxfp8"][1]),
    "gpt_oss": (gpt_oss, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
}


def is_projection_or_head(name: str, tensor: Tensor) -> bool:
    return is_projection(name, tensor) or name == "lm_head.weight"


def convert(
    source: Path,
    directory: Path,
    way: str,
    is_converted: Callable[[str, Tensor], bool] = is_projection,
    config: dict[str, Any] | None = None,
    multiple: int | None = None,
) -> tuple[Path, Path]:
    """Write a saved model in one of these formats, and what it stands for in float32; return both directories."""
    write, written_config = (WAYS | OWN_WAYS)[way]
    quantized, plain = directory / "quantized", directory / "plain"
    tensors, expected, published = load_file(source / "model.safetensors"), dict[str, Tensor](), dict[str, Tensor]()
    multiple = multiple or (32 if "mxfp" in way else 16)
    for name, tensor in tensors.items():
        if is_converted(name, tensor) and tensor.shape[-1] % multiple == 0:
            expected[name] = write(name, tensor, published)
        else:
            expected[name] = published[name] = tensor
    for target, saved in ((quantized, published), (plain, expected)):
        shutil.copytree(source, target)
        save_file({name: tensor.contiguous() for name, tensor in saved.items()}, target / "model.safetensors")
    path = quantized / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config or written_config}))
    return quantized, plain
