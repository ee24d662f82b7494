"""Kernels of experts multiply with exactly what weights in microscaling formats stand for.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from strandline.kernels.expert_choices import added_up
from strandline.kernels.experts.moe import (
    RELU_SQUARED,
    SWIGLU,
    Activation,
    ExpertBiases,
    ExpertWeights,
    Router,
    SharedExpert,
    SharedOutput,
    sum_of_chosen,
)
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.formats import fp4
from strandline.kernels.gemm.formats.coded import BLOCK_INPUTS
from strandline.kernels.gemm.weights import CodedWeight
from tests.cpu.kernels.gemm.formats import FP4, MXFP8, exact
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.experts import many_triton, moe_triton
from strandline.kernels.experts.few_triton import mixture_few
from strandline.kernels.experts.many_triton import compute_choices, compute_dequantized
from strandline.kernels.gemm.formats.launches import few_pair
from strandline.kernels.gemm.formats.operand_triton import can_extend, operand
from strandline.kernels.gemm.library_triton import dequantize_into
from strandline.kernels.launch import Launch, Pair

Shape = tuple[int, int, int, int, int]
"""Experts, of a token, channels, features, and features of the shared expert; 0: there is none."""

SHAPES: list[Shape] = [(4, 3, 48, 32, 24), (3, 2, 160, 160, 0), (8, 2, 128, 256, 256)]
ACTIVATIONS = [SWIGLU, SWIGLU._replace(limit=0.6), RELU_SQUARED]
FEW = few_pair((32, 128, 1), 64, 1)
TILES = (Launch(16, 32, BLOCK_INPUTS, 1, 1, 2), Launch(16, 32, BLOCK_INPUTS, 1, 1))
DENSE_TILES = (Launch(16, 32, 32, 1, 1, 2), Launch(16, 32, 32, 1, 1))
FORMATS = FP4 | MXFP8
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 3e-2}
"""``|out - expected| / |expected|``; the interpreter cuts bfloat16 off where a GPU rounds it."""


def activate(activation: Activation, up: Tensor) -> Tensor:
    if not activation.is_gated:
        return up.relu().square()
    gate, up = up.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * gate.sigmoid() * up


class Case:
    """Random arguments of a mixture; factors, or scales, of what no token chose are NaN."""

    def __init__(
        self, num_tokens: int, shape: Shape, dtype: torch.dtype, device: str, activation: Activation, name: str
    ) -> None:
        num_experts, top_k, channels, size, shared_size = shape
        parts = 1 + activation.is_gated
        self.routing = Routing(top_k, is_normalised=True)
        weight = partial(FORMATS[name].weight, device=device)
        self.x_TD = torch.randn(num_tokens, channels, device=device).to(dtype)
        self.logits_TE = torch.randn(num_tokens, num_experts, device=device).to(dtype)
        up = weight(num_experts, parts * size, channels)
        down = weight(num_experts, channels, size)
        self.experts = ExpertWeights(up, down, activation)
        self.shared: SharedExpert | None = None
        self.shared_down = weight(channels, max(1, shared_size))
        if shared_size:
            projected = torch.randn(num_tokens, parts * shared_size, device=device).to(dtype)
            self.shared = SharedExpert(projected, self.shared_down)
        self.chosen = route.reference(self.logits_TE, None, self.routing)
        is_idle_E = torch.ones(num_experts, dtype=torch.bool, device=device)
        is_idle_E[self.chosen[1].flatten()] = False
        for idle in (up, down):
            if idle.factors is not None:
                idle.factors[is_idle_E] = torch.nan
            else:
                idle.scales[is_idle_E] = 255

    def expected(self, *, with_shared: bool) -> Tensor:
        """Return the result in float64, but for hidden features, which are rounded."""
        dtype, out_TD = self.x_TD.dtype, torch.zeros_like(self.x_TD, dtype=torch.float64)
        activation = self.experts.activation
        if with_shared and self.shared is not None:
            hidden = activate(activation, self.shared.projected_TS.double()).to(dtype)
            out_TD += hidden.double() @ exact(self.shared_down).t()
        weights_TK, experts_TK = self.chosen
        for expert in experts_TK.unique().tolist():
            token_A, choice_A = (experts_TK == expert).nonzero(as_tuple=True)
            up, down = (exact(weight[expert]) for weight in self.experts[:2])  # type: ignore[union-attr, arg-type]
            hidden = activate(activation, self.x_TD[token_A].double() @ up.t()).to(dtype)
            out_AD = hidden.double() @ down.t()
            out_TD.index_add_(0, token_A, out_AD * weights_TK[token_A, choice_A].double().unsqueeze(-1))
        return out_TD


def check_few(case: Case, few: Pair = FEW) -> None:
    with poisoned_memory():
        out_TD = mixture_few(case.x_TD, case.experts, case.shared, case.logits_TE, None, case.routing, few)
    assert_near(out_TD, case.expected(with_shared=True))


def check_many(case: Case, tiles: tuple[Launch, Launch] = TILES) -> None:
    """Compute the shared expert, too, if it is as the others."""
    is_joined = case.shared is not None and can_extend(case.experts.down, case.shared.down)
    shared = case.shared if is_joined else None
    with poisoned_memory():
        out_TD = added_up(compute_choices(case.x_TD, case.experts, case.chosen, shared, tiles))
    assert_near(out_TD, case.expected(with_shared=is_joined))


def check_dequantized(case: Case, tiles: tuple[Launch, Launch] = DENSE_TILES) -> None:
    """Dequantise few experts at a time."""
    with pytest.MonkeyPatch.context() as patch, poisoned_memory():
        patch.setattr(many_triton, "SCRATCH_BYTES", 1)
        patch.setattr(many_triton, "ALIGNED_EXPERTS", 2)
        out_TD = added_up(compute_dequantized(case.x_TD, case.experts, case.chosen, None, tiles))
    assert_near(out_TD, case.expected(with_shared=False))


def assert_near(found: Tensor, expected: Tensor) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < TOLERANCES[found.dtype], error


DTYPES, CHECKS = (torch.float32, torch.bfloat16), (check_few, check_many, check_dequantized)
PAIRS = {
    (DTYPES[(3 - row + column) % 3 % 2], list(FORMATS)[(row + column) % 3], activation, shape)
    for row, shape in enumerate(SHAPES)
    for column, activation in enumerate(ACTIVATIONS)
}
"""For every two of a dtype, a format, an activation and a shape, a case that has both."""


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("dtype", "name", "activation", "shape"),
    [
        pytest.param(*case, marks=[] if case in PAIRS else pytest.mark.long)
        for case in itertools.product(DTYPES, FORMATS, ACTIVATIONS, SHAPES)
    ],
)
def test_experts_multiply_with_what_weights_stand_for(
    check: Callable[[Case], None], dtype: torch.dtype, name: str, activation: Activation, shape: Shape
) -> None:
    # Pairs suffice: no line of the kernels depends on more than two of the four.
    torch.manual_seed(0)
    check(Case(3 if check is check_few else 9, shape, dtype, "cpu", activation, name))


@pytest.mark.parametrize("activation", [SWIGLU, RELU_SQUARED])
def test_ranks_dequantise_their_experts_of_many_tokens(activation: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    case = Case(12, (7, 3, 48, 32, 24), torch.float32, "cpu", activation, "nvfp4")
    num_up, num_channels = case.experts.up.shape[1], case.experts.down.shape[1]
    experts = case.experts._replace(biases=ExpertBiases(torch.randn(7, num_up), torch.randn(7, num_channels)))
    router, shared = Router(case.logits_TE, None, case.routing), SharedOutput(torch.randn_like(case.x_TD))
    num_dequantized = list[int]()

    def counted(out_OI: Tensor, weight: CodedWeight) -> None:
        num_dequantized.append(weight.shape[0])
        dequantize_into(out_OI, weight)

    monkeypatch.setattr(many_triton, "dequantize_into", counted)
    monkeypatch.setattr(many_triton, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(many_triton, "ALIGNED_EXPERTS", 2)
    monkeypatch.setattr(moe_triton, "MAX_TOKENS_FEW", 0)
    expected = sum_of_chosen(case.x_TD, experts, case.chosen, shared).double()
    for least in (6, 5):  # an expert has 36 / 7 choices on average
        experts_launches = fp4.LAUNCHES.experts._replace(min_dequantized=least)
        monkeypatch.setattr(fp4.FP4, "launches", fp4.LAUNCHES._replace(experts=experts_launches))
        num_dequantized.clear()
        out_TD = torch.zeros_like(case.x_TD)
        for held in (range(3), range(3, 7)):
            part = experts.part(slice(held.start, held.stop))._replace(held=held)
            with poisoned_memory():
                out_TD += added_up(moe_triton.mixture(case.x_TD, part, router, None if held.start else shared))
        assert num_dequantized == ([] if least == 6 else [2, 1, 2, 1, 2, 2, 2, 2])
        assert_near(out_TD, expected)


@pytest.mark.parametrize(
    ("max_tiles", "least"), [(16, None), (0, None), (16, 1)], ids=["joined", "apart", "dequantised"]
)
def test_a_shared_expert_like_the_others_is_added(
    max_tiles: int, least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = Case(12, (3, 2, 48, 32, 32), torch.float32, "cpu", SWIGLU, "nvfp4")
    monkeypatch.setattr(moe_triton, "MAX_TOKENS_FEW", 0)
    monkeypatch.setattr(moe_triton, "MAX_TILES_JOINED", max_tiles)
    experts_launches = fp4.LAUNCHES.experts._replace(min_dequantized=least)
    monkeypatch.setattr(fp4.FP4, "launches", fp4.LAUNCHES._replace(experts=experts_launches))
    router = Router(case.logits_TE, None, case.routing)
    with poisoned_memory():
        out_TD = added_up(moe_triton.mixture(case.x_TD, case.experts, router, case.shared))
    assert_near(out_TD, case.expected(with_shared=True))


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_with_an_extra_matrix_are_one_flat_tuple(name: str) -> None:
    # Triton compiles no None in a tuple inside a tuple, as factors would be, though it interprets it.
    weight, extra = FORMATS[name].weight(2, 16, 128), FORMATS[name].weight(16, 128)
    assert can_extend(weight, extra)
    for taken in (operand(weight), operand(weight, extra)):
        assert not any(isinstance(argument, tuple) for argument in taken.data)


def test_one_rank_adds_a_shared_expert_like_the_others() -> None:
    torch.manual_seed(0)
    case = Case(12, (7, 3, 48, 32, 32), torch.float32, "cpu", SWIGLU, "nvfp4")
    out_TD = torch.zeros_like(case.x_TD)
    for held in (range(3), range(3, 7)):
        part = case.experts.part(slice(held.start, held.stop))._replace(held=held)
        shared = case.shared if held.start else None
        with poisoned_memory():
            out_TD += added_up(compute_choices(case.x_TD, part, case.chosen, shared, TILES))
    assert_near(out_TD, case.expected(with_shared=True))


def test_pairs_of_parameters_are_complete() -> None:
    values = (DTYPES, tuple(FORMATS), ACTIVATIONS, SHAPES)
    for first, second in itertools.combinations(range(4), 2):
        found = {(case[first], case[second]) for case in PAIRS}
        assert found == set(itertools.product(values[first], values[second]))
