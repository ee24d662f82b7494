"""Time the mixture of experts of Nemotron-3-Nano-30B-A3B on a GPU: router, experts without gate, shared expert.

Run: ``PYTHONPATH=src python3 benchmarks/kernels/sigmoid_moe.py [--sweep]``. Times are medians of graph replays; several
layers' weights take turns, so that none is found in the cache. The floor is the weights that are read over 4.3 TB/s.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from moe import BYTES_PER_S, time_us
from torch import Tensor

from strandline.kernels.experts import moe_triton, router
from strandline.kernels.experts.expert_tiles import Few
from strandline.kernels.experts.moe_few_triton import Shared, choose_few, mixture_few
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import route
from strandline.kernels.gemm import linear_and_logits_triton
from strandline.kernels.gemm.linear_and_logits_triton import linear_and_logits
from strandline.kernels.gemm.linear_triton import MAX_ROWS_GEMV, Gemv, launch_gemv, linear
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.rowwise.norm import rms_norm_of_gated
from strandline.kernels.rowwise.norm_triton import rms_norm_of_gated as rms_norm_of_gated_triton

HIDDEN, EXPERTS, SIZE, SHARED_SIZE = 2688, 128, 1856, 3712
INNER_SIZE, NUM_GROUPS = 4096, 8
ROUTING = Routing(6, True, "sigmoid", 1e-20, 2.5)
TOKENS = (1, 2, 4, 8, 16, 64)
NUM_LAYERS = 3
"""Sets of weights, 2.6 GB each."""

FEWS = [
    Few(*up, *down)
    for up, down in [
        ((1, 1024, 1), (1, 4)),
        ((2, 512, 1), (1, 4)),
        ((2, 1024, 1), (1, 4)),
        ((4, 512, 1), (1, 4)),
        ((4, 1024, 1), (1, 4)),
        ((4, 512, 2), (1, 4)),
        ((4, 1024, 2), (1, 4)),
        ((8, 512, 2), (1, 4)),
        ((4, 4096, 4), (1, 4)),
        ((2, 1024, 1), (1, 2)),
        ((2, 1024, 1), (1, 8)),
        ((2, 1024, 1), (2, 4)),
        ((2, 1024, 1), (2, 8)),
    ]
]


PAIRS = [Gemv(*v) for v in [(1, 512, 2), (1, 1024, 2), (1, 1024, 4), (2, 512, 2), (2, 1024, 4), (1, 4096, 4)]]
LOGITS = [Gemv(*v) for v in [(1, 256, 1), (1, 512, 2), (1, 1024, 4), (1, 2048, 8), (2, 1024, 4)]]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).mul_(shape[-1] ** -0.5)


class Layer:
    """Weights of a layer."""

    def __init__(self) -> None:
        self.router_ED, self.bias_E = random(EXPERTS, HIDDEN, dtype=torch.float32), random(EXPERTS, dtype=torch.float32)
        self.up_EFD, self.down_EDF = random(EXPERTS, SIZE, HIDDEN), random(EXPERTS, HIDDEN, SIZE)
        self.shared_up_SD, self.shared_down_DS = random(SHARED_SIZE, HIDDEN), random(HIDDEN, SHARED_SIZE)

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return linear_and_logits(x_TD, self.shared_up_SD, None, self.router_ED)

    def project_apart(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return linear(x_TD, self.shared_up_SD), F.linear(x_TD.float(), self.router_ED)

    def mixture(self, x_TD: Tensor) -> Tensor:
        up_TS, logits_TE = self.project(x_TD)
        weights = (self.up_EFD, self.down_EDF, DenseWeight(self.shared_down_DS))
        return moe_triton.mixture_relu_squared(x_TD, up_TS, logits_TE, *weights, ROUTING, self.bias_E)

    def few(self, x_TD: Tensor, projected: tuple[Tensor, Tensor], few: Few) -> Tensor:
        shared = Shared(projected[0], None, self.shared_down_DS)
        return mixture_few(x_TD, projected[1], self.up_EFD, self.down_EDF, shared, ROUTING, few, self.bias_E)


def report(name: str, num_tokens: int, functions: Sequence[Callable[[], object]], floor_bytes: float = 0.0) -> float:
    """Time one variant, print a line, and return microseconds."""
    try:
        measured = time_us(functions)
    except Exception as error:  # noqa: BLE001 - a variant that does not compile must not end the sweep
        print(f"{name} tokens={num_tokens}: {type(error).__name__}: {str(error)[:100]!r}", flush=True)
        return float("inf")
    floor = f", {100e6 * floor_bytes / BYTES_PER_S / measured:.0f} % of floor" if floor_bytes else ""
    print(f"{name} tokens={num_tokens}: {measured:.1f} us{floor}", flush=True)
    return float(measured)


def floor_bytes(logits_TE: Tensor, bias_E: Tensor) -> float:
    """Return the bytes of the experts that are chosen, and of the shared one's last weight."""
    num_chosen = len(route(logits_TE, bias_E, ROUTING)[1].unique())
    return 2.0 * HIDDEN * (2 * SIZE * num_chosen + SHARED_SIZE)


def time_tokens(layers: list[Layer], num_tokens: int, *, sweeps: bool) -> None:
    x_TD = random(num_tokens, HIDDEN).mul_(HIDDEN**0.5)
    projected = [layer.project(x_TD) for layer in layers]
    logits = [logits_TE for _, logits_TE in projected]
    pairs = list(zip(layers, logits, strict=True))
    for name, router_of in {"route, torch": router.route.reference, "route": route}.items():
        report(name, num_tokens, [partial(router_of, b, a.bias_E, ROUTING) for a, b in pairs])
    first_bytes = HIDDEN * (2.0 * SHARED_SIZE + 4 * EXPERTS)
    report("projections apart", num_tokens, [partial(a.project_apart, x_TD) for a in layers], first_bytes)
    report("projections", num_tokens, [partial(a.project, x_TD) for a in layers], first_bytes)
    if sweeps:
        sweep_projections(layers, x_TD, first_bytes)
    experts_bytes = sum(floor_bytes(b, a.bias_E) for a, b in pairs) / len(pairs)
    report("mixture", num_tokens, [partial(a.mixture, x_TD) for a in layers], first_bytes + experts_bytes)
    out_TO, gate_TO, weight_O = random(num_tokens, INNER_SIZE), random(num_tokens, INNER_SIZE), random(INNER_SIZE)
    for name, norm in {"norm, torch": rms_norm_of_gated.reference, "norm": rms_norm_of_gated_triton}.items():
        report(name, num_tokens, [partial(norm, out_TO, gate_TO, weight_O, 1e-5, NUM_GROUPS)])
    if num_tokens > 8:
        return
    chosen = choose_few(num_tokens, ROUTING.top_k, SIZE, SHARED_SIZE, is_gated=False)
    assert chosen is not None
    best = (float("inf"), chosen)
    for few in FEWS if sweeps else [chosen]:
        functions = [partial(a.few, x_TD, p, few) for a, p in zip(layers, projected, strict=True)]
        best = min(best, (report(f"experts {tuple(few)}", num_tokens, functions, experts_bytes), few))
    print(f"BEST few tokens={num_tokens}: {best}, chosen {chosen}", flush=True)
    many = [partial(apart, a, x_TD, *p) for a, p in zip(layers, projected, strict=True)]
    report("experts by lists", num_tokens, many, experts_bytes)


def sweep_projections(layers: list[Layer], x_TD: Tensor, num_bytes: float) -> None:
    """Time the variants of the launches that a router's product is in."""
    num_tokens = len(x_TD)
    if num_tokens > MAX_ROWS_GEMV:
        for gemv in LOGITS:
            functions = [
                partial(launch_gemv, x_TD, a.router_ED, None, gemv, is_gated=False, out_dtype=torch.float32)
                for a in layers
            ]
            report(f"logits {tuple(gemv)}", num_tokens, functions)
        report("logits, torch", num_tokens, [partial(in_torch, x_TD, a.router_ED) for a in layers])
        return
    chosen = linear_and_logits_triton.PAIR
    for gemv in PAIRS:
        linear_and_logits_triton.PAIR = gemv
        report(f"projections {tuple(gemv)}", num_tokens, [partial(a.project, x_TD) for a in layers], num_bytes)
    linear_and_logits_triton.PAIR = chosen


def in_torch(x_TD: Tensor, router_ED: Tensor) -> Tensor:
    return F.linear(x_TD.float(), router_ED)


def apart(layer: Layer, x_TD: Tensor, up_TS: Tensor, logits_TE: Tensor) -> Tensor:
    """Compute the experts as more tokens do: routed first, then expert by expert."""
    chosen = route(logits_TE, layer.bias_E, ROUTING)
    shared_TD = linear(F.relu(up_TS).square(), layer.shared_down_DS)
    return moe_triton.experts(x_TD, layer.up_EFD, layer.down_EDF, *chosen, shared_TD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try the launch variants of few tokens")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    arguments = parser.parse_args()
    layers = [Layer() for _ in range(NUM_LAYERS)]
    for num_tokens in arguments.tokens:
        time_tokens(layers, num_tokens, sweeps=arguments.sweep)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
