"""Time the short convolution at the 8,192 channels of Qwen3.5 on a GPU: a prefill's tokens, and a step of decoding.

Run: ``PYTHONPATH=src python3 benchmarks/kernels/conv1d.py [--sweep]``. One graph holds a call for each of several
layers, whose inputs together are larger than the cache; a time is the median of its replays over the calls. Inputs are
columns of rows of 12,352, as the fused projection leaves them. The floor is inputs, outputs and windows once at
4.28 TB/s. A prefill's time holds both of its launches.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from strandline.kernels.chunk_table import build_chunk_table
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences import conv1d, conv1d_triton

CHANNELS, TAPS, ROW = 8192, 4, 12_352
BYTES_PER_S = 4.28e12
TOUCHED_BYTES = 200 << 20
"""Bytes of all calls of one graph: several times the cache."""

PREFILLS = ((128, 1), (2048, 1), (2048, 16), (8192, 1), (8192, 8), (32_768, 4))
"""Tokens in all, and sequences."""

BATCHES = (1, 4, 16, 64, 256)
PREFILL_VARIANTS = [
    (block_t, channels_per_thread * 32 * num_warps, num_warps)
    for block_t, channels_per_thread, num_warps in product((4, 8, 16, 32), (4, 8, 16), (1, 2, 4))
    if block_t * channels_per_thread <= 256
]
UPDATE_VARIANTS = [
    (block_n, block_c, num_warps)
    for block_n, block_c, num_warps in product((1, 2, 4, 8), (64, 128, 256, 512, 1024, 2048), (1, 2, 4, 8))
    if 128 <= block_n * block_c // num_warps * 4 <= 8192
]

Call = partial[Tensor]
"""Takes the module whose operation it calls."""


def tokens(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, ROW, device="cuda", dtype=torch.bfloat16)[:, :CHANNELS]


def arena(num_slots: int, num_layers: int) -> Tensor:
    return torch.randn(num_slots, num_layers, TAPS - 1, CHANNELS, device="cuda", dtype=torch.bfloat16)


def prefill_calls(num_tokens: int, num_sequences: int) -> list[Call]:
    """Return several layers' calls: every second sequence resumes, every one has a cut in its middle."""
    length = num_tokens // num_sequences
    num_layers = min(16, max(2, TOUCHED_BYTES // (num_tokens * CHANNELS * 4)))
    window_SLRC = arena(2 * num_sequences + 1, num_layers)
    starts = [64 * (i % 2) for i in range(num_sequences)]
    cuts = [[(start + length // 2, num_sequences + 1 + i)] for i, start in enumerate(starts)]
    chunks = build_chunk_table([(start, start + length) for start in starts], cuts, "cuda")
    dst_N = torch.arange(1, num_sequences + 1, device="cuda")
    src_N = dst_N * (dst_N % 2 == 0)
    weight_CW = torch.randn(CHANNELS, TAPS, device="cuda", dtype=torch.bfloat16)
    return [
        partial(run_prefill, tokens(num_tokens), weight_CW, None, window_SLRC[:, layer], src_N, dst_N, chunks)
        for layer in range(num_layers)
    ]


def run_prefill(*arguments: object) -> Tensor:
    *inputs, module = arguments
    return operation(module, "causal_conv1d_prefill")(*inputs, "silu")


def update_calls(batch_size: int) -> list[Call]:
    """Return several layers' calls, with windows shifted in place."""
    num_layers = min(30, max(4, TOUCHED_BYTES // (batch_size * CHANNELS * 16)))
    window_SLRC = arena(batch_size + 1, num_layers)
    slots = torch.randperm(batch_size, device="cuda") + 1
    weights = torch.randn(num_layers, CHANNELS, TAPS, device="cuda", dtype=torch.bfloat16)
    return [
        partial(run_update, tokens(batch_size), weights[layer], None, window_SLRC[:, layer], slots, slots)
        for layer in range(num_layers)
    ]


def run_update(*arguments: object) -> Tensor:
    *inputs, module = arguments
    return operation(module, "causal_conv1d_update")(*inputs, "silu")


def operation(module: object, name: str) -> Callable[..., Tensor]:
    found = getattr(module, name)
    return found.reference if isinstance(found, Operation) else found


def time_us(all_calls: Sequence[Call]) -> float:
    """Return the median time of one call."""
    all_calls[0](conv1d_triton)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in all_calls:
            call(conv1d_triton)
    times = list[float]()
    for _ in range(23):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(all_calls))
    return sorted(times[3:])[10]


def check(name: str, call: Call) -> None:
    """Compare outputs and windows with the torch version on the same device."""
    window_SRC = call.args[3]
    before_SRC = window_SRC.clone()
    expected = call(conv1d)
    expected_SRC = window_SRC.clone()
    window_SRC.copy_(before_SRC)
    y = call(conv1d_triton)
    ratio = float((y.double() - expected.double()).norm() / expected.double().norm())
    is_right = ratio < 4e-3 and torch.equal(window_SRC, expected_SRC)
    print(f"check {name}: {'ok' if is_right else 'WRONG'} ({ratio:.1e})")


def report(name: str, variant: tuple[int, ...], us: float, traffic: int) -> None:
    print(
        f"{name:32} variant {variant!s:16} {us:8.2f} us {traffic / us / 1e3:6.0f} GB/s "
        f"{100 * traffic / BYTES_PER_S * 1e6 / us:5.1f} % of floor",
        flush=True,
    )


def sweep(name: str, all_calls: Sequence[Call], traffic: int, variants: Sequence[tuple[int, ...]]) -> None:
    found = []
    for variant in variants:
        if name.startswith("prefill"):
            conv1d_triton.BLOCK_T, conv1d_triton.BLOCK_C, conv1d_triton.NUM_WARPS = variant
        else:
            conv1d_triton.UPDATE_LAUNCHES, conv1d_triton.UPDATE_LARGEST = (), variant
        try:
            found.append((time_us(all_calls), variant))
        except Exception as error:  # noqa: BLE001 - a variant that does not compile is a result, too
            print(f"{name} {variant}: {type(error).__name__} {str(error).splitlines()[:1]}")
    for us, variant in sorted(found)[:6]:
        report(name, variant, us, traffic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try every launch, print the six best of each size")
    options = parser.parse_args()
    torch.manual_seed(0)
    check("prefill", prefill_calls(2048, 16)[0])
    check("update", update_calls(33)[0])
    for num_tokens, num_sequences in PREFILLS:
        name = f"prefill {num_tokens} tokens, {num_sequences} seq"
        calls, traffic = prefill_calls(num_tokens, num_sequences), num_tokens * CHANNELS * 4
        if options.sweep and num_tokens in (128, 8192):
            sweep(name, calls, traffic, PREFILL_VARIANTS)
        elif not options.sweep:
            variant = (conv1d_triton.BLOCK_T, conv1d_triton.BLOCK_C, conv1d_triton.NUM_WARPS)
            report(name, variant, time_us(calls), traffic)
    for batch_size in BATCHES:
        name, calls, traffic = f"update batch {batch_size}", update_calls(batch_size), batch_size * CHANNELS * 16
        if options.sweep:
            sweep(name, calls, traffic, UPDATE_VARIANTS)
        else:
            report(name, conv1d_triton._update_launch(batch_size), time_us(calls), traffic)


if __name__ == "__main__":
    main()
