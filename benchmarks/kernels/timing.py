"""Times of calls, checksums and errors of what they return, and the kernels that they launch."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor

REPLAYS, ROUNDS = 15, 3
"""A time is the least of some rounds' medians: other work on the machine only ever adds to it."""

FLUSHED_BYTES = 1 << 28
"""Written before each measurement, several times the second-level cache."""

LEAD_CYCLES = 20_000
"""Cycles for which the GPU waits, so that no launch of a measurement comes late."""

Run = Callable[[], object]


def gpu_time_us(calls: Sequence[Run], *, in_graph: bool = True) -> float:
    """Return the time of one of these calls, from replays of a CUDA graph of them all.

    Args:
        in_graph: whether a graph can hold them; else they are launched one by one.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    run = _graph(calls).replay if in_graph else lambda: [call() for call in calls]
    run()
    scratch = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    medians = [median(_replay_us(run, scratch) for _ in range(REPLAYS)) for _ in range(ROUNDS)]
    return min(medians) / len(calls)


def _graph(calls: Sequence[Run]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay_us(run: Run, scratch: Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    scratch.zero_()
    torch.cuda._sleep(LEAD_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


def cpu_times_us(variants: Sequence[Run], repeats: int = 9) -> list[tuple[float, float]]:
    """Return the least and the median time of each call; calls take turns, so that all meet the same neighbours."""
    for call in variants:
        call()
    rounds = [[_elapsed_us(call) for call in variants] for _ in range(repeats)]
    return [(min(times), median(times)) for times in zip(*rounds, strict=True)]


def _elapsed_us(call: Run) -> float:
    begun_s = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begun_s)


def tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors in what a call returns."""
    if isinstance(result, Tensor):
        return [result]
    if is_dataclass(result):
        return tensors_of([getattr(result, part.name) for part in fields(result)])
    return [tensor for part in result for tensor in tensors_of(part)] if isinstance(result, list | tuple) else []


def checksum(tensors: Sequence[Tensor]) -> str:
    """Return a checksum of the bytes of tensors."""
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of a tensor; of numbers that are not finite, how many differ."""
    return max(_error(a, e) for a, e in zip(actual, expected, strict=True))


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        raise ValueError(f"the result has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not expected.is_floating_point():
        return float((actual != expected).float().mean())
    a, e = actual.double(), expected.double()
    differing = float((a.isfinite() != e.isfinite()).double().mean())
    a, e = (torch.where(e.isfinite() & a.isfinite(), x, 0) for x in (a, e))
    return max(differing, float((a - e).norm() / e.norm().clamp(min=1e-30)))


@contextmanager
def recorded_kernels() -> Iterator[list[dict[str, Any]]]:
    """Record the Triton kernels that are launched on a GPU: their registers, spills, shared memory and code."""
    found: list[dict[str, Any]] = []
    if not torch.cuda.is_available() or find_spec("triton") is None:
        yield found
        return
    kernel_class: Any = import_module("triton.compiler").CompiledKernel
    original = kernel_class.launch_metadata

    def record(kernel: Any, *arguments: Any) -> Any:
        kernel._init_handles()
        kernel_facts = {
            "name": kernel.metadata.name,
            "registers": kernel.n_regs,
            "spills": kernel.n_spills,
            "shared": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
            "ptx": code_checksum(kernel.asm["ptx"], kernel.metadata.name),
        }
        found.append(kernel_facts)
        return original(kernel, *arguments)

    kernel_class.launch_metadata = record
    try:
        yield found
    finally:
        kernel_class.launch_metadata = original


def code_checksum(ptx: str, name: str) -> str:
    """Return a checksum of a kernel's PTX without its name and without source lines."""
    code = re.sub(r"\s*//.*$|^\s*\.(loc|file)\b.*$|^\$L__tmp\d+:$", "", ptx, flags=re.MULTILINE)
    code = code.partition("\t.section")[0].replace(name, "kernel")
    return sha256("\n".join(line for line in code.splitlines() if line.strip()).encode()).hexdigest()[:16]
