"""Deterministic, a kernel's result for a token has the same bits in any step that computes it. No tolerances."""

from dataclasses import replace

import pytest
import torch

from strandline.kernels.attention.attention_triton import paged_attention
from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import build_chunk_table
from strandline.kernels.operation import Launches
from strandline.kernels.recurrences.gdn_decode_triton import gdn_decode
from strandline.kernels.recurrences.gdn_prefill_triton import gdn_prefill
from strandline.kernels.rowwise.norm_triton import rms_norm_gated, rms_norm_zero_centered
from tests.cpu.kernels.attention.test_attention import Case, decodes, make_case
from tests.cpu.kernels.attention.test_attention_triton import to_device
from tests.cpu.kernels.recurrences.test_gdn_prefill_triton import REAL, Shape, make_arena, make_layer

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def attend(case: Case) -> torch.Tensor:
    arguments = (case.q_THD, case.memory, case.batch, case.num_decodes)
    return paged_attention(*arguments, scale=0.3, launches=Launches.FIXED)


def part(case: Case, index: int, start: int, end: int, *, is_decode: bool) -> Case:
    """Return the step that computes tokens ``[start, end)`` of one sequence alone."""
    first = case.batch.query_starts[index] + start - case.ranges[index][0]
    device = case.q_THD.device
    batch = replace(
        case.batch,
        query_starts=(0, end - start),
        context_lens=(end,),
        query_starts_N1=torch.tensor([0, end - start], device=device),
        context_lens_N=torch.tensor([end], device=device),
        block_table_NM=case.batch.block_table_NM[index : index + 1, : -(-end // 64)].contiguous(),
    )
    return replace(case, q_THD=case.q_THD[first : first + end - start], batch=batch, num_decodes=int(is_decode))


@DTYPES
@pytest.mark.parametrize("heads", [(4, 4, 256), (2, 3, 64), (1, 5, 16)], ids=str)
def test_attention_of_a_token_does_not_depend_on_the_step(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    ranges = [*decodes(1, 64, 65, 1100, 2500), (0, 300), (128, 700), (0, 1)]
    case = to_device(make_case(ranges, 5, heads=heads, dtype=dtype), "cuda")
    whole = attend(case)
    for index, (start, end) in enumerate(ranges):
        rows = whole[case.batch.query_starts[index] :][: end - start]
        assert torch.equal(attend(part(case, index, start, end, is_decode=index < 5)), rows), (start, end)
        for cut in range(start // 64 * 64 + 64, end, 192):
            for a, b in ((start, cut), (cut, end)):
                again = attend(part(case, index, a, b, is_decode=False))
                if index >= 5:
                    assert torch.equal(again, rows[a - start : b - start]), (start, end, a, b)


@DTYPES
@pytest.mark.parametrize("shape", [REAL, Shape(4, 8, 64, 64), Shape(2, 4, 8, 8)], ids=str)
def test_prompt_in_steps_on_the_grid_is_bitwise_equal(shape: Shape, dtype: torch.dtype) -> None:
    layer, num_tokens = make_layer(1000, shape, dtype, "cuda"), 700
    state = make_arena([], shape, "cuda")

    def run(start: int, end: int, src: int, dst: int, cuts: tuple[tuple[int, int], ...] = ()) -> torch.Tensor:
        table = build_chunk_table([(start, end)], [cuts], "cuda")
        slots = Slots(torch.tensor([src], device="cuda"), torch.tensor([dst], device="cuda"))
        return gdn_prefill(layer.rows(start, end), state, slots, table, launches=Launches.FIXED)

    whole = run(0, num_tokens, 0, 1, ((64, 2), (640, 3)))
    for cut, slot in ((64, 2), (640, 3)):
        assert torch.equal(run(0, cut, 0, 4), whole[:cut])
        assert torch.equal(state[4], state[slot])
        assert torch.equal(run(cut, num_tokens, slot, 5), whole[cut:])
        assert torch.equal(state[5], state[1])
    both = build_chunk_table([(0, num_tokens), (0, 300)], [(), ()], "cuda")
    slots = Slots(torch.tensor([0, 0], device="cuda"), torch.tensor([6, 7], device="cuda"))
    beside = gdn_prefill(layer, state, slots, both, launches=Launches.FIXED)
    assert torch.equal(beside[:num_tokens], whole)
    assert torch.equal(state[6], state[1])


@DTYPES
def test_a_decoded_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    layer = make_layer(40, REAL, dtype, "cuda")
    state = make_arena([1], REAL, "cuda")

    def run(start: int, end: int, dst: int) -> torch.Tensor:
        src_N = torch.ones(end - start, dtype=torch.int64, device="cuda")
        slots = Slots(src_N, torch.arange(dst, dst + end - start).cuda())
        return gdn_decode(layer.rows(start, end), state, slots, launches=Launches.FIXED)

    whole = run(0, 20, 2)
    expected = state[2 + 7].clone()
    assert torch.equal(run(7, 8, 23), whole[7:8])
    assert torch.equal(state[23], expected)


@DTYPES
@pytest.mark.parametrize("size", [32, 256, 2560])
def test_a_normalised_row_does_not_depend_on_its_neighbours(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(1000, size, device="cuda", dtype=dtype)
    weight = torch.randn(size, device="cuda", dtype=dtype)
    heads, gate = torch.randn(2, 300, 32, 128, device="cuda", dtype=dtype)
    head_weight = torch.randn(128, device="cuda", dtype=dtype)
    whole = rms_norm_zero_centered(x, weight, 1e-6)
    gated = rms_norm_gated(heads, gate, head_weight, 1e-6)
    for start, end in ((0, 1), (5, 6), (3, 20), (16, 32)):
        assert torch.equal(rms_norm_zero_centered(x[start:end], weight, 1e-6), whole[start:end])
        assert torch.equal(rms_norm_gated(heads[start:end], gate[start:end], head_weight, 1e-6), gated[start:end])
