"""Time the decode step of Gated DeltaNet at the heads of Qwen3.5 (16 key, 32 value heads of 128) on a GPU.

Run: ``PYTHONPATH=src python3 benchmarks/kernels/gdn_decode.py [--sweep]``. One graph holds a call for each of several
layers, whose states together are larger than the cache; a time is the median of its replays over the calls. The floor
is the states read and written once at 4.28 TB/s. Every slot is read and written in place.
"""

import argparse
from itertools import product

import torch
from torch import Tensor

from strandline.kernels import gdn, gdn_decode_triton

KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BYTES_PER_S = 4.28e12
TOUCHED_BYTES = 400 << 20
"""Of the states of all calls of one graph: several times the cache."""

VARIANTS = [
    (block_v, num_warps)
    for block_v, num_warps in product((8, 16, 32, 64, 128), (1, 2, 4, 8))
    if block_v <= 64 * num_warps
]

Call = tuple[Tensor, ...]


def calls(batch_size: int, state_dtype: torch.dtype) -> list[Call]:
    """Return the arguments of every layer's call: slots of one arena, a slot apart from the next by all layers."""
    state_bytes = VALUE_HEADS * HEAD_DIM * HEAD_DIM * state_dtype.itemsize
    num_layers = min(30, max(4, TOUCHED_BYTES // (batch_size * state_bytes)))
    arena = torch.randn(batch_size + 1, num_layers, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device="cuda").to(state_dtype)
    slots = torch.randperm(batch_size, device="cuda") + 1
    A_log_H = torch.empty(VALUE_HEADS, device="cuda").uniform_(0.001, 4).log()
    dt_bias_H = torch.randn(VALUE_HEADS, device="cuda")
    sizes = [KEY_HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM, VALUE_HEADS, VALUE_HEADS]
    found = []
    for layer in range(num_layers):
        q, k, v, a_NH, b_NH = torch.randn(batch_size, sum(sizes), device="cuda").bfloat16().split(sizes, dim=1)
        q_NGK, k_NGK, v_NHV = (x.unflatten(1, (-1, HEAD_DIM)) for x in (q, k, v))
        found.append((q_NGK, k_NGK, v_NHV, a_NH, b_NH, A_log_H, dt_bias_H, arena[:, layer], slots, slots))
    return found


def time_us(all_calls: list[Call]) -> float:
    """Return the median time of one call."""
    gdn_decode_triton.gdn_decode(*all_calls[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in all_calls:
            gdn_decode_triton.gdn_decode(*call)
    times = []
    for _ in range(23):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(all_calls))
    return sorted(times[3:])[10]


def check(batch_size: int, state_dtype: torch.dtype) -> None:
    """Compare one call with the torch version on the same device, in float32."""
    *inputs, state_SHKV, src_N, dst_N = calls(batch_size, state_dtype)[1]
    expected_SHKV = state_SHKV.to(torch.float32, copy=True)
    expected_NHV = gdn.gdn_decode.__wrapped__(*(x.float() for x in inputs), expected_SHKV, src_N, dst_N)
    out_NHV = gdn_decode_triton.gdn_decode(*inputs, state_SHKV, src_N, dst_N)
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
                report(batch_size, state_dtype, variant, time_us(calls(batch_size, state_dtype)))


if __name__ == "__main__":
    main()
