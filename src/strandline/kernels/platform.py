"""Which version of an operation runs: torch's, the definition of right, Triton's or Numba's.

Every operation is a torch function; one that has faster twins names their modules. On a CUDA device with Triton its
twin runs, on a CPU Numba's (``runtime_numba.py``), everywhere else the torch function: that is how a new accelerator
starts. The choice is made once per process and device type.

*Deterministic*, a kernel adds in an order that does not depend on what else is in the step: who launches kernels says
which it wants. Twins choose their tiles accordingly; torch functions on a CPU are what they are.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from strandline.env import NUMBA, TRITON, is_numba_off, is_triton_off
from strandline.kernels import operation
from strandline.kernels.binding import bind_kernels
from strandline.kernels.operation import Operation, Workload
from strandline.specs import TensorSpec


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
    names = (path.stem for path in Path(__file__).parent.glob("*_numba.py"))
    return sorted(f"strandline.kernels.{name}" for name in names if name not in ("runtime_numba", "tile_numba"))


class _Mode:
    """What the kernels that are launched next should be."""

    is_deterministic = False


def set_deterministic(is_deterministic: bool) -> None:
    """Say whether the kernels launched from now on must be invariant to the batch. Whoever launches says it anew."""
    _Mode.is_deterministic = is_deterministic


def is_deterministic() -> bool:
    """Return whether a row's result may depend on that row alone, to the last bit."""
    return _Mode.is_deterministic


@cache
def _chosen(called: Operation[..., Any], workload: Workload) -> Callable[..., Any]:
    return bind_kernels([called], workload)[called]


def _choose(called: Operation[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """Return what runs a call whose backend nobody has bound."""
    first = args[0]
    memory: tuple[TensorSpec, ...] = ()
    if called.name.startswith("gdn_"):
        state = args[0] if called.name == "gdn_fold" else args[7]
        memory = (TensorSpec("state", (state.shape[-1],), _name(state.dtype)),)
    return _chosen(called, Workload(first.device.type, _name(first.dtype), memory, _Mode.is_deterministic))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


operation.Unbound.choose = staticmethod(_choose)
