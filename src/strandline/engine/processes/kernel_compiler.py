"""The program of a process that compiles a share of an engine's kernels (``compiling.py``)."""

import pickle
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from strandline.engine.processes.dry_run import run_start
from strandline.engine.startup.compiling import Share
from strandline.kernels.gpu import Gpu
from strandline.kernels.recording_triton import (
    Variant,
    build_driver,
    build_launcher,
    can_build_launchers,
    read_compiler,
    recording,
)


def compile_share(share: Share) -> None:
    """Compile kernels into Triton's cache on disk, from when the dry run finds them.

    Raises:
        RuntimeError: a process failed; it has written why.
        Exception: the dry run's, after what it had found was compiled.
    """
    compilers = Compilers(share)
    try:
        with recording(share.gpu, compilers.compile):
            run_start(share.config)
    finally:
        compilers.finish()


class Compilers:
    """Processes that compile one kernel each: copies of this one, which has loaded the compiler."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._num_found = 0
        self._waiting = deque[Callable[[], None]]()
        self._running = list[BaseProcess]()
        self._has_failed = False
        if share.number == 0 and can_build_launchers():
            self._waiting.append(build_driver)
        read_compiler(share.gpu)
        self._begin()

    def compile(self, variant: Variant) -> None:
        """Compile a kernel if it is of this share, once a process is free."""
        if self._num_found % self._share.num_shares == self._share.number:
            self._waiting.append(partial(compile_one, variant, self._share.gpu))
        self._num_found += 1
        self._begin()

    def finish(self) -> None:
        """Wait until all have been compiled.

        Raises:
            RuntimeError: a process failed; it has written why.
        """
        while self._running:
            wait([process.sentinel for process in self._running])
            self._begin()
        if self._has_failed:
            raise RuntimeError("a kernel could not be compiled")

    def _begin(self) -> None:
        """Begin what waits, in the order in which it was found, as far as processes are free."""
        self._has_failed |= any(process.exitcode for process in self._running)
        self._running = [process for process in self._running if process.exitcode is None]
        while self._waiting and len(self._running) < self._share.num_processes:
            process = get_context("fork").Process(target=self._waiting.popleft())
            process.start()
            self._running.append(process)


def compile_one(variant: Variant, gpu: Gpu) -> None:
    """Compile a kernel, and what launches it on this machine."""
    kernel, _ = variant.compile(gpu)
    if can_build_launchers():
        build_launcher(kernel)


if __name__ == "__main__":
    compile_share(pickle.load(sys.stdin.buffer))
