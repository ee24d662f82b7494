"""Triton's Gated DeltaNet prefill against torch's: outputs, final states and the states at cuts, on any device.

Shape suffixes as in ``kernels/recurrences/gdn.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import Chunks, build_chunk_table, plan_chunks
from strandline.kernels.operation import Launches
from strandline.kernels.recurrences import gdn
from strandline.kernels.recurrences.gdn_prefill_numba import gdn_prefill as gdn_prefill_by_numba
from tests.bound import bound
from tests.cpu.kernels.recurrences.test_chunkwise import Prompt
from tests.cpu.kernels.recurrences.test_gdn import Layer

gdn_prefill_by_torch = bound(gdn.gdn_prefill)

if find_spec("triton") is not None:
    from strandline.kernels.recurrences import delta_rule_triton
    from strandline.kernels.recurrences.gdn_prefill_triton import gdn_prefill

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

FLOAT32_ERROR = 2e-5
"""``|out - ref| / |ref|``: both sum float32, a GPU multiplies with 21 bits, and the inverse multiplies the errors."""

BFLOAT16_ERROR = 1.5e-2
"""Operands of every product are rounded to 8 bits (the interpreter cuts them off), sums are float32."""

NUM_SLOTS = 24
POISON = float("nan")


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer."""

    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16


REAL = Shape(16, 32, 128, 128)


def make_layer(num_tokens: int, shape: Shape, dtype: torch.dtype, device: str) -> Layer:
    """Return random inputs as views of fused projections, with NaN around them; some heads decay fast, some hardly."""
    key_size, value_size = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    fused_TC = torch.randn(num_tokens + 1, 2 * key_size + value_size + 16, device=device).to(dtype)
    gates_TX = torch.randn(num_tokens + 1, 2 * shape.value_heads + 8, device=device).to(dtype)
    fused_TC[num_tokens:] = gates_TX[num_tokens:] = POISON
    q_TX, k_TX, v_TX, _ = fused_TC[:num_tokens].split([key_size, key_size, value_size, 16], dim=1)
    a_TH, b_TH, _ = gates_TX[:num_tokens].split([shape.value_heads, shape.value_heads, 8], dim=1)
    return Layer(
        q_TX.unflatten(1, (shape.key_heads, shape.key_dim)),
        k_TX.unflatten(1, (shape.key_heads, shape.key_dim)),
        v_TX.unflatten(1, (shape.value_heads, shape.value_dim)),
        a_TH,
        b_TH,
        torch.empty(shape.value_heads, device=device).uniform_(0.001, 4).log(),
        torch.randn(shape.value_heads, device=device),
    )


def make_arena(filled_slots: Sequence[int], shape: Shape, device: str) -> Tensor:
    """Return the strided view of one layer's states: NaN everywhere but in the filled slots."""
    state_shape = (shape.value_heads, shape.key_dim, shape.value_dim)
    size = shape.value_heads * shape.key_dim * shape.value_dim
    arena_SX = torch.full((NUM_SLOTS, size + 7 * 64), POISON, device=device)
    state_SHKV: Tensor = arena_SX[:, 64 : 64 + size].unflatten(1, state_shape)
    for slot in filled_slots:
        state_SHKV[slot] = torch.randn(state_shape, device=device)
    return state_SHKV


def check(
    layer: Layer, state_SHKV: Tensor, prompts: Sequence[Prompt], limit: float, *, is_short: bool = False
) -> float:
    """Assert outputs, every slot that is written and that no other is; return the larger error."""
    device = state_SHKV.device
    ranges, cuts = [(p.start, p.end) for p in prompts], [p.cuts for p in prompts]
    expected_SHKV = state_SHKV.cpu().clone()
    slots = Slots(torch.tensor([p.src for p in prompts]), torch.tensor([p.dst for p in prompts]))
    expected_THV = gdn_prefill_by_torch(layer.exact(), expected_SHKV, slots, build_chunk_table(ranges, cuts))
    # Freed memory that the kernels' scratch is likely to get.
    poison = [torch.full((layer.v_THV.numel() * n,), POISON, device=device) for n in (1, 2, 3, 4)]
    del poison
    chunks = replace(build_chunk_table(ranges, cuts, device), is_short=is_short)
    out_THV = gdn_prefill(layer, state_SHKV, Slots(*(x.to(device) for x in slots)), chunks)
    assert out_THV.dtype == layer.q_TGK.dtype
    out_error = float((out_THV.cpu().float() - expected_THV).norm() / expected_THV.norm())
    is_written = expected_SHKV.isfinite()
    assert torch.equal(state_SHKV.cpu().isfinite(), is_written)
    state_error = float(
        (state_SHKV.cpu() - expected_SHKV)[is_written].norm() / expected_SHKV[is_written].norm().clamp_min(1e-30)
    )
    assert out_error <= limit
    assert state_error <= limit
    return max(out_error, state_error)


def check_lengths(shape: Shape, device: str, dtype: torch.dtype, limit: float) -> None:
    for num_tokens in (1, 63, 65, 130):
        prompts = [Prompt(37, 37 + num_tokens, 2, 1, ((37 + (num_tokens + 1) // 2, 3),))]
        check(make_layer(num_tokens, shape, dtype, device), make_arena([2], shape, device), prompts, limit)


def check_mixed_batch(shape: Shape, device: str, dtype: torch.dtype, limit: float) -> None:
    prompts = [
        Prompt(37, 38, src=1, dst=1),
        Prompt(0, 130, src=0, dst=2, cuts=((1, 3), (64, 4), (65, 5), (130, 6))),
        Prompt(64, 67, src=7, dst=8, cuts=((66, 9),)),
        Prompt(63, 90, src=7, dst=0),
        Prompt(5, 69, src=7, dst=11, cuts=((64, 12), (68, 13))),
        Prompt(0, 1, src=0, dst=14, cuts=((1, 15),)),
    ]
    layer = make_layer(sum(p.end - p.start for p in prompts), shape, dtype, device)
    check(layer, make_arena([1, 7], shape, device), prompts, limit)


def check_verification(num_sequences: int, shape: Shape, device: str, dtype: torch.dtype, limit: float) -> None:
    """Sequences of a few tokens, most with a cut to the slot that they come from, across the chunks' grid or not."""
    prompts = [
        Prompt(60 + i, 61 + i + i % 5, 1 + i, 0, ((61 + i + i % 3, 1 + i),)) if i % 4 else Prompt(9, 10, 1 + i, 1 + i)
        for i in range(num_sequences)
    ]
    prompts = [p if not p.cuts or p.cuts[0][0] <= p.end else replace(p, cuts=((p.end, p.src),)) for p in prompts]
    layer = make_layer(sum(p.end - p.start for p in prompts), shape, dtype, device)._replace(max_beta=2)
    check(layer, make_arena(range(1, 1 + num_sequences), shape, device), prompts, limit, is_short=True)


def check_negative_eigenvalues(device: str, dtype: torch.dtype, limit: float) -> None:
    layer = make_layer(130, Shape(), dtype, device)._replace(max_beta=2)
    check(layer, make_arena([2], Shape(), device), [Prompt(37, 167, 2, 1, ((100, 3),))], limit)


def check_gates(gate: str, device: str) -> None:
    shape = Shape(2, 4)
    layer = make_layer(150, shape, torch.float32, device)
    a_TH = torch.full_like(layer.a_TH, {"no decay": -200.0, "strong": 20.0}.get(gate, 3e4))
    if gate == "one in ten":
        a_TH = layer.a_TH - 6.0
        a_TH[::10] = 3e4
    if gate == "infinite":
        a_TH = layer.a_TH.clone()
        a_TH[::7] = torch.inf
    layer = layer._replace(a_TH=a_TH, A_log_H=torch.tensor([2.7, 0.0, -3.0, 4.0], device=device))
    check(layer, make_arena([1], shape, device), [Prompt(5, 155, 1, 2, ((70, 3),))], FLOAT32_ERROR)


def check_repeated_keys(device: str, dtype: torch.dtype, limit: float, max_beta: int = 1) -> None:
    shape = Shape()
    layer = make_layer(130, shape, dtype, device)
    k_TGK = (layer.k_TGK[:1].float() + 1e-3 * layer.k_TGK.float()).to(dtype)
    b_TH, a_TH = torch.full_like(layer.b_TH, 20.0), layer.a_TH - 30.0
    layer = layer._replace(k_TGK=k_TGK, b_TH=b_TH, a_TH=a_TH, max_beta=max_beta)
    check(layer, make_arena([1], shape, device), [Prompt(0, 130, 1, 2)], limit)


def check_segments(
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
    max_segments: int,
    num_chunks: int = 16,
) -> None:
    """A long sequence beside short ones, which have segments as long as its."""
    division = delta_rule_triton.Division(10**6, min_chunks=1, max_segments=max_segments)
    monkeypatch.setattr(delta_rule_triton, "DIVISION", division)
    monkeypatch.setattr(delta_rule_triton, "NUM_SMS", 10**6)
    end = 64 * num_chunks - 20
    prompts = [
        Prompt(0, 130, src=0, dst=2, cuts=((1, 3), (64, 4), (65, 5), (130, 6))),
        Prompt(64, 67, src=7, dst=8, cuts=((66, 9),)),
        Prompt(5, end, src=7, dst=10, cuts=((64, 11), (100, 12), (end - 70, 13))),
        Prompt(63, 290, src=14, dst=14, cuts=((64 * 4, 15),)),
        Prompt(0, 1, src=0, dst=16),
    ]
    layer = make_layer(sum(p.end - p.start for p in prompts), shape, dtype, device)
    # Every other head hardly decays: what was before a segment is still in the states behind it.
    layer.A_log_H[::2] = -9.0
    layer = layer._replace(max_beta=1 + max_segments % 2)
    check(layer, make_arena([7, 14], shape, device), prompts, limit)


def check_padded_segments(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded step for one long prompt that has others, empty ones and empty chunks: as without padding."""
    monkeypatch.setattr(delta_rule_triton, "DIVISION", delta_rule_triton.Division(10**6, min_chunks=2, max_segments=4))
    monkeypatch.setattr(delta_rule_triton, "NUM_SMS", 10**6)
    layer = make_layer(64 * 12, Shape(), dtype, device)
    layer.A_log_H[::2] = -9.0
    ranges, cuts = [(0, 300), (5, 40), (10, 64 * 12 - 325)], [((70, 6),), ((40, 7),), ((64, 8), (200, 9))]
    plain = plan_chunks(ranges, cuts)
    num_chunks, room = len(plain.starts), len(plain.starts) + 10
    firsts = (*plain.first_chunks, *(num_chunks,) * 3)
    columns = [firsts, *((*column, *(0,) * (room - len(column))) for column in plain.columns[1:])]
    guess = Chunks((0, *(12,) * 6), *((1,) * room,) * 3)
    results = []
    for slots, table in (
        (([0, 1, 2], [3, 1, 4]), plain.with_tensors([torch.tensor(c, device=device) for c in plain.columns])),
        (
            ([0, 1, 2, 0, 0, 0], [3, 1, 4, 0, 0, 0]),
            guess.with_tensors([torch.tensor(c, device=device) for c in columns]),
        ),
    ):
        torch.manual_seed(7)
        state_SHKV = make_arena([1, 2], Shape(), device)
        assert delta_rule_triton.choose_launch(table, 2, 16).num_segments == 4
        places = Slots(torch.tensor(slots[0], device=device), torch.tensor(slots[1], device=device))
        out_THV = gdn_prefill(layer, state_SHKV, places, table)
        results.append((out_THV, state_SHKV.nan_to_num(9.0)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0].isfinite().all()


def check_nan_stays(device: str) -> None:
    shape = Shape()
    layer = make_layer(40, shape, torch.float32, device)
    for tokens in layer[:5]:
        tokens[10:25] = POISON
    slots = Slots(torch.tensor([0, 0, 0], device=device), torch.tensor([1, 2, 3], device=device))
    chunks = build_chunk_table([(0, 10), (0, 15), (0, 15)], [(), (), ()], device)
    out_THV = gdn_prefill(layer, make_arena([], shape, device), slots, chunks)
    assert out_THV[:10].isfinite().all()
    assert out_THV[10:25].isnan().all()
    assert out_THV[25:].isfinite().all()


GATES = ["no decay", "strong", "total", "one in ten", "infinite"]


def test_outputs_and_states_are_torchs_at_any_length() -> None:
    check_lengths(Shape(), "cpu", torch.float32, FLOAT32_ERROR)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_of_smaller_dtypes_are_rounded_where_stored(state_dtype: torch.dtype) -> None:
    state_SHKV = make_arena([2], Shape(), "cpu").to(state_dtype)
    layer = make_layer(141, Shape(), torch.float32, "cpu")
    check(layer, state_SHKV, [Prompt(37, 178, 2, 1, ((100, 3),))], torch.finfo(state_dtype).eps)


@pytest.mark.parametrize("shape", [Shape(), Shape(1, 3, 5, 7), Shape(2, 2, 24, 40)], ids=str)
def test_a_mixed_batch_treats_each_sequence_alone(shape: Shape) -> None:
    check_mixed_batch(shape, "cpu", torch.float32, FLOAT32_ERROR)


def test_bfloat16_costs_roundings_of_operands_only() -> None:
    check_mixed_batch(Shape(), "cpu", torch.bfloat16, BFLOAT16_ERROR)


@pytest.mark.parametrize("shape", [Shape(), Shape(1, 3, 5, 7), Shape(2, 2, 24, 40)], ids=str)
@pytest.mark.parametrize("max_segments", [2, 3, 7])
def test_sequences_in_segments_are_torchs(shape: Shape, max_segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_segments(shape, "cpu", torch.float32, FLOAT32_ERROR, monkeypatch, max_segments)


def test_segments_in_bfloat16_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    # States that hardly decay keep all roundings: undivided, the error is the same to three digits.
    check_segments(Shape(), "cpu", torch.bfloat16, 2 * BFLOAT16_ERROR, monkeypatch, 5)


def test_padded_steps_are_divided_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    check_padded_segments("cpu", torch.float32, monkeypatch)


@pytest.mark.parametrize(("key_dim", "num_runs"), [(128, 2), (130, 1)])
def test_sequences_of_wide_keys_are_not_divided(key_dim: int, num_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, grids = delta_rule_triton._advance_kernel, list[tuple[int, ...]]()

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(delta_rule_triton, "_advance_kernel", Recorded())
    shape = Shape(1, 1, key_dim, 16)
    monkeypatch.setattr(delta_rule_triton, "DIVISION", delta_rule_triton.DIVISION._replace(min_chunks=1))
    layer = make_layer(130, shape, torch.float32, "cpu")
    check(layer, make_arena([1], shape, "cpu"), [Prompt(0, 130, 1, 2)], FLOAT32_ERROR)
    assert len(grids) == num_runs


def test_deterministic_prefills_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule_triton, "DIVISION", delta_rule_triton.DIVISION._replace(min_chunks=1))
    layer, state_SHKV = make_layer(300, Shape(), torch.float32, "cpu"), make_arena([], Shape(), "cpu")
    layer.A_log_H[:] = -9.0

    def run(start: int, end: int, src: int, dst: int) -> Tensor:
        table = build_chunk_table([(start, end)], [()])
        slots = Slots(torch.tensor([src]), torch.tensor([dst]))
        return gdn_prefill(layer.rows(start, end), state_SHKV, slots, table, launches=Launches.FIXED)

    whole = run(0, 300, 0, 1)
    assert torch.equal(torch.cat([run(0, 64, 0, 2), run(64, 256, 2, 2), run(256, 300, 2, 2)]), whole)
    assert torch.equal(state_SHKV[2], state_SHKV[1])


@pytest.mark.parametrize("is_short", [False, True])
def test_outputs_are_written_where_they_are_wanted(is_short: bool) -> None:
    layer, table = make_layer(4, Shape(), torch.float32, "cpu"), build_chunk_table([(0, 4)], [()])
    arguments = (layer, make_arena([], Shape(), "cpu"), Slots(torch.tensor([0]), torch.tensor([0])))
    expected = gdn_prefill_by_torch(*arguments, table)
    for prefill in (
        gdn_prefill_by_torch,
        gdn_prefill,
        partial(gdn_prefill, launches=Launches.FIXED),
        gdn_prefill_by_numba,
    ):
        rows_THV = torch.full((9, *layer.v_THV.shape[1:]), POISON)
        out_THV = prefill(*arguments, replace(table, is_short=is_short), out_THV=rows_THV[3:7])
        assert out_THV.data_ptr() == rows_THV[3:].data_ptr()
        assert float((rows_THV[3:7] - expected).norm() / expected.norm()) <= FLOAT32_ERROR
        assert rows_THV[[0, 1, 2, 7, 8]].isnan().all()


def test_few_long_sequences_are_divided() -> None:
    def segments(lengths: Sequence[int], num_heads: int) -> int:
        chunks = build_chunk_table([(0, length) for length in lengths], [()] * len(lengths))
        return delta_rule_triton.choose_launch(chunks, num_heads, 128).num_segments

    assert [segments([8192], heads) for heads in (8, 16, 32, 48, 64)] == [8, 4, 2, 1, 1]
    assert [segments([length], 16) for length in (1024, 2048, 4096, 65536)] == [1, 3, 4, 4]
    assert segments([4096, 4096], 16) == segments([8000, 1, 50, 64], 16) == segments([4096, 2048], 16) == 4
    assert segments([4096, 4096], 32) == segments([4096, 1024], 48) == 1
    assert segments([64] * 128, 16) == segments([8000] + [1] * 32, 16) == segments([], 16) == 1


@pytest.mark.parametrize("gate", GATES)
def test_extreme_gates_neither_overflow_nor_lose_the_weak_ones(gate: str) -> None:
    check_gates(gate, "cpu")


@pytest.mark.parametrize("max_beta", [1, 2])
def test_repeated_keys_written_at_full_strength_stay_accurate(max_beta: int) -> None:
    check_repeated_keys("cpu", torch.float32, 1e-4, max_beta)


def test_negative_eigenvalues_are_torchs() -> None:
    check_negative_eigenvalues("cpu", torch.float32, FLOAT32_ERROR)


@pytest.mark.parametrize("shape", [Shape(), Shape(1, 3, 5, 7), Shape(2, 2, 24, 40)], ids=str)
@pytest.mark.parametrize("num_sequences", [1, 11])
def test_few_tokens_per_sequence_are_torchs(num_sequences: int, shape: Shape) -> None:
    check_verification(num_sequences, shape, "cpu", torch.float32, FLOAT32_ERROR)


def test_few_tokens_per_sequence_in_bfloat16() -> None:
    check_verification(11, Shape(), "cpu", torch.bfloat16, BFLOAT16_ERROR)


def test_nan_in_the_tokens_of_one_sequence_stays_there() -> None:
    check_nan_stays("cpu")
