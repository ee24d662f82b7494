"""Which layers of a model launch all kernels that the whole model launches.

Kernels follow from the shapes and dtypes of tensors and from the settings of a layer's parts; layers that have these in
common launch the same ones. So kernels are found out, loaded and compiled with a few layers.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn

from strandline.kernels.binding import Kernels

ALIKE_LAYERS: Final = 2
"""How many of several layers that are alike are distinct: a kernel of one and of several may differ."""

PLAIN: Final = (str, int, float, range, Enum, torch.dtype)


def distinct_layers(layers: Sequence[nn.Module]) -> list[int]:
    """Return the indices of layers that launch all kernels that these launch."""
    counts, distinct = Counter[Hashable](), list[int]()
    for index, layer in enumerate(layers):
        kind = tuple((type(part), _form(vars(part))) for part in layer.modules())
        counts[kind] += 1
        if counts[kind] <= ALIKE_LAYERS:
            distinct.append(index)
    return distinct


def _form(value: Any) -> Hashable:
    """Return what the same values of two layers that are alike have in common."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return tuple((key, _form(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    if is_dataclass(value) and not isinstance(value, type | Kernels):
        return tuple(_form(getattr(value, field.name)) for field in fields(value))
    return repr(type(value))
