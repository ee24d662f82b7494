"""Time the router and the experts of Qwen3.5-35B-A3B on a GPU, alone and against torch's grouped product.

Run: ``PYTHONPATH=src python3 benchmarks/kernels/moe.py [--sweep] [--ranks 2]``. Times are medians of graph replays;
several layers' weights take turns, so that none is found in the cache. The floor is the chosen experts' weights over
4.3 TB/s or the products over 700 TFLOP/s, whichever is longer. With ``--ranks`` few tokens are multiplied with the
first rank's experts alone; the floor is that of all experts, divided.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.expert_choices import added_up
from strandline.kernels.experts import moe, moe_many_triton, moe_triton
from strandline.kernels.experts.expert_tiles import MAX_TOKENS_FEW, Few
from strandline.kernels.experts.moe_few_triton import Shared, choose_few, mixture_few
from strandline.kernels.experts.moe_list_triton import list_choices
from strandline.kernels.experts.moe_many_triton import Tile
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import route

HIDDEN, EXPERTS, TOP_K, SIZE = 2048, 256, 8, 512
ROUTING = Routing(TOP_K, is_normalised=True)
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 8192)
BYTES_PER_S, FLOPS = 4.3e12, 700e12
NUM_LAYERS = 4
"""Sets of weights, 1.6 GB each; a batch of one finds its 50 MB in the cache unless choices differ, too."""

FEW_UPS = [
    (1, 512, 1),
    (1, 1024, 1),
    (1, 2048, 1),
    (2, 512, 1),
    (2, 1024, 1),
    (2, 2048, 1),
    (2, 512, 2),
    (2, 1024, 2),
    (4, 512, 2),
    (2, 1024, 4),
    (2, 2048, 4),
]
FEW_DOWNS = [
    (4, 4, 1),
    (1, 1, 1),
    (1, 2, 1),
    (2, 2, 1),
    (2, 4, 1),
    (4, 8, 1),
    (8, 8, 1),
    (1, 1, 2),
    (1, 1, 4),
    (1, 2, 4),
    (2, 2, 2),
    (2, 4, 2),
    (2, 4, 4),
    (4, 4, 2),
    (4, 8, 2),
]
"""Outputs, inputs and warps of a program; of the second product, with all inputs, outputs, warps and tiles."""

UP_SMALL = [
    Tile(16, n, k, warps, stages)
    for n, k, warps, stages in [
        (16, 128, 4, 4),
        (16, 256, 4, 3),
        (32, 64, 4, 5),
        (32, 128, 4, 3),
        (32, 128, 4, 4),
        (32, 128, 4, 6),
        (32, 256, 4, 3),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (64, 128, 8, 4),
    ]
]
DOWN_SMALL = [
    Tile(16, n, k, warps, stages)
    for n, k, warps, stages in [
        (32, 128, 4, 4),
        (32, 256, 4, 2),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 256, 4, 2),
        (128, 64, 4, 4),
        (128, 128, 8, 3),
    ]
]
UP_LARGE = [
    Tile(m, n, 64, warps, stages, split)
    for m, n, warps, stages, split in [
        (32, 64, 4, 4, 1),
        (64, 64, 4, 3, 1),
        (64, 64, 4, 4, 1),
        (64, 128, 4, 3, 1),
        (64, 128, 8, 4, 1),
        (128, 64, 4, 3, 1),
        (128, 64, 8, 4, 2),
        (128, 128, 8, 3, 2),
        (128, 128, 8, 4, 1),
        (128, 128, 8, 4, 2),
        (128, 128, 8, 4, 3),
        (128, 128, 8, 4, 4),
    ]
]
DOWN_LARGE = [
    Tile(m, n, 64, warps, stages, split)
    for m, n, warps, stages, split in [
        (32, 128, 4, 4, 1),
        (64, 128, 4, 4, 1),
        (64, 256, 8, 3, 1),
        (128, 128, 4, 3, 2),
        (128, 128, 8, 4, 2),
        (128, 256, 8, 3, 1),
        (128, 256, 8, 3, 2),
    ]
]

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def time_us(functions: Sequence[Callable[[], object]]) -> float:
    """Return the median time of one call, of graph replays of one call each."""
    graphs = []
    for function in functions:
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        graphs.append(graph)
    turn = cycle(graphs)
    for _ in range(len(graphs)):
        next(turn).replay()
    times = list[float]()
    for _ in range(24):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000)
        start.record()
        for _ in range(len(graphs)):
            next(turn).replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(graphs))
    return sorted(times)[len(times) // 2]


def layers() -> list[tuple[Tensor, Tensor]]:
    """Return several layers' experts."""
    return [
        (
            torch.randn(EXPERTS, 2 * SIZE, HIDDEN, device="cuda", dtype=torch.bfloat16).mul_(HIDDEN**-0.5),
            torch.randn(EXPERTS, HIDDEN, SIZE, device="cuda", dtype=torch.bfloat16).mul_(SIZE**-0.5),
        )
        for _ in range(NUM_LAYERS)
    ]


def inputs(num_tokens: int, weights: tuple[Tensor, Tensor]) -> Inputs:
    x_TD, shared_TD = torch.randn(2, num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    gate_T1 = torch.randn(num_tokens, 1, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(num_tokens, EXPERTS, device="cuda", dtype=torch.bfloat16)
    chosen = route(logits, None, ROUTING)
    return x_TD, *weights, *chosen, shared_TD, gate_T1


def floor_us(num_tokens: int, experts_TK: Tensor) -> float:
    weight_bytes = len(experts_TK.unique()) * 3 * SIZE * HIDDEN * 2
    return 1e6 * max(weight_bytes / BYTES_PER_S, num_tokens * TOP_K * 6 * SIZE * HIDDEN / FLOPS)


def grouped_torch(
    x_TD: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor,
    gate_T1: Tensor,
) -> Tensor:
    """Do the same by torch's grouped product, a sort, and passes between."""
    expert_A, order_A = experts_TK.flatten().sort()
    expert_E = torch.arange(len(gate_up), device=x_TD.device)
    ends_E = torch.searchsorted(expert_A, expert_E, right=True).to(torch.int32)
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    gate_AF, up_AF = grouped_mm(x_TD[order_A // TOP_K], gate_up.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    out_AD = grouped_mm(F.silu(gate_AF) * up_AF, down.transpose(1, 2), offs=ends_E)
    choice_AD = torch.empty_like(out_AD)
    choice_AD[order_A] = out_AD
    choice_TKD = choice_AD.view(len(x_TD), TOP_K, -1)
    return torch.einsum("tk,tkd->td", weights_TK.to(x_TD.dtype), choice_TKD) + shared_TD * gate_T1.sigmoid()


def check() -> None:
    """Compare with the torch version, at the model's shape."""
    weights = layers()[0]
    for num_tokens in (1, 4, 16, 300, 2048):
        arguments = inputs(num_tokens, weights)
        expected = moe.experts_glu(*arguments).float()
        actual = moe_triton.experts(*arguments).float()
        error = float((actual - expected).norm() / expected.norm())
        print(f"check: {num_tokens} tokens, error ratio {error:.2e}: {'ok' if error < 1e-2 else 'ERROR'}", flush=True)


def report(
    name: str, num_tokens: int, variant: str, make: Callable[[Inputs], Callable[[], object]], *, share: float = 1.0
) -> float:
    """Time one variant with its share of the experts' weights, print a line, and return microseconds."""
    torch.manual_seed(num_tokens)
    sets = [inputs(num_tokens, weights) for weights in LAYERS]
    try:
        measured = time_us([make(arguments) for arguments in sets])
    except Exception as error:  # noqa: BLE001 - a variant that does not compile must not end the sweep
        print(f"{name} tokens={num_tokens} {variant}: {type(error).__name__}: {str(error)[:100]!r}", flush=True)
        return float("inf")
    floor = share * floor_us(num_tokens, sets[0][4])
    print(
        f"{name} tokens={num_tokens} {variant}: {measured:.1f} us, {100 * floor / measured:.0f} % of floor", flush=True
    )
    return measured


def variants_up(tile: Tile, arguments: Inputs) -> Callable[[], object]:
    """Return a call of the first grouped product alone."""
    x_TD, gate_up, _, _, experts_TK, _, _ = arguments
    starts, choices = list_choices(experts_TK, EXPERTS)
    hidden = torch.empty(experts_TK.numel(), SIZE, device="cuda", dtype=torch.bfloat16)
    return lambda: moe_many_triton.launch_up(x_TD, gate_up, starts, choices, hidden, TOP_K, tile)


def variants_down(tile: Tile, arguments: Inputs) -> Callable[[], object]:
    """Return a call of the second grouped product alone."""
    _, _, down, _, experts_TK, _, _ = arguments
    starts, choices = list_choices(experts_TK, EXPERTS)
    hidden = torch.randn(experts_TK.numel(), SIZE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(experts_TK.numel(), HIDDEN, device="cuda", dtype=torch.bfloat16)
    return lambda: moe_many_triton.launch_down(hidden, down, starts, choices, out, tile)


def sweep_few(num_tokens: int, num_ranks: int) -> None:
    """Time first products in front of the second one in force, then second products behind the fastest of these."""
    in_force = choose_few(num_tokens, TOP_K, SIZE, SIZE, is_gated=True, is_divided=num_ranks > 1)
    if in_force is None:
        raise RuntimeError("experts of this size do not go this way")

    def taken_us(variant: Few) -> float:
        try:
            error = error_of_few(num_tokens, variant)
        except Exception:  # noqa: BLE001 - the report says why it does not run
            error = 0.0
        verdict = "" if error < 1e-2 else f" ERROR {error:.1e}"
        return report(
            "few", num_tokens, f"{tuple(variant)}{verdict}", partial(few, variant, num_ranks), share=1 / num_ranks
        )

    down_in_force = in_force[3:]
    ups = {up: taken_us(Few(*up, *down_in_force)) for up in FEW_UPS}
    best_up = min(ups, key=ups.__getitem__)
    downs = {down: taken_us(Few(*best_up, *down)) for down in FEW_DOWNS}
    best_down = min(downs, key=downs.__getitem__)
    print(f"BEST few tokens={num_tokens}: {(*best_up, *best_down)}, {downs[best_down]:.1f} us", flush=True)


def error_of_few(num_tokens: int, variant: Few) -> float:
    """Return the error ratio of a variant against the same experts in torch."""
    x_TD, gate_up, down, *_ = inputs(num_tokens, LAYERS[0])
    logits = torch.randn(num_tokens, EXPERTS, device="cuda", dtype=torch.bfloat16)
    projected = torch.randn(num_tokens, 2 * SIZE, device="cuda", dtype=torch.bfloat16)
    gate_T1 = torch.randn(num_tokens, 1, device="cuda", dtype=torch.bfloat16)
    gate, up = projected.chunk(2, dim=-1)
    shared_TD = F.linear(F.silu(gate) * up, SHARED_DOWN)
    arguments = (x_TD, gate_up, down, *route(logits, None, ROUTING), shared_TD, gate_T1)
    expected = moe.experts_glu(*arguments).float()
    shared = Shared(projected, gate_T1, SHARED_DOWN)
    actual = mixture_few(x_TD, logits, gate_up, down, shared, ROUTING, variant).float()
    return float((actual - expected).norm() / expected.norm())


def sweep(num_tokens: int, num_ranks: int) -> None:
    """Time the launch variants that make sense at this size, and print the best of each kernel."""
    if num_tokens <= 16:
        sweep_few(num_tokens, num_ranks)
    if num_tokens < 8:
        return
    for name, make, small, large, share in (
        ("up", variants_up, UP_SMALL, UP_LARGE, 2 / 3),
        ("down", variants_down, DOWN_SMALL, DOWN_LARGE, 1 / 3),
    ):
        tiles = small if num_tokens < 256 else large if num_tokens > 1024 else [*small, *large]
        best_tile = min((report(name, num_tokens, str(tuple(t)), partial(make, t), share=share), t) for t in tiles)
        print(f"BEST {name} tokens={num_tokens}: {best_tile}", flush=True)


def few(few: Few, num_ranks: int, arguments: Inputs) -> Callable[[], object]:
    """Return a call of the way of few tokens: the router's and the shared expert's part are in it, too."""
    x_TD, gate_up, down, *_ = arguments
    fused = torch.randn(len(x_TD), 2 * SIZE + EXPERTS + 8, device="cuda", dtype=torch.bfloat16)
    projected = fused.split([2 * SIZE, EXPERTS, 1, 7], dim=-1)[:3]
    shared = Shared(projected[0], projected[2], SHARED_DOWN)
    num_held = EXPERTS // num_ranks
    held = None if num_ranks == 1 else range(num_held)
    return lambda: mixture_few(x_TD, projected[1], gate_up[:num_held], down[:num_held], shared, ROUTING, few, held=held)


def many(tiles: tuple[Tile, Tile], arguments: Inputs) -> Callable[[], object]:
    """Return a call of the way of many tokens."""
    return lambda: added_up(moe_many_triton.compute_choices(*arguments, *tiles))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try the launch variants")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--ranks", type=int, default=1, help="among which the experts of few tokens are divided")
    arguments = parser.parse_args()
    check()
    for num_tokens in arguments.tokens:
        if arguments.sweep and num_tokens <= MAX_TOKENS_FEW:
            sweep_few(num_tokens, arguments.ranks)
            continue
        logits = torch.randn(num_tokens, EXPERTS, device="cuda", dtype=torch.bfloat16)
        routed = time_us([lambda: route(logits, None, ROUTING)])  # noqa: B023
        print(f"route tokens={num_tokens}: {routed:.1f} us", flush=True)
        report("experts", num_tokens, "chosen", lambda a: lambda: moe_triton.experts(*a))
        chosen = choose_few(num_tokens, TOP_K, SIZE, SIZE, is_gated=True, is_divided=arguments.ranks > 1)
        if num_tokens <= 16 and chosen:
            report("experts", num_tokens, "few", partial(few, chosen, arguments.ranks), share=1 / arguments.ranks)
        for name in ("DECODE", "MIDDLE", "PREFILL"):
            tiles = getattr(moe_many_triton, f"TILES_{name}")
            report("experts", num_tokens, name, partial(many, tiles))
        report("experts", num_tokens, "torch grouped_mm", lambda a: lambda: grouped_torch(*a))
        if arguments.sweep:
            sweep(num_tokens, arguments.ranks)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    LAYERS = layers()
    SHARED_DOWN = torch.randn(HIDDEN, SIZE, device="cuda", dtype=torch.bfloat16).mul_(SIZE**-0.5)
    main()
