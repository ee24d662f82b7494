"""Time products in FP8 with block scales at the shapes of Qwen3.5-35B-A3B and 27B on a GPU.

Run: ``PYTHONPATH=src:benchmarks/kernels python3 benchmarks/kernels/block_scaled.py [--rows 1 16 64 512 8192]``. Beside
ours: torch's GEMM in bfloat16, and torch's block-scaled GEMM (``torch._scaled_mm`` with scales per row and 128 inputs
and per 128 × 128 weights, on Hopper GPUs only) with its inputs quantised before, which is not part of its time. Times
are medians of graph replays; weights take turns. The floor is the FP8 weight's bytes over 4.3 TB/s.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from linear import BYTES_PER_S, time_us  # type: ignore[import-not-found]
from torch import Tensor

from strandline.kernels import block_scaled_triton
from strandline.kernels.block_scaled import GROUP, block_scaled_linear, quantize_groups
from strandline.models.fp8_conversion import quantize_blocks

SHAPES = {
    "35B in_proj_qkvz": (2048, 12288),
    "35B out_proj": (4096, 2048),
    "27B gate_up": (5120, 34816),
    "27B down": (17408, 5120),
}
ROWS = (1, 4, 16, 64, 512, 8192)


def scaled_mm(x: Tensor, weight_OI: Tensor, scale_YX: Tensor) -> Callable[[], Tensor]:
    """Return torch's block-scaled product with these inputs, whose scales it wants column by column."""
    num_rows = -(-len(x) // 4) * 4
    padded = torch.nn.functional.pad(x, (0, 0, 0, num_rows - len(x)))
    quantized_TXG, scale_TX = quantize_groups(padded)
    quantized, scale = quantized_TXG.flatten(1), scale_TX.t().contiguous().t()
    return lambda: torch._scaled_mm(
        quantized, weight_OI.t(), scale_a=scale, scale_b=scale_YX.t(), out_dtype=torch.bfloat16
    )


def measure(name: str, num_rows: int) -> None:
    """Check and time every way of one product."""
    num_inputs, num_outputs = SHAPES[name]
    count = max(3, -(-300_000_000 // (num_inputs * num_outputs)))
    options = {"device": "cuda", "dtype": torch.bfloat16}
    wide = [torch.randn(num_outputs, num_inputs, **options).mul_(num_inputs**-0.5) for _ in range(count)]
    narrow = [quantize_blocks(weight) for weight in wide]
    x = torch.randn(num_rows, num_inputs, **options)
    expected = block_scaled_linear.reference(x, *narrow[0]).double()
    ways: dict[str, Callable[[int], Callable[[], Tensor]]] = {
        "bfloat16": lambda i: lambda: torch.nn.functional.linear(x, wide[i]),
        "ours": lambda i: lambda: block_scaled_triton.block_scaled_linear(x, *narrow[i]),
        "torch FP8": lambda i: scaled_mm(x, *narrow[i]),
    }
    floor_us = 1e6 * num_inputs * num_outputs / BYTES_PER_S
    for way, make in ways.items():
        try:
            steps = [make(i) for i in range(count)]
            error = float((steps[0]()[:num_rows].double() - expected).norm() / expected.norm())
            taken_us = time_us(steps)
        except Exception as problem:  # noqa: BLE001 - a way that does not run here must not end the others
            print(f"{name} rows={num_rows} {way}: {type(problem).__name__}: {str(problem)[:80]!r}", flush=True)
            continue
        share = f"{100 * floor_us / taken_us:.0f} % of floor"
        print(f"{name} rows={num_rows} {way}: {taken_us:.2f} us, {share}, error {error:.1e}", flush=True)


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    for num_rows in parser.parse_args().rows:
        for name, (num_inputs, num_outputs) in SHAPES.items():
            if num_inputs % GROUP == num_outputs % GROUP == 0:
                measure(name, num_rows)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
