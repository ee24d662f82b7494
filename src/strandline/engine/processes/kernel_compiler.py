"""The program of a process that compiles a share of an engine's kernels (``compiling.py``)."""

import pickle
import sys
from multiprocessing import get_context

from strandline.engine.processes.dry_run import run_start
from strandline.engine.startup.compiling import Share
from strandline.kernels.gpu import Gpu
from strandline.kernels.recording_triton import Variant, recording


def compile_share(share: Share) -> None:
    """Compile kernels into Triton's cache on disk, in processes that are copies of this one.

    Raises:
        RuntimeError: a process failed; it has written why.
        Exception: the dry run's, after what it had found was compiled.
    """
    variants = list[Variant]()
    try:
        with recording(share.gpu) as variants:
            run_start(share.config)
    finally:
        compile_in_processes(variants, share)


def compile_in_processes(variants: list[Variant], share: Share) -> None:
    """Compile a share of these kernels.

    Raises:
        RuntimeError: a process failed; it has written why.
    """
    processes = [
        get_context("fork").Process(target=compile_each, args=(variants[number :: share.step], share.gpu))
        for number in range(share.first, share.first + share.num_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a kernel could not be compiled")


def compile_each(variants: list[Variant], gpu: Gpu) -> None:
    """Compile kernels one after the other."""
    for variant in variants:
        variant.compile(gpu)


if __name__ == "__main__":
    compile_share(pickle.load(sys.stdin.buffer))
