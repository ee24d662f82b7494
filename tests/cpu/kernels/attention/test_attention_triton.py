"""Attention in Triton equals a plain softmax over the sequence's own tokens, and sees nothing else.

``check`` runs on any device; tests/gpu runs the same steps, and some at a model's shapes. The memory of every case is
NaN but for what its sequences own.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import log
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from strandline.kernels.attention.attention_splits import (
    DecodePlan,
    least_decode_programs,
    num_decode_splits,
    num_prefill_splits,
)
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.gpu import GPUS, standing_for
from strandline.kernels.operation import Launches
from tests.cpu.kernels.attention.test_attention import Case, decodes, make_case, with_sinks
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.attention import (
    attention_prefix_triton,
    attention_splits,
    attention_splits_triton,
    attention_triton,
)
from strandline.kernels.attention.tiles_triton import Tile

TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""``|out - ref| / |ref|``: scores of up to 30 in float32, as exponents; bfloat16 weights and results, of 8 bits."""

MIXED = [*decodes(400, 1, 70), (0, 20), (60, 140), (0, 1), (64, 129)]


def to_device(case: Case, device: str) -> Case:
    """Move what the kernels read; keep blocks as far apart as they were."""
    tensors = {
        field.name: value.to(device) if isinstance(value := getattr(case.batch, field.name), Tensor) else value
        for field in fields(AttentionBatch)
    }
    moved = (_moved(view, device) for view in (case.memory.k_BPGD, case.memory.v_BPGD))
    sinks_H = None if case.memory.sinks_H is None else case.memory.sinks_H.to(device)
    memory = KVMemory(*moved, case.memory.k_scale, case.memory.v_scale, sinks_H)
    return replace(case, q_THD=case.q_THD.to(device), memory=memory, batch=AttentionBatch(**tensors))


def _moved(view: Tensor, device: str) -> Tensor:
    apart = torch.full((len(view), view.stride(0)), torch.nan, dtype=view.dtype, device=device)
    moved = apart.as_strided(view.shape, view.stride())
    moved.copy_(view)
    return moved


def error(actual: Tensor, expected: Tensor) -> float:
    """Return ``|out - ref| / |ref|``."""
    difference = actual.double().cpu() - expected.double()
    return float(difference.norm() / expected.double().norm())


def check(case: Case, device: str, window_tokens: int | None = None, *, is_causal: bool = True) -> None:
    expected = case.oracle(window_tokens, is_causal=is_causal)
    moved = to_device(case, device)
    rows = (moved.q_THD, moved.memory, moved.batch, moved.num_decodes)
    with poisoned_memory():
        actual = attention_triton.paged_attention(*rows, scale=0.3, window_tokens=window_tokens, is_causal=is_causal)
    assert actual.shape == case.q_THD.shape
    assert actual.dtype == case.q_THD.dtype
    assert error(actual, expected) < TOLERANCES[case.q_THD.dtype]


def with_padding(case: Case, num_rows: int) -> Case:
    """Add decodes of an empty context behind the last, as a graph of a fixed size has them."""
    batch = case.batch
    padded = replace(
        batch,
        query_starts=(),
        context_lens=(),
        query_starts_N1=torch.cat([batch.query_starts_N1, batch.query_starts_N1[-1:].expand(num_rows)]),
        context_lens_N=torch.cat([batch.context_lens_N, torch.zeros(num_rows, dtype=torch.int64)]),
        block_table_NM=torch.cat(
            [batch.block_table_NM, torch.zeros(num_rows, batch.block_table_NM.shape[1], dtype=torch.int32)]
        ),
    )
    q_THD = torch.cat([case.q_THD, torch.randn(num_rows, *case.q_THD.shape[1:]).to(case.q_THD.dtype)])
    return replace(case, q_THD=q_THD, batch=padded, num_decodes=case.num_decodes + num_rows)


def check_padding(case: Case, device: str) -> None:
    num_real = case.num_decodes
    padded = to_device(with_padding(case, 3), device)
    with poisoned_memory():
        actual = attention_triton.paged_attention(
            padded.q_THD, padded.memory, padded.batch, padded.num_decodes, scale=0.3
        )
    assert error(actual[:num_real], case.oracle()) < TOLERANCES[case.q_THD.dtype]
    assert actual[num_real:].count_nonzero() == 0


def check_views(case: Case, device: str) -> None:
    """Queries as a part of wider rows; a block table of int64 whose rows lie apart."""
    table = case.batch.block_table_NM
    wide_table = torch.full((len(table), table.shape[1] + 3), 2**40)
    wide_table[:, : table.shape[1]] = table
    num_tokens, num_heads, head_dim = case.q_THD.shape
    wide_q = torch.full((num_tokens, num_heads, 2, head_dim), torch.nan, dtype=case.q_THD.dtype)
    wide_q[:, :, 0] = case.q_THD
    moved = to_device(case, device)
    batch = replace(moved.batch, block_table_NM=wide_table.to(device)[:, : table.shape[1]])
    actual = attention_triton.paged_attention(
        wide_q.to(device)[:, :, 0], moved.memory, batch, case.num_decodes, scale=0.3
    )
    assert actual.is_contiguous()
    assert error(actual, case.oracle()) < TOLERANCES[case.q_THD.dtype]


@pytest.mark.parametrize("window_tokens", [None, 1, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decodes_equal_the_oracle_and_see_no_nan(dtype: torch.dtype, window_tokens: int | None) -> None:
    case = make_case(decodes(1, 63, 64, 65, 130), 5, heads=(2, 3, 16), dtype=dtype, window_tokens=window_tokens)
    check(case, "cpu", window_tokens)


@pytest.mark.parametrize("window_tokens", [None, 1, 5, 64])
@pytest.mark.parametrize("ranges", [[(0, 1)], [(0, 63), (90, 128)], [(63, 65), (130, 150)]])
def test_prefills_equal_the_oracle_and_see_no_nan(ranges: list[tuple[int, int]], window_tokens: int | None) -> None:
    check(make_case(ranges, heads=(1, 2, 8), window_tokens=window_tokens), "cpu", window_tokens)


BLOCKS_OF_DRAFTS = [(129, 146), (0, 3), (62, 70), (300, 304)]
"""Sequences of an anchor and drafts."""


@pytest.mark.parametrize("most_rows", [None, 17])
@pytest.mark.parametrize("window_tokens", [None, 1, 5, 64])
def test_rows_that_see_to_the_end_equal_the_oracle(window_tokens: int | None, most_rows: int | None) -> None:
    case = make_case(BLOCKS_OF_DRAFTS, heads=(2, 2, 16), window_tokens=window_tokens)
    case = replace(case, batch=replace(case.batch, most_rows=most_rows))
    check(case, "cpu", window_tokens, is_causal=False)


def with_drafts(case: Case) -> Case:
    """Return a step as a CUDA graph is planned for it, in which sequences verify drafts."""
    most_rows = max(end - start for start, end in case.ranges)
    planned = tuple(8192 for _ in case.ranges)
    return replace(case, batch=replace(case.batch, most_rows=most_rows, context_lens=planned))


@pytest.mark.parametrize("window_tokens", [None, 1, 5, 64])
@pytest.mark.parametrize("scales", [None, (0.01, 0.02)])
def test_drafts_equal_the_oracle_and_see_no_nan(window_tokens: int | None, scales: tuple[float, float] | None) -> None:
    dtype = torch.float32 if scales is None else torch.bfloat16
    case = make_case(BLOCKS_OF_DRAFTS, heads=(2, 3, 16), dtype=dtype, scales=scales, window_tokens=window_tokens)
    check(with_drafts(case), "cpu", window_tokens)
    check(with_sinks(with_drafts(case)), "cpu", window_tokens)


@pytest.mark.parametrize("num_splits", [1, 3, 40])
def test_results_of_drafts_do_not_depend_on_the_splits(monkeypatch: pytest.MonkeyPatch, num_splits: int) -> None:
    monkeypatch.setattr(attention_splits, "num_decode_splits", lambda *_: num_splits)
    check(with_drafts(make_case(BLOCKS_OF_DRAFTS, heads=(1, 2, 8))), "cpu")


@pytest.mark.parametrize(("num_sequences", "head_dim", "splits"), [(1, 256, 64), (16, 256, 9), (64, 256, 1)])
def test_drafts_that_have_enough_bytes_under_way_are_not_split(
    monkeypatch: pytest.MonkeyPatch, num_sequences: int, head_dim: int, splits: int
) -> None:
    case = with_drafts(make_case([(0, 3)] * num_sequences, heads=(2, 1, head_dim), dtype=torch.bfloat16))
    found = Mock(return_value=1)
    monkeypatch.setattr(attention_splits, "num_decode_splits", found)
    check(case, "cpu")
    assert num_decode_splits(*found.call_args.args) == splits


@pytest.mark.parametrize("num_splits", [1, 3, 40])
def test_nan_keys_give_nan_however_contexts_are_split(monkeypatch: pytest.MonkeyPatch, num_splits: int) -> None:
    for name in ("num_decode_splits", "num_prefill_splits"):
        monkeypatch.setattr(attention_splits, name, lambda *_: num_splits)
    case = make_case([(2499, 2500), (1999, 2001)], 1, heads=(1, 2, 8))
    for sequence, key in enumerate((2490, 1500)):
        block = case.batch.block_table_NM[sequence, key // 64]
        case.memory.k_BPGD[block, key % 64] = torch.nan
    rows = (case.q_THD, case.memory, case.batch, case.num_decodes)
    assert attention_triton.paged_attention(*rows, scale=0.3).isnan().all()


@pytest.mark.parametrize("num_splits", [1, 32, 33, 70, 130])
def test_splits_without_keys_are_not_read(num_splits: int) -> None:
    partial_RSD, lse_RS = torch.randn(6, num_splits, 24), torch.randn(6, num_splits)
    lse_RS[1, num_splits // 3 :] = -torch.inf
    lse_RS[2, : num_splits - 1] = -torch.inf
    lse_RS[3] = -torch.inf
    lse_RS[4, 1::2] = -torch.inf
    weight_RS1 = (lse_RS * log(2)).softmax(-1).nan_to_num().unsqueeze(-1)
    expected_THD = (partial_RSD * weight_RS1).sum(1).view(3, 2, 24)
    lse_RS[5, 1:] = -torch.inf
    lse_RS[5, -1] = expected_THD[2, 1] = torch.nan
    partial_RSD[lse_RS == -torch.inf] = torch.nan
    out_THD = torch.full((4, 2, 24), torch.nan)
    attention_splits_triton.combine(partial_RSD, lse_RS, out_THD, 1, 3, num_splits)
    torch.testing.assert_close(out_THD[1:], expected_THD, equal_nan=True)
    assert out_THD[0].isnan().all()


@pytest.mark.parametrize("heads", [(1, 1, 4), (1, 5, 16), (2, 2, 12)])
def test_mixed_steps_keep_the_order_of_rows(heads: tuple[int, int, int]) -> None:
    check(make_case([*decodes(130, 1), (0, 20), (60, 70), (0, 1)], 2, heads=heads), "cpu")


def test_mixed_steps_in_bfloat16_stay_close_to_the_oracle() -> None:
    check(make_case(MIXED, 3, heads=(2, 8, 32), dtype=torch.bfloat16), "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.01, 0.02)])
def test_e4m3_memory_gives_what_its_values_give(scales: tuple[float, float], dtype: torch.dtype) -> None:
    check(make_case(MIXED, 3, heads=(2, 3, 16), dtype=dtype, scales=scales), "cpu")
    case = make_case([*decodes(130, 1), (60, 75)], 2, heads=(1, 2, 12), dtype=dtype, scales=scales, window_tokens=65)
    check(case, "cpu", 65)


@pytest.mark.parametrize("num_splits", [1, 2, 9])
def test_the_result_does_not_depend_on_the_splits(monkeypatch: pytest.MonkeyPatch, num_splits: int) -> None:
    monkeypatch.setattr(attention_triton, "plan_decodes", lambda *_, **__: DecodePlan(num_splits, 0))
    monkeypatch.setattr(attention_splits, "num_prefill_splits", lambda *_: num_splits)
    check(make_case([*decodes(200, 3), (60, 75)], 2, heads=(1, 2, 8)), "cpu")


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window_tokens", [None, 65])
def test_sinks_take_their_share_once_however_keys_are_split(
    monkeypatch: pytest.MonkeyPatch, num_splits: int, window_tokens: int | None
) -> None:
    monkeypatch.setattr(attention_triton, "plan_decodes", lambda *_, **__: DecodePlan(num_splits, 0))
    monkeypatch.setattr(attention_splits, "num_prefill_splits", lambda *_: num_splits)
    case = make_case([*decodes(200, 3), (60, 75)], 2, heads=(2, 3, 16), window_tokens=window_tokens)
    check(with_sinks(case), "cpu", window_tokens)


def test_many_sequences_find_their_tiles() -> None:
    check(make_case([(i, i + 1 + i % 3) for i in range(19)], heads=(1, 2, 4)), "cpu")


BEHIND_PREFIXES: Sequence[tuple[list[tuple[int, int]], int]] = [
    ([(150, 170)], 0),
    ([*decodes(70, 1), (10, 14), (130, 135), (64, 130), (128, 131), (0, 3)], 2),
]
"""Ranges and decodes of steps with sequences behind one or two whole blocks, alone and between others."""


def attend_prefix(
    q_THD: Tensor, memory: KVMemory, table_M: Tensor, num_blocks: int, scale_log2: float, span_blocks: int = 1
) -> tuple[Tensor, Tensor]:
    """Do what ``attention_prefix_triton.attend_prefix`` does."""
    heads_per_key = q_THD.shape[1] // memory.k_BPGD.shape[2]
    blocks = table_M[:num_blocks].long()
    k_LHD, v_LHD = (
        torch.stack([x[block].float() for block in blocks]).flatten(0, 1).repeat_interleave(heads_per_key, 1)
        for x in (memory.k_BPGD, memory.v_BPGD)
    )
    scores_THL = torch.einsum("thd,lhd->thl", q_THD.float(), k_LHD) * (scale_log2 * log(2))
    out_THD = torch.einsum("thl,lhd->thd", scores_THL.softmax(-1), v_LHD)
    return out_THD.contiguous(), (scores_THL.logsumexp(-1) / log(2)).contiguous()


def attend_blocks(
    q_THD: Tensor,
    memory: KVMemory,
    table_M: Tensor,
    num_blocks: int,
    scale_log2: float,
    result: tuple[Tensor, Tensor],
    *,
    is_continued: bool,
) -> None:
    """Do what ``attention_prefix_triton._attend_blocks`` does."""
    assert memory.k_BPGD.dtype == q_THD.dtype
    out_THD, lse_TH = attend_prefix(q_THD, memory, table_M, num_blocks, scale_log2)
    if is_continued:
        both_TH = torch.logaddexp2(lse_TH, result[1])
        out_THD *= (lse_TH - both_TH).exp2().unsqueeze(-1)
        out_THD += result[0] * (result[1] - both_TH).exp2().unsqueeze(-1)
        lse_TH = both_TH
    result[0].copy_(out_THD)
    result[1].copy_(lse_TH)


@pytest.mark.parametrize("span_blocks", [1, 2, 4, 9])
def test_prefixes_in_e4m3_are_attended_to_span_by_span(monkeypatch: pytest.MonkeyPatch, span_blocks: int) -> None:
    case = make_case([(260, 265)], heads=(2, 3, 24), dtype=torch.bfloat16, scales=(0.01, 0.02))
    arguments = (case.q_THD, case.memory, case.batch.block_table_NM[0], 4, 0.01)
    expected = attend_prefix(*arguments)
    monkeypatch.setattr(attention_prefix_triton, "_attend_blocks", attend_blocks)
    with poisoned_memory():
        actual = attention_prefix_triton.attend_prefix(*arguments, span_blocks)
    assert max(map(error, actual, expected)) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("elements", [512, 4096])
def test_widened_blocks_hold_the_same_numbers(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(attention_prefix_triton, "WIDEN_ELEMENTS", elements)
    memory = make_case([(190, 200)], heads=(2, 1, 24), dtype=torch.bfloat16, scales=(0.01, 0.02)).memory
    wide = KVMemory(*(torch.full((4, 64, 2, 24), torch.nan, dtype=torch.bfloat16) for _ in range(2)))
    table = torch.tensor([5, 1, 2], dtype=torch.int32)
    attention_prefix_triton.widen(memory, table, wide)
    for stored, copied in ((memory.k_BPGD, wide.k_BPGD), (memory.v_BPGD, wide.v_BPGD)):
        expected = torch.stack([stored[block].to(torch.bfloat16) for block in table])
        torch.testing.assert_close(copied[:3], expected, rtol=0, atol=0, equal_nan=True)
        assert copied[3].isnan().all()


@pytest.mark.parametrize(("ranges", "num_decodes"), BEHIND_PREFIXES)
@pytest.mark.parametrize(
    ("dtype", "scales"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, (0.01, 0.02))]
)
def test_prefills_start_from_the_result_of_the_prefix_kernel(
    monkeypatch: pytest.MonkeyPatch,
    ranges: list[tuple[int, int]],
    num_decodes: int,
    dtype: torch.dtype,
    scales: tuple[float, float] | None,
) -> None:
    monkeypatch.setattr(attention_triton, "supports", lambda *_: True)
    monkeypatch.setattr(attention_triton, "attend_prefix", attend_prefix)
    monkeypatch.setattr(attention_triton, "MIN_PREFIX_QUERIES", 3)
    monkeypatch.setattr(attention_triton, "MIN_PREFIX_BLOCKS", 1)
    case = make_case(ranges, num_decodes, heads=(2, 3, 16), dtype=dtype, scales=scales)
    check(case, "cpu")
    check(with_sinks(case), "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("factor", "is_failing", "warning"), [(1, False, None), (1.1, False, "are wrong"), (1, True, "OSError: no")]
)
def test_prefix_kernel_is_used_only_if_it_works(
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    factor: float,
    is_failing: bool,
    warning: str | None,
    dtype: torch.dtype,
) -> None:
    def attend(*arguments: Any) -> tuple[Tensor, Tensor]:
        if is_failing:
            raise OSError("no such instruction")
        out_THD, lse_TH = attend_prefix(*arguments)
        return factor * out_THD, lse_TH

    monkeypatch.setattr(attention_triton, "attend_prefix", attend)
    attention_triton._is_prefix_kernel_correct.cache_clear()
    assert attention_triton._is_prefix_kernel_correct(torch.device("cpu"), dtype, 2, 16, 3) == (warning is None)
    assert [str(w.message) for w in recwarn if warning is None or warning not in str(w.message)] == []
    attention_triton._is_prefix_kernel_correct.cache_clear()


def test_prefix_kernel_serves_long_prefills_behind_long_prefixes() -> None:
    batch = make_case([(0, 1), (2112, 3136), (2112, 3137), (2047, 3200), (2048, 3200), (0, 1100)]).batch
    blocks = [attention_triton._num_prefix_blocks(batch, sequence) for sequence in range(6)]
    assert blocks == [0, 0, 33, 0, 32, 0]


def test_missing_gluon_interface_is_logged_once_on_hopper(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention_prefix_triton, "IS_AVAILABLE", False)
    attention_prefix_triton._is_available.cache_clear()
    kv_BPGD = torch.empty(2, 4, 64, 1, 64, dtype=torch.bfloat16, device="meta")
    q_THD = torch.empty(1, 2, 64, dtype=torch.bfloat16, device="meta")
    for name in ("sm_90", "sm_80", "sm_90"):
        with standing_for(GPUS[name]):
            assert not attention_prefix_triton.supports(q_THD, KVMemory(*kv_BPGD))
    assert ["lacks the Gluon interface" in record.getMessage() for record in caplog.records] == [True]
    attention_prefix_triton._is_available.cache_clear()


def test_prefills_take_the_tile_that_fits() -> None:
    case = make_case([(0, 70)], heads=(2, 1, 256))
    memory = KVMemory(*(x.to("meta", torch.bfloat16) for x in (case.memory.k_BPGD, case.memory.v_BPGD)))
    q_THD = case.q_THD.to("meta", torch.bfloat16)
    call = attention_triton._Call(q_THD, memory, case.batch, torch.empty_like(q_THD), 0.3, None)
    tiles = {}
    for name in ("sm_80", "sm_86", "sm_90", "sm_120"):
        with standing_for(GPUS[name]):
            tiles[name] = call.prefill_tile
    large, small = attention_triton.PREFILL_TILE, attention_triton.SMALL_PREFILL_TILE
    assert tiles == {"sm_80": large, "sm_86": small, "sm_90": large, "sm_120": small}


def test_steps_captured_in_graphs_never_use_the_prefix_kernel() -> None:
    case = make_case([(2112, 3200), (4096, 6000)], heads=(1, 1, 16))
    padded = replace(case, batch=replace(case.batch, is_padded=True))
    call = attention_triton._Call(case.q_THD, case.memory, padded.batch, torch.empty_like(case.q_THD), 0.3, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_triton, "_has_prefix_kernel", lambda _: True)
        together, behind = Mock(), Mock()
        patch.setattr(attention_triton, "_attend_together", together)
        patch.setattr(attention_triton, "_attend_behind_prefix", behind)
        attention_triton._attend_prefills(call, 0, Launches.MEASURED)
        assert (together.call_count, behind.call_count) == (1, 0)
        attention_triton._attend_prefills(call._replace(batch=case.batch), 0, Launches.MEASURED)
        assert (together.call_count, behind.call_count) == (1, 2)


def test_padded_rows_of_a_graph_give_zeros() -> None:
    check_padding(make_case(decodes(70, 1), 2, heads=(2, 2, 8)), "cpu")


def test_views_of_wider_rows_are_read_in_place() -> None:
    check_views(make_case([*decodes(70, 3), (0, 9)], 2, heads=(2, 2, 8)), "cpu")


def test_keys_and_values_laid_out_differently_are_refused() -> None:
    case = make_case([(0, 3)])
    memory = KVMemory(case.memory.k_BPGD, case.memory.v_BPGD.contiguous())
    with pytest.raises(ValueError, match="strides of keys"):
        attention_triton.paged_attention(case.q_THD, memory, case.batch, 0, scale=0.3)


@pytest.mark.parametrize(
    ("num_programs", "num_blocks", "splits"),
    [(2, 18, 18), (2, 10_000, 128), (32, 72, 17), (512, 72, 2), (1024, 72, 1), (1024, 512, 4), (2, 0, 1)],
)
def test_few_decodes_are_split_and_long_ones_bounded(num_programs: int, num_blocks: int, splits: int) -> None:
    assert num_decode_splits(num_programs, num_blocks) == splits


@pytest.mark.parametrize(
    ("num_programs", "head_dim", "splits"),
    [(2, 256, 17), (64, 256, 7), (128, 256, 1), (128, 128, 4), (256, 128, 1), (256, 64, 2), (512, 64, 1)],
)
def test_decodes_that_have_enough_bytes_under_way_are_not_split(num_programs: int, head_dim: int, splits: int) -> None:
    tile = attention_triton.DECODE_TILE if head_dim > 128 else attention_triton.NARROW_DECODE_TILE
    bytes_each = tile.bytes_ahead(torch.empty(1, 64, 1, head_dim, dtype=torch.bfloat16))
    least_programs = least_decode_programs(num_programs, bytes_each, attention_triton.DECODE_PROGRAMS)
    assert num_decode_splits(num_programs, 17, least_programs) == splits


@pytest.mark.parametrize(
    ("heads", "tile"),
    [
        ((2, 4, 128), attention_triton.NARROW_DECODE_TILE),
        ((1, 16, 128), attention_triton.NARROW_DECODE_TILE),
        ((1, 17, 128), attention_triton.DECODE_TILE),
        ((4, 1, 129), attention_triton.DECODE_TILE),
    ],
)
def test_narrow_heads_have_a_tile_of_two_warps(heads: tuple[int, int, int], tile: Tile) -> None:
    case = make_case([(0, 1)], heads=heads)
    call = attention_triton._Call(case.q_THD.bfloat16(), case.memory, case.batch, case.q_THD, 1.0, None)
    assert attention_triton.decode_tile(call) == tile


@pytest.mark.parametrize(("num_programs", "num_tiles", "splits"), [(16, 66, 8), (1024, 128, 1), (256, 66, 1)])
def test_a_few_tiles_over_a_long_context_are_split(num_programs: int, num_tiles: int, splits: int) -> None:
    assert num_prefill_splits(num_programs, num_tiles) == splits


CASES: Sequence[tuple[list[tuple[int, int]], int, int | None]] = [
    (decodes(1, 63, 64, 65, 130, 1000), 6, None),
    (decodes(1, 63, 64, 65, 130, 1000), 6, 100),
    ([(0, 1), (0, 130), (64, 128), (63, 65), (70, 400)], 0, None),
    ([(0, 130), (64, 128), (70, 400)], 0, 65),
    (MIXED, 3, None),
    ([(800, 928)], 0, None),
]
"""Ranges, decodes and window of steps that tests/gpu runs too."""
