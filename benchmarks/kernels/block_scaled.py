"""Time products in FP8 with block scales at the shapes of Qwen3.5-35B-A3B and 27B on a GPU.

Run: ``PYTHONPATH=src:benchmarks/kernels python3 benchmarks/kernels/block_scaled.py [--sweep] [--rows 1 16 64 8192]``.
With ``--behind-norm``, only the ways of one to four rows, each behind the norm that quantises them. Otherwise, beside
ours, with quantising of the inputs and without: our product in bfloat16, the product with the ordinary rows that
lie behind these in the model's fused weight, in one launch where there is one, and torch's block-scaled GEMM on Hopper
GPUs (``torch._scaled_mm`` with scales per row and 128 inputs and per 128 × 128 weights), whose inputs are quantised by
our launch. Times are medians of graph replays; weights take turns. The floor is the FP8 weight's bytes over 4.3 TB/s,
or the multiplications at 1,400 TFLOP/s.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from linear import BYTES_PER_S, time_us
from torch import Tensor

from strandline.kernels.gemm import block_scaled_triton, linear_triton, stacked_linear_triton
from strandline.kernels.gemm.block_scaled import block_scaled_linear
from strandline.kernels.gemm.block_scaled_triton import Beside, Gemv, Tile
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight, StackedWeight
from strandline.kernels.rowwise.norm_triton import rms_norm_zero_centered_quantized
from strandline.kernels.rowwise.quantized_rows import GROUP
from strandline.kernels.rowwise.quantizing_triton import quantize_rows
from strandline.models.storage.fp8_conversion import quantize_blocks

FLOPS = 1.4e15

SHAPES = {
    "35B in_proj_qkvz": (2048, 12288),
    "35B out_proj": (4096, 2048),
    "35B shared": (2048, 1024),
    "27B gate_up": (5120, 34816),
    "27B down": (17408, 5120),
}
ROWS = (1, 3, 16, 64, 512, 8192)

GEMVS = [
    Gemv(*v)
    for v in [
        (1, 2048, 1),
        (2, 1024, 1),
        (2, 2048, 1),
        (4, 512, 1),
        (4, 1024, 1),
        (2, 4096, 2),
        (4, 1024, 2),
        (4, 512, 2),
        (8, 512, 2),
        (2, 1024, 2),
        (4, 512, 4),
        (4, 1024, 4),
        (4, 2048, 4),
        (8, 512, 4),
        (8, 1024, 4),
        # For outputs so few that one warp each fills no multiprocessor.
        (1, 1024, 1),
        (1, 2048, 2),
        (2, 2048, 4),
    ]
]
TILES = [
    Tile(*v)
    for v in [
        (64, 16, 4, 4),
        (64, 16, 4, 6),
        (128, 16, 4, 4),
        (64, 32, 4, 5),
        (64, 64, 4, 4),
        (128, 64, 4, 4),
        (128, 64, 4, 3),
        (128, 128, 8, 3),
        (128, 128, 8, 4),
        (64, 128, 4, 4),
        (128, 128, 4, 3),
        (256, 128, 8, 3),
    ]
]
"""Outputs and rows of a tile, warps and stages."""

ROWS_BEHIND = {"35B in_proj_qkvz": 64, "35B shared": 264}
"""Ordinary rows of the same fused weight; the variants of few rows multiply them, too."""

Product = Callable[[Tensor, ScaledWeight], Tensor]


def scaled_mm(x: Tensor, weight: ScaledWeight) -> Tensor:
    """Return torch's block-scaled product, which asks for scales of activations column by column."""
    out = x.new_empty(len(x), len(weight.values))
    block_scaled_triton.multiply_in_torch(out, x, weight, None)
    return out


def before(product: Callable[..., Tensor]) -> Product:
    """Return a product of rows that are quantised once."""
    quantized = cache(quantize_rows)
    return lambda x, weight: product(quantized(x), weight)


def with_rows_behind(num_rows: int) -> Product:
    """Return the product with a weight of parts, the second of which is not in FP8."""
    dense = cache(
        lambda weight: DenseWeight(torch.randn(num_rows, weight.values.shape[1], device="cuda", dtype=torch.bfloat16))
    )
    return before(lambda x, weight: stacked_linear_triton.stacked_linear(x, StackedWeight((weight, dense(weight)))))


def with_tile(tile: Tile, spans: int) -> Product:
    """Return the product of rows that are quantised before, with one way of tiling."""
    quantized = cache(quantize_rows)

    def multiply(x: Tensor, weight: ScaledWeight) -> Tensor:
        out = x.new_empty(len(x), len(weight.values))
        block_scaled_triton.launch_gemm(out, quantized(x), weight, None, tile, spans)
        return out

    return multiply


def with_gemv(gemv: Gemv, num_rows_behind: int) -> Product:
    """Return the product of few rows, quantised before, with one way of tiling, and with ordinary rows behind."""
    quantized = cache(quantize_rows)
    dense = cache(lambda w: torch.randn(num_rows_behind, w.values.shape[1], device="cuda", dtype=torch.bfloat16))

    def multiply(x: Tensor, weight: ScaledWeight) -> Tensor:
        out = x.new_empty(len(x), len(weight.values) + num_rows_behind)
        beside = Beside(x, dense(weight)) if num_rows_behind else None
        block_scaled_triton.launch_gemv(out, quantized(x), weight, None, gemv, beside=beside)
        return out[:, : len(weight.values)]

    return multiply


def ways(num_rows: int, num_rows_behind: int, *, is_sweep: bool) -> Iterator[tuple[str, Product]]:
    """Yield the ways to compute a product in FP8, by name."""
    yield "chosen", block_scaled_triton.block_scaled_linear
    yield "chosen, quantised before", before(block_scaled_triton.block_scaled_linear)
    if num_rows >= 16:
        yield "torch FP8", scaled_mm
        yield "quantising alone", lambda x, _: quantize_rows(x).values_TI
    if not is_sweep:
        return
    if num_rows <= block_scaled_triton.MAX_ROWS_GEMV:
        for gemv in GEMVS:
            if gemv.block_n * num_rows <= 16:
                yield f"{tuple(gemv)} quantised before", with_gemv(gemv, num_rows_behind)
    if num_rows == 1:
        return
    for tile in TILES:
        if max(16, min(num_rows, 128)) / 2 <= tile.block_m < 2 * max(16, num_rows):
            for spans in (1, 4, 8) if num_rows <= 64 else (1,):
                yield f"{tuple(tile)} spans={spans}", with_tile(tile, spans)


def measure(name: str, num_rows: int, *, is_sweep: bool) -> None:
    """Check and time every way of one product."""
    num_inputs, num_outputs = SHAPES[name]
    count = max(3, -(-200_000_000 // (num_inputs * num_outputs)))
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    wide = [torch.randn(num_outputs, num_inputs, **options).mul_(num_inputs**-0.5) for _ in range(count)]
    narrow = [ScaledWeight(*quantize_blocks(weight)) for weight in wide]
    x = torch.randn(num_rows, num_inputs, **options)
    expected = block_scaled_linear.reference(x, narrow[0]).double()
    floor_us = 1e6 * num_inputs * num_outputs * max(1 / BYTES_PER_S, 2 * num_rows / FLOPS)
    taken_us = time_us([partial(linear_triton.linear, x, weight) for weight in wide])
    print(f"{name} rows={num_rows} bfloat16: {taken_us:.2f} us", flush=True)
    num_rows_behind = ROWS_BEHIND.get(name, 0)
    found = list(ways(num_rows, num_rows_behind, is_sweep=is_sweep))
    if num_rows_behind:
        found.insert(2, (f"with {num_rows_behind} rows behind", with_rows_behind(num_rows_behind)))
    for way, product in found:
        try:
            # Of all weights, so that what is made once for each is not made while a graph is captured.
            out, *_ = [product(x, weight) for weight in narrow]
            error = float((out.double() - expected).norm() / expected.norm()) if out.shape == expected.shape else 0
            taken_us = time_us([partial(product, x, weight) for weight in narrow])
        except Exception as problem:  # noqa: BLE001 - a way that does not run here must not end the others
            print(f"{name} rows={num_rows} {way}: {type(problem).__name__}: {str(problem)[:80]!r}", flush=True)
            continue
        share = f"{100 * floor_us / taken_us:.0f} % of floor"
        print(f"{name} rows={num_rows} {way}: {taken_us:.2f} us, {share}, error {error:.1e}", flush=True)


def measure_behind_norm(name: str, num_rows: int) -> None:
    """Check and time the ways to tile a product of few rows that a norm quantises, as in a layer.

    The norm's time alone is taken off. What a program requests before the norm has ended shows only here.
    """
    num_inputs, num_outputs = SHAPES[name]
    num_behind = ROWS_BEHIND.get(name, 0)
    count = max(4, -(-200_000_000 // (num_inputs * num_outputs)))
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    wide = (torch.randn(num_outputs, num_inputs, **options).mul_(num_inputs**-0.5) for _ in range(count))
    weights = [
        (ScaledWeight(*quantize_blocks(weight)), torch.randn(num_behind, num_inputs, **options)) for weight in wide
    ]
    x, gain = torch.randn(num_rows, num_inputs, **options), torch.randn(num_inputs, **options)
    normed = partial(rms_norm_zero_centered_quantized, x, gain, 1e-6)
    norm_us = time_us([normed] * count)
    plain = normed().plain_TI
    if plain is None:
        raise RuntimeError("the norm kept no plain rows")
    expected = block_scaled_linear.reference(plain, weights[0][0]).double()

    def multiply(gemv: Gemv, weight: ScaledWeight, dense: Tensor) -> Tensor:
        rows, out = normed(), torch.empty(num_rows, num_outputs + num_behind, **options)
        beside = Beside(rows.plain_TI, dense) if num_behind and rows.plain_TI is not None else None
        block_scaled_triton.launch_gemv(out, rows, weight, None, gemv, beside=beside)
        return out[:, :num_outputs]

    floor_us = 1e6 * num_inputs * (num_outputs + 2 * num_behind) / BYTES_PER_S
    found = []
    chosen = (block_scaled_triton.GEMV_WIDE, block_scaled_triton.GEMV_NARROW)
    for gemv in dict.fromkeys((*chosen, *GEMVS)):
        if gemv.block_n * num_rows > 16:
            continue
        try:
            actual = multiply(gemv, *weights[0])
            error = float((actual.double() - expected).norm() / expected.norm())
            taken_us = time_us([partial(multiply, gemv, *weight) for weight in weights]) - norm_us
        except Exception as problem:  # noqa: BLE001 - a way that does not run here must not end the others
            print(f"{name} rows={num_rows} {tuple(gemv)}: {type(problem).__name__}: {str(problem)[:80]!r}", flush=True)
            continue
        verdict = "" if error < 1e-2 else f" ERROR {error:.1e}"
        found.append((taken_us, f"{tuple(gemv)}{verdict}"))
        share = 100 * floor_us / taken_us
        print(f"{name} rows={num_rows} {tuple(gemv)} behind a norm: {taken_us:.2f} us, {share:.0f} % of floor{verdict}")
    best = ", ".join(f"{way} {taken_us:.2f}" for taken_us, way in sorted(found)[:4])
    print(f"BEST {name} rows={num_rows} behind a norm of {norm_us:.2f} us: {best}", flush=True)


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--shapes", default="", help="part of a shape's name")
    parser.add_argument("--sweep", action="store_true", help="try the launch variants")
    parser.add_argument("--behind-norm", action="store_true", help="try those of one to four rows, each behind a norm")
    arguments = parser.parse_args()
    for num_rows in arguments.rows:
        for name, (num_inputs, num_outputs) in SHAPES.items():
            if arguments.shapes not in name or num_inputs % GROUP or num_outputs % GROUP:
                continue
            if arguments.behind_norm:
                measure_behind_norm(name, num_rows)
            else:
                measure(name, num_rows, is_sweep=arguments.sweep)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
