"""Time norms and gates on a GPU, at the shapes of Qwen3.5-4B and Qwen3.5-35B-A3B.

Run: ``PYTHONPATH=src python3 benchmarks/kernels/norm.py [--sweep]``. Times are medians of graph replays over rotating
inputs. The floor is each input read and each output written once, at 4.3 TB/s.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import cycle, product

import torch
from torch import Tensor

from strandline.kernels.rowwise import activation, activation_triton, norm, norm_triton

BYTES_PER_S = 4.3e12
TOKENS = (1, 16, 256, 8192)
NUM_SETS = 4
EPS = 1e-6

Outputs = Tensor | tuple[Tensor, ...]
Make = Callable[[int], tuple[Tensor, ...]]
Case = tuple[str, Make, Callable[..., Outputs], Callable[..., Outputs], int]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def view(num_tokens: int, size: int, *inner: int) -> Tensor:
    """Return a part of the rows of a fused projection."""
    part = randn(num_tokens, size + 4096)[:, 2048 : 2048 + size]
    return part.unflatten(1, inner) if inner else part


def cases_of_rows(size: int) -> list[Case]:
    weight = randn(size)
    return [
        (
            f"add_rms_norm {size}",
            lambda t: (randn(t, size), randn(t, size)),
            lambda x, r: norm_triton.add_rms_norm_zero_centered(x, r, weight, EPS),
            lambda x, r: norm.add_rms_norm_zero_centered.reference(x, r, weight, EPS),
            4 * size * 2,
        ),
        (
            f"rms_norm {size}",
            lambda t: (randn(t, size),),
            lambda x: norm_triton.rms_norm_zero_centered(x, weight, EPS),
            lambda x: norm.rms_norm_zero_centered.reference(x, weight, EPS),
            2 * size * 2,
        ),
    ]


def case_of_swiglu(size: int) -> Case:
    functions = (activation_triton.swiglu, activation.swiglu.reference)
    return f"swiglu {size}", lambda t: (view(t, 2 * size),), *functions, 3 * size * 2


def cases() -> list[Case]:
    """Return name, inputs for a number of tokens, Triton's and torch's function, and bytes moved per token."""
    found = [case for size in (2048, 2560) for case in cases_of_rows(size)]
    weight_V = randn(128)
    found.append(
        (
            "rms_norm_gated 32 x 128",
            lambda t: (randn(t, 32, 128), view(t, 4096, 32, 128)),
            lambda x, g: norm_triton.rms_norm_gated(x, g, weight_V, EPS),
            lambda x, g: norm.rms_norm_gated.reference(x, g, weight_V, EPS),
            3 * 4096 * 2,
        )
    )
    found += [case_of_swiglu(size) for size in (512, 9216)]
    # Open gates: the values, gated in place again and again, must not fade to zeros.
    gate = (activation_triton.sigmoid_gate, activation.sigmoid_gate.reference)
    found.append(("sigmoid_gate 4096", lambda t: (randn(t, 4096), view(t, 4096).add_(8)), *gate, 3 * 4096 * 2))
    return found


def time_us(function: Callable[..., object], sets: list[tuple[Tensor, ...]]) -> float:
    """Return the median time of one call over rotating inputs."""
    graphs = []
    for tensors in sets:
        function(*tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                function(*tensors)
        graphs.append(graph)
    turn = cycle(graphs)
    times = list[float]()
    for _ in range(24):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000)
        start.record()
        for _ in graphs:
            next(turn).replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(graphs) / 4)
    return sorted(times)[len(times) // 2]


def report(name: str, num_tokens: int, make: Make, function: Callable[..., Outputs], num_bytes: int) -> float:
    """Time one variant, print a line, and return microseconds."""
    try:
        measured = time_us(function, [make(num_tokens) for _ in range(NUM_SETS)])
    except Exception as error:  # noqa: BLE001 - a variant that does not compile must not end the sweep
        print(f"{name} tokens={num_tokens}: {type(error).__name__}: {str(error)[:100]!r}", flush=True)
        return float("inf")
    moved = num_tokens * num_bytes
    rate, floor = moved / measured / 1e3, 1e6 * moved / BYTES_PER_S
    share = 100 * floor / measured
    print(f"{name} tokens={num_tokens}: {measured:.2f} us, {rate:.0f} GB/s, {share:.0f} % of floor", flush=True)
    return measured


def all_of(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check() -> None:
    """Compare with the torch versions."""
    for name, make, triton_function, torch_function, _ in cases():
        tensors = make(300)
        expected = torch_function(*(x.clone() for x in tensors))
        actual = triton_function(*tensors)
        pairs = zip(all_of(actual), all_of(expected), strict=True)
        error = max(float((a.float() - e.float()).norm() / e.float().norm()) for a, e in pairs)
        print(f"check {name}: error ratio {error:.1e}: {'ok' if error < 1e-3 else 'ERROR'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try the launch variants")
    sweep = parser.parse_args().sweep
    check()
    for (name, make, function, torch_function, num_bytes), num_tokens in product(cases(), TOKENS):
        report(name, num_tokens, make, function, num_bytes)
        report(f"{name}, torch,", num_tokens, make, torch_function, num_bytes)
    if not sweep:
        return
    for rows, short, long, block in ((512, 2, 4, 512), (2048, 4, 8, 2048), (4096, 8, 16, 4096), (1024, 2, 16, 1024)):
        norm_triton.ROW_ELEMENTS, norm_triton.WARPS_SHORT, norm_triton.WARPS_LONG = rows, short, long
        activation_triton.BLOCK, activation_triton.WARPS = block, max(4, block // 512)
        print(f"-- row elements {rows}, warps {short} and {long}, block {block}", flush=True)
        for (name, make, function, _, num_bytes), num_tokens in product(cases(), (1, 8192)):
            report(name, num_tokens, make, function, num_bytes)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
