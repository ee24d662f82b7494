"""Compilation of all kernels for CPUs ahead of their use."""

import subprocess
import sys
from pathlib import Path


def compile_kernels() -> None:
    """Fill Numba's cache unless that has been done: for half a minute, in two processes."""
    from strandline.kernels import runtime_numba

    directory = runtime_numba.cache_directory()
    # Any process may have compiled some kernels already, or is about to: what is there does not say that all are.
    if directory is None or (directory / "complete").exists():
        return
    package = Path(runtime_numba.__file__).parent
    paths = sorted(path.relative_to(package).with_suffix("") for path in package.rglob("*_numba.py"))
    modules = [".".join(("strandline.kernels", *path.parts)) for path in paths]
    programs = [f"import {', '.join(share)}" for share in (modules[::2], modules[1::2])]
    processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    codes = [process.wait() for process in processes]
    if not any(codes):
        (directory / "complete").touch()
