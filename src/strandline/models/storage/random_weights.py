"""Random weights, which keep activations and decays in a realistic range.

A generator for each parameter, seeded by the name under which its values are published, draws the same weights on all
devices of a kind, in every order, and however layers are composed of parts: benchmarks compare engines of several
revisions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from strandline.models.layers.parts.site import Gain
from strandline.models.layers.parts.targets import NamedTargets, Target, base_of

MAX_HOST_ELEMENTS: Final = 2**20
"""The largest tensor that is drawn on the host for a GPU: 10 ms of a core."""


class Publishes(Protocol):
    """What has parameters, and names under which their values are published."""

    def targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``torch.nn.Module``."""


def published_names(targets: Mapping[str, Target]) -> dict[int, str]:
    """Return a name of each parameter, by its ``id``: that of the first published tensor that goes to it.

    If the tensor goes to several parameters, their numbers follow.
    """
    names = dict[int, str]()
    for name, target in targets.items():
        bases = dict.fromkeys(id(base_of(part)) for piece in target.pieces for part in piece.parts)
        for number, base in enumerate(bases):
            names.setdefault(base, f"{name} {number}" if number else name)
    return names


def names_of_parameters(model: Publishes) -> dict[str, str]:
    """Return the names that parameters are drawn by, before some are replaced: published ones, by the model's own."""
    published = published_names(dict(model.targets(frozenset())))
    return {own: published.get(id(parameter), own) for own, parameter in model.named_parameters()}


def fill_with_random_weights(model: Publishes, names: Mapping[str, str], seed: int, dtype: torch.dtype) -> None:
    """Fill every parameter. What several shards hold gets the same values in each.

    Args:
        names: see ``names_of_parameters``.
        dtype: matrices are rounded to it, as they would be published.
    """
    for own_name, tensor in model.named_parameters():
        kind, number = own_name.rpartition(".")[2], seed_of(names[own_name], seed)
        # A CPU takes minutes for the weights of a GPU.
        if tensor.is_cuda and tensor.numel() > MAX_HOST_ELEMENTS:
            drawn_on = torch.Generator(tensor.device).manual_seed(number)
            tensor.data.normal_(generator=drawn_on).mul_(_scale(kind, tensor.shape))
            continue
        values = _values(kind, tuple(tensor.shape), torch.Generator().manual_seed(number)) + isinstance(tensor, Gain)
        tensor.data.copy_(values if values.ndim == 1 else values.to(dtype))


def seed_of(name: str, seed: int) -> int:
    """Return a number that depends on the name and the seed alone."""
    number = seed
    for byte in name.encode():
        number = (number * 257 + byte + 1) % (2**61 - 1)
    return number


def _values(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if kind.startswith("A_log"):
        return torch.empty(shape).uniform_(1, 16, generator=generator).log_()
    if kind.startswith("dt_bias"):
        # The inverse of softplus, of time steps between 0.001 and 0.1 with even logarithms.
        step = torch.empty(shape).uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
        return step + torch.log(-torch.expm1(-step))
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * noise
    return noise * _scale(kind, shape)


def _scale(kind: str, shape: Sequence[int]) -> float:
    return 0.02 if kind.startswith("embed") else float(shape[-1] ** -0.5)
