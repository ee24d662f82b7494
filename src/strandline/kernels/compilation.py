"""Compilation of kernels for CPUs ahead of their use, on several cores."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent

MAX_PROCESSES: Final = 4
"""The longest kernel takes a quarter of the time of all: further processes would wait for it."""

END: Final = 255

PROGRAM: Final = f"""
import os, sys
from importlib import import_module
while (number := os.read(int(sys.argv[1]), 1)[0]) != {END}:
    import_module("strandline.kernels." + sys.argv[2 + number])
"""
"""What each process runs: it takes the number of the next module from a pipe that all share, and imports it."""


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


def compile_modules(modules: Sequence[str], num_cores: int) -> bool:
    """Import modules of ``strandline.kernels`` in other processes, which compile their kernels; return whether all did.

    A module that cannot be imported there raises its error where it is imported next.
    """
    # The longest first, so that no process ends long after the others.
    sizes = {module: PACKAGE.joinpath(*module.split(".")).with_suffix(".py").stat().st_size for module in modules}
    names = sorted(modules, key=sizes.__getitem__, reverse=True)
    num_processes = min(num_cores, len(names), MAX_PROCESSES)
    numbers, write_end = os.pipe()
    try:
        os.write(write_end, bytes([*range(len(names)), *[END] * num_processes]))
        command = [sys.executable, "-c", PROGRAM, str(numbers), *names]
        processes = [subprocess.Popen(command, pass_fds=[numbers]) for _ in range(num_processes)]
    finally:
        os.close(write_end)
        os.close(numbers)
    codes = [process.wait() for process in processes]
    return not any(codes)
