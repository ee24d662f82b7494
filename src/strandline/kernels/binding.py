"""The choice of a function for each operation of an engine, made once at start.

On a CUDA device with Triton this is the Triton version, on a CPU the Numba version if there is one, and otherwise the
reference implementation, which also serves new accelerators. ``STRANDLINE_TRITON=0`` and ``STRANDLINE_NUMBA=0`` choose
reference implementations. If a backend cannot run a workload, the reason is recorded and reported.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from tqdm import tqdm

from strandline.clock import SYSTEM_CLOCK
from strandline.env import NUMBA, TRITON, fuse_multiply_add, is_numba_off, is_triton_off
from strandline.kernels.compilation import compile_modules, uncompiled
from strandline.kernels.gpu import is_stood_for
from strandline.kernels.operation import Backend, Launches, Operation, Workload
from strandline.kernels.ranks import ONE_RANK, Ranks

LOGGER: Final = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

PROGRESS_DELAY_S: Final = 1.0
"""Delay before the progress bar appears."""

LOG_INTERVAL_S: Final = 4.0
"""Least time between reports of progress in the log."""

LONG_S: Final = 10.0
"""Loading takes so long only where kernels are compiled."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operation that runs its reference implementation, although the device's backend has a faster version.

    Operations left to torch on purpose are not counted.
    """

    operation: str
    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of one engine's operations. ``kernels[operation]`` is looked up at start, not in steps."""

    workload: Workload
    functions: Mapping[Operation[..., Any], Callable[..., Any]]
    fallbacks: tuple[Fallback, ...]
    ranks: Ranks = ONE_RANK
    """The ranks that compute the same steps as this engine's device."""

    def __getitem__(self, operation: Operation[P, R]) -> Callable[P, R]:
        return self.functions[operation]

    @property
    def is_compiled_on_gpu(self) -> bool:
        """Whether all operations are GPU kernels: compiled on first use, and without synchronization with the host."""
        return self.workload.device_type == "cuda" and not self.fallbacks


@runtime_checkable
class UsesKernels(Protocol):
    """A layer that computes with operations."""

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        """The operations that it uses."""

    def use_kernels(self, kernels: Kernels) -> None:
        """Look up its operations."""


def bind_kernels(
    operations: Iterable[Operation[..., Any]], workload: Workload, ranks: Ranks = ONE_RANK, *, progress: bool = False
) -> Kernels:
    """Choose a function for each operation, and load it. Numba kernels are compiled here, once per machine."""
    functions: dict[Operation[..., Any], Callable[..., Any]] = {}
    fallbacks = list[Fallback]()
    device_type = workload.device_type
    wanted = "Numba" if device_type == "cpu" else "Triton"
    obstacle = why_unavailable(wanted, device_type)
    if wanted == "Triton" and obstacle is None:
        fuse_multiply_add()
    distinct = list(dict.fromkeys(operations))
    if wanted == "Numba" and obstacle is None and ranks.size == 1:
        _compile_ahead(distinct, workload, has_bar=progress)
    shown = tqdm(distinct, "Loading kernels", delay=PROGRESS_DELAY_S) if progress else _logged(distinct)
    for operation in shown:
        functions[operation] = operation.reference
        for backend in operation.backends:
            if backend.name != wanted:
                continue
            reason = obstacle or backend.limit(workload)
            if reason is None:
                functions[operation] = _load(operation, backend, workload)
            else:
                fallbacks.append(Fallback(operation.name, backend.name, reason))
    return Kernels(workload, functions, tuple(fallbacks), ranks)


def _compile_ahead(operations: Iterable[Operation[..., Any]], workload: Workload, *, has_bar: bool) -> None:
    """Compile the Numba kernels that are not in its cache, with at most as many processes as torch has threads.

    Args:
        has_bar: show progress as a bar, not in the log.
    """
    backends = [backend for operation in operations for backend in operation.backends if backend.name == "Numba"]
    modules = dict.fromkeys(backend.module for backend in backends if backend.limit(workload) is None)
    missing = uncompiled(list(modules))
    num_threads = torch.get_num_threads()
    if min(len(missing), num_threads) < 2:
        return
    if has_bar:
        with tqdm(total=len(missing), desc="Compiling kernels for this CPU, once", unit="file") as bar:
            compile_modules(missing, num_threads, lambda num_done: bar.update(num_done - bar.n))
        return
    LOGGER.warning("kernels: compiling %d files for this CPU, once, which may take a minute", len(missing))
    compile_modules(missing, num_threads, LoggedProgress(len(missing)))


class LoggedProgress:
    """Logs how many kernels are compiled, now and then.

    Args:
        num_files: how many there are.
    """

    def __init__(self, num_files: int) -> None:
        self._num_files = num_files
        self._logged_s = self._start_s = SYSTEM_CLOCK()

    def __call__(self, num_done: int) -> None:
        """Note how many are compiled."""
        now_s = SYSTEM_CLOCK()
        if now_s - self._logged_s > LOG_INTERVAL_S or num_done == self._num_files:
            self._logged_s = now_s
            LOGGER.warning("kernels: %d of %d compiled, %.0f s", num_done, self._num_files, now_s - self._start_s)


def _logged(operations: Sequence[Operation[..., Any]]) -> Iterator[Operation[..., Any]]:
    """Yield operations; once they have taken long to load, log why."""
    start_s, is_logged = SYSTEM_CLOCK(), False
    for number, operation in enumerate(operations):
        if not is_logged and SYSTEM_CLOCK() - start_s > LONG_S:
            is_logged = True
            LOGGER.warning(
                "kernels: compiling for this CPU, once, which may take minutes; %d of %d are loaded",
                number,
                len(operations),
            )
        yield operation


def reference_kernels(operations: Iterable[Operation[..., Any]]) -> Kernels:
    """Return the reference implementations."""
    functions = {operation: operation.reference for operation in operations}
    return Kernels(Workload("any", "any"), functions, ())


def why_unavailable(backend: str, device_type: str) -> str | None:
    """Return why a backend is not available for devices of this type; None: it is."""
    return _why_no_numba() if backend == "Numba" else _why_no_triton(device_type)


def _why_no_numba() -> str | None:
    if is_numba_off():
        return f"{NUMBA} is 0"
    if find_spec("numba") is None:
        return "Numba is not installed"
    if not import_module("strandline.kernels.runtime_numba").has_threads():
        return "torch has brought no GNU OpenMP library along, whose threads they run on"
    return None


def _why_no_triton(device_type: str) -> str | None:
    if is_triton_off():
        return f"{TRITON} is 0"
    has_gpu = is_stood_for() or (torch.cuda.is_available() and torch.version.hip is None)
    is_there = find_spec("triton") is not None and has_gpu
    return None if is_there and device_type == "cuda" else f"there is no working Triton for {device_type} here"


def _load(operation: Operation[..., Any], backend: Backend, workload: Workload) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"strandline.kernels.{backend.module}"), operation.name)
    if workload.is_deterministic and backend.takes_launches:
        return partial(function, launches=Launches.FIXED)
    return function
