"""Matrix products with weights of every format, at the shapes of Qwen3.5-4B, 27B and 35B-A3B, Nemotron-3-Nano-30B-A3B
and Qwen3-8B.

Every product follows a norm, as in the model, which quantises for products in FP8; the norm's time alone is taken off.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from case import FLOPS, FLOPS_FP8, Launch, Work, case, device_type, parse_launches, random, turns
from operands import FORMATS, GROUPS, bind_norm, bytes_per_weight, num_bytes, product, random_weight, reference_product
from torch import Tensor

from strandline.kernels.gemm.formats.launches import rows_launch
from strandline.kernels.gemm.launches import MAX_ROWS_FEW, MAX_ROWS_SKINNY, Kernel, Plan
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight, StackedWeight
from strandline.kernels.launch import Launch as TileLaunch
from strandline.kernels.rowwise.quantized_rows import plain_rows

ROWS = (1, 2, 3, 4, 8, 16, 64, 256, 512, 2048, 8192)


class Shape(NamedTuple):
    """A projection of one of the models."""

    num_inputs: int
    num_outputs: int
    is_gated: bool = False
    num_dense: int = 0
    """Outputs of ordinary weights in the same fused weight, where the others are quantised."""


QUANTIZED_SHAPES = {
    "4B-gate-up": Shape(2560, 18432, is_gated=True),
    "4B-down": Shape(9216, 2560),
    "35B-in-qkvz": Shape(2048, 12288, num_dense=64),
    "35B-out": Shape(4096, 2048),
    "35B-shared": Shape(2048, 1024, num_dense=264),
    "27B-gate-up": Shape(5120, 34816),
    "27B-down": Shape(17408, 5120),
    "Nemotron-in": Shape(2688, 10304),
    "Nemotron-out": Shape(4096, 2688),
    "Nemotron-attention-in": Shape(2688, 4608),
    "Nemotron-shared-up": Shape(2688, 3712),
    "Nemotron-shared-down": Shape(3712, 2688),
}
SHAPES = QUANTIZED_SHAPES | {
    "4B-in": Shape(2560, 12352),
    "4B-out": Shape(4096, 2560),
    "35B-in": Shape(2048, 12352),
    "35B-shared-in": Shape(2048, 1288),
    "35B-attention-in-of-2-ranks": Shape(2048, 4608),
    "35B-out-of-2-ranks": Shape(2048, 2048),
    "35B-shared-in-of-2-ranks": Shape(2048, 776),
    "35B-head": Shape(2048, 248320),
    "8B-in": Shape(4096, 6144),
    "8B-out": Shape(4096, 4096),
    "8B-gate-up": Shape(4096, 24576, is_gated=True),
    "8B-down": Shape(12288, 4096),
    "8B-head": Shape(4096, 151936),
    "35B-head-of-2-ranks": Shape(2048, 124160),
}
TINY = {"shape": Shape(256, 128, num_dense=8), "rows": 3}

DENSE_ROWS = "1,1024,1 1,2048,1 2,512,1 2,1024,1 4,256,1 4,512,1 1,1024,2 2,512,2 2,1024,2 4,512,2 1,1024,4"
DENSE_ROWS += " 1,2048,4 2,1024,4 4,1024,4 2,2048,4 8,1024,4 4,2048,8"
SKINNIES = "16,256,2,4 32,128,4,5 64,128,4,4 32,128,4,4,2 32,128,4,4,4 32,128,4,4,8 64,128,4,4,4 64,128,4,4,8"
SKINNIES += " 64,128,4,3,8 32,256,4,3,4 16,256,4,3,2"
"""Outputs and inputs of a program, warps, stages and spans of the inputs; the first three also of gated products."""
DENSE_TILES = "16,32,128,4,6 16,64,128,4,4 16,64,64,4,6 16,128,64,4,5 16,128,128,4,3 64,32,128,4,4 64,64,64,4,5"
DENSE_TILES += " 64,64,128,4,4 64,128,64,4,4 64,128,64,8,5 64,128,128,8,3 64,256,64,8,4"
"""Rows, outputs and inputs of a tile, warps and stages."""
FP8_ROWS = "1,2048,1 2,1024,1 2,2048,1 4,512,1 4,1024,1 2,4096,2 4,1024,2 4,512,2 8,512,2 2,1024,2 4,512,4 4,1024,4"
FP8_ROWS += " 4,2048,4 8,512,4 8,1024,4 1,1024,1 1,2048,2 2,2048,4"
INT4_ROWS = "1,1024,1 2,1024,1 4,1024,1 8,1024,1 2,2048,1 4,2048,1 1,2048,2 2,2048,2 4,2048,2 8,2048,2 4,1024,2"
INT4_ROWS += " 1,4096,4 2,4096,4 4,4096,4 4,2048,4 8,2048,4 8,1024,4 2,8192,8"
FP8_TILES = "64,16,4,4 64,16,4,6 128,16,4,4 64,32,4,5 64,64,4,4 128,64,4,4 128,64,4,3 128,128,8,3 128,128,8,4"
FP8_TILES += " 64,128,4,4 128,128,4,3 256,128,8,3 128,256,8,3"
INT4_TILES = "64,16,4,3 64,16,4,4 64,16,4,6 64,16,4,8 128,16,4,3 128,16,4,4 128,16,8,4 64,16,2,4 32,16,2,4 32,16,1,4"
INT4_TILES += " 64,32,4,4 64,32,4,5 128,32,4,3 128,32,8,4 64,64,4,3 64,64,4,4 128,64,4,3 128,64,8,3 128,64,8,4"
INT4_TILES += " 64,128,4,3 128,128,8,2 128,128,8,3 256,64,8,3 64,256,8,2 128,256,8,2"
"""Outputs and rows of a tile, warps and stages."""


def work(weight_format: str, shape: Shape, rows: int, group: int = 128) -> Work:
    """Return products with one format of weight."""
    is_gated, is_fp8 = shape.is_gated, weight_format == "fp8"
    count = turns(shape.num_inputs * shape.num_outputs * bytes_per_weight(weight_format), at_least=4, at_most=200)
    sizes = (shape.num_outputs, shape.num_inputs)
    weights = [random_weight(weight_format, *sizes, group=group) for _ in range(count)]
    x_TI = random(rows, shape.num_inputs)
    norm = partial(bind_norm(weight_format, random(shape.num_inputs)), x_TI)
    variants: dict[str, Any] = {
        "strandline": product(is_gated=is_gated),
        "deterministic": product(is_gated=is_gated, is_deterministic=True),
    }
    further = {"dense": dense_variants, "fp8": fp8_variants}.get(weight_format, coded_variants)
    peers, partial_variants = further(shape, rows, variants)
    return Work(
        variants,
        [(weight,) for weight in weights],
        num_bytes=num_bytes(weights[0]),
        num_flops=2.0 * rows * shape.num_inputs * shape.num_outputs,
        flops_per_s=FLOPS_FP8 if is_fp8 else FLOPS,
        reference=reference_product(is_gated=is_gated),
        before=lambda _: norm(),
        peers=peers,
        partial=partial_variants,
        launches=partial(launches, weight_format, shape, rows),
    )


Names = tuple[set[str], set[str]]
"""Names of variants by others, and of those that compute something else."""


def dense_variants(shape: Shape, rows: int, variants: dict[str, Any]) -> Names:
    """Add torch's product."""
    del rows

    def in_torch(x: Tensor, weight: DenseWeight) -> Tensor:
        out = F.linear(x, weight.values_OI)
        return F.silu(out.chunk(2, dim=-1)[0]) * out.chunk(2, dim=-1)[1] if shape.is_gated else out

    variants["torch"] = in_torch
    return {"torch"}, set()


def fp8_variants(shape: Shape, rows: int, variants: dict[str, Any]) -> Names:
    """Add the product that quantises its rows, that with ordinary rows in the same weight, and torch's."""
    strandline, others = variants["strandline"], {"quantising alone"}
    variants["of plain rows"] = lambda x, weight: strandline(plain_rows(x), weight)
    if shape.num_dense:
        variants[f"with {shape.num_dense} dense outputs"] = with_dense_outputs(shape)
        others.add(f"with {shape.num_dense} dense outputs")
    if rows < 16 or device_type() != "cuda":
        return set(), others
    from strandline.kernels.gemm.fp8 import multiply_in_torch
    from strandline.kernels.rowwise.quantizing_triton import quantize_rows

    def in_torch(x: Any, weight: ScaledWeight) -> Tensor:
        out_TO = torch.empty(len(x), len(weight.values), dtype=torch.bfloat16, device=x.device)
        multiply_in_torch(out_TO, x, weight, None)
        return out_TO

    variants["torch FP8"] = in_torch
    variants["quantising alone"] = lambda x, _: quantize_rows(plain_rows(x))
    return {"torch FP8"}, others | ({"torch FP8"} if shape.is_gated else set())


def coded_variants(shape: Shape, rows: int, variants: dict[str, Any]) -> Names:
    """Add the product with the dequantised weight, and that with ordinary rows in the same weight."""
    if shape.num_dense:
        variants[f"with {shape.num_dense} dense outputs"] = with_dense_outputs(shape)
    if rows >= 64:
        dequantised = Launch("dequantised", {"gemm.gemms_triton.choose": Plan(Kernel.LIBRARY)})
        strandline = variants["strandline"]

        def multiply_dequantised(x: Tensor, weight: Any) -> Any:
            with dequantised.in_force():
                return strandline(x, weight)

        if device_type() == "cuda":
            variants["dequantised"] = multiply_dequantised
    return set(), {f"with {shape.num_dense} dense outputs"}


def with_dense_outputs(shape: Shape) -> Any:
    """Return the product with a fused weight, the last part of which is in no format."""
    dense = DenseWeight(random(shape.num_dense, shape.num_inputs))
    multiply = product()
    return lambda x, weight: multiply(x, StackedWeight((weight, dense)))


def launches(weight_format: str, shape: Shape, rows: int) -> Iterator[Launch]:
    """Yield the kernels and launches that make sense for a shape."""
    plans = list[Plan]()
    if rows <= MAX_ROWS_FEW:
        few = parse_launches(rows_launch, {"dense": DENSE_ROWS, "fp8": FP8_ROWS}.get(weight_format, INT4_ROWS))
        most = 4096 if weight_format == "dense" else 1 << 30
        plans += [
            Plan(Kernel.ROWS, launch)
            for launch in few
            if launch.block_n * rows <= 16 and launch.block_n * launch.block_k * rows <= most * launch.warps
        ]
    if weight_format == "dense":
        if 2 < rows <= MAX_ROWS_SKINNY:
            skinny = parse_launches(_skinny, SKINNIES)[: 3 if shape.is_gated else None]
            plans += [Plan(Kernel.SKINNY, launch) for launch in skinny]
        if 8 <= rows <= 64 and not shape.is_gated:
            tiles = (tile for tile in parse_launches(TileLaunch, DENSE_TILES) if tile.block_m >= rows)
            plans += [Plan(Kernel.TILES, tile._replace(splits=splits)) for tile in tiles for splits in (1, 2, 4, 8)]
    elif rows > 1:
        largest = 128 if weight_format == "fp8" else 256
        for tile in parse_launches(_tile, FP8_TILES if weight_format == "fp8" else INT4_TILES):
            if max(16, min(rows, largest)) / 2 <= tile.block_m < 2 * max(16, rows):
                spans = (1, 2, 4, 8) if rows <= 64 else (1,)
                plans += [Plan(Kernel.TILES, tile._replace(splits=splits)) for splits in spans]
    for plan in plans:
        yield Launch(f"{plan.kernel.value} {tuple(plan.launch or ())}", {"gemm.gemms_triton.choose": plan})


def _skinny(block_n: int, block_k: int, warps: int, stages: int, splits: int = 1) -> TileLaunch:
    return TileLaunch(16, block_n, block_k, warps, stages, splits)


def _tile(block_n: int, block_m: int, warps: int, stages: int) -> TileLaunch:
    """Return a tile of a quantised weight, whose programs take 128 inputs at a time."""
    return TileLaunch(block_m, block_n, 128, warps, stages)


for _format in FORMATS:
    _shapes = SHAPES if _format == "dense" else QUANTIZED_SHAPES
    _axes: dict[str, Any] = {"group": GROUPS} if _format == "int4" else {}
    case(f"linear/{_format}", shape=_shapes, rows=ROWS, **_axes, tiny=TINY)(partial(work, _format))
