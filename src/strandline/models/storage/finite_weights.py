"""Checks that weights are finite numbers once they are loaded."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from strandline.models.layers.parts.targets import Target

CHECKED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are not quantised."""


class LoadedWeight(NamedTuple):
    """A published weight after it has been copied."""

    path: Path
    name: str
    target: Target


def find_non_finite(parameters: Iterable[Tensor], weights: Iterable[LoadedWeight]) -> Iterator[str]:
    """Yield which weights are not finite and what they hold; minus infinity may be in vectors.

    Args:
        parameters: all memory of the weights, which is searched first; waits once for each device.
    """
    if _are_finite(parameters):
        return
    for path, name, target in weights:
        for part in filter(_is_checked, (part for piece in target.pieces for part in piece.parts)):
            extremes = _extremes(part)
            if not bool(extremes.isfinite().all()):
                yield f"{path}: {name} holds {'NaN' if bool(extremes.isnan().any()) else 'infinity'} once it is loaded"
                break


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    extremes: dict[torch.device, list[Tensor]] = {}
    for each in filter(_is_checked, tensors):
        extremes.setdefault(each.device, []).append(_extremes(each))
    return all(bool(torch.stack(found).isfinite().all()) for found in extremes.values())


def _is_checked(tensor: Tensor) -> bool:
    return tensor.dtype in CHECKED_DTYPES and tensor.numel() > 0 and not tensor.is_meta


def _extremes(tensor: Tensor) -> Tensor:
    """Return the least and the greatest number of a tensor; of a vector, the greatest alone, twice.

    Minus infinity turns off what a number of a vector stands for: an expert, a sink, a decay.
    """
    least, greatest = tensor.aminmax()
    return torch.stack((greatest if tensor.dim() < 2 else least, greatest)).float()
