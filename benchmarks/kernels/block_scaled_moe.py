"""Time the experts of Qwen3.5-35B-A3B in FP8 on a GPU, beside those in bfloat16.

Run: ``PYTHONPATH=src:benchmarks/kernels python3 benchmarks/kernels/block_scaled_moe.py [--sweep] [--tokens 1 64]``.
Tokens come quantised. Times are medians of graph replays; several layers' weights take turns, so that none is found in
the cache. The floor is the chosen experts' bytes over 4.3 TB/s, or the multiplications at 1,400 TFLOP/s, whichever is
longer.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import inf

import torch
from moe import BYTES_PER_S, EXPERTS, HIDDEN, ROUTING, SIZE, TOP_K, time_us
from torch import Tensor

from strandline.kernels.expert_choices import added_up
from strandline.kernels.experts import block_scaled_moe_triton, moe_triton
from strandline.kernels.experts.block_scaled_moe import block_scaled_experts_glu
from strandline.kernels.experts.block_scaled_moe_few_triton import mixture_few
from strandline.kernels.experts.expert_tiles import MAX_TOKENS_FEW, ExpertTile, Few
from strandline.kernels.experts.moe_list_triton import list_choices
from strandline.kernels.experts.router_triton import route
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight
from strandline.kernels.rowwise.quantized_rows import GROUP
from strandline.kernels.rowwise.quantizing_triton import quantize_rows

TOKENS = (1, 3, 16, 64, 256, 8192)
FLOPS = 1.4e15
NUM_LAYERS = 3
MOST_TOKENS_FEW = 16
"""Up to this many tokens the way of few is timed, too, where it is not the chosen one."""

FEW_UPS = [
    (1, 2048, 1),
    (2, 512, 1),
    (2, 1024, 1),
    (2, 2048, 1),
    (4, 512, 1),
    (4, 512, 2),
    (4, 1024, 2),
    (8, 512, 4),
    (8, 1024, 4),
    (8, 2048, 4),
    (16, 512, 4),
]
FEW_DOWNS = [(4, 4), (4, 8), (8, 8), (2, 4), (2, 2), (4, 2), (8, 4), (16, 8), (1, 1), (2, 1), (1, 2)]
"""Outputs, inputs and warps of a program."""

UP_TILES = {
    "small": [
        ExpertTile(m, GROUP, *v)
        for m, *v in [(16, 4, 2), (16, 4, 3), (16, 8, 3), (16, 4, 4), (16, 4, 5), (16, 8, 2), (16, 8, 4), (32, 8, 3)]
    ],
    "large": [
        ExpertTile(m, GROUP, *v)
        for m, *v in [(64, 8, 3), (64, 4, 3), (64, 4, 2), (64, 8, 2), (128, 8, 2, 2), (128, 8, 3, 2), (128, 8, 4, 2)]
    ],
}
DOWN_TILES = {
    "small": [
        ExpertTile(m, n, *v)
        for m, n, *v in [
            (16, 64, 4, 3),
            (16, 64, 4, 4),
            (16, 64, 4, 5),
            (16, 128, 4, 2),
            (16, 128, 4, 3),
            (16, 128, 4, 4),
            (16, 128, 4, 5),
            (16, 128, 8, 3),
            (16, 128, 8, 4),
            (32, 128, 4, 4),
        ]
    ],
    "large": [
        ExpertTile(m, 128, *v)
        for m, *v in [(64, 4, 4), (64, 4, 3), (64, 4, 2), (64, 4, 3, 2), (64, 8, 3), (128, 8, 3, 2), (128, 8, 2, 2)]
    ],
}

Layer = tuple[ScaledWeight, ScaledWeight, ScaledWeight]


def scaled(*shape: int) -> ScaledWeight:
    """Return random weights with random scales."""
    values = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
    flat = values.view(-1, shape[-1])
    for rows in flat.split(2**14):
        rows.copy_(torch.randn(rows.shape, device="cuda", dtype=torch.bfloat16).mul_(100).clamp_(-448, 448))
    scales = torch.rand(*shape[:-2], shape[-2] // GROUP, shape[-1] // GROUP, device="cuda")
    return ScaledWeight(values, scales.mul_(shape[-1] ** -0.5 / 50).add_(1e-6))


class Inputs:
    """A batch for one layer."""

    def __init__(self, num_tokens: int, layer: Layer) -> None:
        self.gate_up, self.down, self.shared_down = layer
        sizes = [2 * SIZE, EXPERTS, 1, 7]
        self.x_TD, self.shared_TD = torch.randn(2, num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        fused = torch.randn(num_tokens, sum(sizes), device="cuda", dtype=torch.bfloat16)
        shared_TS, logits_TE, gate_T1, _ = fused.split(sizes, dim=-1)
        self.projected = (shared_TS, logits_TE, gate_T1)
        self.rows = quantize_rows(self.x_TD)
        self.chosen = route(logits_TE, None, ROUTING)

    def mixture(self) -> Tensor:
        weights = (self.gate_up, self.down, self.shared_down)
        mixture = block_scaled_moe_triton.block_scaled_mixture
        return added_up(mixture(self.rows, *self.projected, *weights, ROUTING))

    def few(self, few: Few) -> Tensor:
        weights = (self.gate_up, self.down, self.shared_down)
        return mixture_few(self.rows, *self.projected, *weights, ROUTING, few)

    def experts(self, tiles: tuple[ExpertTile, ExpertTile]) -> Tensor:
        arguments = (self.rows, self.gate_up, self.down, *self.chosen, self.shared_TD, self.projected[2])
        return added_up(block_scaled_moe_triton.compute_choices(*arguments, *tiles))

    def hidden(self) -> tuple[Tensor, Tensor]:
        quantized = torch.randn(self.chosen[1].numel(), SIZE, device="cuda").to(torch.float8_e4m3fn)
        return quantized, torch.rand(SIZE // GROUP, len(quantized), device="cuda")

    def up(self, tile: ExpertTile) -> Callable[[], object]:
        """Return a call of the first product alone."""
        listed, hidden, x = list_choices(self.chosen[1], EXPERTS), self.hidden(), self.rows
        arguments = (x, self.gate_up, listed, hidden, TOP_K, tile)
        return lambda: block_scaled_moe_triton.launch_up(*arguments)

    def downward(self, tile: ExpertTile) -> Callable[[], object]:
        """Return a call of the second product alone."""
        listed, hidden = list_choices(self.chosen[1], EXPERTS), self.hidden()
        out_AD = torch.empty(self.chosen[1].numel(), HIDDEN, device="cuda", dtype=torch.bfloat16)
        return lambda: block_scaled_moe_triton.launch_down(hidden, self.down, listed, out_AD, tile)

    def floor_us(self) -> float:
        weight_bytes = len(self.chosen[1].unique()) * 3 * SIZE * HIDDEN
        return 1e6 * max(weight_bytes / BYTES_PER_S, self.chosen[1].numel() * 6 * SIZE * HIDDEN / FLOPS)


def call_few(few: Few, inputs: Inputs) -> Callable[[], object]:
    """Return a call of the way of few tokens."""
    return lambda: inputs.few(few)


def report(
    name: str, num_tokens: int, make: Callable[[Inputs], Callable[[], object]], *, layers: list[Layer], share: float = 1
) -> float:
    """Time one way with its share of the experts' weights, print a line and return microseconds."""
    sets = [Inputs(num_tokens, layer) for layer in layers]
    try:
        measured = time_us([make(inputs) for inputs in sets])
    except Exception as error:  # noqa: BLE001 - a variant that does not compile must not end the others
        print(f"tokens={num_tokens} {name}: {type(error).__name__}: {str(error)[:80]!r}", flush=True)
        return inf
    floor = share * sets[0].floor_us()
    print(f"tokens={num_tokens} {name}: {measured:.1f} us, {100 * floor / measured:.0f} % of floor", flush=True)
    return measured


def check(layer: Layer) -> None:
    """Compare with the reference implementation, at the model's shape."""
    for num_tokens in (1, 16, 300):
        inputs = Inputs(num_tokens, layer)
        arguments = (inputs.x_TD, inputs.gate_up, inputs.down, *inputs.chosen, inputs.shared_TD, inputs.projected[2])
        expected = added_up(block_scaled_experts_glu.reference(*arguments)).float()
        actual = added_up(block_scaled_moe_triton.block_scaled_experts_glu(*arguments)).float()
        error = float((actual - expected).norm() / expected.norm())
        # Torch divides in another way, so that some hidden features become the next e4m3 number; one token has 4,096.
        print(f"check: {num_tokens} tokens, error ratio {error:.2e}: {'ok' if error < 3e-2 else 'ERROR'}", flush=True)


def sweep_few(num_tokens: int, layers: list[Layer]) -> None:
    """Time first products in front of the second one in force, then second products behind the fastest of these."""

    def taken_us(few: Few) -> float:
        return report(f"few {tuple(few)}", num_tokens, partial(call_few, few), layers=layers)

    in_force = block_scaled_moe_triton.FEW[num_tokens > 1]
    down_in_force = (in_force.block_down_n, in_force.warps_down)
    up = min((Few(*up, *down_in_force) for up in FEW_UPS), key=taken_us)[:3]
    best = min((Few(*up, *down) for down in FEW_DOWNS), key=taken_us)
    print(f"tokens={num_tokens} fastest: {tuple(best)}", flush=True)


def sweep(num_tokens: int, layers: list[Layer]) -> None:
    """Time the launch variants that make sense at this size."""
    if num_tokens <= 4:
        sweep_few(num_tokens, layers)
        return
    size = "small" if num_tokens <= 64 else "large"
    for tile in UP_TILES[size]:
        report(f"up {tuple(tile)}", num_tokens, partial(Inputs.up, tile=tile), layers=layers, share=2 / 3)
    for tile in DOWN_TILES[size]:
        report(f"down {tuple(tile)}", num_tokens, partial(Inputs.downward, tile=tile), layers=layers, share=1 / 3)


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try the launch variants")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    arguments = parser.parse_args()
    shapes = ((EXPERTS, 2 * SIZE, HIDDEN), (EXPERTS, HIDDEN, SIZE), (HIDDEN, SIZE))
    layers = [(scaled(*shapes[0]), scaled(*shapes[1]), scaled(*shapes[2])) for _ in range(NUM_LAYERS)]
    check(layers[0])
    wide = [[torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes] for _ in range(NUM_LAYERS)]
    for num_tokens in arguments.tokens:
        report("mixture", num_tokens, lambda i: i.mixture, layers=layers)
        if MAX_TOKENS_FEW < num_tokens <= MOST_TOKENS_FEW:
            few = block_scaled_moe_triton.FEW[1]
            report("mixture, choice by choice", num_tokens, partial(call_few, few), layers=layers)
        turn = iter(wide)

        def in_bfloat16(inputs: Inputs, turn: Iterator[list[Tensor]] = turn) -> Callable[[], object]:
            gate_up, down, shared = next(turn)
            arguments = (inputs.x_TD, *inputs.projected, gate_up, down, DenseWeight(shared), ROUTING)
            return lambda: added_up(moe_triton.mixture(*arguments))

        report("mixture in bfloat16", num_tokens, in_bfloat16, layers=layers, share=2)
        if arguments.sweep:
            sweep(num_tokens, layers)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
