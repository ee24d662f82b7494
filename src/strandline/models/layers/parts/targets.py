"""Targets of published tensors: views of the model's own, often fused, parameters.

A model lists its published tensors by name, each with a target; loading copies them into the views. If a tensor is
divided among shards (``shard.py``), only this shard's part is read. A published tensor whose rows alternate between
parameters (per head: query, then gate) has several parts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strandline.models.layers.parts.shard import WHOLE, Shard

Index = tuple[slice, ...]
"""A part of a tensor: a range of each of its first dimensions; empty: all of it."""

Read = Callable[[Index], Tensor]
"""Returns a part of a published tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a published tensor, and the views that its rows go to."""

    index: Index
    parts: tuple[Tensor, ...]
    """Views; several are ``[groups, rows of a group, ...]``, whose rows alternate group by group."""
    is_transposed: bool = False
    """Whether matrices are published with their inputs before their rows."""

    def copy_from(self, published: Tensor) -> None:
        """Copy the part; converts dtype and device."""
        if self.is_transposed:
            published = published.mT
        if len(self.parts) == 1:
            self.parts[0].copy_(published)
            return
        groups, _, *rest = self.parts[0].shape
        grouped = published.reshape(groups, -1, *rest)
        for part, rows in zip(self.parts, grouped.split([p.shape[1] for p in self.parts], dim=1), strict=True):
            part.copy_(rows)


@dataclass(frozen=True, slots=True)
class Target:
    """One published tensor: its shape, and the pieces of it that are copied."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """Empty: the tensor is recognised and not used."""
    is_shared: bool = False
    """Whether several layers use it. An adapter changes each use by itself: none can be added to the tensor."""

    @property
    def view(self) -> Tensor | None:
        """A view that the tensor goes to, with the dtype and device of all; None: there is none."""
        return self.pieces[0].parts[0] if self.pieces else None

    @torch.no_grad()
    def copy_from(self, read: Read) -> None:
        """Copy the parts of the tensor that are used."""
        for piece in self.pieces:
            piece.copy_from(read(piece.index))


NamedTargets = Iterator[tuple[str, Target]]
"""Published names with their targets."""

Split = Callable[[Tensor], Target]
"""Returns the target for a parameter: the whole published tensor, or a shard of it."""


def base_of(view: Tensor) -> Tensor:
    """Return the parameter that a tensor is a view of."""
    return view if view._base is None else view._base


def whole(view: Tensor) -> Target:
    """Return the target of a tensor that is copied to one view."""
    return Target(tuple(view.shape), (Piece((), (view,)),))


def sharded(view: Tensor, shard: Shard, dim: int = 0) -> Target:
    """Return the target of a tensor that is divided equally along a dimension; ``view`` is one shard."""
    if shard.count == 1:
        return whole(view)
    shape, size = list(view.shape), view.shape[dim]
    shape[dim] = size * shard.count
    return _part(view, tuple(shape), shard.index * size, dim)


def spanned(view: Tensor, span: range, num: int) -> Target:
    """Return the target of a tensor of ``num`` rows; those in ``span``, if any, go to the first rows of a view."""
    if not span:
        return unused(num, *view.shape[1:])
    return _part(view[: len(span)], (num, *view.shape[1:]), span.start, 0)


def _part(view: Tensor, shape: tuple[int, ...], start: int, dim: int) -> Target:
    index = (*[slice(None)] * dim, slice(start, start + view.shape[dim]))
    return Target(shape, (Piece(index, (view,)),))


def stacked(*targets: Target) -> Target:
    """Return the target of a tensor that holds the rows of one tensor after another."""
    if len(targets) == 1:
        return targets[0]
    pieces, start = list[Piece](), 0
    for target in targets:
        for piece in target.pieces:
            rows, *rest = piece.index or (slice(0, target.shape[0]),)
            first = start + (rows.start or 0)
            last = start + (target.shape[0] if rows.stop is None else rows.stop)
            pieces.append(Piece((slice(first, last), *rest), piece.parts))
        start += target.shape[0]
    return Target((start, *targets[0].shape[1:]), tuple(pieces))


def stacked_rows(rows: Tensor, sizes: Sequence[int], shards: Sequence[Shard]) -> Target:
    """Return the target of a tensor whose rows are several parts, each divided separately.

    Args:
        rows: the parts' shards, one above the other.
        sizes: how many rows of ``rows`` each part has.
    """
    parts = zip(rows.split(list(sizes)), shards, strict=True)
    return stacked(*(sharded(part, shard) for part, shard in parts))


def unused(*shape: int) -> Target:
    """Return the target of a published tensor that is not needed."""
    return Target(shape, ())


def interleaved(*parts: Tensor, shard: Shard = WHOLE) -> Target:
    """Return the target of a tensor that holds, group after group, the rows of each part.

    Args:
        parts: views ``[groups, rows of a group, ...]``; the published tensor is ``[groups * all rows, ...]``.
        shard: selects the groups that ``parts`` hold.
    """
    groups, _, *rest = parts[0].shape
    num_rows = groups * sum(part.shape[1] for part in parts)
    index = () if shard.count == 1 else (slice(shard.index * num_rows, (shard.index + 1) * num_rows),)
    return Target((num_rows * shard.count, *rest), (Piece(index, parts),))


def renamed(targets: NamedTargets, names: Mapping[str, str]) -> NamedTargets:
    """Yield targets under a family's own names.

    Args:
        names: maps a component of a dotted name to the family's name for it.
    """
    for name, target in targets:
        yield ".".join(names.get(component, component) for component in name.split(".")), target
