"""What a CUDA graph cannot capture, noticed on a CPU: a function that needs the host while the device runs it.

Within ``without_host``, these raise: tensors made of Python's data, which are copied from the host (a number that is
assigned to an element is one), data that is read on the host, and results whose shape depends on data. Functions of
operations that have backends may do all that: on a GPU, their kernels run instead.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strandline.kernels.binding import Kernels

COPIES_FROM_HOST = torch.ops.aten.lift_fresh.default
INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
"""Their shapes depend on data only where an index is a mask."""
READS = ("tolist", "numpy", "cpu", "to")
"""Methods that dispatch nothing where the tensor is on the host already."""


class NeedsHost(Exception):
    """A captured function needs the host."""


class _Guard:
    """Decides whether a function that is called may need the host.

    Args:
        kernels: whose functions may, if their operations have backends.
    """

    def __init__(self, kernels: Kernels) -> None:
        functions = [function for operation, function in kernels.functions.items() if operation.backends]
        self._codes = {_code_of(function) for function in functions}

    def check(self, function: object) -> None:
        """
        Raises:
            NeedsHost: the function was not called by one that may need the host.
        """
        if _on_the_host:
            return
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code not in self._codes:
            frame = frame.f_back
        if frame is None:
            raise NeedsHost(f"{function} needs the host, which a CUDA graph that is captured cannot wait for")


def _code_of(function: Callable[..., Any]) -> CodeType:
    while isinstance(function, partial):
        function = function.func
    code: CodeType = function.__code__
    return code


class _Dispatched(TorchDispatchMode):
    def __init__(self, guard: _Guard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (may_need_host := _elementary.get(func)) is None:
            # What is made of other operations is dispatched as a whole in inference mode.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            may_need_host = _elementary[func] = _may_need_host(func)
        if may_need_host and _needs_host(func, args):
            self._guard.check(func)
        return func(*args, **kwargs)


_elementary: dict[Any, bool] = {}
"""Operations that are not made of others, and whether there are arguments with which they need the host."""


def _may_need_host(function: Any) -> bool:
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return function is COPIES_FROM_HOST or function in INDEXED or not tags.isdisjoint(function.tags)


def _needs_host(function: Any, args: Sequence[Any]) -> bool:
    if function in INDEXED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return True


def _guarded(name: str) -> Callable[..., Any]:
    """Return a method of tensors that is checked within ``without_host``."""
    method = getattr(Tensor, name)

    @wraps(method)
    def checked(self: Tensor, *args: Any, **options: Any) -> Any:
        if _active.guard is not None and not (name == "to" and _is_dtype(*args, **options)):
            _active.guard.check(method)
        return method(self, *args, **options)

    return checked


class _Active(threading.local):
    guard: _Guard | None = None
    """The guard of this thread within ``without_host``."""


_active = _Active()

# A mode that sees all functions would take as long as small operations do.
for read in READS:
    setattr(Tensor, read, _guarded(read))


def _is_dtype(*args: Any, **options: Any) -> bool:
    return all(isinstance(each, torch.dtype) for each in (*args, *options.values()))


@contextmanager
def without_host(kernels: Kernels) -> Iterator[None]:
    """Raise ``NeedsHost`` where what is called needs the host.

    Args:
        kernels: whose functions may need it, if their operations have backends.
    """
    before, guard = _active.guard, _Guard(kernels)
    _active.guard = guard
    try:
        with _Dispatched(guard):
            yield
    finally:
        _active.guard = before


@contextmanager
def on_the_host() -> Iterator[None]:
    """Let a test's own part of a captured function need the host."""
    _on_the_host.append(True)
    try:
        yield
    finally:
        _on_the_host.pop()


_on_the_host: list[bool] = []
"""Not empty: within ``on_the_host``."""
