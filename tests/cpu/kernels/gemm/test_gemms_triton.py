"""Triton's products with weights of every format are near those of float64, whichever kernel a number of rows takes.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.gemm.formats.coded import BLOCK_INPUTS
from strandline.kernels.gemm.linear import gated_linear, head_linear, linear
from strandline.kernels.gemm.weights import CodedWeight, DenseWeight, ScaledWeight, StackedWeight
from strandline.kernels.gpu import GPUS, standing_for
from strandline.kernels.launch import Launch
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.activation import swiglu
from strandline.kernels.rowwise.quantized_rows import GROUP, QuantizedRows
from tests.cpu.kernels.gemm.formats import (
    ALL_FORMATS,
    CASES,
    CODED,
    DENSE,
    FP8,
    INT4,
    Case,
    error,
    exact,
    four_bit_weight,
    gated,
    of_every_case,
    of_every_format,
    of_quantized_formats,
    product,
    scaled_weight,
)
from tests.cpu.kernels.gemm.test_formats import SIZES
from tests.cpu.kernels.rowwise.test_quantizing_triton import assert_quantized
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.gemm import gemms_triton, launches, library_triton
from strandline.kernels.gemm.formats import fp8
from strandline.kernels.gemm.formats.launches import FormatLaunches, Preloaded, rows_launch
from strandline.kernels.gemm.launches import MAX_ROWS_FEW, MAX_ROWS_SKINNY, Kernel, Plan, choose, choose_adapted
from strandline.kernels.gemm.logits_triton import logits_of_many
from strandline.kernels.gemm.rows_triton import launch_rows
from strandline.kernels.rowwise.quantizing_triton import quantize_rows

WORSE = 1.02
"""Most that an error may be of that of the product in float32 with the weight in bfloat16, both rounded to bfloat16."""

ROUNDED = 1e-2
ROUNDED_DENSE = 6e-3
CUT_OFF_GATED = 3e-2
"""Most that an error may be in 16 bits: Triton's interpreter cuts off bits that a GPU rounds, in a gate thrice."""

MIN_NUMBERS, MIN_NUMBERS_GATED = 1_000, 10_000
"""Fewest numbers whose errors are compared: rounding may favour either of a few, and gated ones are rounded thrice."""

DTYPES = [torch.float32, torch.bfloat16]

GATED_AS_WELL = [(1, 20), (3, GROUP), (9, 20)]
"""Rows and outputs of gated products that ``--long`` adds: each number is with others in every run."""

GATED_SIZE = 0.02
"""Size of rows in front of a gate, so that no exponential overflows."""

SKINNY = Launch(16, 16, 32, 1, 1)

assert fp8.LAUNCHES.linear is not None
assert fp8.LAUNCHES.linear.preloaded is not None
PRELOADED = fp8.LAUNCHES.linear.preloaded


def preloading(preloaded: Preloaded) -> FormatLaunches:
    """Return FP8's launches with other ones of products that load their weight before they wait."""
    assert fp8.LAUNCHES.linear is not None
    return fp8.LAUNCHES._replace(linear=fp8.LAUNCHES.linear._replace(preloaded=preloaded))


def check(
    case: Case, found: Tensor, x: Tensor, weight: Any, bias: Tensor | None = None, *, is_gated: bool = False
) -> None:
    """Compare a product with that in float64; on a GPU, its error with that of the dequantised weight, too."""
    expected = gated(product(x, weight)) if is_gated else product(x, weight, bias)
    assert (found.shape, found.dtype) == (expected.shape, x.dtype)
    if not found.numel():
        return
    rounded = (1 + is_gated) * ROUNDED
    if isinstance(weight, DenseWeight):
        rounded = CUT_OFF_GATED if is_gated and x.device.type == "cpu" else ROUNDED_DENSE
    assert error(found, expected) < ((1 + is_gated) * case.tolerance if x.dtype == torch.float32 else rounded)
    is_rounded = isinstance(weight, CodedWeight) and x.dtype != torch.float32 and x.device.type != "cpu"
    if not is_rounded or found.numel() < (MIN_NUMBERS_GATED if is_gated else MIN_NUMBERS):
        return
    theirs = F.linear(x.float(), exact(weight).to(x.dtype).float(), None if bias is None else bias.float()).to(x.dtype)
    if is_gated:
        theirs = swiglu.reference(theirs)  # rounded as often
    assert error(found, expected) <= WORSE * error(theirs, expected)


def check_linear(
    case: Case, num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str, **options: Any
) -> None:
    """Check the products that engines take."""
    x = case.make_x(num_rows, num_inputs, dtype, device)
    weight = case.weight(num_outputs, num_inputs, dtype=dtype, device=device, **options)
    # Odd numbers of rows have a bias with measured launches, even ones with fixed launches: each kernel gets both.
    biases = [torch.randn(num_outputs).to(device, dtype), None]
    for bias, chosen in zip(biases if num_rows % 2 else biases[::-1], Launches, strict=True):
        with poisoned_memory():
            found = gemms_triton.linear(x, weight, bias, launches=chosen)
        check(case, found, x, weight, bias)


def check_gated(case: Case, num_rows: int, num_inputs: int, size: int, dtype: torch.dtype, device: str) -> None:
    x = case.make_x(num_rows, num_inputs, dtype, device).mul_(GATED_SIZE)
    weight = case.weight(2 * size, num_inputs, dtype=dtype, device=device)
    for chosen in Launches:
        with poisoned_memory():
            check(case, gemms_triton.gated_linear(x, weight, launches=chosen), x, weight, is_gated=True)


def check_plan(
    case: Case, plan: Plan, num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str
) -> None:
    """Check one kernel and launch; gated ones, too, where the kernel applies gates."""
    x = case.make_x(num_rows, num_inputs, dtype, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemms_triton, "choose", lambda *_, **__: plan)
        weight, bias = case.weight(num_outputs, num_inputs, dtype=dtype, device=device), torch.randn(num_outputs)
        with poisoned_memory():
            found = gemms_triton.linear(x, weight, bias.to(device, dtype))
        check(case, found, x, weight, bias.to(device, dtype))
        if plan.kernel in (Kernel.ROWS, Kernel.SKINNY) and plan.launch is not None and plan.launch.splits == 1:
            weight = case.weight(2 * num_outputs, num_inputs, dtype=dtype, device=device)
            x.mul_(GATED_SIZE)
            with poisoned_memory():
                found = gemms_triton.gated_linear(x, weight)
            check(case, found, x, weight, is_gated=True)


def check_dequantized(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str) -> None:
    """Check what many rows are multiplied with, to the bit, and the product."""
    for case in CODED.values():
        weight = case.weight(num_outputs, num_inputs, device=device)
        x, bias = case.make_x(num_rows, num_inputs, dtype, device), torch.randn(num_outputs).to(device, dtype)
        with poisoned_memory():
            found = torch.empty(num_outputs, num_inputs, dtype=dtype, device=device)
            library_triton.dequantize_into(found, weight)
            out = torch.empty(num_rows, num_outputs, dtype=dtype, device=device)
            library_triton.multiply_in_library(out, x, weight, bias)
        is_exact = device != "cpu" or dtype == torch.float32
        torch.testing.assert_close(found, weight.dequantize().to(dtype), rtol=0 if is_exact else ROUNDED, atol=0)
        assert error(out, F.linear(x, found, bias).double()) < ROUNDED


def check_parts(case: Case, num_rows: int, num_inputs: int, sizes: list[int], dtype: torch.dtype, device: str) -> None:
    """Check weights of parts, quantised and dense ones in turn; quantised rows give the same bits."""
    x = case.make_x(num_rows, num_inputs, dtype, device)
    options = {"dtype": dtype, "device": device}
    makes = [DENSE["dense"].weight if index % 2 else case.weight for index in range(len(sizes))]
    parts = [make(size, num_inputs, **options) for make, size in zip(makes, sizes, strict=True)]
    weight, whole_bias = StackedWeight(tuple(parts)), torch.randn(sum(sizes)).to(device, dtype)
    tolerance = case.tolerance if dtype == torch.float32 else ROUNDED
    # One kind of launches has a bias; which one depends on the numbers of rows and parts.
    biases = [whole_bias, None]
    for bias, chosen in zip(biases if (num_rows // 2 + len(parts)) % 2 else biases[::-1], Launches, strict=True):
        expected = torch.cat([product(x, part) for part in parts], dim=1) + (0.0 if bias is None else bias.double())
        multiply = partial(gemms_triton.linear, weight=weight, bias_O=bias, launches=chosen)
        with poisoned_memory():
            found = multiply(x)
        assert (found.shape, found.dtype) == (expected.shape, dtype)
        assert num_rows == 0 or error(found, expected) < tolerance
        if weight.is_in_fp8 and (device == "cpu" or not 1 < num_rows <= MAX_ROWS_FEW):
            assert torch.equal(multiply(quantize_rows(x)), found)


def check_fixed(case: Case, num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str) -> None:
    """Compare the bits of rows alone, and among others."""
    weight = case.weight(num_outputs, num_inputs, dtype=dtype, device=device)
    x = case.make_x(num_rows, num_inputs, dtype, device)
    multiply = partial(gemms_triton.linear, weight=weight, launches=Launches.FIXED)
    whole = multiply(x)
    for start, end in ((0, 1), (5, 6), (7, 40), (0, 64), (0, 65), (1, num_rows // 2), (num_rows - 3, num_rows)):
        assert torch.equal(multiply(x[start:end]), whole[start:end]), (start, end)


def check_quantized_inputs(
    case: Case, num_rows: int, num_inputs: int, size: int, dtype: torch.dtype, device: str
) -> None:
    """Compare products in FP8 of quantised rows with those of plain ones, bit by bit."""
    x = case.make_x(num_rows, num_inputs, dtype, device).mul_(GATED_SIZE)
    weight, rows = case.weight(2 * size, num_inputs, device=device), quantize_rows(x)
    for name, operation in (("linear", linear), ("gated_linear", gated_linear)):
        for chosen in Launches:
            multiply = partial(getattr(gemms_triton, name), launches=chosen)
            assert torch.equal(multiply(rows, weight), multiply(x, weight))
        if device == "cpu":
            # Elsewhere torch's own division rounds in another way.
            assert torch.equal(operation.reference(rows, weight), operation.reference(x, weight))
    for chosen in Launches:
        plain = gemms_triton.gated_linear(x, weight, launches=chosen)
        quantized = gemms_triton.gated_linear_quantized(rows, weight, launches=chosen)
        if isinstance(quantized, Tensor):
            assert torch.equal(quantized, plain)
        else:
            assert_quantized(quantized, plain)


def check_linear_and_logits(
    case: Case, num_rows: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: str, *, has_bias: bool
) -> None:
    """Check a product and logits, which are as near as float32 gets; sizes are inputs, outputs and experts."""
    num_inputs, num_outputs, num_experts = sizes
    x = case.make_x(num_rows, num_inputs, dtype, device)
    weight = case.weight(num_outputs, num_inputs, dtype=dtype, device=device)
    dense = DENSE["dense"]
    router = dense.weight(num_experts, num_inputs, device=device)
    bias = torch.randn(num_outputs, device=device, dtype=dtype) if has_bias else None
    for chosen in Launches:
        with poisoned_memory():
            out, logits = gemms_triton.linear_and_logits(x, weight, bias, router, torch.float32, launches=chosen)
        check(case, out, x, weight, bias)
        check(dense, logits, x.float(), router)


def check_logits_of_many(num_rows: int, num_inputs: int, num_experts: int, device: str) -> None:
    """Check logits in tensor cores, of rows that lie apart and a router whose numbers have all the bits of float32."""
    x = torch.randn(num_rows, num_inputs + 8, device=device).bfloat16()[:, :num_inputs]
    router = torch.randn(num_experts, num_inputs, device=device)
    with poisoned_memory():
        found = logits_of_many(x, router, launches.LOGITS_TILE)
    assert found.dtype == torch.float32
    expected = x.double() @ router.double().t()
    theirs = x.float() @ router.t()
    assert error(found, expected) <= 4 * error(theirs, expected) + 1e-7


def check_heads(num_rows: int, num_heads: int, num_outputs: int, num_inputs: int, device: str) -> None:
    """Check a part of every head's channels, with weights that lie either way."""
    wide = torch.randn(num_rows, num_heads, num_inputs + 8, device=device)
    x_THI = wide[:, :, :num_inputs]
    for weight_HOI in (
        torch.randn(num_heads, num_outputs, num_inputs, device=device),
        torch.randn(num_heads, num_inputs, num_outputs, device=device).mT,
    ):
        expected = torch.einsum("thi,hoi->tho", x_THI.double(), weight_HOI.double())
        multiplies: list[Callable[[Tensor, Tensor], Tensor]] = [
            head_linear.reference,
            *(partial(gemms_triton.head_linear, launches=chosen) for chosen in Launches),
        ]
        for multiply in multiplies:
            out = multiply(x_THI, weight_HOI)
            assert out.shape == expected.shape
            assert error(out, expected) < DENSE["dense"].tolerance


@of_every_format
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs", "dtype"),
    [
        pytest.param(*size, dtype, marks=[] if DTYPES[index % 2] is dtype else pytest.mark.long)
        for index, size in enumerate([*SIZES, (70, 96, 5)])
        for dtype in DTYPES
    ],
)
def test_products_are_near_float64s(
    num_rows: int, num_inputs: int, num_outputs: int, case: Case, dtype: torch.dtype
) -> None:
    check_linear(case, num_rows, num_inputs, num_outputs, dtype, "cpu")


@pytest.mark.parametrize("num_rows", [1, 6])
@pytest.mark.parametrize("case", [*FP8.values(), *CODED.values()], ids=[*FP8, *CODED])
def test_scales_of_every_size_are_multiplied(num_rows: int, case: Case) -> None:
    check_linear(case, num_rows, 200, 70, torch.float32, "cpu")


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize("case", CODED.values(), ids=CODED)
def test_float16_rows_are_near_float64s(num_rows: int, case: Case) -> None:
    check_linear(case, num_rows, 300, 70, torch.float16, "cpu")


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 6])
def test_scales_may_have_any_dtype(num_rows: int, scale_dtype: torch.dtype) -> None:
    check_linear(INT4["int4-128"], num_rows, 200, 70, torch.float32, "cpu", scale_dtype=scale_dtype)


@pytest.mark.parametrize("num_rows", [1, 6])
def test_scales_of_whole_rows_may_be_repeated(num_rows: int) -> None:
    case, weight = INT4["int4-128"], four_bit_weight(70, 300)
    x, scales = case.make_x(num_rows, 300, torch.float32, "cpu"), weight.scales[:, :1].expand(-1, 3)
    repeated = CodedWeight(weight.format, weight.words, scales, 300, 128)
    check(case, gemms_triton.linear(x, repeated), x, repeated)


@of_every_case
@pytest.mark.parametrize(
    "tile", [Launch(16, 64, BLOCK_INPUTS, 4, 1, splits=3), Launch(64, 32, BLOCK_INPUTS, 4, 1)], ids=["split", "whole"]
)
def test_tiles_are_near_float64s(tile: Launch, case: Case) -> None:
    dtype = DTYPES[tile.splits == 1 and case not in FP8.values()]
    check_plan(case, Plan(Kernel.TILES, tile), 70, 520, 100, dtype, "cpu")


@of_every_case
@pytest.mark.parametrize(
    ("launch", "num_rows", "num_inputs"), [(rows_launch(4, 128, 1), 1, 256), (rows_launch(2, 512, 2), 3, 640)]
)
def test_few_rows_are_near_float64s(launch: Launch, num_rows: int, num_inputs: int, case: Case) -> None:
    num_outputs = 128 if case in (FP8["fp8"], FP8["fp8-32"]) else 13
    check_plan(case, Plan(Kernel.ROWS, launch), num_rows, num_inputs, num_outputs, DTYPES[num_rows == 3], "cpu")


@pytest.mark.parametrize("case", FP8.values(), ids=FP8)
@pytest.mark.parametrize("num_rows", [2, 3, 6])
def test_preloaded_products_are_near_float64s(num_rows: int, case: Case) -> None:
    check_plan(case, Plan(Kernel.PRELOADED, PRELOADED.launch), num_rows, 1024, 100, DTYPES[num_rows == 3], "cpu")


def test_preloaded_weights_have_dense_parts_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8.FP8, "launches", preloading(PRELOADED._replace(min_numbers=1)))
    check_parts(FP8["fp8"], 3, 1024, [100, 20], torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "dtype", "kernel"),
    [
        (1, 4096, torch.bfloat16, Kernel.ROWS),
        (2, 4096, torch.bfloat16, Kernel.ROWS),
        (3, 4096, torch.bfloat16, Kernel.PRELOADED),
        (4, 4096, torch.bfloat16, Kernel.PRELOADED),
        (5, 4096, torch.bfloat16, Kernel.TILES),
        (3, 4096, torch.float32, Kernel.ROWS),
        (3, 2048, torch.bfloat16, Kernel.ROWS),
        (3, 4224, torch.bfloat16, Kernel.TILES),
    ],
)
def test_few_rows_preload_large_weights(num_rows: int, num_inputs: int, dtype: torch.dtype, kernel: Kernel) -> None:
    x = torch.empty(num_rows, num_inputs, dtype=dtype, device="meta")
    weight = scaled_weight(2048, num_inputs, device="meta")
    assert choose(x, weight, Launches.MEASURED).kernel is kernel
    # What adapters do is added by other kernels.
    assert choose_adapted(x, weight).kernel in (Kernel.ROWS, Kernel.TILES)


@pytest.mark.parametrize(
    ("name", "is_gated", "outputs"),
    [("int4-128", False, 8), ("int4-128", True, 2), ("nvfp4", False, 8), ("nvfp4", True, 8)],
)
def test_outputs_of_4_bit_gates_fit_registers(name: str, outputs: int, *, is_gated: bool) -> None:
    weight = CASES[name].weight(16384, 128, device="meta")
    plan = choose(torch.empty(1, 128, device="meta"), weight, Launches.MEASURED, is_gated=is_gated)
    assert plan.kernel is Kernel.ROWS
    assert plan.launch is not None
    assert plan.launch.block_n == outputs


@pytest.mark.parametrize(("architecture", "is_preloaded"), [("sm_89", False), ("sm_90", True), ("sm_120", True)])
def test_weights_are_preloaded_where_launches_overlap(architecture: str, *, is_preloaded: bool) -> None:
    x = torch.empty(3, 4096, dtype=torch.bfloat16, device="meta")
    weight = scaled_weight(2048, 4096, device="meta")
    with standing_for(GPUS[architecture]):
        assert (choose(x, weight, Launches.MEASURED).kernel is Kernel.PRELOADED) is is_preloaded


@pytest.mark.parametrize(("num_rows", "block_m", "splits"), [(33, 64, 8), (192, 64, 8), (193, 128, 1), (4096, 128, 1)])
def test_narrow_tiles_of_many_rows_are_larger_and_whole(num_rows: int, block_m: int, splits: int) -> None:
    x = torch.empty(num_rows, 4096, dtype=torch.bfloat16, device="meta")
    weight = scaled_weight(1024, 4096, rows_per_scale=1, device="meta")
    plan = choose(x, weight, Launches.MEASURED)
    assert plan.kernel is Kernel.TILES
    assert (plan.launch.block_m, plan.launch.splits) == (block_m, splits)


@pytest.mark.parametrize("launch", [SKINNY, SKINNY._replace(splits=3)], ids=["whole", "split"])
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [(1, 40, 1), (3, 130, 33), (16, 96, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_skinny_products_are_near_float64s(
    num_rows: int, num_inputs: int, num_outputs: int, launch: Launch, dtype: torch.dtype
) -> None:
    plan = Plan(Kernel.SKINNY, launch)
    check_plan(DENSE["dense"], plan, num_rows, num_inputs, num_outputs, dtype, "cpu")


@of_every_format
@pytest.mark.parametrize(
    ("num_rows", "size"),
    [(1, GROUP), (3, 20), (9, GROUP), *(pytest.param(*pair, marks=pytest.mark.long) for pair in GATED_AS_WELL)],
)
def test_gated_products_are_near_float64s(num_rows: int, size: int, case: Case) -> None:
    case = CASES["fp8-channels"] if case is FP8["fp8"] and size % GROUP else case
    check_gated(case, num_rows, 260, size, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_multiply_the_dequantised_weight(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_triton, "SCRATCH_CODES", 30 * 200)
    check_dequantized(9, 200, 70, dtype, "cpu")


@of_quantized_formats
@pytest.mark.parametrize("num_rows", [0, 1, 3, 9, 65])
def test_weights_of_two_parts_are_near_float64s(num_rows: int, case: Case) -> None:
    check_parts(case, num_rows, 260, [130, 7], torch.float32, "cpu")


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "is_together"),
    [(64, 1024, True), (70, 1024, True), (192, 1024, True), (193, 1024, False), (64, 8192, True), (70, 8192, False)],
)
def test_dense_parts_join_tiles_of_few_rows(
    num_rows: int, num_outputs: int, monkeypatch: pytest.MonkeyPatch, *, is_together: bool
) -> None:
    launched = list[str]()
    monkeypatch.setattr(gemms_triton, "quantized", lambda rows: rows)
    for name in ("_multiply_pair", "multiply_into"):
        monkeypatch.setattr(gemms_triton, name, lambda *_, name=name: launched.append(name))
    dense = DenseWeight(torch.empty(20, 256, dtype=torch.bfloat16, device="meta"))
    weight = StackedWeight((scaled_weight(num_outputs, 256, device="meta"), dense))
    gemms_triton.linear(torch.empty(num_rows, 256, dtype=torch.bfloat16, device="meta"), weight)
    assert launched == (["_multiply_pair"] if is_together else ["multiply_into"] * 2)


def test_dense_parts_of_several_tiles_are_near_float64s() -> None:
    check_parts(FP8["fp8"], 70, 256, [64, 7], torch.bfloat16, "cpu")


@of_quantized_formats
@pytest.mark.parametrize("num_rows", [1, 9])
def test_weights_of_more_parts_are_near_float64s(num_rows: int, case: Case) -> None:
    check_parts(case, num_rows, 260, [130, 7, 20], torch.float32, "cpu")


@pytest.mark.usefixtures("rows_alike")
@of_every_format
def test_fixed_launches_multiply_each_row_alone(case: Case) -> None:
    dtype = torch.float32 if case is FP8["fp8"] else torch.bfloat16
    check_fixed(case, 70, 260, 40, dtype, "cpu")


@pytest.mark.parametrize(("num_rows", "dtype"), [(1, torch.bfloat16), (3, torch.float32), (6, torch.bfloat16)])
def test_quantised_rows_give_the_same_bits(num_rows: int, dtype: torch.dtype) -> None:
    check_quantized_inputs(FP8["fp8-32"], num_rows, 260, 32, dtype, "cpu")


@pytest.mark.parametrize("num_outputs", [32, 64])
def test_few_rows_are_quantised_once_for_many_outputs(num_outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms_triton, "MIN_OUTPUTS_QUANTIZED", 64)
    taken = list[bool]()

    def noted(out_TO: Tensor, rows: Any, *args: Any, **options: Any) -> None:
        taken.append(isinstance(rows, QuantizedRows))
        launch_rows(out_TO, rows, *args, **options)

    monkeypatch.setattr(gemms_triton, "launch_rows", noted)
    weight = scaled_weight(num_outputs, 256)
    x = torch.randn(1, 256).bfloat16()
    assert torch.equal(gemms_triton.linear(x, weight), gemms_triton.linear(quantize_rows(x), weight))
    assert taken == [num_outputs == 64, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "sizes"), [(1, (40, 3, 5)), (3, (130, 33, 7)), (4, (64, 16, 1)), (21, (300, 4, 3)), (70, (20, 4, 3))]
)
def test_logits_are_computed_in_float32(num_rows: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_linear_and_logits(DENSE["dense"], num_rows, sizes, dtype, "cpu", has_bias=num_rows == 3)


@of_quantized_formats
@pytest.mark.parametrize("num_rows", [1, 3, 18, 70])
def test_logits_beside_quantised_products_are_those_of_plain_rows(case: Case, num_rows: int) -> None:
    check_linear_and_logits(case, num_rows, (256, 40, 5), torch.float32, "cpu", has_bias=num_rows == 3)


@pytest.mark.parametrize(("num_rows", "sizes"), [(1, (64, 5)), (70, (20, 4)), (130, (200, 130))])
def test_logits_of_many_rows_are_as_near_as_float32_gets(num_rows: int, sizes: tuple[int, int]) -> None:
    check_logits_of_many(num_rows, *sizes, "cpu")


def test_many_rows_take_tiles_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms_triton, "MIN_ROWS_LOGITS_TILES", 65)
    x, router = torch.randn(70, 40).bfloat16(), torch.randn(5, 40)
    found = gemms_triton.logits(x, DenseWeight(router), torch.float32)
    assert torch.equal(found, logits_of_many(x, router, launches.LOGITS_TILE))
    in_float32 = gemms_triton.logits(x.float(), DenseWeight(router), torch.float32)
    assert torch.equal(in_float32, F.linear(x.float(), router))


@pytest.mark.parametrize("shape", [(3, 2, 20, 12), (70, 3, 64, 16)], ids=str)
def test_products_of_heads_are_near_float64s(shape: tuple[int, int, int, int]) -> None:
    check_heads(*shape, "cpu")


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("plan", [Plan(Kernel.ROWS, rows_launch(4, 32, 1)), Plan(Kernel.SKINNY, SKINNY)], ids=str)
def test_a_row_s_bits_do_not_depend_on_its_neighbours(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 70), DenseWeight(torch.randn(20, 70))
    monkeypatch.setattr(gemms_triton, "choose", lambda *_, **__: plan)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(gemms_triton.linear(x[order], weight), gemms_triton.linear(x, weight)[order])


def test_torch_multiplies_many_rows_and_dense_batches() -> None:
    weight = DenseWeight(torch.randn(20, 70))
    for x in (torch.randn(40, 70), torch.randn(2, 3, 70), torch.randn(0, 70), torch.randn(70, 40).t()):
        assert torch.equal(gemms_triton.linear(x, weight), F.linear(x, weight.values_OI))


@of_every_format
def test_products_of_no_rows_are_empty(case: Case) -> None:
    x, weight = torch.zeros(2, 0, 300), case.weight(256, 300)
    assert gemms_triton.linear(x, weight).shape == (2, 0, 256)
    assert gemms_triton.gated_linear(x, weight).shape == (2, 0, 128)
    assert gemms_triton.linear(x, weight, launches=Launches.FIXED).shape == (2, 0, 256)


def test_rows_of_zeros_give_the_bias() -> None:
    weight, bias = scaled_weight(130, 300), torch.randn(130)
    for rows in (2, 6):
        assert torch.equal(gemms_triton.linear(torch.zeros(rows, 300), weight, bias), bias.expand(rows, -1))


def kernels_of(weight: Any, rows: list[int], dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Return the kernels that numbers of rows take."""
    x = torch.empty(max(rows), weight.shape[1], dtype=dtype, device="meta")
    return [choose(x[:count], weight, Launches.MEASURED).kernel.value for count in rows]


def test_kernels_depend_on_the_number_of_rows() -> None:
    meta = {"device": "meta", "dtype": torch.bfloat16}
    small, large = (ScaledWeight(torch.empty(size, 2048, **meta), torch.empty(1)) for size in (4096, 12288))
    assert kernels_of(small, [1, 2, 3, 4, 5, 300]) == ["rows"] * 2 + ["preloaded"] * 2 + ["tiles"] * 2
    assert kernels_of(large, [1, 2, 3, 4, 5]) == ["rows"] * 2 + ["preloaded"] * 2 + ["tiles"]
    assert kernels_of(four_bit_weight(64, 128), [1, 4, 16, 64, 65]) == ["rows", "rows", "tiles", "tiles", "library"]
    dense = DenseWeight(torch.empty(16384, 2048, **meta))
    assert kernels_of(dense, [1, 2, MAX_ROWS_SKINNY, 17]) == ["rows", "skinny", "skinny", "library"]
    assert kernels_of(dense, [2, 5], torch.float32) == ["skinny", "library"]
    assert kernels_of(DenseWeight(torch.empty(248_320, 2048, **meta)), [1, 2]) == ["rows", "library"]


@pytest.mark.parametrize(("num_rows", "num_outputs"), [(1, 2560), (1, 248_320), (65, 2560), (8192, 12352)])
def test_every_fixed_tile_has_64_rows_at_least(num_rows: int, num_outputs: int) -> None:
    for tiles in (format.launches.linear_fixed for format in ALL_FORMATS):
        assert tiles.choose(num_rows, num_outputs, torch.bfloat16).block_m >= 64
