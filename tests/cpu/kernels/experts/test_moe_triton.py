"""The Triton experts equal the torch versions, whichever of their two ways a batch takes.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

import pytest
import torch
from torch import Tensor

from strandline.kernels.experts.router import Routing, route
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.expert_choices import added_up
from strandline.kernels.experts import moe_list_triton, moe_triton
from strandline.kernels.experts.few_launches import MAX_TOKENS_FEW, choose_dense
from strandline.kernels.experts.few_triton import mixture_few
from strandline.kernels.experts.many_launches import choose_launches
from strandline.kernels.experts.many_triton import compute_choices
from strandline.kernels.experts.moe import RELU_SQUARED, SWIGLU, ExpertWeights, Router, SharedExpert, SharedOutput
from strandline.kernels.gemm.formats.dense import DENSE
from strandline.kernels.gemm.formats.launches import few_pair
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.launch import Launch, Pair
from strandline.kernels.operation import Launches

FEW = few_pair((4, 16, 1), 8, 1)
TILES = (Launch(16, 16, 16, 1, 1, 2), Launch(16, 32, 16, 1, 1))
"""Small, so that small shapes have several tiles of every kind."""

ERROR_RATIO = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
ERROR_RATIO_INTERPRETER = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
"""``|out - ref| / |ref|``, ref in float64. The interpreter cuts bfloat16 off where a GPU rounds it."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    size: int,
    dtype: torch.dtype,
    device: str,
    experts_TK: Tensor | None = None,
) -> Inputs:
    """Return random arguments of experts: views of wider rows, and NaN for every expert that no token chose."""
    wide = torch.full((num_tokens, 2 * hidden_size + 8), torch.nan, dtype=dtype, device=device)
    x_TD, shared_TD, gate_T1 = (
        wide[:, first : first + columns].normal_()
        for first, columns in ((0, hidden_size), (hidden_size, hidden_size), (2 * hidden_size + 3, 1))
    )
    gate_up = torch.randn(num_experts, 2 * size, hidden_size, device=device, dtype=dtype).mul_(hidden_size**-0.5)
    down = torch.randn(num_experts, hidden_size, size, device=device, dtype=dtype).mul_(size**-0.5)
    logits = torch.randn(num_tokens, num_experts, device=device)
    weights, experts = route.reference(logits, None, Routing(top_k, is_normalised=True))
    experts = experts if experts_TK is None else experts_TK
    is_idle_E = torch.ones(num_experts, dtype=torch.bool, device=device)
    is_idle_E[experts.flatten()] = False
    gate_up[is_idle_E], down[is_idle_E] = torch.nan, torch.nan
    return x_TD, gate_up, down, weights, experts, shared_TD, gate_T1


def reference(arguments: Inputs) -> Tensor:
    """Compute in float64, expert by expert; an idle expert's NaN is never touched."""
    x_TD, gate_up, down, weights, experts, shared_TD, gate_T1 = arguments
    out_TD = shared_TD.double() * gate_T1.double().sigmoid()
    for expert in experts.unique().tolist():
        token_A, choice_A = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x_TD[token_A].double() @ gate_up[expert].double().t()).chunk(2, dim=-1)
        out_AD = (gate * gate.sigmoid() * up) @ down[expert].double().t()
        out_TD.index_add_(0, token_A, out_AD * weights[token_A, choice_A].double().unsqueeze(-1))
    return out_TD


def halves(num_experts: int) -> list[range]:
    """Return which experts each of two ranks holds; one rank holds a single expert."""
    half = num_experts // 2
    return [held for held in (range(half), range(half, num_experts)) if held]


def check_near(actual: Tensor, expected: Tensor, num_parts: int = 1) -> None:
    """Check a result, or the sum of several that were rounded each for itself."""
    limits = ERROR_RATIO if actual.is_cuda else ERROR_RATIO_INTERPRETER
    ratio = float((actual.double() - expected).norm() / expected.norm())
    assert ratio < num_parts * limits[actual.dtype], ratio


def check_sum(parts: list[Tensor], shared_TD: Tensor, expected_TD: Tensor) -> None:
    """Check what several ranks make of their experts and, each of them, of the whole shared expert."""
    total_TD = torch.stack(parts).double().sum(0) - (len(parts) - 1) * shared_TD
    check_near(total_TD.to(parts[0].dtype), expected_TD, len(parts))


def experts_many(arguments: Inputs, tiles: tuple[Launch, Launch], held: range | None = None) -> Tensor:
    """Return what ``compute_choices`` computes of the experts that are held, added up."""
    x_TD, gate_up, down, weights, experts, shared_TD, gate_T1 = arguments
    part = slice(None) if held is None else slice(held.start, held.stop)
    own = ExpertWeights(DenseWeight(gate_up[part]), DenseWeight(down[part]), held=held)
    return added_up(compute_choices(x_TD, own, (weights, experts), SharedOutput(shared_TD, gate_T1), tiles))


def check_experts(arguments: Inputs, tiles: tuple[Launch, Launch]) -> None:
    expected_TD = reference(arguments)
    with poisoned_memory():
        check_near(experts_many(arguments, tiles), expected_TD)
        *_, shared_TD, gate_T1 = arguments
        gated_TD, ranks = shared_TD.double() * gate_T1.double().sigmoid(), halves(len(arguments[2]))
        check_sum([experts_many(arguments, tiles, held) for held in ranks], gated_TD, expected_TD)


def check_experts_without_gate(arguments: Inputs) -> None:
    """Take the first half of each expert's rows for the up projection."""
    x_TD, gate_up, down, weights, experts, *_ = arguments
    up = gate_up[:, : down.shape[2]].contiguous()
    expected_TD = torch.zeros(x_TD.shape, dtype=torch.float64, device=x_TD.device)
    for expert in experts.unique().tolist():
        token_A, choice_A = (experts == expert).nonzero(as_tuple=True)
        hidden_AF = (x_TD[token_A].double() @ up[expert].double().t()).relu() ** 2
        out_AD = hidden_AF @ down[expert].double().t()
        expected_TD.index_add_(0, token_A, out_AD * weights[token_A, choice_A].double().unsqueeze(-1))
    own = ExpertWeights(DenseWeight(up), DenseWeight(down), RELU_SQUARED)
    for launches in Launches:
        tiles = choose_launches(DENSE, x_TD.dtype, experts.numel() // len(up), launches, is_gated=False)
        with poisoned_memory():
            check_near(added_up(compute_choices(x_TD, own, (weights, experts), None, tiles)), expected_TD)


class Mixture:
    """Random arguments of mixtures, views of a wider tensor; experts that no token chose are NaN.

    Args:
        shape: E, K, D, F and S; without S there is no shared expert.
        is_gated: whether experts have gates, and the shared one one before it.
    """

    def __init__(
        self, num_tokens: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, *, is_gated: bool
    ) -> None:
        num_experts, self.top_k, hidden_size, size, shared_size = shape
        self.is_gated = is_gated
        self.routing = Routing(self.top_k, True)
        self.bias_E = None
        if not is_gated:
            self.routing = Routing(self.top_k, True, "sigmoid", 1e-6, 2.5)
            self.bias_E = torch.randn(num_experts, device=device)
        sizes = [shared_size * (1 + is_gated), num_experts, 1]
        wide = torch.full((num_tokens, sum(sizes) + 7), torch.nan, dtype=dtype, device=device)
        parts = wide[:, 3:-4].normal_().split(sizes, dim=-1)
        self.shared_TS, self.logits_TE, self.gate_T1 = parts[0], parts[1], parts[2] if is_gated else None
        weights, experts = route.reference(self.logits_TE, self.bias_E, self.routing)
        self.x_TD, gate_up, self.down, *_ = inputs(
            num_tokens, num_experts, self.top_k, hidden_size, size, dtype, device, experts
        )
        self.up = gate_up if is_gated else gate_up[:, :size].contiguous()
        self.shared_down = torch.randn(hidden_size, shared_size, device=device, dtype=dtype).mul_(shared_size**-0.5)
        shared_TF = self._activated(self.shared_TS.double())
        self.shared_TD = shared_TF @ self.shared_down.double().t()
        if self.gate_T1 is not None:
            self.shared_TD *= self.gate_T1.double().sigmoid()
        self.expected_TD = self.shared_TD.clone()
        for expert in experts.unique().tolist():
            token_A, choice_A = (experts == expert).nonzero(as_tuple=True)
            hidden_AF = self._activated(self.x_TD[token_A].double() @ self.up[expert].double().t())
            out_AD = hidden_AF @ self.down[expert].double().t()
            self.expected_TD.index_add_(0, token_A, out_AD * weights[token_A, choice_A].double().unsqueeze(-1))

    def _activated(self, projected: Tensor) -> Tensor:
        if not self.is_gated:
            return projected.relu() ** 2
        gate, up = projected.chunk(2, dim=-1)
        return gate * gate.sigmoid() * up

    def run(
        self, held: range | None = None, *, launches: Launches = Launches.MEASURED, has_shared: bool = True
    ) -> Tensor:
        """Compute it as a layer does, on a rank that holds these experts."""
        shared = None
        if has_shared:
            projected_TS = self.shared_TS if self.is_gated else self.shared_TS.clone()
            shared = SharedExpert(projected_TS, DenseWeight(self.shared_down), self.gate_T1)
        router = Router(self.logits_TE, self.bias_E, self.routing)
        return added_up(moe_triton.mixture(self.x_TD, self.experts(held), router, shared, launches=launches))

    def experts(self, held: range | None = None) -> ExpertWeights:
        """Return those that a rank holds."""
        part = slice(None) if held is None else slice(held.start, held.stop)
        activation = SWIGLU if self.is_gated else RELU_SQUARED
        return ExpertWeights(DenseWeight(self.up[part]), DenseWeight(self.down[part]), activation, held)

    def run_few(self, few: Pair, held: range | None = None) -> Tensor:
        """Compute it choice by choice, however many tokens there are."""
        shared = SharedExpert(self.shared_TS, DenseWeight(self.shared_down), self.gate_T1)
        return mixture_few(self.x_TD, self.experts(held), shared, self.logits_TE, self.bias_E, self.routing, few)


def check_mixture(
    num_tokens: int,
    shape: tuple[int, int, int, int, int],
    few: Pair,
    dtype: torch.dtype,
    device: str,
    *,
    is_gated: bool,
) -> None:
    """Compare all ways with float64, given the choices of the reference; the shape is E, K, D, F and S."""
    mixture = Mixture(num_tokens, shape, dtype, device, is_gated=is_gated)
    expected_TD = mixture.expected_TD
    with poisoned_memory():
        if num_tokens <= 8:
            check_near(mixture.run_few(few), expected_TD)
            parts = [mixture.run_few(few, held) for held in halves(shape[0])]
            check_sum(parts, mixture.shared_TD, expected_TD)
        check_near(mixture.run(), expected_TD)
        check_near(mixture.run(launches=Launches.FIXED), expected_TD)
        if num_tokens > MAX_TOKENS_FEW:
            check_sum([mixture.run(held) for held in halves(shape[0])], mixture.shared_TD, expected_TD)
        if num_tokens != 3:
            check_near(mixture.run(has_shared=False), expected_TD - mixture.shared_TD)


def check_list(experts_TK: Tensor, num_experts: int) -> None:
    with poisoned_memory():
        starts_E, choices_A = moe_list_triton.list_choices(experts_TK, num_experts)
    counts_E = experts_TK.flatten().bincount(minlength=num_experts)
    assert starts_E.tolist() == [0, *counts_E.cumsum(0).tolist()]
    assert torch.equal(choices_A.long(), experts_TK.flatten().sort(stable=True).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "size"),
    [(1, 4, 3, 12, 7), (1, 1, 1, 16, 16), (5, 6, 2, 20, 32), (40, 2, 2, 33, 10)],
)
def test_experts_equal_a_loop_in_float64(
    num_tokens: int, num_experts: int, top_k: int, hidden_size: int, size: int, dtype: torch.dtype
) -> None:
    check_experts(inputs(num_tokens, num_experts, top_k, hidden_size, size, dtype, "cpu"), TILES)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(("block", "blocks"), [(4, 2), (1, 3), (8, 4)])
def test_tiles_one_after_the_other_equal_a_loop_in_float64(block: int, blocks: int, *, is_gated: bool) -> None:
    few = few_pair((4, 16, 1), block, 1, blocks)
    for num_tokens, shape in ((1, (4, 3, 12, 7, 5)), (3, (5, 2, 32, 16, 8))):
        check_mixture(num_tokens, shape, few, torch.float32, "cpu", is_gated=is_gated)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "shape", "dtype"),
    [
        (1, (4, 3, 12, 7, 5), torch.float32),
        (1, (1, 1, 16, 16, 16), torch.bfloat16),
        (3, (5, 2, 32, 16, 8), torch.bfloat16),
        (10, (5, 2, 20, 18, 33), torch.float32),
    ],
)
def test_the_mixture_equals_a_loop_in_float64(
    num_tokens: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, is_gated: bool
) -> None:
    check_mixture(num_tokens, shape, FEW, dtype, "cpu", is_gated=is_gated)


def test_tiles_of_few_tokens_hold_so_many_numbers() -> None:
    assert choose_dense(1, 8, 512, 512, is_gated=True) == few_pair((4, 1024, 2), 4, 4)
    assert choose_dense(3, 8, 512, 512, is_gated=True) == few_pair((4, 512, 2), 4, 4)
    assert choose_dense(1, 8, 512, 512, is_gated=True, is_divided=True) == few_pair((4, 512, 2), 4, 4)
    assert choose_dense(3, 8, 512, 512, is_gated=True, is_divided=True) == few_pair((4, 512, 2), 4, 4, 2)
    assert choose_dense(3, 6, 1856, 3712, is_gated=False) == few_pair((4, 512, 1), 1, 4)
    assert choose_dense(1, 8, 4096, 0, is_gated=True) == few_pair((4, 1024, 2), 1, 8)
    assert choose_dense(1, 8, 4097, 0, is_gated=True) is None
    assert choose_dense(1, 2, 64, 2**16, is_gated=True) is None
    assert choose_dense(1, 22, 64, 64, is_gated=False) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 7), (40, 32)])
def test_experts_without_gate_equal_a_loop_in_float64(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    check_experts_without_gate(inputs(num_tokens, 4, 3, 20, size, dtype, "cpu"))


@pytest.mark.parametrize("last", [0, 1, 16, 17, 31])
def test_an_expert_s_last_choices_take_half_a_tile(last: int) -> None:
    tiles = (Launch(32, 16, 16, 1, 1, 2), Launch(32, 32, 16, 1, 1))
    halved = (tiles[0]._replace(is_halved=True), tiles[1]._replace(is_halved=True))
    num_tokens = 64 + last
    experts_TK = torch.stack([torch.full((num_tokens,), 1), torch.arange(num_tokens) % 2 + 2], dim=1)
    arguments = inputs(num_tokens, 4, 2, 20, 24, torch.float32, "cpu", experts_TK)
    check_experts(arguments, halved)
    torch.testing.assert_close(experts_many(arguments, halved), experts_many(arguments, tiles))


def test_all_choices_may_fall_on_one_expert() -> None:
    arguments = list(inputs(40, 4, 1, 16, 16, torch.float32, "cpu"))
    arguments[1][2], arguments[2][2] = torch.randn(32, 16), torch.randn(16, 16)
    arguments[4] = torch.full((40, 1), 2)
    chosen: Inputs = tuple(arguments)  # type: ignore[assignment]
    check_experts(chosen, TILES)


@pytest.mark.usefixtures("rows_alike")
def test_a_token_s_result_changes_no_bit_with_its_neighbours() -> None:
    arguments = inputs(20, 3, 2, 16, 16, torch.float32, "cpu")
    x, gate_up, down, weights, experts, shared, gate = arguments
    order = torch.randperm(20)
    out = experts_many(arguments, TILES)
    reordered = (x[order], gate_up, down, weights[order], experts[order], shared[order], gate[order])
    shuffled = experts_many(reordered, TILES)
    assert torch.equal(shuffled, out[order])


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 4, 2), (33, 5, 3), (130, 1, 1)])
def test_choices_are_listed_by_expert(
    num_tokens: int, num_experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts_TK = torch.randint(num_experts, (num_tokens, top_k))
    check_list(experts_TK, num_experts)
    monkeypatch.setattr(moe_list_triton, "BLOCK_DIRECT", 16)
    check_list(experts_TK, num_experts)
    monkeypatch.setattr(moe_list_triton, "MAX_CHOICES_DIRECT", 0)
    for name, size in (("BLOCK_CHOICES", 32), ("BLOCK_COUNTS", 2), ("BLOCK_PEERS", 8)):
        monkeypatch.setattr(moe_list_triton, name, size)
    check_list(experts_TK, num_experts)
