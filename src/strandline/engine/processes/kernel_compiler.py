"""The program of a process that compiles a share of an engine's kernels (``compiling.py``)."""

import fcntl
import gc
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Final

from strandline.engine.processes.dry_run import run_start
from strandline.engine.startup.compiling import Share
from strandline.kernels.gpu import Gpu
from strandline.kernels.recording_triton import (
    Variant,
    build_driver,
    build_launcher,
    cache_directory,
    can_build_launchers,
    read_compiler,
    recording,
)

LOCKS: Final = "strandline-locks"


def compile_share(share: Share) -> None:
    """Compile kernels into Triton's cache on disk, from when the dry run finds them.

    Raises:
        RuntimeError: a process failed; it has written why.
        Exception: the dry run's, after what it had found was compiled.
    """
    compilers = Compilers(share)
    try:
        with recording(share.gpu, compilers.compile):
            run_start(share.config, share.rank)
    finally:
        compilers.finish()


class Compilers:
    """Processes that compile one kernel each: copies of this one, which has loaded the compiler."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._waiting = deque[Callable[[], None]]()
        self._of_others = deque[Callable[[], None]]()
        """Kernels of other ranks' shares."""
        self._running = list[BaseProcess]()
        self._has_failed = False
        if share.number == 0 and can_build_launchers():
            self._waiting.append(build_driver)
        self._reading = Thread(target=read_compiler, args=(share.gpu,))
        """Until it has ended, nothing is compiled: processes would each read the compiler."""
        self._reading.start()

    def compile(self, variant: Variant) -> None:
        """Compile a kernel of this share once a process is free; of another rank's, at the end, if it has not been.

        It may be a kernel that only this rank launches.
        """
        share, compile = self._share, partial(compile_one, variant, self._share.gpu)
        if int(variant.digest, 16) % share.num_shares == share.number:
            self._waiting.append(compile)
        elif share.config.tensor_parallel_size > 1:
            self._of_others.append(compile)
        self._begin()

    def finish(self) -> None:
        """Wait until all have been compiled.

        Raises:
            RuntimeError: a process failed; it has written why.
        """
        self._waiting += self._of_others
        self._begin()
        while self._running:
            wait([process.sentinel for process in self._running])
            self._begin()
        if self._has_failed:
            raise RuntimeError("a kernel could not be compiled")

    def _begin(self) -> None:
        """Begin what waits, in the order in which it was found, as far as processes are free."""
        self._reading.join()
        self._has_failed |= any(process.exitcode for process in self._running)
        self._running = [process for process in self._running if process.exitcode is None]
        while self._waiting and len(self._running) < self._share.num_processes:
            process = get_context("fork").Process(target=self._waiting.popleft())
            process.start()
            self._running.append(process)


def compile_one(variant: Variant, gpu: Gpu) -> None:
    """Compile a kernel, and what launches it on this machine; wait where another process does so."""
    with compiling_alone(variant.digest):
        kernel, _ = variant.compile(gpu)
        if can_build_launchers():
            build_launcher(kernel)


@contextmanager
def compiling_alone(digest: str) -> Iterator[None]:
    """Hold the lock of a kernel, as far as there can be any: a byte of one file in Triton's cache."""
    with ExitStack() as stack:
        with suppress(OSError):
            cache_directory().mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((cache_directory() / LOCKS).open("w"))
            fcntl.lockf(file, fcntl.LOCK_EX, 1, int(digest[:12], 16))
        yield


if __name__ == "__main__":
    gc.disable()  # the process ends before garbage matters
    compile_share(pickle.load(sys.stdin.buffer))
