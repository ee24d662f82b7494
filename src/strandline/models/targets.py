"""Where a published tensor goes: views of the model's own, often fused, parameters.

A model lists its published tensors by name, each with a target; loading is copying into the views. A published
tensor whose rows alternate between parameters (per head: query, then gate) has several parts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Target:
    """One published tensor: its shape, and the views that it is copied into."""

    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]
    """None: the tensor is known, and not used."""

    def copy_from(self, published: Tensor) -> None:
        """Copy the tensor, which must have ``shape``, into the parts; converts dtype and device."""
        with torch.no_grad():
            if len(self.parts) == 1:
                self.parts[0].copy_(published)
                return
            if not self.parts:
                return
            groups, _, *rest = self.parts[0].shape
            grouped = published.view(groups, -1, *rest)
            for part, piece in zip(self.parts, grouped.split([p.shape[1] for p in self.parts], dim=1), strict=True):
                part.copy_(piece)


NamedTargets = Iterator[tuple[str, Target]]
"""Published names with their targets."""


def whole(view: Tensor) -> Target:
    """Return the target of a tensor that goes to one place."""
    return Target(tuple(view.shape), (view,))


def unused(*shape: int) -> Target:
    """Return the target of a tensor that is published and not needed."""
    return Target(shape, ())


def split(*parts: Tensor) -> Target:
    """Return the target of a tensor whose rows are those of one part after another."""
    return interleaved(*(part.unsqueeze(0) for part in parts))


def interleaved(*parts: Tensor) -> Target:
    """Return the target of a tensor that holds, group after group, the rows of each part.

    Args:
        parts: views ``[groups, rows of a group, ...]``; the published tensor is ``[groups * all rows, ...]``.
    """
    groups, _, *rest = parts[0].shape
    return Target((groups * sum(part.shape[1] for part in parts), *rest), parts)


def renamed(targets: NamedTargets, names: Mapping[str, str]) -> NamedTargets:
    """Yield targets under a family's own names.

    Args:
        names: of one component of a dotted name each, by the name that it stands for.
    """
    for name, target in targets:
        yield ".".join(names.get(component, component) for component in name.split(".")), target
