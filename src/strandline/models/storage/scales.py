"""Checks of published scales, and the scales of keys and values."""

import re
from collections.abc import Mapping
from typing import Final, Literal

import torch
from torch import Tensor

from strandline.errors import WeightsError

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
        index = wrong.nonzero()[0].tolist()
        value = float(scale[tuple(index)])
        raise WeightsError(f"{name}{index if index else ''} is {value}; scales are positive numbers")
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
