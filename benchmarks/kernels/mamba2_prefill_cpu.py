"""Time Mamba-2 prefills on a CPU: the Numba version beside the reference implementation, at published shapes.

    PYTHONPATH=src python3 benchmarks/kernels/mamba2_prefill_cpu.py [--threads 1] [--repeats 9]

One layer, one sequence that resumes from a state. Both versions run in turns, so that both meet the same neighbours;
the least and the median of their times are printed, and the relative error of the outputs.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strandline.kernels.chunk_table import build_chunk_table
from strandline.kernels.recurrences import mamba2_prefill_numba
from strandline.kernels.recurrences.mamba2 import mamba2_prefill

SHAPES = {"Granite-4.0-H-Tiny": (48, 64, 1, 128), "Nemotron-3-Nano-30B-A3B": (64, 64, 8, 128)}
"""Heads, channels of a head, groups, channels of the state."""

NUM_TOKENS = (16, 512, 2048)


def arguments(shape: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return one layer's random inputs, parts of one tensor's rows, and its states."""
    num_heads, head_dim, num_groups, state_dim = shape
    sizes = [num_heads * head_dim, num_groups * state_dim, num_groups * state_dim, num_heads]
    x, B, C, dt = torch.randn(num_tokens, sum(sizes)).to(dtype).split(sizes, dim=1)
    return (
        x.unflatten(1, (num_heads, head_dim)),
        B.unflatten(1, (num_groups, state_dim)),
        C.unflatten(1, (num_groups, state_dim)),
        dt,
        torch.empty(num_heads).uniform_(0.001, 16).log(),
        torch.randn(num_heads),
        torch.randn(num_heads),
        (0.0, torch.inf),
        torch.randn(3, num_heads, state_dim, head_dim),
        torch.tensor([1]),
        torch.tensor([2]),
        build_chunk_table([(0, num_tokens)], [()]),
    )


def timed_ms(function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> float:
    begun_s = time.perf_counter()
    function(*inputs)
    return 1e3 * (time.perf_counter() - begun_s)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    versions = (mamba2_prefill.reference, mamba2_prefill_numba.mamba2_prefill)
    for name, shape in SHAPES.items():
        for num_tokens in NUM_TOKENS:
            for dtype in (torch.float32, torch.bfloat16):
                inputs = arguments(shape, num_tokens, dtype)
                expected, out = (version(*inputs).float() for version in versions)
                rounds = [[timed_ms(version, inputs) for version in versions] for _ in range(options.repeats)]
                (torch_ms, numba_ms) = (sorted(times) for times in zip(*rounds, strict=True))
                middle = options.repeats // 2
                print(
                    f"{name}, {num_tokens} tokens, {str(dtype).removeprefix('torch.')}: "
                    f"torch {torch_ms[0]:.1f} ms (median {torch_ms[middle]:.1f}), "
                    f"Numba {numba_ms[0]:.1f} ms (median {numba_ms[middle]:.1f}), "
                    f"error {float((out - expected).norm() / expected.norm()):.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
