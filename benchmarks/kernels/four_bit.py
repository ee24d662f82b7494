"""Time products with weights in 4 bits at the shapes of Qwen3.5-4B, 35B-A3B and 27B on a GPU.

Run: ``PYTHONPATH=src:benchmarks/kernels python3 benchmarks/kernels/four_bit.py [--sweep] [--experts] [--rows 1 16]``.
Beside ours: our product in bfloat16 and, for rows from 64 on, the weight dequantised and multiplied by torch. With
``--experts``, the mixture of 35B-A3B instead, its experts in bfloat16 and in 4 bits; rows are tokens. ``--sweep`` tries
the launch variants; the line ``BEST`` names the fastest, to be put into ``four_bit_launches.py``. Compiling
them takes most of the time: with ``--compile``, several processes, each with some ``--shapes``, do that before.

Times are medians of graph replays; weights take turns. The floor is the bytes of codes and scales over 4.3 TB/s on an
H200 and 3.0 TB/s on an H100, or the multiplications at 800 TFLOP/s.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from linear import time_us
from torch import Tensor

from strandline.kernels.expert_choices import added_up
from strandline.kernels.experts import four_bit_moe_triton, moe_triton
from strandline.kernels.experts.expert_tiles import ExpertTile, Few
from strandline.kernels.experts.four_bit_moe_few_triton import mixture_few
from strandline.kernels.experts.moe_list_triton import list_choices
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import route
from strandline.kernels.gemm import four_bit_launches as launches
from strandline.kernels.gemm import four_bit_triton, linear_triton
from strandline.kernels.gemm.four_bit_launches import Gemv, Tile
from strandline.kernels.gemm.weights import DenseWeight, FourBitWeight

FLOPS = 8e14
BYTES_PER_S = {"H200": 4.3e12, "H100": 3.0e12}

SHAPES = {
    "35B in_proj_qkvz": (2048, 12288),
    "35B out_proj": (4096, 2048),
    "35B shared": (2048, 1024),
    "4B gate_up": (2560, 18432),
    "4B down": (9216, 2560),
    "27B gate_up": (5120, 34816),
}
"""Inputs and outputs."""

ROWS = (1, 2, 3, 4, 8, 16, 64, 512, 8192)
CHECKED_ROWS = 64
ROWS_EXPERTS = (1, 2, 4, 8, 16, 64, 256, 1024, 8192)

GEMVS = [
    Gemv(*v)
    for v in [
        (1, 1024, 1),
        (2, 1024, 1),
        (4, 1024, 1),
        (8, 1024, 1),
        (2, 2048, 1),
        (4, 2048, 1),
        (1, 2048, 2),
        (2, 2048, 2),
        (4, 2048, 2),
        (8, 2048, 2),
        (4, 1024, 2),
        (1, 4096, 4),
        (2, 4096, 4),
        (4, 4096, 4),
        (4, 2048, 4),
        (8, 2048, 4),
        (8, 1024, 4),
        (2, 8192, 8),
    ]
]
"""Outputs and inputs of a program, and warps."""

TILES = [
    Tile(*v)
    for v in [
        (64, 16, 4, 3),
        (64, 16, 4, 4),
        (64, 16, 4, 6),
        (64, 16, 4, 8),
        (128, 16, 4, 3),
        (128, 16, 4, 4),
        (128, 16, 8, 4),
        (64, 16, 2, 4),
        (32, 16, 2, 4),
        (32, 16, 1, 4),
        (64, 32, 4, 4),
        (64, 32, 4, 5),
        (128, 32, 4, 3),
        (128, 32, 8, 4),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (64, 128, 4, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (256, 64, 8, 3),
        (64, 256, 8, 2),
        (128, 256, 8, 2),
    ]
]
"""Outputs and rows of a tile, warps and stages."""

FEWS = [
    Few(*v)
    for v in [
        (2, 1024, 1, 8, 8),
        (4, 1024, 1, 8, 8),
        (2, 2048, 1, 8, 8),
        (4, 2048, 1, 8, 8),
        (2, 2048, 2, 8, 8),
        (4, 2048, 2, 8, 8),
        (8, 2048, 2, 8, 8),
        (8, 2048, 4, 8, 8),
        (4, 2048, 2, 4, 4),
        (4, 2048, 2, 8, 4),
        (4, 2048, 2, 16, 8),
        (4, 2048, 2, 2, 4),
    ]
]
"""Features, inputs and warps of a program of the first product; channels and warps of one of the second."""

EXPERT_TILES = [
    ExpertTile(*v)
    for v in [
        (16, 64, 4, 3),
        (16, 64, 4, 4),
        (16, 64, 4, 6),
        (16, 128, 4, 3),
        (16, 128, 8, 4),
        (32, 64, 4, 4),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 64, 4, 3, 2),
        (64, 128, 8, 3),
        (64, 128, 8, 3, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 3, 2),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    ]
]
"""Rows and features of a tile, warps, stages and programs among which an expert's choices are dealt out."""

MIXTURE = {"experts": 256, "top_k": 8, "channels": 2048, "size": 512}

Product = Callable[[Tensor, FourBitWeight], Tensor]
Timer = Callable[[Sequence[Callable[[], object]]], float]


def bytes_per_s() -> float:
    """Return the bandwidth that the floor assumes for this GPU."""
    name = torch.cuda.get_device_name()
    return next((rate for part, rate in BYTES_PER_S.items() if part in name), BYTES_PER_S["H200"])


def random_weight(*shape: int, group: int) -> FourBitWeight:
    """Return random codes and scales, symmetric."""
    num_inputs = shape[-1]
    words = torch.randint(-(2**31), 2**31, (*shape[:-1], num_inputs // 8), dtype=torch.int32, device="cuda")
    scales = (torch.rand(*shape[:-1], num_inputs // group, device="cuda") + 0.5) * num_inputs**-0.5 / 4.6
    return FourBitWeight(words, scales.bfloat16(), None, num_inputs, group)


def with_gemv(gemv: Gemv) -> Product:
    """Return the product of few rows with one way of tiling."""

    def multiply(x: Tensor, weight: FourBitWeight) -> Tensor:
        out = x.new_empty(len(x), weight.shape[0])
        four_bit_triton.launch_gemv(out, x, weight, None, gemv)
        return out

    return multiply


def with_tile(tile: Tile, spans: int) -> Product:
    """Return the product with one way of tiling."""

    def multiply(x: Tensor, weight: FourBitWeight) -> Tensor:
        out = x.new_empty(len(x), weight.shape[0])
        four_bit_triton.launch_tile(out, x, weight, None, tile, spans)
        return out

    return multiply


def dequantized(x: Tensor, weight: FourBitWeight) -> Tensor:
    """Return torch's product with the dequantised weight."""
    out = x.new_empty(len(x), weight.shape[0])
    four_bit_triton.multiply_dequantized(out, x, weight, None)
    return out


def ways(num_rows: int, *, is_sweep: bool) -> Iterator[tuple[str, Product]]:
    """Yield the ways to compute a product in 4 bits, by name."""
    yield "chosen", four_bit_triton.four_bit_linear
    yield "invariant", four_bit_triton.four_bit_linear_invariant
    if num_rows >= 64:
        yield "dequantised", dequantized
    if not is_sweep:
        return
    if num_rows <= launches.MAX_ROWS_GEMV:
        for gemv in GEMVS:
            if gemv.block_n * num_rows <= 16:
                yield f"{gemv}", with_gemv(gemv)
    for tile in TILES:
        if max(16, min(num_rows, 256)) / 2 <= tile.block_m < 2 * max(16, num_rows):
            for spans in (1, 2, 4, 8) if num_rows <= 64 else (1,):
                yield f"{tile} spans={spans}", with_tile(tile, spans)


def run_once(steps: Sequence[Callable[[], object]]) -> float:
    """Compile what a step launches."""
    steps[0]()
    return 1.0


def measure(name: str, num_rows: int, group: int, timer: Timer, *, is_sweep: bool) -> None:
    """Check and time every way of one product."""
    num_inputs, num_outputs = SHAPES[name]
    count = max(3, -(-400_000_000 // (num_inputs * num_outputs)))
    weights = [random_weight(num_outputs, num_inputs, group=group) for _ in range(count)]
    wide = [weights[0].dequantize().bfloat16()]
    wide += [wide[0].clone() for _ in range(max(2, count // 4))]
    x = torch.randn(num_rows, num_inputs, device="cuda", dtype=torch.bfloat16)
    expected = x[:CHECKED_ROWS].double() @ weights[0].dequantize().double().t()
    num_bytes = weights[0].words.nbytes + weights[0].scales.nbytes
    floor_us = 1e6 * max(num_bytes / bytes_per_s(), 2 * num_rows * num_inputs * num_outputs / FLOPS)
    taken_us = timer([partial(linear_triton.linear, x, weight) for weight in wide])
    theirs = linear_triton.linear(x, wide[0])[:CHECKED_ROWS]
    error = float((theirs.double() - expected).norm() / expected.norm())
    print(f"{name} rows={num_rows} bfloat16: {taken_us:.2f} us, error {error:.1e}", flush=True)
    found = ((way, partial(product, x), weights) for way, product in ways(num_rows, is_sweep=is_sweep))
    report(f"{name} rows={num_rows}", found, expected, floor_us, timer)


def report(
    name: str,
    found: Iterator[tuple[str, Callable[[Any], Tensor], list[Any]]],
    expected: Tensor,
    floor_us: float,
    timer: Timer,
) -> None:
    """Check and time ways to compute a result, given arguments that take turns; print a line for each and the best."""
    times = []
    for way, product, arguments in found:
        try:
            out = product(arguments[0])
            error = float((out[: len(expected)].double() - expected).norm() / expected.norm())
            taken_us = timer([partial(product, argument) for argument in arguments])
        except Exception as problem:  # noqa: BLE001 - a way that does not run here must not end the others
            print(f"{name} {way}: {type(problem).__name__}: {str(problem)[:80]!r}", flush=True)
            continue
        verdict = "" if error < 1e-2 else " WRONG"
        times.append((taken_us, f"{way}{verdict}"))
        share = f"{100 * floor_us / taken_us:.0f} % of floor"
        print(f"{name} {way}: {taken_us:.2f} us, {share}, error {error:.1e}{verdict}", flush=True)
    best = "; ".join(f"{way} {taken_us:.2f}" for taken_us, way in sorted(times)[:5])
    print(f"BEST {name} (floor {floor_us:.2f}): {best}", flush=True)


Experts = tuple[FourBitWeight, FourBitWeight, FourBitWeight]


def measure_experts(num_tokens: int, group: int, timer: Timer, *, is_sweep: bool) -> None:
    """Check and time a mixture of experts."""
    num_experts, top_k, channels, size = MIXTURE.values()
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    routing = Routing(top_k, is_normalised=True)
    x, shared = torch.randn(num_tokens, channels, **options), torch.randn(num_tokens, 2 * size, **options)
    logits, gate = torch.randn(num_tokens, num_experts, **options), torch.randn(num_tokens, 1, **options)
    experts: list[Experts] = [
        (
            random_weight(num_experts, 2 * size, channels, group=group),
            random_weight(num_experts, channels, size, group=group),
            random_weight(channels, size, group=group),
        )
        for _ in range(3)
    ]
    gate_up, down = (weight.dequantize().bfloat16() for weight in experts[0][:2])
    shared_down = DenseWeight(experts[0][2].dequantize().bfloat16())
    projected = (shared, logits, gate)
    in_bfloat16 = (gate_up, down, shared_down)

    def dense() -> Tensor:
        return added_up(moe_triton.mixture(x, *projected, *in_bfloat16, routing))

    expected = dense().double()
    print(f"experts tokens={num_tokens} bfloat16: {timer([dense] * 3):.2f} us", flush=True)
    chosen = route(logits, None, routing)
    num_used = len(chosen[1].unique())
    codes = num_used * 3 * size * channels + size * channels
    floor_us = 1e6 * max(
        codes * (0.5 + 2 / group) / bytes_per_s(), 6 * num_tokens * (top_k + 1) * size * channels / FLOPS
    )
    print(f"experts tokens={num_tokens}: {num_used} experts used", flush=True)

    def mixture(weights: Experts) -> Tensor:
        return added_up(four_bit_moe_triton.four_bit_mixture(x, *projected, *weights, routing))

    def invariant(weights: Experts) -> Tensor:
        return added_up(four_bit_moe_triton.four_bit_mixture_invariant(x, *projected, *weights, routing))

    def with_few(few: Few, weights: Experts) -> Tensor:
        return mixture_few(x, *projected, *weights, routing, few)

    found: list[tuple[str, Callable[[Any], Tensor]]] = [("chosen", mixture), ("invariant", invariant)]
    if is_sweep and num_tokens <= 8:
        found += [(f"{few}", partial(with_few, few)) for few in FEWS]
    report(f"experts tokens={num_tokens}", ((*way, experts) for way in found), expected, floor_us, timer)
    if is_sweep:
        sweep_expert_tiles(x, experts, chosen[1], floor_us, timer)


def sweep_expert_tiles(x: Tensor, experts: list[Experts], experts_TK: Tensor, floor_us: float, timer: Timer) -> None:
    """Time the tiles of both products of many tokens, each alone."""
    num_tokens, top_k = experts_TK.shape
    listed = list_choices(experts_TK, len(experts[0][0].words))
    hidden = x.new_empty(num_tokens * top_k, experts[0][1].num_inputs)
    out = x.new_empty(num_tokens * top_k, x.shape[1])

    def up(tile: ExpertTile, weights: Experts) -> Tensor:
        four_bit_moe_triton.launch_up(x, weights[0], *listed, hidden, top_k, tile)
        return hidden

    def down(tile: ExpertTile, weights: Experts) -> Tensor:
        four_bit_moe_triton.launch_down(hidden, weights[1], *listed, out, tile)
        return out

    choices_per_expert = num_tokens * top_k // len(experts[0][0].words)
    for name, product, share in (("up", up, 2 / 3), ("down", down, 1 / 3)):
        expected = product(EXPERT_TILES[0], experts[0]).double()
        ways = (
            (f"{tile}", partial(product, tile), experts)
            for tile in EXPERT_TILES
            if tile.block_m <= 4 * max(16, choices_per_expert)
        )
        report(f"experts {name} tokens={num_tokens}", ways, expected, floor_us * share, timer)


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--shapes", default="", help="part of a shape's name")
    parser.add_argument("--group", type=int, default=128, help="inputs that share a scale (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="try the launch variants")
    parser.add_argument("--experts", action="store_true", help="measure the mixture of experts instead")
    parser.add_argument("--compile", action="store_true", help="run each variant once, so that others find it compiled")
    arguments = parser.parse_args()
    timer = run_once if arguments.compile else time_us
    if arguments.experts:
        for num_tokens in arguments.rows or ROWS_EXPERTS:
            measure_experts(num_tokens, arguments.group, timer, is_sweep=arguments.sweep)
        return
    for num_rows in arguments.rows or ROWS:
        for name in SHAPES:
            if arguments.shapes in name:
                measure(name, num_rows, arguments.group, timer, is_sweep=arguments.sweep)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
