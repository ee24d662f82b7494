"""Time the decode step of Gated DeltaNet at the heads of Qwen3.5 (16 key, 32 value heads of 128) on a GPU.

Run: ``PYTHONPATH=src python3 benchmarks/kernels/gdn_decode.py [--sweep]``. One graph holds a call for each of several
layers, whose states together are larger than the cache; a time is the median of its replays over the calls. The floor
is the bytes that must move at 4.28 TB/s. Every slot is read and written in place.

*Plain*: states are read and written. *Logged*: states are read, and written by those sequences whose log is full; the
mean over steps in which all logs are equally full, and the time of one in which every length is as frequent.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from strandline.kernels.batch import LogBatch
from strandline.kernels.recurrences import gdn, gdn_decode_triton
from strandline.kernels.recurrences.gdn_log import LOG_TOKENS, LogMemory

KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BYTES_PER_S = 4.28e12
TOUCHED_BYTES = 400 << 20
"""Bytes of the states of all calls of one graph: several times the cache."""

VARIANTS = [
    (block_v, num_warps)
    for block_v, num_warps in product((8, 16, 32, 64, 128), (1, 2, 4, 8))
    if block_v <= 64 * num_warps
]

Call = tuple[Any, ...]
"""Tensors, and what keeps some."""


def calls(batch_size: int, state_dtype: torch.dtype) -> list[Call]:
    """Return the arguments of every layer's call: slots of one arena, a slot apart from the next by all layers."""
    state_bytes = VALUE_HEADS * HEAD_DIM * HEAD_DIM * state_dtype.itemsize
    num_layers = min(30, max(4, TOUCHED_BYTES // (batch_size * state_bytes)))
    arena = torch.randn(batch_size + 1, num_layers, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device="cuda").to(state_dtype)
    slots = torch.randperm(batch_size, device="cuda") + 1
    A_log_H = torch.empty(VALUE_HEADS, device="cuda").uniform_(0.001, 4).log()
    dt_bias_H = torch.randn(VALUE_HEADS, device="cuda")
    sizes = [KEY_HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM, VALUE_HEADS, VALUE_HEADS]
    found: list[Call] = []
    for layer in range(num_layers):
        q, k, v, a_NH, b_NH = torch.randn(batch_size, sum(sizes), device="cuda").bfloat16().split(sizes, dim=1)
        q_NGK, k_NGK, v_NHV = (x.unflatten(1, (-1, HEAD_DIM)) for x in (q, k, v))
        found.append((q_NGK, k_NGK, v_NHV, a_NH, b_NH, A_log_H, dt_bias_H, arena[:, layer], slots, slots))
    return found


def time_us(all_calls: list[Call]) -> float:
    """Return the median time of one call."""
    return replay_us(record(gdn_decode_triton.gdn_decode, all_calls), len(all_calls))


def time_logged_us(all_calls: list[Call], num_places: int = LOG_TOKENS) -> tuple[float, float]:
    """Return the mean time of one call over equally full logs, and its time where every length is as frequent."""
    batch_size = len(all_calls[0][0])
    log_N = torch.randperm(batch_size, device="cuda") + 1
    len_N = torch.zeros(batch_size, dtype=torch.int64, device="cuda")
    num_folded_N = torch.zeros_like(len_N)
    logs = LogBatch(log_N, len_N, log_N, (), num_folded_N, ())
    sizes = ((KEY_HEADS, num_places, HEAD_DIM), (VALUE_HEADS, num_places, HEAD_DIM), (VALUE_HEADS, num_places))
    logged = [
        (*call, LogMemory(*(-torch.rand(batch_size + 1, *size, device="cuda") for size in sizes)), logs)
        for call in all_calls
    ]
    graph = record(gdn_decode_triton.gdn_decode_logged, logged)
    times = list[float]()
    for length in range(num_places + 1):
        len_N.fill_(length)
        num_folded_N.fill_(length + 1 if length == num_places else 0)
        times.append(replay_us(graph, len(logged)))
    len_N.copy_(torch.arange(batch_size, device="cuda") % (num_places + 1))
    num_folded_N.copy_((len_N + 1) * (len_N == num_places))
    return sum(times) / len(times), replay_us(graph, len(logged))


def record(operation: Callable[..., Tensor], all_calls: Sequence[tuple[object, ...]]) -> torch.cuda.CUDAGraph:
    """Return a graph of these calls."""
    operation(*all_calls[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in all_calls:
            operation(*call)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, num_calls: int) -> float:
    """Return the median time of one of a graph's calls."""
    times = list[float]()
    for _ in range(23):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / num_calls)
    return sorted(times[3:])[10]


def check(batch_size: int, state_dtype: torch.dtype) -> None:
    """Compare one call with the torch version on the same device, in float32."""
    call = calls(batch_size, state_dtype)[1]
    inputs, (state_SHKV, src_N, dst_N) = call[:-3], call[-3:]
    expected_SHKV = state_SHKV.to(torch.float32, copy=True)
    exact = (*(x.float() for x in inputs), expected_SHKV, src_N, dst_N)
    expected_NHV, out_NHV = gdn.gdn_decode.reference(*exact), gdn_decode_triton.gdn_decode(*call)
    out, state = error_ratio(out_NHV, expected_NHV), error_ratio(state_SHKV, expected_SHKV)
    is_right = out < 4e-3 and state < (1e-5 if state_dtype == torch.float32 else 4e-3)
    print(f"check batch {batch_size}, state {state_dtype}: {'ok' if is_right else 'WRONG'} ({out:.1e}, {state:.1e})")


def error_ratio(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def report(batch_size: int, state_dtype: torch.dtype, variant: tuple[int, int], us: float) -> None:
    traffic = 2 * batch_size * VALUE_HEADS * HEAD_DIM * HEAD_DIM * state_dtype.itemsize
    print(
        f"gdn_decode batch {batch_size:4} state {str(state_dtype)[6:]:8} block {variant[0]:3} warps {variant[1]} "
        f"{us:8.2f} us {traffic / us / 1e3:6.0f} GB/s {100 * traffic / BYTES_PER_S * 1e6 / us:5.1f} % of floor",
        flush=True,
    )


def report_logged(batch_size: int, state_dtype: torch.dtype, plain_us: float) -> None:
    in_step_us, mixed_us = time_logged_us(calls(batch_size, state_dtype))
    state_bytes = VALUE_HEADS * HEAD_DIM * HEAD_DIM * state_dtype.itemsize
    token_bytes = (KEY_HEADS + VALUE_HEADS) * HEAD_DIM * 4
    traffic = batch_size * (state_bytes * (LOG_TOKENS + 2) / (LOG_TOKENS + 1) + token_bytes * (LOG_TOKENS / 2 + 1))
    print(
        f"  with a log: {in_step_us:8.2f} us in step, {mixed_us:8.2f} mixed {traffic / mixed_us / 1e3:6.0f} GB/s "
        f"{100 * traffic / BYTES_PER_S * 1e6 / mixed_us:5.1f} % of floor, {plain_us / mixed_us:5.2f} of plain",
        flush=True,
    )


def sweep(batch_size: int, state_dtype: torch.dtype) -> None:
    all_calls = calls(batch_size, state_dtype)
    found = []
    for variant in VARIANTS:
        gdn_decode_triton.FEW = gdn_decode_triton.MANY = gdn_decode_triton.Launch(*variant)
        try:
            found.append((time_us(all_calls), variant))
        except Exception as error:  # noqa: BLE001 - a variant that does not compile is a result, too
            print(f"block {variant[0]} warps {variant[1]}: {type(error).__name__} {str(error).splitlines()[:1]}")
    for us, variant in sorted(found)[:6]:
        report(batch_size, state_dtype, variant, us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try every launch, print the six best of each batch")
    options = parser.parse_args()
    torch.manual_seed(0)
    for state_dtype in (torch.float32, torch.bfloat16):
        check(33, state_dtype)
        for batch_size in BATCHES:
            if options.sweep and batch_size in (1, 16, 64, 256):
                sweep(batch_size, state_dtype)
            elif not options.sweep:
                is_few = batch_size <= gdn_decode_triton.FEW_SEQUENCES
                variant = gdn_decode_triton.FEW if is_few else gdn_decode_triton.MANY
                us = time_us(calls(batch_size, state_dtype))
                report(batch_size, state_dtype, variant, us)
                report_logged(batch_size, state_dtype, us)


if __name__ == "__main__":
    main()
