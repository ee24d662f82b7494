"""Experts in 4 bits equal a loop in float64 over the numbers that weights stand for, in torch and in Triton.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.experts.four_bit_moe import four_bit_experts_glu, four_bit_mixture
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.weights import BLOCK_INPUTS, DenseWeight, FourBitWeight
from tests.cpu.kernels.experts.test_block_scaled_moe import Shape
from tests.cpu.kernels.gemm.test_four_bit import exact, four_bit_weight
from tests.interpreter import multiply_bfloat16, subtract_bfloat16, take_loop_bounds_from_memory
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.experts import few_launches, four_bit_moe_triton, many_launches
from strandline.kernels.experts.few_launches import Few
from strandline.kernels.experts.many_launches import Measured
from strandline.kernels.experts.many_triton import compute_choices
from strandline.kernels.experts.moe import ExpertWeights, SharedOutput
from strandline.kernels.launch import Launch

take_loop_bounds_from_memory()
multiply_bfloat16()
subtract_bfloat16()

FEW = Few(32, 128, 1, 64, 1)
TILES = (
    (Launch(16, 32, BLOCK_INPUTS, 1, 1, 2), Launch(16, 32, BLOCK_INPUTS, 1, 1)),
    (Launch(64, 64, BLOCK_INPUTS, 1, 1), Launch(64, 64, BLOCK_INPUTS, 1, 1, 2)),
)
"""Small, so that small shapes have several tiles."""

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 1e-2}
TOLERANCES_INTERPRETER = {torch.float32: 2e-4, torch.bfloat16: 3e-2}
"""``|out - expected| / |expected|``; the interpreter cuts bfloat16 off where a GPU rounds it."""

SHAPES: list[Shape] = [(4, 3, 40, 8, 24), (3, 2, 130, 160, 100), (8, 2, 128, 256, 128)]


def limit(dtype: torch.dtype, device: str) -> float:
    return (TOLERANCES if device == "cuda" else TOLERANCES_INTERPRETER)[dtype]


class Case:
    """Random arguments of a mixture: views of wider rows; scales of what no token chose are NaN."""

    def __init__(
        self,
        num_tokens: int,
        shape: Shape,
        dtype: torch.dtype,
        device: str,
        *,
        is_shared_dense: bool = False,
        has_gate: bool = True,
        group: int = 32,
        symmetric: bool = True,
    ) -> None:
        num_experts, top_k, channels, size, shared_size = shape
        self.routing = Routing(top_k, is_normalised=True)
        sizes = [2 * shared_size, num_experts, 1, 2]
        wide = torch.full((num_tokens, channels + sum(sizes)), torch.nan, dtype=dtype, device=device)
        self.x_TD = wide[:, :channels].normal_()
        projected = wide[:, channels:].split(sizes, dim=-1)
        self.shared_gate_up, self.logits, gate = (part.normal_() for part in projected[:3])
        self.gate = gate if has_gate else None
        options = {"group": group, "symmetric": symmetric, "device": device}
        self.gate_up = four_bit_weight(num_experts, 2 * size, channels, **options)  # type: ignore[arg-type]
        self.down = four_bit_weight(num_experts, channels, size, **options)  # type: ignore[arg-type]
        shared = four_bit_weight(channels, shared_size, **options)  # type: ignore[arg-type]
        self.shared_down = DenseWeight(exact(shared).to(dtype)) if is_shared_dense else shared
        self.weights, self.experts = route.reference(self.logits, None, self.routing)
        is_idle_E = torch.ones(num_experts, dtype=torch.bool, device=device)
        is_idle_E[self.experts.flatten()] = False
        for weight in (self.gate_up, self.down):
            weight.scales[is_idle_E] = torch.nan

    @property
    def arguments(
        self,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, FourBitWeight, FourBitWeight, DenseWeight | FourBitWeight]:
        return (self.x_TD, self.shared_gate_up, self.logits, self.gate, self.gate_up, self.down, self.shared_down)

    def expected(self) -> Tensor:
        """Return the result in float64, but for hidden features, which are rounded."""
        dtype = self.x_TD.dtype
        gate, up = self.shared_gate_up.double().chunk(2, dim=-1)
        hidden = (gate * gate.sigmoid() * up).to(dtype).double()
        shared = self.shared_down
        out_TD = hidden @ (exact(shared) if isinstance(shared, FourBitWeight) else shared.values_OI.double()).t()
        if self.gate is not None:
            out_TD *= self.gate.double().sigmoid()
        for expert in self.experts.unique().tolist():
            token_A, choice_A = (self.experts == expert).nonzero(as_tuple=True)
            gate, up = (self.x_TD[token_A].double() @ exact(self.gate_up[expert]).t()).chunk(2, dim=-1)
            hidden = (gate * gate.sigmoid() * up).to(dtype)
            out_AD = hidden.double() @ exact(self.down[expert]).t()
            out_TD.index_add_(0, token_A, out_AD * self.weights[token_A, choice_A].double().unsqueeze(-1))
        return out_TD


WAYS: list[Callable[..., Summand]] = [
    four_bit_mixture.reference,
    four_bit_moe_triton.four_bit_mixture,
    four_bit_moe_triton.four_bit_mixture_invariant,
]


def check_mixture(num_tokens: int, shape: Shape, dtype: torch.dtype, device: str, **options: int) -> None:
    """Compare every way of a mixture with float64."""
    case = Case(num_tokens, shape, dtype, device, **options)  # type: ignore[arg-type]
    expected = case.expected()
    with poisoned_memory():
        results = [added_up(way(*case.arguments, case.routing)) for way in WAYS]
    errors = [float((result.double() - expected).norm() / expected.norm()) for result in results]
    assert max(errors) < limit(dtype, device), errors


def check_ranks(num_tokens: int, shape: Shape, dtype: torch.dtype, device: str) -> None:
    """Compare the sum over two ranks, each with a part of the experts, with float64, in every way."""
    case = Case(num_tokens, shape, dtype, device, symmetric=False)
    expected, num_experts = case.expected(), shape[0]
    x_TD, shared_TS, logits_TE, gate_T1, gate_up, down, shared_down = case.arguments
    for way in WAYS:
        out_TD = torch.zeros_like(expected)
        for held in (range(num_experts // 3 + 1), range(num_experts // 3 + 1, num_experts)):
            # The first rank's shared expert is all of it.
            own_TS = torch.zeros_like(shared_TS) if held.start else shared_TS
            rows = slice(held.start, held.stop)
            experts = [
                FourBitWeight(x.words[rows], x.scales[rows], x.zeros[rows], x.num_inputs, x.group)  # type: ignore[index]
                for x in (gate_up, down)
            ]
            with poisoned_memory():
                part = way(x_TD, own_TS, logits_TE, gate_T1, *experts, shared_down, case.routing, held)
                out_TD += added_up(part)
        assert float((out_TD - expected).norm() / expected.norm()) < limit(dtype, device)


def check_experts(
    num_tokens: int, shape: Shape, tiles: tuple[Launch, Launch], dtype: torch.dtype, device: str, **options: int
) -> None:
    """Compare tiles with the reference implementation."""
    case = Case(num_tokens, shape, dtype, device, **options)  # type: ignore[arg-type]
    shared_TD = torch.randn_like(case.x_TD)
    arguments = (case.x_TD, case.gate_up, case.down, case.weights, case.experts, shared_TD, case.gate)
    expected = added_up(four_bit_experts_glu.reference(*arguments)).double()
    experts, shared = ExpertWeights(case.gate_up, case.down), SharedOutput(shared_TD, case.gate)
    with poisoned_memory():
        out_TD = added_up(compute_choices(case.x_TD, experts, (case.weights, case.experts), shared, tiles))
    assert float((out_TD.double() - expected).norm() / expected.norm()) < limit(dtype, device)


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(few_launches.FEW, FourBitWeight, (FEW, FEW))
    small = Measured(TILES[0], TILES[0], TILES[0], (TILES[1],) * 3, TILES[0])
    monkeypatch.setitem(many_launches.MEASURED, FourBitWeight, small)


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
    num_tokens: int, shape: Shape, dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_tiles(monkeypatch)
    is_first = num_tokens == 1
    options = {"is_shared_dense": num_tokens == 3, "has_gate": is_first, "symmetric": is_first}
    check_mixture(num_tokens, shape, dtype, "cpu", group=group, **options)


@pytest.mark.parametrize(
    ("num_tokens", "shape", "dtype"),
    [(1, SHAPES[0], torch.bfloat16), (3, SHAPES[1], torch.float32), (18, (2, 1, 130, 130, 130), torch.float32)],
)
def test_the_experts_of_two_ranks_add_up_to_all(
    num_tokens: int, shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_tiles(monkeypatch)
    check_ranks(num_tokens, shape, dtype, "cpu")


@pytest.mark.parametrize("tiles", TILES, ids=["16 rows", "64 rows"])
@pytest.mark.parametrize(("shape", "group"), [(SHAPES[1], 64), (SHAPES[2], 128)])
def test_tiles_equal_the_reference(tiles: tuple[Launch, Launch], shape: Shape, group: int) -> None:
    check_experts(40, shape, tiles, torch.float32, "cpu", group=group, symmetric=group == 64)
