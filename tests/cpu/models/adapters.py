"""Adapters as PEFT writes them, random, and what they make of a model of transformers."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
RANK = 3
ALPHA = 6.0

Factors = dict[str, tuple[Tensor, Tensor]]
"""Two factors by the name of a module."""


def linear_modules(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of the text part's layers, by the names that PEFT gives them."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and "layers." in name
        and not any(tower in name for tower in ("visual", "vision", "audio"))
    }


def draw(shapes: Mapping[str, tuple[int, int]], rank: int = RANK, seed: int = 0) -> Factors:
    """Return random factors for modules with weights of these shapes, which change them about as much as they are."""
    generator = torch.Generator().manual_seed(seed)
    factors = Factors()
    for name, (num_outputs, num_inputs) in shapes.items():
        down = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
        factors[name] = down, torch.randn(num_outputs, rank, generator=generator) * 0.2
    return factors


def write(
    directory: Path, factors: Factors, *, prefix: str = "base_model.model.", config: Mapping[str, Any] | None = None
) -> Path:
    """Write an adapter's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict[str, Tensor]()
    for name, (down, up) in factors.items():
        tensors[f"{prefix}{name}.lora_A.weight"] = down.contiguous()
        tensors[f"{prefix}{name}.lora_B.weight"] = up.contiguous()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": "all-linear"}
    (directory / CONFIG).write_text(json.dumps({**values, **(config or {})}))
    return directory


def merged(model: Any, factors: Factors, scale: float = ALPHA / RANK) -> Any:
    """Return a copy of a model of transformers whose linear layers have been changed."""
    model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    for name, (down, up) in factors.items():
        modules[name].weight += scale * (up.to(down.dtype) @ down)
    return model


def change_files(change: Callable[[dict[str, Tensor]], object], path: Path) -> None:
    """Change the tensors of an adapter's file."""
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
