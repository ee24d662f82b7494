"""Experts in FP8 and in 4 bits equal a loop in float64 over the numbers that are multiplied, in torch and in Triton.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.experts.moe import (
    RELU_SQUARED,
    SWIGLU,
    Activation,
    ExpertBiases,
    ExpertWeights,
    Router,
    SharedExpert,
    SharedOutput,
    mixture,
    sum_of_chosen,
)
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.formats.coded import BLOCK_INPUTS
from strandline.kernels.gemm.formats.four_bit import FOUR_BIT
from strandline.kernels.gemm.formats.fp8 import FP8
from strandline.kernels.gemm.low_rank import LowRankTerm
from strandline.kernels.gemm.weights import CodedWeight, DenseWeight, ScaledWeight
from strandline.kernels.launch import Launch, Pair
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.activation import biased_swiglu
from strandline.kernels.rowwise.quantized_rows import GROUP
from tests.cpu.kernels.gemm import test_low_rank as low_rank
from tests.cpu.kernels.gemm.formats import exact, four_bit_weight, multiplied, scaled_weight
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.experts import moe_triton
from strandline.kernels.experts.many_triton import compute_choices, compute_dequantized
from strandline.kernels.gemm.formats.launches import ExpertLaunches, few_pair

Shape = tuple[int, int, int, int, int]
"""Experts, choices of a token, channels, features, features of the shared expert; 0: there is none."""

SHAPES: list[Shape] = [(4, 3, 40, 8, 24), (3, 2, 130, 160, 100), (8, 2, 128, 256, 128)]

WAYS: dict[str, Callable[..., Summand]] = {
    "reference": mixture.reference,
    "measured": moe_triton.mixture,
    "fixed": partial(moe_triton.mixture, launches=Launches.FIXED),
}

FEW = few_pair((32, 128, 1), 64, 1)
DENSE_TILES = (Launch(16, 32, 32, 1, 1, 2), Launch(16, 32, 32, 1, 1))


def fp8_weight(num_experts: int, num_rows: int, num_inputs: int, *, size: int, device: str, **_: Any) -> ScaledWeight:
    return scaled_weight(num_experts, num_rows, num_inputs, rows_per_scale=gcd(size, GROUP), device=device)


class Format(NamedTuple):
    """What tests know about a format."""

    make: Callable[..., Any]
    tiles: tuple[Pair, Pair]
    """Small, so that small shapes have several tiles; of both orientations."""
    limits: dict[torch.dtype, float]
    limits_interpreter: dict[torch.dtype, float]
    """``|out - expected| / |expected|``."""


FORMATS = {
    # A feature that lies between two e4m3 numbers may be rounded to either. The interpreter cuts bfloat16 off where a
    # GPU rounds it. Where the largest feature of a group is rounded to another bfloat16, the group's scale changes by
    # 2**-8, and with it what a twentieth of its features are rounded to: in the 32 groups of one token, that was seen
    # to make 2.3e-2.
    "fp8": Format(
        fp8_weight,
        (
            (Launch(16, GROUP, GROUP, 1, 1, 2), Launch(16, 32, GROUP, 1, 1)),
            (Launch(64, GROUP, GROUP, 1, 1), Launch(64, 64, GROUP, 1, 1, 2)),
        ),
        {torch.float32: 3e-3, torch.bfloat16: 3e-2},
        {torch.float32: 3e-3, torch.bfloat16: 6e-2},
    ),
    "4 bits": Format(
        four_bit_weight,
        (
            (Launch(16, 32, BLOCK_INPUTS, 1, 1, 2), Launch(16, 32, BLOCK_INPUTS, 1, 1)),
            (Launch(64, 64, BLOCK_INPUTS, 1, 1), Launch(64, 64, BLOCK_INPUTS, 1, 1, 2)),
        ),
        {torch.float32: 2e-4, torch.bfloat16: 1e-2},
        {torch.float32: 2e-4, torch.bfloat16: 3e-2},
    ),
}


def limit(name: str, dtype: torch.dtype, device: str) -> float:
    return (FORMATS[name].limits if device == "cuda" else FORMATS[name].limits_interpreter)[dtype]


def rows_of(weight: Any, rows: slice) -> Any:
    """Return some of several matrices."""
    return weight[rows]


class Case:
    """Random arguments of a mixture: views of wider rows; what no token chose is NaN."""

    def __init__(
        self,
        name: str,
        num_tokens: int,
        shape: Shape,
        dtype: torch.dtype,
        device: str,
        *,
        is_gated: bool = True,
        limit: float | None = None,
        are_dense: bool = False,
        is_shared_dense: bool = False,
        has_shared_gate: bool = True,
        has_bias: bool = False,
        has_biases: bool = False,
        adapters: low_rank.Case | None = None,
        **options: Any,
    ) -> None:
        num_experts, top_k, channels, size, shared_size = shape
        self.format, self.activation = FORMATS[name], SWIGLU._replace(limit=limit) if is_gated else RELU_SQUARED
        self.biases: ExpertBiases | None = None
        if has_biases:
            self.activation = Activation(biased_swiglu, is_gated=True, limit=1.5, slope=1.7)
            up_EF, down_ED = (torch.randn(num_experts, n, device=device).to(dtype) for n in (2 * size, channels))
            self.biases = ExpertBiases(up_EF, down_ED)
        self.routing, parts = Routing(top_k, is_normalised=True), 1 + is_gated
        sizes = [parts * shared_size, num_experts, 1, 2]
        wide = torch.full((num_tokens, channels + sum(sizes)), torch.nan, dtype=dtype, device=device)
        self.x_TD = wide[:, :channels].normal_()
        projected = wide[:, channels:].split(sizes, dim=-1)
        self.projected_TS, self.logits_TE, gate = (part.normal_() for part in projected[:3])
        self.gate_T1 = gate if has_shared_gate else None
        self.bias_E = torch.randn(num_experts, device=device) if has_bias else None
        make = partial(self.format.make, device=device, **options)
        self.up = make(num_experts, parts * size, channels, size=size)
        self.down = make(num_experts, channels, size, size=GROUP)
        if are_dense:
            self.up, self.down = (DenseWeight(exact(x).to(dtype)) for x in (self.up, self.down))
        self.shared_down: Any = None
        if shared_size:
            shared = make(1, channels, shared_size, size=GROUP)[0]
            self.shared_down = DenseWeight(exact(shared).to(dtype)) if is_shared_dense else shared
        self.adapters, self.term = adapters, None
        if adapters is not None:
            tiled = low_rank.tiles(adapters.slots_T, len(adapters.ranks_SP), device)
            self.term = LowRankTerm(low_rank.build(adapters, dtype, device), tiled)
        self.weights, self.experts = route.reference(self.logits_TE, self.bias_E, self.routing)
        is_idle_E = torch.ones(num_experts, dtype=torch.bool, device=device)
        is_idle_E[self.experts.flatten()] = False
        for weight in (self.up, self.down):
            if isinstance(weight, ScaledWeight):
                weight.values.view(torch.uint8)[is_idle_E] = 0x7F
            else:
                (weight.values_OI if are_dense else weight.scales)[is_idle_E] = torch.nan

    def run(self, way: Callable[..., Summand], held: range | None = None, num_tokens: int | None = None) -> Tensor:
        """Compute the first tokens on a rank with some of the experts; the first rank has all of the shared expert."""
        tokens, rows = slice(num_tokens), slice(None) if held is None else slice(held.start, held.stop)
        biases = None if self.biases is None else ExpertBiases(*(bias[rows] for bias in self.biases))
        experts = ExpertWeights(rows_of(self.up, rows), rows_of(self.down, rows), self.activation, held, biases)
        shared = None
        if self.shared_down is not None:
            projected_TS = self.projected_TS[tokens]
            if (held is not None and held.start) or not self.activation.is_gated:
                # Of experts without a gate it is overwritten.
                projected_TS = projected_TS.clone().mul_(held is None or not held.start)
            gate_T1 = None if self.gate_T1 is None else self.gate_T1[tokens]
            shared = SharedExpert(projected_TS, self.shared_down, gate_T1, self.term)
        router = Router(self.logits_TE[tokens], self.bias_E, self.routing)
        return added_up(way(self.x_TD[tokens], experts, router, shared))

    def activated(self, projected: Tensor) -> Tensor:
        """Return hidden features, rounded to the dtype of tokens."""
        if not self.activation.is_gated:
            return (projected.relu() ** 2).to(self.x_TD.dtype)
        gate, up = projected.chunk(2, dim=-1)
        if (limit := self.activation.limit) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if (slope := self.activation.slope) is not None:
            return (gate * (slope * gate).sigmoid() * (up + 1)).to(self.x_TD.dtype)
        return (gate * gate.sigmoid() * up).to(self.x_TD.dtype)

    def product(self, x: Tensor, weight: Any) -> Tensor:
        """Return the product in float64."""
        if isinstance(weight, DenseWeight):
            return x.double() @ weight.values_OI.double().t()
        return multiplied(x, weight) @ exact(weight).t()

    def expected(self) -> Tensor:
        """Return the result in float64, but for what is rounded on the way."""
        out_TD = torch.zeros_like(self.x_TD, dtype=torch.float64)
        if self.shared_down is not None:
            hidden_TS = self.activated(self.projected_TS.double())
            out_TD += self.product(hidden_TS, self.shared_down)
            if self.adapters is not None and self.term is not None:
                out_TD = low_rank.exact(out_TD, hidden_TS, self.term.weights, self.adapters.slots_T)
        if self.gate_T1 is not None:
            out_TD *= self.gate_T1.double().sigmoid()
        for expert in self.experts.unique().tolist():
            token_A, choice_A = (self.experts == expert).nonzero(as_tuple=True)
            up_F, down_D = (0, 0) if self.biases is None else (bias[expert] for bias in self.biases)
            hidden = self.activated(self.product(self.x_TD[token_A], self.up[expert]) + up_F)
            out_AD = self.product(hidden, self.down[expert]) + down_D
            out_TD.index_add_(0, token_A, out_AD * self.weights[token_A, choice_A].double().unsqueeze(-1))
        return out_TD


def check_mixture(name: str, num_tokens: int, shape: Shape, dtype: torch.dtype, device: str, **options: Any) -> None:
    """Compare every way of a mixture with float64."""
    case = Case(name, num_tokens, shape, dtype, device, **options)
    expected = case.expected()
    with poisoned_memory():
        results = {way: case.run(function) for way, function in WAYS.items()}
    errors = {way: float((result.double() - expected).norm() / expected.norm()) for way, result in results.items()}
    assert max(errors.values()) < limit(name, dtype, device), errors


def check_ranks(name: str, num_tokens: int, shape: Shape, dtype: torch.dtype, device: str, **options: Any) -> None:
    """Compare the sum over two ranks, each with a part of the experts, with float64, in every way."""
    case = Case(name, num_tokens, shape, dtype, device, **options)
    expected, num_experts = case.expected(), shape[0]
    for way in WAYS.values():
        out_TD = torch.zeros_like(expected)
        for held in (range(num_experts // 3 + 1), range(num_experts // 3 + 1, num_experts)):
            with poisoned_memory():
                out_TD += case.run(way, held)
        assert float((out_TD - expected).norm() / expected.norm()) < limit(name, dtype, device)


def check_experts(
    name: str, num_tokens: int, shape: Shape, tiles: Pair, dtype: torch.dtype, device: str, **options: Any
) -> None:
    """Compare tiles with the reference implementation."""
    case = Case(name, num_tokens, shape, dtype, device, **options)
    experts = ExpertWeights(case.up, case.down, case.activation)
    arguments = (case.x_TD, experts, (case.weights, case.experts))
    shared = SharedOutput(torch.randn_like(case.x_TD), case.gate_T1)
    expected = sum_of_chosen(*arguments, shared).double()
    with poisoned_memory():
        results = [added_up(compute_choices(*arguments, shared, tiles))]
        if isinstance(case.up, CodedWeight):
            results.append(added_up(compute_dequantized(*arguments, shared, DENSE_TILES)))
    for out_TD in results:
        assert float((out_TD.double() - expected).norm() / expected.norm()) < limit(name, dtype, device)


def check_joined(
    num_tokens: int, shape: Shape, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare a shared expert that joins the others with one by itself."""
    case = Case("fp8", num_tokens, shape, dtype, device)
    results = []
    for max_tokens in (num_tokens, 0):
        monkeypatch.setattr(moe_triton, "MAX_TOKENS_JOINED", max_tokens)
        with poisoned_memory():
            results.append(case.run(moe_triton.mixture).double())
    expected = case.expected()
    joined, apart = (float((result - expected).norm() / expected.norm()) for result in results)
    assert joined < limit("fp8", dtype, device)
    assert float((results[0] - results[1]).norm() / expected.norm()) < limit("fp8", dtype, device) / 4, (joined, apart)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for format, tiles in ((FP8, FORMATS["fp8"].tiles), (FOUR_BIT, FORMATS["4 bits"].tiles)):
        fixed = tiles[format is FOUR_BIT]
        small = ExpertLaunches(tiles[0], tiles[0], tiles[0], (fixed, fixed, fixed), tiles[0])
        launches = format.launches._replace(experts=small, few_experts=(FEW, FEW))
        monkeypatch.setattr(format, "launches", launches)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("num_tokens", "shape", "dtype", "group"),
    [
        (1, SHAPES[0], torch.bfloat16, 128),
        (1, SHAPES[1], torch.float32, 32),
        (3, SHAPES[2], torch.bfloat16, 64),
        (7, SHAPES[0], torch.float32, 128),
        (7, SHAPES[1], torch.bfloat16, 32),
    ],
)
def test_the_mixture_equals_a_loop_in_float64(
    name: str, num_tokens: int, shape: Shape, dtype: torch.dtype, group: int
) -> None:
    options: dict[str, Any] = {"is_shared_dense": num_tokens == 3, "has_shared_gate": num_tokens == 1}
    if name == "4 bits":
        options |= {"group": group, "symmetric": num_tokens == 1}
    check_mixture(name, num_tokens, shape, dtype, "cpu", **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("num_tokens", "shape", "is_gated"),
    [
        (1, (4, 3, 40, 8, 0), True),
        (7, (3, 2, 130, 160, 0), True),
        (1, (4, 3, 40, 8, 24), False),
        (3, (3, 2, 130, 160, 0), False),
        (7, (3, 2, 130, 160, 100), False),
    ],
)
def test_experts_need_neither_a_gate_nor_a_shared_expert(
    name: str, num_tokens: int, shape: Shape, is_gated: bool
) -> None:
    options = {"is_gated": is_gated, "has_shared_gate": False, "has_bias": True}
    check_mixture(name, num_tokens, shape, torch.float32, "cpu", **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_shared_expert_is_quantised_alone(name: str, num_tokens: int) -> None:
    check_mixture(name, num_tokens, SHAPES[0], torch.float32, "cpu", are_dense=True)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_clamped_experts_equal_a_loop_in_float64(name: str, num_tokens: int) -> None:
    check_mixture(name, num_tokens, SHAPES[0], torch.float32, "cpu", limit=0.6)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("num_tokens", "are_dense"), [(1, False), (1, True), (7, False), (7, True)])
def test_biases_of_both_products_are_added(name: str, num_tokens: int, are_dense: bool) -> None:
    options = {"has_shared_gate": False, "has_biases": True, "are_dense": are_dense}
    check_mixture(name, num_tokens, (3, 2, 130, 160, 0), torch.float32, "cpu", **options)
    check_ranks(name, num_tokens, (4, 3, 40, 8, 0), torch.float32, "cpu", **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("num_tokens", "shape", "dtype"),
    [(1, SHAPES[0], torch.bfloat16), (3, SHAPES[1], torch.float32), (18, (2, 1, 130, 130, 130), torch.float32)],
)
def test_the_experts_of_two_ranks_add_up_to_all(name: str, num_tokens: int, shape: Shape, dtype: torch.dtype) -> None:
    check_ranks(name, num_tokens, shape, dtype, "cpu", **({} if name == "fp8" else {"symmetric": False}))


@pytest.mark.usefixtures("small_tiles")
def test_shared_expert_of_the_same_size_is_one_more_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    check_joined(18, (2, 1, 130, 130, 130), torch.float32, "cpu", monkeypatch)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("shape", "group"), [(SHAPES[1], 64), (SHAPES[2], 128)])
def test_tiles_equal_the_reference(name: str, rows: int, shape: Shape, group: int) -> None:
    options = {} if name == "fp8" else {"group": group, "symmetric": group == 64}
    check_experts(name, 40, shape, FORMATS[name].tiles[rows == 64], torch.float32, "cpu", **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("slots", "max_rank", "is_gated", "are_dense"),
    [
        ([1], 16, True, False),
        ([0, low_rank.NONE, 1], 40, True, False),
        ([0, low_rank.NONE, 1], 3, False, True),
        ([1, 0, 0, low_rank.NONE, 1, 1, 0], 16, True, False),
        ([1, 0, 0, low_rank.NONE, 1, 1, 0], 3, False, True),
    ],
)
def test_adapters_add_to_a_shared_expert(
    name: str, slots: list[int], max_rank: int, is_gated: bool, are_dense: bool
) -> None:
    *_, channels, _, shared_size = shape = (4, 3, 40, 8, 24) if are_dense else (3, 2, 130, 160, 600)
    adapters = low_rank.Case(slots, [0] * channels, [[2], [max_rank]], shared_size, max_rank)
    options = {"is_gated": is_gated, "has_shared_gate": is_gated, "adapters": adapters, "are_dense": are_dense}
    check_mixture(name, len(slots), shape, torch.float32, "cpu", **options)
    check_ranks(name, len(slots), shape, torch.float32, "cpu", **options)
