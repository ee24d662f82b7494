"""Operations as an engine would bind them for the tensors that a test calls them with."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from strandline.kernels.batch import KVMemory
from strandline.kernels.binding import bind_kernels
from strandline.kernels.operation import Operation, Workload
from strandline.specs import TensorSpec

P = ParamSpec("P")
R = TypeVar("R")


def bound(operation: Operation[P, R]) -> Callable[P, R]:
    """Return a function that binds the operation to each call's device and dtypes. The environment counts."""
    signature = inspect.signature(operation.reference)

    @wraps(operation.reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(_tensors(args))
        memory = tuple(_kept(signature.bind(*args, **kwargs).arguments))
        workload = Workload(first.device.type, _dtype_name(first), memory)
        return bind_kernels([operation], workload)[operation](*args, **kwargs)

    return call


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _kept(arguments: dict[str, Any]) -> Iterator[TensorSpec]:
    for name, value in arguments.items():
        kept = {"key": value.k_BPGD, "value": value.v_BPGD} if isinstance(value, KVMemory) else {}
        if name.startswith(("state_", "window_S")):
            kept = {name.partition("_")[0]: value}
        for kind, tensor in kept.items():
            yield TensorSpec(kind, tuple(tensor.shape[1:]), _dtype_name(tensor))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
