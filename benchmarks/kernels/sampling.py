"""Time the choice of tokens on a GPU, at a vocabulary of 248,320.

Run: ``PYTHONPATH=src python3 benchmarks/kernels/sampling.py [--sweep]``. Times are medians of graph replays. The floor
is one pass over the logits at 4.3 TB/s.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from strandline.kernels.sampling import sampling, sampling_triton

VOCAB = 248_320
BYTES_PER_S = 4.3e12
ROWS = (1, 16, 64, 256)
FILTERS = {"top-k 20, top-p 0.95": (20, 0.95, 0.0), "top-p 0.95": (0, 0.95, 0.0), "min-p 0.05": (0, 1.0, 0.05)}


def time_us(function: Callable[[], object], *, in_graph: bool = True) -> float:
    """Return the median time of one call."""
    function()
    torch.cuda.synchronize()
    run = function
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        run = graph.replay
        run()
    times = list[float]()
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000)
        start.record()
        for _ in range(5):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / 5)
    return sorted(times)[len(times) // 2]


def report(name: str, logits_NV: Tensor, function: Callable[[], object], *, in_graph: bool = True) -> None:
    """Time one variant and print a line."""
    try:
        measured = time_us(function, in_graph=in_graph)
    except Exception as error:  # noqa: BLE001 - a variant that does not run must not end the rest
        print(f"{name} rows={len(logits_NV)}: {type(error).__name__}: {str(error)[:100]!r}", flush=True)
        return
    floor = 1e6 * logits_NV.numel() * logits_NV.element_size() / BYTES_PER_S
    print(f"{name} rows={len(logits_NV)}: {measured:.1f} us, {100 * floor / measured:.0f} % of one pass", flush=True)


def parameters(num_rows: int, values: tuple[int, float, float]) -> tuple[Tensor, Tensor, Tensor]:
    top_k, top_p, min_p = values
    return (
        torch.full((num_rows,), top_k, device="cuda"),
        torch.full((num_rows,), top_p, device="cuda"),
        torch.full((num_rows,), min_p, device="cuda"),
    )


def peaked_logits(num_rows: int) -> Tensor:
    """Return logits with most of the mass in some hundred tokens, as in language models."""
    logits_NV = 2 * torch.randn(num_rows, VOCAB, device="cuda")
    likely_NC = torch.randint(VOCAB, (num_rows, 300), device="cuda")
    return logits_NV.scatter_add_(-1, likely_NC, 14 * torch.rand(num_rows, 300, device="cuda"))


def check() -> None:
    """Compare with the torch versions."""
    logits_NV = peaked_logits(8)
    for name, values in FILTERS.items():
        args = parameters(8, values)
        kept_NV = sampling_triton.mask_top_k_top_p_min_p(logits_NV, *args).isfinite()
        expected_NV = sampling.mask_top_k_top_p_min_p.reference(logits_NV, *args).isfinite()
        verdict = "ok" if torch.equal(kept_NV, expected_NV) else f"{int((kept_NV != expected_NV).sum())} differ"
        print(f"check {name}: {int(expected_NV.sum())} kept: {verdict}", flush=True)
    uniform_N = torch.rand(8, device="cuda", dtype=torch.float64)
    same = torch.equal(sampling_triton.sample(logits_NV, uniform_N), sampling.sample.reference(logits_NV, uniform_N))
    print(f"check sample: {'ok' if same else 'differs'}", flush=True)
    same = torch.equal(sampling_triton.greedy(logits_NV), logits_NV.argmax(dim=-1))
    print(f"check greedy: {'ok' if same else 'ERROR'}", flush=True)


def measure(num_rows: int) -> None:
    logits_NV = peaked_logits(num_rows)
    half_NV = logits_NV.bfloat16()
    uniform_N = torch.rand(num_rows, device="cuda", dtype=torch.float64)
    report("greedy float32", logits_NV, lambda: sampling_triton.greedy(logits_NV))
    report("greedy bfloat16", half_NV, lambda: sampling_triton.greedy(half_NV))
    report("argmax of torch", logits_NV, lambda: logits_NV.argmax(dim=-1))
    report("sample", logits_NV, lambda: sampling_triton.sample(logits_NV, uniform_N))
    report("sample of torch", logits_NV, lambda: sampling.sample.reference(logits_NV, uniform_N), in_graph=False)
    for name, values in FILTERS.items():
        args = parameters(num_rows, values)
        report(name, logits_NV, partial(sampling_triton.mask_top_k_top_p_min_p, logits_NV, *args))
    flat_NV = torch.randn_like(logits_NV)
    args = parameters(num_rows, (0, 0.95, 0.0))
    report("top-p 0.95, flat", flat_NV, lambda: sampling_triton.mask_top_k_top_p_min_p(flat_NV, *args))
    if num_rows <= 16:
        call = sampling.mask_top_k_top_p_min_p.reference
        report("top-p 0.95 of torch", logits_NV, lambda: call(logits_NV, *args), in_graph=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try other chunks and bounds")
    sweep = parser.parse_args().sweep
    check()
    for num_rows in ROWS:
        measure(num_rows)
    if not sweep:
        return
    for chunk, tiles in ((2048, 1280), (8192, 1280), (4096, 768), (4096, 1600)):
        sampling_triton.CHUNK, sampling_triton.BOUND_TILES = chunk, tiles
        print(f"-- chunk {chunk}, bound tiles {tiles}", flush=True)
        for num_rows in (1, 64):
            measure(num_rows)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
