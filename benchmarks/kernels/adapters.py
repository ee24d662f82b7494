"""Products with LoRA adapters, at the shapes of Qwen3.5-4B and 35B-A3B: of rank 16, of all rows or of several adapters.

The product follows a norm, as in the model, and its time is taken with and without what an adapter adds.
"""

from typing import NamedTuple

import torch
from case import Launch, Work, bound, case, random, turns
from operands import bind_norm
from torch import Tensor

from strandline.device.batches.adapter_tiles import tile_rows
from strandline.device.hardware.upload import upload_together
from strandline.kernels.gemm.linear import linear
from strandline.kernels.gemm.low_rank import AdapterWeights, LowRankTerm, TiledRows
from strandline.kernels.gemm.weights import DenseWeight

RANK = 16


class Shape(NamedTuple):
    """A projection of one of the models, and the outputs of its parts."""

    num_inputs: int
    parts: tuple[int, ...]


SHAPES = {
    "4B-in": Shape(2560, (8192, 4096, 32, 32)),
    "4B-gate-up": Shape(2560, (9216, 9216)),
    "4B-down": Shape(9216, (2560,)),
    "4B-out": Shape(4096, (2560,)),
    "35B-in": Shape(2048, (8192, 4096, 32, 32)),
    "35B-out": Shape(4096, (2048,)),
}
SWEPT = [(block, span) for block in (32, 64, 128, 256) for span in (256, 512, 1024)]
"""Outputs of a program, and fewest inputs of another one."""


@case(
    "linear/adapters",
    tiny={"shape": Shape(64, (40, 24)), "rows": 3, "slots": 2},
    shape=SHAPES,
    rows=(1, 4, 16, 64, 256, 2048),
    slots=(1, 8),
)
def adapters(shape: Shape, rows: int, slots: int) -> Work:
    num_outputs = sum(shape.parts)
    count = turns(2.0 * shape.num_inputs * num_outputs, at_least=2)
    x_TI = random(rows, shape.num_inputs)
    norm = bind_norm("dense", random(shape.num_inputs))
    tiles = tile_rows(torch.arange(rows).remainder(slots).cpu().numpy())
    tiled = TiledRows(*upload_together(tiles, x_TI.device))
    parts = torch.arange(len(shape.parts), dtype=torch.int32)
    part_O = parts.repeat_interleave(torch.tensor(shape.parts))
    ranks_SP = torch.full((slots, len(shape.parts)), RANK, dtype=torch.int32)

    def changes() -> AdapterWeights:
        down_SPRI = random(slots, len(shape.parts), RANK, shape.num_inputs, scale=shape.num_inputs**-0.5)
        return AdapterWeights(down_SPRI, random(slots, num_outputs, RANK), ranks_SP, part_O)

    multiply = bound(linear)

    def with_adapters(x: Tensor, weight: DenseWeight, weights: AdapterWeights) -> Tensor:
        out: Tensor = multiply(x, weight, None, LowRankTerm(weights, tiled))
        return out

    def reference(x: Tensor, weight: DenseWeight, weights: AdapterWeights) -> Tensor:
        return linear.reference(x, weight, None, LowRankTerm(weights, tiled))

    scale = shape.num_inputs**-0.5
    return Work(
        {"strandline": with_adapters, "without adapters": lambda x, weight, _: multiply(x, weight)},
        [(DenseWeight(random(num_outputs, shape.num_inputs, scale=scale)), changes()) for _ in range(count)],
        num_bytes=2.0 * shape.num_inputs * num_outputs,
        num_flops=2.0 * rows * shape.num_inputs * num_outputs,
        reference=reference,
        before=lambda *_: norm(x_TI),
        partial={"without adapters"},
        launches=lambda: [
            Launch(
                f"{block} outputs, {span} inputs",
                {"gemm.low_rank_triton.block_outputs": block, "gemm.low_rank_triton.MIN_SPAN": span},
            )
            for block, span in SWEPT
        ],
    )
