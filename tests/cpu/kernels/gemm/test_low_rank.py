"""What adapters add to products is near the sum in float64, on a CPU and by Triton's kernels.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from strandline.device.batches.adapter_tiles import most_tiles, tile_rows
from strandline.kernels.gemm.linear import gated_linear, linear
from strandline.kernels.gemm.low_rank import (
    NO_SLOT,
    TILE_ROWS,
    AdapterWeights,
    LowRankTerm,
    TiledRows,
    add_low_rank,
)
from strandline.kernels.gemm.weights import StackedWeight
from strandline.kernels.operation import Launches
from tests.cpu.kernels.gemm import formats
from tests.cpu.kernels.gemm.formats import error, gated, of_quantized_formats, product
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.gemm import gemms_triton, low_rank_triton

Add = Callable[[Tensor, Tensor, AdapterWeights, TiledRows], Tensor]
NONE = NO_SLOT
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""Largest difference of a sum; twice that for the worst of millions."""

MEAN_TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
"""Norm of all differences over that of all sums."""

"""In bfloat16, sums of up to 130 products have factors of eight bits, which Triton's interpreter cuts off."""


class Case(NamedTuple):
    """Adapters of a weight, and rows that have some of them."""

    slots_T: Sequence[int]
    part_O: Sequence[int]
    ranks_SP: Sequence[Sequence[int]]
    """Up to the maximum rank; 0: the adapter does not change the part."""
    num_inputs: int = 40
    max_rank: int = 16


def random_slots(num_rows: int, num_slots: int) -> list[int]:
    values: list[int] = np.random.default_rng(num_rows).integers(NONE, num_slots, num_rows).tolist()
    return values


CASES = {
    "one row": Case([0], [0] * 8, [[3]]),
    "one row of several adapters": Case([2], [0] * 70, [[3], [4], [16]]),
    "odd ranks in any order": Case([1, NONE, 0, 1, 0, NONE, 2], [0] * 33, [[1], [5], [11]], max_rank=11),
    "parts in pieces": Case([0, 1, 0], [0] * 5 + [1] * 7 + [-1] * 3 + [2] * 9 + [0] * 6, [[2, 0, 7], [0, 3, 9]]),
    "blocks of several parts": Case([0] * 3, [0, 1, 2, 3] * 40, [[4, 4, 4, 4]]),
    "a part across blocks": Case([1, 0], [0] * 100 + [1] * 100, [[0, 9], [9, 0]]),
    "no output can change": Case([0], [-1] * 9, [[4]]),
    "blocks of ranks": Case([0, 1, NONE], [0] * 20 + [1] * 20, [[100, 130], [3, 65]], max_rank=130),
    "several tiles": Case(random_slots(100, 3), [0] * 40 + [1] * 24, [[7, 0], [0, 16], [16, 3]]),
    "spans of inputs": Case([0, 1], [0] * 24, [[5], [9]], num_inputs=1700),
    "many tiles": Case([0] * (9 * TILE_ROWS + 1), [0] * 24, [[5], [9]], num_inputs=700),
}


def build(case: Case, dtype: torch.dtype, device: str) -> AdapterWeights:
    """Return random weights; what is not in use is NaN."""
    generator = torch.Generator().manual_seed(len(case.part_O))
    num_slots, num_parts = len(case.ranks_SP), len(case.ranks_SP[0])
    down_SPRI = torch.full((num_slots, num_parts, case.max_rank, case.num_inputs), torch.nan)
    up_SOR = torch.full((num_slots, len(case.part_O), case.max_rank), torch.nan)
    part_O = torch.tensor(case.part_O, dtype=torch.int32)
    for slot, ranks in enumerate(case.ranks_SP):
        for part, rank in enumerate(ranks):
            down_RI = torch.randn(rank, case.num_inputs, generator=generator) * case.num_inputs**-0.5
            down_SPRI[slot, part, :rank] = down_RI
            outputs = part_O == part
            up_SOR[slot, outputs, :rank] = torch.randn(int(outputs.sum()), rank, generator=generator)
    ranks_SP = torch.tensor(case.ranks_SP, dtype=torch.int32, device=device)
    # As of one projection among several.
    wide_SQ = torch.cat([torch.full_like(ranks_SP, 99), ranks_SP, torch.full_like(ranks_SP, 99)], dim=1)
    rank_SP = wide_SQ[:, num_parts : 2 * num_parts]
    return AdapterWeights(down_SPRI.to(device, dtype), up_SOR.to(device, dtype), rank_SP, part_O.to(device))


def tiles(slots_T: Sequence[int], num_slots: int, device: str) -> TiledRows:
    """Return the rows' tiles as a CUDA graph has them: with unused ones, whose rows are not read."""
    own_rows_M, own_slots_U, _ = map(torch.from_numpy, tile_rows(np.array(slots_T)))
    count = most_tiles(len(slots_T), num_slots)
    rows_M, slots_U = torch.full((count * TILE_ROWS,), 7), torch.full((count,), NO_SLOT)
    rows_M[: len(own_rows_M)], slots_U[: len(own_slots_U)] = own_rows_M, own_slots_U
    return TiledRows(rows_M.to(device), slots_U.to(device), torch.tensor(slots_T, device=device))


def exact(out_TO: Tensor, x_TI: Tensor, weights: AdapterWeights, slots_T: Sequence[int]) -> Tensor:
    out_TO = out_TO.double().clone()
    for row, slot in enumerate(slots_T):
        for part, rank in enumerate(weights.rank_SP[slot].tolist() if slot != NONE else []):
            outputs = weights.part_O == part
            hidden_R = weights.down_SPRI[slot, part, :rank].double() @ x_TI[row].double()
            out_TO[row, outputs] += weights.up_SOR[slot, outputs, :rank].double() @ hidden_R
    return out_TO


def check_sums(add: Add, case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    weights = build(case, dtype, device)
    generator = torch.Generator().manual_seed(1)
    num_rows = len(case.slots_T)
    x_TI = torch.randn(num_rows, case.num_inputs + 8, generator=generator).to(device, dtype)[:, : case.num_inputs]
    out_TO = torch.randn(num_rows, len(case.part_O) + 8, generator=generator).to(device, dtype)
    before_TO = out_TO.clone()
    tiled = tiles(case.slots_T, len(case.ranks_SP), device)
    view_TO = out_TO[:, : len(case.part_O)]
    with poisoned_memory():
        assert add(view_TO, x_TI, weights, tiled) is view_TO
    expected = exact(before_TO[:, : len(case.part_O)], x_TI, weights, case.slots_T)
    tolerance = TOLERANCE[dtype] * (2 if expected.numel() > 10**6 else 1)
    torch.testing.assert_close(view_TO.double(), expected, rtol=tolerance, atol=tolerance)
    assert (view_TO.double() - expected).norm() <= MEAN_TOLERANCE[dtype] * expected.norm()
    assert out_TO[:, len(case.part_O) :].equal(before_TO[:, len(case.part_O) :])
    without = torch.tensor([slot == NONE for slot in case.slots_T], device=device)
    assert out_TO[without].equal(before_TO[without])


def check_invariance(add: Add, dtype: torch.dtype, device: str = "cpu", num_inputs: int = 100) -> None:
    """Check that a row's bits depend on that row and its adapter alone."""
    case = Case([], [0] * 40 + [1] * 24, [[16, 3], [5, 7]], num_inputs=num_inputs)
    weights = build(case, dtype, device)
    generator = torch.Generator().manual_seed(1)
    x_TI = torch.randn(40, num_inputs, generator=generator).to(device, dtype)
    out_TO = torch.randn(40, 64, generator=generator).to(device, dtype)
    slots = random_slots(40, 2)
    together_TO = add(out_TO.clone(), x_TI, weights, tiles(slots, 2, device))
    for row in (0, 5, 39):
        alone_1O = add(
            out_TO[row : row + 1].clone(), x_TI[row : row + 1], weights, tiles(slots[row : row + 1], 2, device)
        )
        assert alone_1O.equal(together_TO[row : row + 1])


ERRORS = {torch.float32: 3e-4, torch.bfloat16: 1.5e-2}
"""Largest error of a product and what is added; ``GATED`` times that after a gate."""

GATED = 3
SIZE_BEFORE_GATES, MOST_BEFORE_GATES = 0.05, 2.0
"""Size of rows, and the largest number in them, so that no exponential overflows."""


def check_products(
    format_case: formats.Case, case: Case, dtype: torch.dtype, device: str = "cpu", parts: Sequence[int] = ()
) -> None:
    """Compare products and what adapters add to them with those in float64, of plain rows and gated.

    Args:
        parts: outputs of a weight's parts, the odd ones dense; none: it is one matrix.
    """
    num_rows, num_outputs = len(case.slots_T), len(case.part_O)
    weights, tiled = build(case, dtype, device), tiles(case.slots_T, len(case.ranks_SP), device)
    term = LowRankTerm(weights, tiled)
    x = format_case.make_x(num_rows, case.num_inputs, dtype, device)
    makes = [formats.DENSE["dense"].weight if index % 2 else format_case.weight for index in range(max(1, len(parts)))]
    of_parts = [
        make(size, case.num_inputs, dtype=dtype, device=device)
        for make, size in zip(makes, parts or [num_outputs], strict=True)
    ]
    weight = StackedWeight(tuple(of_parts)) if parts else of_parts[0]
    before_TO = torch.cat([product(x, part) for part in of_parts], dim=1)
    expected_TO = exact(before_TO, x, weights, case.slots_T)
    for chosen in Launches:
        with poisoned_memory():
            found_TO = gemms_triton.linear(x, weight, None, term, launches=chosen)
        assert found_TO.dtype == dtype
        assert error(found_TO, expected_TO) < ERRORS[dtype]
    if device == "cpu":
        assert error(linear.reference(x, weight, None, term), expected_TO) < ERRORS[dtype]
    if parts or num_outputs % 2:
        return
    x = x.mul_(SIZE_BEFORE_GATES).clamp_(-MOST_BEFORE_GATES, MOST_BEFORE_GATES)
    expected_TF = gated(exact(product(x, weight), x, weights, case.slots_T))
    for chosen in Launches:
        with poisoned_memory():
            found_TF = gemms_triton.gated_linear(x, weight, term, launches=chosen)
        assert error(found_TF, expected_TF) < GATED * ERRORS[dtype]
    if device == "cpu":
        assert error(gated_linear.reference(x, weight, term), expected_TF) < GATED * ERRORS[dtype]


PRODUCTS = {
    "one row": Case([1], [0] * 30 + [1] * 10, [[3, 0], [9, 16]], 160),
    "rows with and without": Case([1, NONE, 0], [0] * 20 + [-1] * 4 + [1] * 16, [[5, 16], [16, 1]], 130),
    "blocks of ranks": Case([1, 0, 1, NONE], [1] * 10 + [0] * 10, [[70, 33], [5, 64]], 40, 70),
    "many rows": Case(random_slots(20, 2), [0] * 20 + [1] * 20, [[5, 16], [16, 1]], 130),
    "tiles of several adapters and parts": Case(
        random_slots(70, 3), [0] * 5 + [-1] * 3 + [1] * 60 + [0] * 30, [[5, 16], [16, 0], [0, 7]], 600
    ),
    "tiles and blocks of ranks": Case(random_slots(20, 2), [1] * 10 + [0] * 10, [[70, 33], [5, 64]], 40, 70),
    "tiles without adapters": Case([NONE] * 20, [0] * 24, [[5], [9]], 130),
    "more rows than tiles take": Case(random_slots(140, 2), [0] * 12 + [1] * 12, [[5, 16], [16, 1]], 130),
}


@pytest.mark.parametrize(
    ("case", "name", "dtype"),
    [
        pytest.param(
            formats.FORMATS[of_format], name, dtype, id=f"{of_format}-{name}-{str(dtype).removeprefix('torch.')}",
            marks=[] if (number + index + kind) % 2 == 0 else pytest.mark.long,
        )
        for number, of_format in enumerate(formats.FORMATS)
        for index, name in enumerate(PRODUCTS)
        for kind, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
)  # fmt: skip
def test_products_with_adapters_are_near_float64s(case: formats.Case, name: str, dtype: torch.dtype) -> None:
    """Ordinary runs test each format with each set of rows in one dtype."""
    check_products(case, PRODUCTS[name], dtype)


@pytest.mark.parametrize("sizes", [(16, 24), (20, 8, 12)], ids=str)
@pytest.mark.parametrize("name", ["one row", "rows with and without", "many rows"])
@of_quantized_formats
def test_adapters_add_to_every_part_of_a_weight(case: formats.Case, name: str, sizes: Sequence[int]) -> None:
    check_products(case, PRODUCTS[name], torch.float32, parts=sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("add", [add_low_rank, low_rank_triton.add_low_rank], ids=["reference", "triton"])
def test_sums_are_near_those_of_float64(add: Add, name: str, dtype: torch.dtype) -> None:
    check_sums(add, CASES[name], dtype)


@pytest.mark.usefixtures("rows_alike")
def test_rows_of_the_kernels_depend_on_themselves_alone() -> None:
    check_invariance(partial(low_rank_triton.add_low_rank, launches=Launches.FIXED), torch.float32, num_inputs=700)


def test_inputs_that_lie_apart_are_copied() -> None:
    case = CASES["several tiles"]
    weights, tiled = build(case, torch.float32, "cpu"), tiles(case.slots_T, 3, "cpu")
    x_IT = torch.randn(case.num_inputs, 100, generator=torch.Generator().manual_seed(1))
    sums = [
        low_rank_triton.add_low_rank(torch.zeros(100, 64), x, weights, tiled) for x in (x_IT.t(), x_IT.t().contiguous())
    ]
    assert sums[0].equal(sums[1])


@pytest.mark.parametrize("num_slots", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 40, 64])
def test_tiles_hold_every_row_with_its_slot(num_rows: int, num_slots: int) -> None:
    for slots in (random_slots(num_rows, num_slots), [row % num_slots for row in range(num_rows)], [NONE] * num_rows):
        rows_M, slots_U, slots_T = tile_rows(np.array(slots))
        assert slots_T.tolist() == slots
        assert len(slots_U) <= most_tiles(num_rows, num_slots)
        found = dict(zip(rows_M.tolist(), slots_U.repeat(TILE_ROWS).tolist(), strict=True))
        found.pop(-1, None)
        assert found == {row: slot for row, slot in enumerate(slots) if slot != NONE}
