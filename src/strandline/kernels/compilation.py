"""Compilation of kernels for CPUs ahead of their use, on several cores."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Final

from strandline.signals import signals_held

PACKAGE: Final = Path(__file__).parent

MAX_PROCESSES: Final = 4
"""The longest kernel takes a quarter of the time of all: further processes would wait for it."""

END: Final = 255

PROGRAM: Final = f"""
import logging, os, sys, threading
from importlib import import_module
numbers, done, lifeline = map(int, sys.argv[1:4])
logging.disable()  # the process that began this one says the same, in its own format
threading.Thread(target=lambda: os._exit(len(os.read(lifeline, 1)) or 1), daemon=True).start()
while (number := os.read(numbers, 1)[0]) != {END}:
    import_module("strandline.kernels." + sys.argv[4 + number])
    os.write(done, b"1")
"""
"""What each process runs: it takes the number of the next module from a pipe that all share, and imports it.

It ends when the process that started it does. Signals that a terminal sends to both are held back."""


def compile_kernels() -> None:
    """Fill Numba's cache unless that has been done, with the cores that this process may use."""
    from strandline.kernels import runtime_numba

    directory = runtime_numba.cache_directory()
    # Any process may have compiled some kernels already, or is about to: what is there does not say that all are.
    if directory is None or (directory / "complete").exists():
        return
    paths = sorted(path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*_numba.py"))
    if compile_modules([".".join(path.parts) for path in paths], len(os.sched_getaffinity(0))):
        (directory / "complete").touch()


def uncompiled(modules: Sequence[str]) -> list[str]:
    """Return the modules of ``strandline.kernels`` without a kernel in Numba's cache; none where there is no cache."""
    from strandline.kernels import runtime_numba

    directory = runtime_numba.cache_directory()
    if directory is None:
        return []
    compiled = {path.name.partition(".")[0] for path in directory.glob("*.nbi")}
    return [module for module in modules if module.rpartition(".")[2] not in compiled]


def compile_modules(
    modules: Sequence[str], num_cores: int, report: Callable[[int], object] = lambda num_done: None
) -> bool:
    """Import modules of ``strandline.kernels`` in other processes, which compile their kernels; return whether all did.

    A module that cannot be imported there raises its error where it is imported next. The processes end with the call,
    also when an exception ends it.

    Args:
        report: is called with the number of modules that are done, after each of them.
    """
    # The longest first, so that no process ends long after the others.
    sizes = {module: PACKAGE.joinpath(*module.split(".")).with_suffix(".py").stat().st_size for module in modules}
    names = sorted(modules, key=sizes.__getitem__, reverse=True)
    num_processes = min(num_cores, len(names), MAX_PROCESSES)
    with ExitStack() as stack:
        numbers, is_done, lifeline = (_pipe(stack) for _ in range(3))
        numbers[1].write(bytes([*range(len(names)), *[END] * num_processes]))
        theirs = [pipe_end.fileno() for pipe_end in (numbers[0], is_done[1], lifeline[0])]
        command = [sys.executable, "-c", PROGRAM, *map(str, theirs), *names]
        processes = list[subprocess.Popen[bytes]]()
        stack.callback(_end, processes)
        with signals_held():
            processes.extend(subprocess.Popen(command, pass_fds=theirs) for _ in range(num_processes))
        is_done[1].close()
        num_done = 0
        while is_done[0].read(1):
            num_done += 1
            report(num_done)
        codes = [process.wait() for process in processes]
        return not any(codes)


def _pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    """Return both ends of a pipe, which the stack closes."""
    reader, writer = os.pipe()
    return stack.enter_context(FileIO(reader, "r")), stack.enter_context(FileIO(writer, "w"))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
