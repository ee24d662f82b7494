"""Processes of ranks that run kernels in Triton's interpreter."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

from tests.interpreter import prepare_interpreter

MAX_WAIT_S = 240


def run_ranks(function: Callable[..., None], num_ranks: int, *arguments: Any) -> list[int | None]:
    """Call a module's function in one process for each rank, which is its first argument; return their exit codes.

    The processes are forks of one that has imported the module, which takes seconds, and has no threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    processes = [context.Process(target=run, args=(function, rank, *arguments)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(MAX_WAIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def run(function: Callable[..., None], rank: int, *arguments: Any) -> None:
    """Run a rank, in its process."""
    prepare_interpreter()
    torch.set_num_threads(1)
    function(rank, *arguments)
