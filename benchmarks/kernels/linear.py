"""Time products of few rows at the shapes of Qwen3.5-4B and 35B-A3B on a GPU, against torch's.

Run: ``PYTHONPATH=src python3 benchmarks/kernels/linear.py [--sweep]``. Every product follows a norm, as in the model;
the norm's time alone is taken off. Times are medians of graph replays; weights take turns, so that none is found in
the cache. The floor is the weight's bytes over 4.3 TB/s.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strandline.kernels.gemm import linear_triton
from strandline.kernels.gemm.linear_triton import Gemv, Skinny
from strandline.kernels.rowwise.activation_triton import swiglu
from strandline.kernels.rowwise.norm_triton import rms_norm_zero_centered

BYTES_PER_S = 4.3e12
ROWS = (1, 2, 4, 8, 16)


class Shape(NamedTuple):
    """A projection of one of the models."""

    name: str
    num_inputs: int
    num_outputs: int
    is_gated: bool = False


SHAPES = (
    Shape("4B in", 2560, 12352),
    Shape("4B out", 4096, 2560),
    Shape("4B gate_up", 2560, 18432, is_gated=True),
    Shape("4B down", 9216, 2560),
    Shape("35B in", 2048, 12352),
    Shape("35B out", 4096, 2048),
    Shape("35B shared in", 2048, 1288),
    Shape("35B attention in, of two ranks", 2048, 4608),
    Shape("35B out, of two ranks", 2048, 2048),
    Shape("35B shared in, of two ranks", 2048, 776),
    Shape("35B head", 2048, 248320),
    Shape("35B head, of two ranks", 2048, 124160),
)
GEMVS = [
    Gemv(*v)
    for v in [
        (1, 1024, 1),
        (1, 2048, 1),
        (2, 512, 1),
        (2, 1024, 1),
        (4, 256, 1),
        (4, 512, 1),
        (1, 1024, 2),
        (2, 512, 2),
        (2, 1024, 2),
        (4, 512, 2),
        (1, 1024, 4),
        (1, 2048, 4),
        (2, 1024, 4),
        (4, 1024, 4),
        (2, 2048, 4),
        (8, 1024, 4),
        (4, 2048, 8),
    ]
]
SKINNIES = [
    Skinny(*v)
    for v in [
        (16, 256, 2, 4),
        (32, 128, 4, 5),
        (64, 128, 4, 4),
        (32, 128, 4, 4, 2),
        (32, 128, 4, 4, 4),
        (32, 128, 4, 4, 8),
        (64, 128, 4, 4, 4),
        (64, 128, 4, 4, 8),
        (64, 128, 4, 3, 8),
        (32, 256, 4, 3, 4),
        (16, 256, 4, 3, 2),
    ]
]

Product = Callable[[Tensor, Tensor], Tensor]


def torch_product(shape: Shape) -> Product:
    """Return torch's product, and the gate after it."""
    if shape.is_gated:
        return lambda x, weight: swiglu(torch.nn.functional.linear(x, weight))
    return torch.nn.functional.linear


def launch(
    launcher: Callable[..., Tensor], tiling: Gemv | Skinny, x: Tensor, weight: Tensor, *, is_gated: bool
) -> Tensor:
    """Compute a product without a bias in one way of tiling."""
    return launcher(x, weight, None, tiling, is_gated=is_gated)


def variants(shape: Shape, num_rows: int, *, is_sweep: bool) -> Iterator[tuple[str, Product]]:
    """Yield the ways to compute one product, by name."""
    gated = shape.is_gated
    yield "torch", torch_product(shape)
    if not is_sweep:
        yield "chosen", linear_triton.gated_linear if gated else linear_triton.linear
        return
    if num_rows <= linear_triton.MAX_ROWS_GEMV:
        for gemv in GEMVS:
            if gemv.block_n * gemv.block_k * num_rows <= 8192 * gemv.warps // 2:
                yield str(tuple(gemv)), partial(launch, linear_triton.launch_gemv, gemv, is_gated=gated)
    if num_rows > 2:
        for tile in SKINNIES[:3] if gated else SKINNIES:
            yield str(tuple(tile)), partial(launch, linear_triton.launch_skinny, tile, is_gated=gated)


def time_us(steps: Sequence[Callable[[], object]]) -> float:
    """Return the median time of one step, of replays of a graph of them all."""
    steps[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    graph.replay()
    times = list[float]()
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(steps))
    return sorted(times)[len(times) // 2]


class Case:
    """Weights of one shape, more than the cache holds, and inputs."""

    def __init__(self, shape: Shape, num_rows: int) -> None:
        self.shape = shape
        self.weight_bytes = 2 * shape.num_inputs * shape.num_outputs
        count = max(4, -(-300_000_000 // self.weight_bytes))
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        scale = shape.num_inputs**-0.5
        make = (torch.randn(shape.num_outputs, shape.num_inputs, **options).mul_(scale) for _ in range(count))
        self.weights = list(make)
        self.x = torch.randn(num_rows, shape.num_inputs, **options)
        self.norm = torch.randn(shape.num_inputs, **options)
        self.floor_us = 1e6 * self.weight_bytes / BYTES_PER_S
        self.norm_us = time_us([self.normed] * 24)

    def normed(self) -> Tensor:
        return rms_norm_zero_centered(self.x, self.norm, 1e-6)

    def time_us(self, product: Product) -> float:
        """Return the time that the product takes behind a norm."""
        steps = [partial(self.step, product, weight) for weight in self.weights * 2]
        return time_us(steps) - self.norm_us

    def step(self, product: Product, weight: Tensor) -> Tensor:
        return product(self.normed(), weight)

    def error(self, product: Product) -> float:
        actual = product(self.x, self.weights[0]).double()
        expected = self.x.double() @ self.weights[0].double().t()
        if self.shape.is_gated:
            gate, up = expected.chunk(2, dim=-1)
            expected = gate * gate.sigmoid() * up
        return float((actual - expected).norm() / expected.norm())


def measure(shape: Shape, num_rows: int, *, is_sweep: bool) -> None:
    """Check and time all ways of one product, and print a line per way and the best of all."""
    case = Case(shape, num_rows)
    found = []
    for name, product in variants(shape, num_rows, is_sweep=is_sweep):
        try:
            error, taken_us = case.error(product), case.time_us(product)
        except Exception as problem:  # noqa: BLE001 - a variant that does not compile must not end the sweep
            print(f"{shape.name} rows={num_rows} {name}: {type(problem).__name__}: {str(problem)[:80]!r}", flush=True)
            continue
        verdict = "" if error < 1e-2 else f" ERROR {error:.1e}"
        found.append((taken_us, name))
        share = 100 * case.floor_us / taken_us
        print(f"{shape.name} rows={num_rows} {name}: {taken_us:.2f} us, {share:.0f} % of floor{verdict}", flush=True)
    if is_sweep:
        best = ", ".join(f"{name} {taken_us:.2f}" for taken_us, name in sorted(found)[:4])
        bounds = f"floor {case.floor_us:.1f}, torch {found[0][0]:.2f}"
        print(f"BEST {shape.name} rows={num_rows} ({bounds}): {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try the launch variants")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--compile", metavar="I/N", help="only compile every N-th variant, from the I-th on")
    arguments = parser.parse_args()
    if arguments.compile:
        index, count = map(int, arguments.compile.split("/"))
        compile_share(index, count, arguments.rows)
        return
    for num_rows in arguments.rows:
        for shape in SHAPES:
            measure(shape, num_rows, is_sweep=arguments.sweep)


def compile_share(index: int, count: int, rows: list[int]) -> None:
    """Run variants once, so that another process finds them compiled."""
    cases = [(s, n, v) for n in rows for s in SHAPES for _, v in variants(s, n, is_sweep=True)]
    for shape, num_rows, product in cases[index::count]:
        x = torch.ones(num_rows, shape.num_inputs, device="cuda", dtype=torch.bfloat16)
        try:
            product(x, torch.ones(shape.num_outputs, shape.num_inputs, device="cuda", dtype=torch.bfloat16))
        except Exception as problem:  # noqa: BLE001 - the sweep says it again
            print(f"{shape.name} rows={num_rows}: {type(problem).__name__}", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
