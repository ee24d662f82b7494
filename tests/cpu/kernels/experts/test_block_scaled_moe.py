"""Experts in FP8 equal a loop in float64 over the numbers that are multiplied, in torch and in Triton.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

from collections.abc import Callable
from math import gcd

import pytest
import torch
from torch import Tensor

from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.experts.block_scaled_moe import block_scaled_experts_glu, block_scaled_mixture
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight
from strandline.kernels.rowwise.quantized_rows import GROUP, quantize_groups
from tests.cpu.kernels.gemm.test_block_scaled import exact, scaled_weight
from tests.interpreter import convert_e4m3, multiply_bfloat16, take_loop_bounds_from_memory
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.experts import block_scaled_moe_triton, few_launches, many_launches
from strandline.kernels.experts.few_launches import Few
from strandline.kernels.experts.many_launches import Measured
from strandline.kernels.experts.many_triton import compute_choices
from strandline.kernels.experts.moe import ExpertWeights, SharedOutput
from strandline.kernels.launch import Launch

take_loop_bounds_from_memory()
multiply_bfloat16()
convert_e4m3()

FEW = Few(32, 128, 1, 64, 1)
TILES = (
    (Launch(16, GROUP, GROUP, 1, 1, 2), Launch(16, 32, GROUP, 1, 1)),
    (Launch(64, GROUP, GROUP, 1, 1), Launch(64, 64, GROUP, 1, 1, 2)),
)
"""Small, so that small shapes have several tiles; of both orientations."""

TOLERANCES = {torch.float32: 3e-3, torch.bfloat16: 3e-2}
TOLERANCES_INTERPRETER = {torch.float32: 3e-3, torch.bfloat16: 6e-2}
"""``|out - expected| / |expected|``: a feature that lies between two e4m3 numbers may be rounded to either. The
interpreter cuts bfloat16 off where a GPU rounds it. Where the largest feature of a group is rounded to another
bfloat16, the group's scale changes by 2**-8, and with it what a twentieth of its features are rounded to: in the 32
groups of one token, that was seen to make 2.3e-2."""

Shape = tuple[int, int, int, int, int]
"""Experts, choices of a token, channels, features, features of the shared expert."""

SHAPES: list[Shape] = [(4, 3, 40, 8, 24), (3, 2, 130, 160, 100), (8, 2, 128, 256, 128)]


def rounded(x: Tensor) -> Tensor:
    """Return what is multiplied instead of x, in float64."""
    x_TXG, scale_TX = quantize_groups(x.reshape(-1, x.shape[-1]))
    return (x_TXG.double() * scale_TX.double().unsqueeze(-1)).flatten(1)[:, : x.shape[-1]].view(x.shape)


def limit(dtype: torch.dtype, device: str) -> float:
    return (TOLERANCES if device == "cuda" else TOLERANCES_INTERPRETER)[dtype]


class Case:
    """Random arguments of a mixture: views of wider rows; what no token chose is NaN."""

    def __init__(
        self,
        num_tokens: int,
        shape: Shape,
        dtype: torch.dtype,
        device: str,
        *,
        is_shared_dense: bool,
        has_gate: bool = True,
    ) -> None:
        num_experts, top_k, channels, size, shared_size = shape
        self.routing = Routing(top_k, is_normalised=True)
        self.sizes = [2 * shared_size, num_experts, 1, 2]
        wide = torch.full((num_tokens, channels + sum(self.sizes)), torch.nan, dtype=dtype, device=device)
        self.x_TD = wide[:, :channels].normal_()
        projected = wide[:, channels:].split(self.sizes, dim=-1)
        self.shared_gate_up, self.logits, gate = (part.normal_() for part in projected[:3])
        self.gate = gate if has_gate else None
        gate_up_rows = gcd(size, GROUP)
        self.gate_up = scaled_weight(num_experts, 2 * size, channels, rows_per_scale=gate_up_rows, device=device)
        self.down = scaled_weight(num_experts, channels, size, device=device)
        shared = scaled_weight(channels, shared_size, device=device)
        self.shared_down = DenseWeight(exact(shared).to(dtype)) if is_shared_dense else shared
        self.weights, self.experts = route.reference(self.logits, None, self.routing)
        is_idle_E = torch.ones(num_experts, dtype=torch.bool, device=device)
        is_idle_E[self.experts.flatten()] = False
        for weight in (self.gate_up, self.down):
            weight.values.view(torch.uint8)[is_idle_E] = 0x7F

    @property
    def arguments(
        self,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, ScaledWeight, ScaledWeight, DenseWeight | ScaledWeight]:
        return (self.x_TD, self.shared_gate_up, self.logits, self.gate, self.gate_up, self.down, self.shared_down)

    def expected(self) -> Tensor:
        """Return the result in float64, but for what is rounded on the way."""
        dtype = self.x_TD.dtype
        gate, up = self.shared_gate_up.double().chunk(2, dim=-1)
        hidden = (gate * gate.sigmoid() * up).to(dtype)
        if isinstance(self.shared_down, ScaledWeight):
            out_TD = rounded(hidden) @ exact(self.shared_down).t()
        else:
            out_TD = hidden.double() @ self.shared_down.values_OI.double().t()
        if self.gate is not None:
            out_TD *= self.gate.double().sigmoid()
        for expert in self.experts.unique().tolist():
            token_A, choice_A = (self.experts == expert).nonzero(as_tuple=True)
            gate, up = (rounded(self.x_TD[token_A]) @ exact(self.gate_up[expert]).t()).chunk(2, dim=-1)
            hidden = (gate * gate.sigmoid() * up).to(dtype)
            out_AD = rounded(hidden) @ exact(self.down[expert]).t()
            out_TD.index_add_(0, token_A, out_AD * self.weights[token_A, choice_A].double().unsqueeze(-1))
        return out_TD


def check_mixture(
    num_tokens: int, shape: Shape, dtype: torch.dtype, device: str, *, is_shared_dense: bool, has_gate: bool = True
) -> None:
    """Compare every way of a mixture with float64."""
    case = Case(num_tokens, shape, dtype, device, is_shared_dense=is_shared_dense, has_gate=has_gate)
    expected = case.expected()
    ways: list[Callable[..., Summand]] = [
        block_scaled_mixture.reference,
        block_scaled_moe_triton.block_scaled_mixture,
        block_scaled_moe_triton.block_scaled_mixture_invariant,
    ]
    with poisoned_memory():
        results = [added_up(way(*case.arguments, case.routing)) for way in ways]
    errors = [float((result.double() - expected).norm() / expected.norm()) for result in results]
    assert max(errors) < limit(dtype, device), errors


def check_ranks(num_tokens: int, shape: Shape, dtype: torch.dtype, device: str) -> None:
    """Compare the sum over two ranks, each with a part of the experts, with float64, in every way."""
    case = Case(num_tokens, shape, dtype, device, is_shared_dense=False)
    expected, num_experts = case.expected(), shape[0]
    x_TD, shared_TS, logits_TE, gate_T1, gate_up, down, shared_down = case.arguments
    for way in (
        block_scaled_mixture.reference,
        block_scaled_moe_triton.block_scaled_mixture,
        block_scaled_moe_triton.block_scaled_mixture_invariant,
    ):
        out_TD = torch.zeros_like(expected)
        for held in (range(num_experts // 3 + 1), range(num_experts // 3 + 1, num_experts)):
            # The first rank's shared expert is all of it.
            own_TS = torch.zeros_like(shared_TS) if held.start else shared_TS
            experts = [
                ScaledWeight(x.values[held.start : held.stop], x.scales[held.start : held.stop], x.rows_per_scale)
                for x in (gate_up, down)
            ]
            with poisoned_memory():
                part = way(x_TD, own_TS, logits_TE, gate_T1, *experts, shared_down, case.routing, held)
                out_TD += added_up(part)
        assert float((out_TD - expected).norm() / expected.norm()) < limit(dtype, device)


def check_experts(
    num_tokens: int, shape: Shape, tiles: tuple[Launch, Launch], dtype: torch.dtype, device: str
) -> Tensor:
    """Compare tiles with the reference implementation, and return their result."""
    case = Case(num_tokens, shape, dtype, device, is_shared_dense=False)
    shared_TD = torch.randn_like(case.x_TD)
    arguments = (case.x_TD, case.gate_up, case.down, case.weights, case.experts, shared_TD, case.gate)
    expected = added_up(block_scaled_experts_glu.reference(*arguments)).double()
    experts, shared = ExpertWeights(case.gate_up, case.down), SharedOutput(shared_TD, case.gate)
    with poisoned_memory():
        out_TD = added_up(compute_choices(case.x_TD, experts, (case.weights, case.experts), shared, tiles))
    assert float((out_TD.double() - expected).norm() / expected.norm()) < limit(dtype, device)
    return out_TD


@pytest.mark.parametrize(
    ("num_tokens", "shape", "dtype"),
    [
        (1, SHAPES[0], torch.bfloat16),
        (1, SHAPES[1], torch.float32),
        (3, SHAPES[2], torch.bfloat16),
        (7, SHAPES[0], torch.float32),
        (7, SHAPES[1], torch.bfloat16),
    ],
)
def test_the_mixture_equals_a_loop_in_float64(
    num_tokens: int, shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(few_launches.FEW, ScaledWeight, (FEW, FEW))
    check_mixture(num_tokens, shape, dtype, "cpu", is_shared_dense=num_tokens == 3, has_gate=dtype == torch.bfloat16)


@pytest.mark.parametrize(
    ("num_tokens", "shape", "dtype"),
    [(1, SHAPES[0], torch.bfloat16), (3, SHAPES[1], torch.float32), (18, (2, 1, 130, 130, 130), torch.float32)],
)
def test_the_experts_of_two_ranks_add_up_to_all(
    num_tokens: int, shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(few_launches.FEW, ScaledWeight, (FEW, FEW))
    use_small_tiles(monkeypatch)
    check_ranks(num_tokens, shape, dtype, "cpu")


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Measured(TILES[0], TILES[0], TILES[0], (TILES[0],) * 3)
    monkeypatch.setitem(many_launches.MEASURED, ScaledWeight, small)


def test_shared_expert_of_the_same_size_is_one_more_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)
    check_joined(18, (2, 1, 130, 130, 130), torch.float32, "cpu", monkeypatch)


def check_joined(
    num_tokens: int, shape: Shape, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare a shared expert that joins the others with one by itself."""
    case = Case(num_tokens, shape, dtype, device, is_shared_dense=False)
    results = []
    for max_tokens in (num_tokens, 0):
        monkeypatch.setattr(block_scaled_moe_triton, "MAX_TOKENS_JOINED", max_tokens)
        with poisoned_memory():
            mixture = block_scaled_moe_triton.block_scaled_mixture
            results.append(added_up(mixture(*case.arguments, case.routing)).double())
    expected = case.expected()
    joined, apart = (float((result - expected).norm() / expected.norm()) for result in results)
    assert joined < limit(dtype, device)
    assert float((results[0] - results[1]).norm() / expected.norm()) < limit(dtype, device) / 4, (joined, apart)


@pytest.mark.parametrize("tiles", TILES, ids=["16 rows", "64 rows"])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_tiles_equal_the_reference(tiles: tuple[Launch, Launch], shape: Shape) -> None:
    check_experts(40, shape, tiles, torch.float32, "cpu")
