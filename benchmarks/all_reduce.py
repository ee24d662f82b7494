"""Time sums over ranks: the engine's with and without the norm that follows, NCCL or gloo, torch's symmetric memory.

    python benchmarks/all_reduce.py
    python benchmarks/all_reduce.py --ranks 4 --sizes 4KiB,64KiB,8MiB --hidden-size 4096

Each rank is a process, on GPUs with a device of its own (NCCL), elsewhere on the CPU (gloo). Messages are bfloat16. On
GPUs ``REPEATS`` calls are captured in a CUDA graph, and the median of ``REPLAYS`` replays is divided by that; on CPUs
the median of as many calls is taken. Each way is first compared with the sum. The slowest rank counts. NVLink multicast
stays off, as in the engine, unless the environment says otherwise.

A message consists of rows of the hidden size. The engine sums few rows in a kernel of its own on GPUs
(``kernels/collectives/rank_sums_triton.py``), with the residual addition and the norm if one follows, and many rows in
another (``kernels/collectives/many_row_sums_triton.py``), which does the same. "NCCL" and "gloo" are the backend's sum
alone, or followed by the engine's kernel for the addition and the norm.

"Choices" are what experts made of rows, ``TOP_K`` of each, which the ranks hold in equal parts: added up by a kernel
before the engine's sum and norm, or by that one.

One-shot: every rank reads all others' messages and adds them up. Two-shot: each adds up its part, then all read those.
Their messages lie in symmetric memory from the start.
"""

import argparse
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from strandline.config import parse_bytes
from strandline.device.ranks.process_ranks import ProcessRanks
from strandline.device.ranks.rendezvous import Rendezvous
from strandline.kernels.binding import bind_kernels
from strandline.kernels.collectives.rank_sums import bind_sum_add_norm
from strandline.kernels.expert_choices import ExpertChoices, added_up
from strandline.kernels.operation import Workload
from strandline.kernels.rowwise.norm import add_rms_norm

EPS: Final = 1e-6
REPEATS: Final = 20
REPLAYS: Final = 100
WARM_UP_CALLS: Final = 5
MAX_WAIT_S: Final = 600
TOP_K: Final = 8
"""Choices of a row; a multiple of the number of ranks."""

Way = Callable[[], Tensor]
"""Sums a message that it holds over all ranks; may overwrite it."""


def main() -> None:
    """Start the ranks, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--sizes", default="4KiB,64KiB,256KiB,1MiB,2MiB,8MiB,32MiB", help="of a message (default: %(default)s)"
    )
    parser.add_argument("--hidden-size", type=int, default=2048, help="channels of a row (default: %(default)s)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    sizes = [parse_bytes(size, "--sizes") for size in options.sizes.split(",")]
    is_cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    name = torch.cuda.get_device_name() if is_cuda else platform.processor()
    print(f"{date.today()} · {options.ranks} ranks · {name} · torch {torch.__version__}", flush=True)
    context = multiprocessing.get_context("spawn")
    meeting = str(Path(tempfile.mkdtemp(prefix="strandline-ranks-")) / "meeting")
    members = [Rendezvous(rank, options.ranks, meeting) for rank in range(options.ranks)]
    processes = [
        context.Process(target=run_rank, args=(member, is_cuda, sizes, options.hidden_size)) for member in members
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(MAX_WAIT_S)
    if codes := [process.exitcode for process in processes if process.exitcode != 0]:
        for process in processes:
            process.kill()
        raise SystemExit(f"ranks have ended with {codes}")


def run_rank(rendezvous: Rendezvous, is_cuda: bool, sizes: list[int], hidden_size: int) -> None:
    """Measure all sizes and ways on one rank; the first one prints."""
    device = torch.device("cuda", rendezvous.rank) if is_cuda else torch.device("cpu")
    ranks = ProcessRanks(rendezvous, device)
    ranks.connect()
    if rendezvous.rank == 0:
        print("| bytes | way | µs |\n| --- | --- | --- |", flush=True)
    for num_bytes in sizes:
        for name, message, way in ways(ranks, num_bytes // 2 // hidden_size, hidden_size, device):
            check(message, way, ranks)
            message.zero_()
            time_us = time_in_graph_us(way) if is_cuda else time_calls_us(way)
            slowest_us = -ranks.least(-round(1000 * time_us)) / 1000
            if rendezvous.rank == 0:
                print(f"| {num_bytes:,} | {name} | {slowest_us:,.1f} |", flush=True)
    ranks.close()


def ways(
    ranks: ProcessRanks, num_rows: int, hidden_size: int, device: torch.device
) -> Iterator[tuple[str, Tensor, Way]]:
    """Yield the name of each way, the message that it sums, and the way."""
    backend = "NCCL" if device.type == "cuda" else "gloo"
    message, residual = (torch.zeros(num_rows, hidden_size, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight, num_elements = torch.ones(hidden_size, dtype=torch.bfloat16, device=device), message.numel()
    kernels = bind_kernels([add_rms_norm], Workload(device.type, "bfloat16"), ranks)
    sum_add_norm = bind_sum_add_norm(kernels, add_rms_norm)
    yield "the engine's sum", message, lambda: ranks.sum(message)
    yield "the engine's sum and norm", message, lambda: sum_add_norm(message, residual, weight, EPS)[1]
    yield backend, message, lambda: all_reduce(message)
    yield (
        f"{backend}, then the norm",
        message,
        lambda: kernels[add_rms_norm](all_reduce(message), residual, weight, EPS)[1],
    )
    if device.type != "cuda":
        return
    choices = choices_of(ranks, num_rows, hidden_size, device)
    yield (
        "choices added up, then the engine's sum and norm",
        choices.out_AD,
        lambda: sum_add_norm(added_up(choices), residual, weight, EPS)[1],
    )
    yield (
        "the engine's sum and norm of choices",
        choices.out_AD,
        lambda: sum_add_norm(choices, residual, weight, EPS)[1],
    )
    import torch.distributed._symmetric_memory as symmetric_memory

    operations: Any = torch.ops.symm_mem
    group = dist.group.WORLD
    assert group is not None
    shared: Tensor = symmetric_memory.empty(num_elements, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(shared, group.group_name)
    if hasattr(operations, "one_shot_all_reduce"):
        yield (
            "symmetric memory, one-shot",
            shared,
            lambda: operations.one_shot_all_reduce(shared, "sum", group.group_name),
        )
    if hasattr(operations, "two_shot_all_reduce_"):
        yield (
            "symmetric memory, two-shot",
            shared,
            lambda: operations.two_shot_all_reduce_(shared, "sum", group.group_name),
        )


def choices_of(ranks: ProcessRanks, num_rows: int, hidden_size: int, device: torch.device) -> ExpertChoices:
    """Return choices whose sum on a rank is what ``out_AD`` is filled with."""
    from strandline.kernels.expert_choices_triton import add_choices

    out_AD = torch.zeros(num_rows * TOP_K, hidden_size, dtype=torch.bfloat16, device=device)
    weights_TK = torch.full((num_rows, TOP_K), ranks.size / TOP_K, device=device)
    experts_TK = torch.arange(TOP_K, dtype=torch.int32, device=device).expand(num_rows, -1).contiguous()
    held = range(TOP_K * ranks.rank // ranks.size, TOP_K * (ranks.rank + 1) // ranks.size)
    return ExpertChoices(out_AD, weights_TK, experts_TK, None, None, held, add_choices)


def all_reduce(message: Tensor) -> Tensor:
    """Sum a message through the backend of the process group, in place."""
    dist.all_reduce(message)
    return message


def check(message: Tensor, way: Way, ranks: ProcessRanks) -> None:
    """Compare a sum with what it must be."""
    message.fill_(ranks.rank + 1)
    if message.is_cuda:
        torch.cuda.synchronize()
    ranks.least(0)
    total = way()
    wanted = ranks.size * (ranks.size + 1) // 2
    if not bool((total == wanted).all()):
        raise SystemExit(f"rank {ranks.rank}: a sum of {wanted} came out as {total.unique().tolist()}")


def time_calls_us(way: Way) -> float:
    """Return the median time of a call."""
    times_s = []
    for _ in range(WARM_UP_CALLS + REPLAYS):
        start_s = time.perf_counter()
        way()
        times_s.append(time.perf_counter() - start_s)
    return median(times_s[WARM_UP_CALLS:]) * 1e6


def time_in_graph_us(way: Way) -> float:
    """Return the median time of a call among those of a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            way()
    for _ in range(WARM_UP_CALLS):
        graph.replay()
    times_ms = list[float]()
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return median(times_ms) * 1000 / REPEATS


if __name__ == "__main__":
    main()
