"""Cases of kernel benchmarks: an operation at named shapes, and what a shape is measured with.

A case is a function, registered with ``@case``, that returns the ``Work`` of one shape. Its axes are the named values
of the function's arguments; every combination is one shape. Tensors are made on the default device, which the runner
sets while a case makes its work. Operations are taken by ``bound``, as an engine takes them, so that a case runs before
and after a change of the kernels.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import product
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from strandline.kernels.binding import Kernels, bind_kernels
from strandline.kernels.operation import Operation, Workload

R = TypeVar("R")

BYTES_PER_S = {"H200": 4.3e12, "H100": 3.0e12}
"""Attained bandwidth of a GPU's memory, by a part of the GPU's name; floors on others are those of the first."""

FLOPS, FLOPS_FP8 = 7e14, 1.4e15
"""Attained operations per second of large matrix products in bfloat16 and in FP8."""

COLD_BYTES = 300_000_000
"""Bytes that the arguments of a graph's calls have together, several times the second-level cache."""

Call = Callable[..., Any]


class Skipped(Exception):
    """Raised by a case that a device, an installation or a shape has no work for; says why."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters that a sweep tries: names in modules of kernels, replaced while the operation runs."""

    name: str
    values: Mapping[str, Any]
    """By ``module.name``. A function is replaced by one that returns the value."""

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Replace the names for a while."""
        with ExitStack() as stack:
            for path, value in self.values.items():
                module_name, _, name = path.rpartition(".")
                module = import_module(f"strandline.kernels.{module_name}")
                is_chosen = callable(getattr(module, name)) and not callable(value)
                new = (lambda *_, chosen=value, **__: chosen) if is_chosen else value
                stack.enter_context(patch.object(module, name, new))
            yield


@dataclass
class Work:
    """The calls of one shape."""

    variants: Mapping[str, Call]
    """Ways to compute the same, by name. Ours come first; ``peers`` names the others."""
    arguments: Sequence[tuple[Any, ...]]
    """Arguments of calls that take turns, so that none is found in the cache."""
    num_bytes: float = 0.0
    """Least bytes that a call moves."""
    num_flops: float = 0.0
    flops_per_s: float = FLOPS
    reference: Call | None = None
    """Takes a call's arguments and returns what variants have to."""
    limit: float = 1e-2
    """Largest relative error."""
    before: Call | None = None
    """Computes a call's first argument from its others, just before it; its time alone is taken off."""
    memory: Callable[..., Sequence[Tensor]] = lambda *_: ()
    """Returns the tensors, among a call's arguments, that a call overwrites."""
    peers: Iterable[str] = ()
    """Variants that are not ours: they have no checksums."""
    partial: Iterable[str] = ()
    """Variants that compute something else, such as a part, and are not checked."""
    eager: Iterable[str] = ()
    """Variants that no CUDA graph can hold."""
    launches: Callable[[], Iterable[Launch]] = tuple
    """Returns the launch parameters that a sweep tries with the first variant."""
    notes: Mapping[str, object] = field(default_factory=dict)
    """Properties of the random inputs that times depend on."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of a case."""

    case: "Case"
    labels: Mapping[str, str]
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        return " ".join([self.case.name, *(f"{axis}={label}" for axis, label in self.labels.items())])

    def work(self) -> Work:
        """Make the inputs."""
        return self.case.make(**self.values)


@dataclass(frozen=True, slots=True)
class Case:
    """A registered case."""

    name: str
    make: Callable[..., Work]
    axes: Mapping[str, Mapping[str, Any]]
    tiny: Mapping[str, Any]
    """Values of the smallest shape, which a CPU and Triton's interpreter compute in a moment."""
    device: str
    """``cuda`` or ``cpu``: where its times mean something."""

    def shapes(self, where: Mapping[str, Sequence[str]]) -> Iterator[Shape]:
        """Yield the shapes whose labels match one pattern for each axis in ``where``."""
        chosen = [
            [item for item in values.items() if any(fnmatchcase(item[0], p) for p in where.get(axis, ["*"]))]
            for axis, values in self.axes.items()
        ]
        for items in product(*chosen):
            labels, values = (dict(zip(self.axes, column, strict=True)) for column in zip(*items, strict=True))
            yield Shape(self, labels, values)

    def tiny_shape(self) -> Shape:
        return Shape(self, {"shape": "tiny"}, self.tiny)


CASES: dict[str, Case] = {}


def case(
    name: str, *, tiny: Mapping[str, Any], device: str = "cuda", **axes: Mapping[str, Any] | Sequence[Any]
) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Register the decorated function as a case.

    Args:
        tiny: arguments of the smallest shape.
        device: where its times mean something.
        axes: values of each argument, by label; without labels, numbers and tuples of numbers label themselves.
    """

    def register(make: Callable[..., Work]) -> Callable[..., Work]:
        labelled = {axis: values if isinstance(values, Mapping) else _labelled(values) for axis, values in axes.items()}
        CASES[name] = Case(name, make, labelled, tiny, device)
        return make

    return register


def _labelled(values: Sequence[Any]) -> dict[str, Any]:
    return {"x".join(map(str, value)) if isinstance(value, tuple) else str(value): value for value in values}


def bound(operation: Operation[..., Any], *, is_deterministic: bool = False) -> Call:
    """Return the function that an engine on the default device would take for an operation."""
    call: Call = kernels_of([operation], is_deterministic=is_deterministic)[operation]
    return call


def kernels_of(operations: Iterable[Operation[..., Any]], *, is_deterministic: bool = False) -> Kernels:
    """Return the functions that an engine on the default device would take."""
    return bind_kernels(operations, Workload(device_type(), "bfloat16", is_deterministic=is_deterministic))


def device_type() -> str:
    """Return the type of device whose kernels run: those for GPUs also in Triton's interpreter."""
    return "cuda" if os.environ.get("TRITON_INTERPRET") == "1" else torch.get_default_device().type


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return normal numbers on the default device."""
    return torch.randn(shape, dtype=dtype).mul_(scale)


def turns(num_bytes: float, *, at_least: int = 1, at_most: int = 32) -> int:
    """Return how many calls' arguments fill ``COLD_BYTES``, given the bytes of one; for tiny shapes as few as allowed.

    Args:
        at_least, at_most: bounds of the result.
    """
    wanted = -(-COLD_BYTES // max(1, int(num_bytes))) if torch.get_default_device().type == "cuda" else 1
    return int(max(at_least, min(at_most, wanted)))


def parse_launches(kind: Callable[..., R], text: str) -> list[R]:
    """Return tuples of launch parameters written as ``1,1024,1 2,512,1``; ``-`` is None."""
    return [kind(*(None if part == "-" else int(part) for part in item.split(","))) for item in text.split()]
