"""Which version of an operation runs: torch's, the definition of right, Triton's or Numba's.

Every operation is a torch function; one that has faster twins names their modules. On a CUDA device with Triton its
twin runs, on a CPU Numba's (``runtime_numba.py``), everywhere else the torch function: that is how a new accelerator
starts. The choice is made once per process and device type.

*Deterministic*, a kernel adds in an order that does not depend on what else is in the step: who launches kernels says
which it wants. Twins choose their tiles accordingly; torch functions on a CPU are what they are.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from strandline.env import NUMBA, TRITON, is_numba_off, is_triton_off

P = ParamSpec("P")
R = TypeVar("R")

TWINS: Final[list[tuple[str, str]]] = []
"""Module and name of every function that stands in for a torch function of the same name and signature."""

INVARIANT_TWINS: Final[list[tuple[str, str]]] = []
"""The same of those that stand in for it in deterministic mode."""


@cache
def runs_triton(device_type: str) -> bool:
    """Return whether operations on devices of this type run their Triton twins."""
    if device_type != "cuda" or is_triton_off():
        return False
    return find_spec("triton") is not None and torch.cuda.is_available() and torch.version.hip is None


NUMBA_DTYPES: Final = (torch.float32, torch.bfloat16)
"""Of the first argument; what else there is runs in torch."""


@cache
def runs_numba() -> bool:
    """Return whether operations on the CPU run their Numba twins."""
    return _numba_obstacle() is None


def _numba_obstacle() -> str | None:
    if is_numba_off():
        return f"{NUMBA} is 0"
    if find_spec("numba") is None:
        return "Numba is not installed"
    if not import_module("strandline.kernels.runtime_numba").has_threads():
        return "torch has brought no GNU OpenMP library along, whose threads they run on"
    return None


def why_torch_serves(device_type: str, dtype: torch.dtype) -> str | None:
    """Say why the torch versions serve on devices of this type, not faster twins; None: the twins do."""
    if device_type == "cpu":
        if dtype not in NUMBA_DTYPES:
            return f"compiled loops exist for float32 and bfloat16, not for {str(dtype).removeprefix('torch.')}"
        obstacle = None if runs_numba() else _numba_obstacle()
        return obstacle and f"compiled loops are left out: {obstacle}"
    if runs_triton(device_type):
        return None
    return f"{TRITON} is 0" if is_triton_off() else f"there is no working Triton for {device_type} here"


def numba_modules() -> list[str]:
    """Return the modules of all Numba twins. To import one is to compile its kernels, unless that has been done."""
    return sorted({module for module, _ in TWINS if module.endswith("_numba")})


class _Mode:
    """What the kernels that are launched next should be."""

    is_deterministic = False


def set_deterministic(is_deterministic: bool) -> None:
    """Say whether the kernels launched from now on must be invariant to the batch. Whoever launches says it anew."""
    _Mode.is_deterministic = is_deterministic


def is_deterministic() -> bool:
    """Return whether a row's result may depend on that row alone, to the last bit."""
    return _Mode.is_deterministic


def has_twins(triton: str | None = None, numba: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name modules of ``strandline.kernels`` whose functions of the same name run where Triton or Numba does.

    The function's first argument must be a tensor on the device that it computes on. The torch version stays within
    reach as ``__wrapped__``.
    """

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        name = reference.__name__
        TWINS.extend((f"strandline.kernels.{module}", name) for module in (triton, numba) if module)

        @cache
        def twin(module: str) -> Callable[P, R]:
            found: Callable[P, R] = getattr(import_module(f"strandline.kernels.{module}"), name)
            return found

        @wraps(reference)
        def choose(*args: P.args, **kwargs: P.kwargs) -> R:
            first = args[0]
            assert isinstance(first, Tensor)
            if triton and first.is_cuda and runs_triton("cuda"):
                return twin(triton)(*args, **kwargs)
            if numba and first.is_cpu and first.dtype in NUMBA_DTYPES and runs_numba():
                return twin(numba)(*args, **kwargs)
            return reference(*args, **kwargs)

        return choose

    return decorate


def has_invariant_twin(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name the module whose function of the same name runs in deterministic mode, where Triton does."""

    def decorate(usual: Callable[P, R]) -> Callable[P, R]:
        INVARIANT_TWINS.append((f"strandline.kernels.{module}", usual.__name__))

        @wraps(usual)
        def choose(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _Mode.is_deterministic:
                return usual(*args, **kwargs)
            first = args[0]
            assert isinstance(first, Tensor)
            if not first.is_cuda or not runs_triton("cuda"):
                return usual(*args, **kwargs)
            twin: Callable[P, R] = getattr(import_module(f"strandline.kernels.{module}"), usual.__name__)
            return twin(*args, **kwargs)

        return choose

    return decorate
