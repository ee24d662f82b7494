"""Products in FP8 on a GPU: the shapes of the CPU's tests, and those of published models."""

import pytest
import torch

from strandline.device.dtypes import E4M3_CAPABILITY
from strandline.kernels.gemm import block_scaled_triton
from strandline.kernels.gemm.block_scaled_triton import can_multiply_in_torch
from strandline.kernels.gemm.rows_triton import Gemv
from strandline.kernels.gemm.tiles_triton import launch_tiles
from strandline.kernels.launch import Launch
from strandline.kernels.rowwise.quantized_rows import GROUP
from strandline.kernels.rowwise.quantizing_triton import quantize_rows
from tests.cpu.kernels.gemm.test_block_scaled import ROWS_PER_SCALE, SIZES, error, exact, make_x, scaled_weight
from tests.cpu.kernels.gemm.test_block_scaled_triton import (
    check_gated,
    check_gemv,
    check_linear,
    check_parts,
    check_quantized_inputs,
    check_quantizing,
    check_tile,
)
from tests.cpu.kernels.rowwise.test_norm_triton import check_quantized_gated_norm, check_quantized_norms

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() < E4M3_CAPABILITY, reason="no products in e4m3 on this GPU"
)

DTYPES = [torch.float32, torch.bfloat16]
WORSE = 1.05
"""Most that our error may be of torch's: both round to the output's dtype, and differ by the order of sums."""

MODELS = [(1, 2048, 12288), (4, 4096, 2048), (16, 2048, 4096), (33, 5120, 1280), (300, 2048, 1024), (700, 512, 2048)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [*SIZES, *MODELS])
def test_products_equal_the_reference(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    check_linear(num_rows, num_inputs, num_outputs, dtype, "cuda")


@pytest.mark.parametrize("rows_per_scale", ROWS_PER_SCALE[1:])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 65])
def test_other_scales_equal_the_reference(num_rows: int, rows_per_scale: int) -> None:
    check_linear(num_rows, 520, 200, torch.bfloat16, "cuda", rows_per_scale)


@pytest.mark.parametrize("spans", [1, 4])
@pytest.mark.parametrize("tile", [*block_scaled_triton.TILES.values(), block_scaled_triton.TILE_MANY])
def test_tiles_equal_the_reference(tile: Launch, spans: int) -> None:
    check_tile(tile, spans, 200, 1024, 384, torch.bfloat16, "cuda")


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize("num_inputs", [520, 2048, 4104])
@pytest.mark.parametrize("gemv", [Gemv(4, 512, 1), Gemv(4, 2048, 4), Gemv(1, 1024, 1)], ids=str)
def test_ways_to_multiply_few_rows_equal_the_reference(
    gemv: Gemv, num_inputs: int, num_rows: int, *, is_gated: bool
) -> None:
    check_gemv(gemv, num_rows, num_inputs, 1152, torch.bfloat16, "cuda", is_gated=is_gated)


@pytest.mark.parametrize("num_rows", [1, 4, 20, 300])
@pytest.mark.parametrize("size", [100, 1024])
def test_gated_products_equal_the_reference(num_rows: int, size: int) -> None:
    check_gated(num_rows, 2048, size, torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(1, 128), (5, 300), (1000, 2048), (3, 17408)])
def test_quantised_rows_equal_the_reference(num_rows: int, num_inputs: int, dtype: torch.dtype) -> None:
    check_quantizing(num_rows, num_inputs, dtype, "cuda")


@pytest.mark.parametrize("sizes", [[130, 7], [12288, 64], [1024, 264]], ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 5, 16, 33, 64, 128, 300, 303])
def test_weights_of_two_parts_equal_the_reference(num_rows: int, sizes: list[int]) -> None:
    check_parts(num_rows, 2048, sizes, torch.bfloat16, "cuda")


def test_weights_of_more_parts_equal_the_reference() -> None:
    check_parts(300, 1024, [256, 40, 384], torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_rows", [1, 6, 64, 300])
def test_quantised_rows_give_the_same_bits(num_rows: int) -> None:
    check_quantized_inputs(num_rows, 2048, 512, torch.bfloat16, "cuda")


@pytest.mark.parametrize(("num_rows", "num_outputs"), [(2, 512), (2, 20000), (3, 512), (3, 8192), (4, 512), (4, 8192)])
def test_few_rows_equal_the_reference(num_rows: int, num_outputs: int) -> None:
    """On both sides of the size at which tiles take over; quantised before, sums may have another order."""
    check_linear(num_rows, 2048, num_outputs, torch.bfloat16, "cuda")
    check_gated(num_rows, 2048, num_outputs // 2, torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 40), (3, 300), (1000, 2048), (5, 5120)])
def test_quantising_norms_equal_quantising_afterwards(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_quantized_norms(num_rows, size, dtype, "cuda")


@pytest.mark.parametrize("shape", [(1, 32, 128), (700, 48, 128), (3, 2, 256), (5, 4, 96)], ids=str)
def test_quantising_gated_norm_equals_quantising_afterwards(shape: tuple[int, int, int]) -> None:
    check_quantized_gated_norm(shape, torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_rows", [1, 7, 64, 65, 600])
def test_invariant_products_depend_on_their_row_alone(num_rows: int) -> None:
    x, weight = make_x(600, 2048, torch.bfloat16, "cuda"), scaled_weight(640, 2048, device="cuda")
    whole = block_scaled_triton.block_scaled_linear_invariant(x, weight)
    assert torch.equal(block_scaled_triton.block_scaled_linear_invariant(x[:num_rows], weight), whole[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64, 300, 2048])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2048, 4096), (17408, 256)])
def test_products_are_as_close_to_float64_as_torchs(
    num_inputs: int, num_outputs: int, num_rows: int, dtype: torch.dtype
) -> None:
    x, weight = make_x(num_rows, num_inputs, dtype, "cuda"), scaled_weight(num_outputs, num_inputs, device="cuda")
    if not can_multiply_in_torch(x.bfloat16(), weight):
        pytest.skip("torch has no products with scales of blocks on this GPU")
    rows = quantize_rows(x)
    scales_TX = rows.scale_XT[:, :num_rows].t().repeat_interleave(GROUP, 1)[:, :num_inputs]
    expected = (rows.values_TI[:num_rows].double() * scales_TX.double()) @ exact(weight).t()
    theirs = torch.empty(num_rows, num_outputs, dtype=dtype, device="cuda")
    try:
        block_scaled_triton.multiply_in_torch(theirs, rows, weight, None)
    except (RuntimeError, ValueError) as refusal:
        if dtype == torch.bfloat16:
            raise
        pytest.skip(f"torch: {refusal}")
    most = WORSE * error(theirs, expected)
    for multiply in (block_scaled_triton.block_scaled_linear, block_scaled_triton.block_scaled_linear_invariant):
        assert error(multiply(x, weight), expected) <= most, multiply.__name__
    tile = block_scaled_triton.choose_tile(num_rows, num_outputs)
    ours = torch.empty_like(theirs)
    launch_tiles(ours, rows, weight, None, tile)
    assert error(ours, expected) <= most, tile
