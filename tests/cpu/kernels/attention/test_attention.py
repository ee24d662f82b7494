"""Attention over blocks equals a plain softmax over the sequence's own tokens, and sees nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.arena import NAN_BYTE, ArenaTensors
from strandline.kernels.attention import attention
from strandline.kernels.attention.qkv import to_e4m3
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.specs import ModelSpec, kv_spec
from tests.bound import bound

paged_attention = bound(attention.paged_attention)

pytestmark = pytest.mark.usefixtures("each_version")

FLOAT32_TOLERANCE = 2e-6
"""Sums of at most 1,000 products of numbers around 1, divided by their own scale."""


@dataclass
class Case:
    """A step whose memory is NaN but for what its sequences own; keys and values of each sequence, in order."""

    q_THD: Tensor
    memory: KVMemory
    batch: AttentionBatch
    keys: list[Tensor]
    values: list[Tensor]
    ranges: list[tuple[int, int]]
    num_decodes: int

    def run(self, window_tokens: int | None = None, *, is_causal: bool = True) -> Tensor:
        rows = (self.q_THD, self.memory, self.batch, self.num_decodes)
        return paged_attention(*rows, scale=0.3, window_tokens=window_tokens, is_causal=is_causal)

    def alone(self, i: int) -> "Case":
        """Return the step of one of the decodes, on the same memory."""
        length = self.batch.context_lens[i]
        batch = replace(
            self.batch,
            query_starts=(0, 1),
            context_lens=(length,),
            query_starts_N1=torch.tensor([0, 1]),
            context_lens_N=torch.tensor([length]),
            block_table_NM=self.batch.block_table_NM[i : i + 1],
            gathers={},
        )
        only = slice(i, i + 1)
        return Case(self.q_THD[only], self.memory, batch, self.keys[only], self.values[only], self.ranges[only], 1)

    def oracle(self, window_tokens: int | None = None, *, is_causal: bool = True) -> Tensor:
        """Attend one token at a time."""
        rows = []
        q_rows = iter(self.q_THD.float())
        heads_per_key = self.q_THD.shape[1] // self.keys[0].shape[1]
        for (start, end), k, v in zip(self.ranges, self.keys, self.values, strict=True):
            k_LHD = k.float().repeat_interleave(heads_per_key, 1)
            v_LHD = v.float().repeat_interleave(heads_per_key, 1)
            for position in range(start, end):
                first = 0 if window_tokens is None else max(0, position - window_tokens + 1)
                seen = slice(first, position + 1 if is_causal else end)
                scores_HL = torch.einsum("hd,lhd->hl", next(q_rows), k_LHD[seen]) * 0.3
                if self.memory.sinks_H is not None:
                    scores_HL = torch.cat((scores_HL, self.memory.sinks_H.unsqueeze(-1)), dim=-1)
                weights_HL = scores_HL.softmax(-1)[:, : len(k_LHD[seen])]
                rows.append(torch.einsum("hl,lhd->hd", weights_HL, v_LHD[seen]))
        return torch.stack(rows)


def make_case(
    ranges: Sequence[tuple[int, int]],
    num_decodes: int = 0,
    *,
    heads: tuple[int, int, int] = (2, 3, 8),
    dtype: torch.dtype = torch.float32,
    window_tokens: int | None = None,
    scales: tuple[float, float] | None = None,
) -> Case:
    """Build a step of sequences with new tokens ``[start, end)``; with a window, what lies before it is NaN too.

    Args:
        heads: key/value heads, query heads per key/value head, head dim.
        scales: scales of keys and of values, which are kept in e4m3 then; None: they are kept in ``dtype``.
    """
    num_kv_heads, heads_per_key, head_dim = heads
    kept_dtype = dtype if scales is None else torch.float8_e4m3fn
    layer = kv_spec(num_kv_heads, head_dim, str(kept_dtype).removeprefix("torch."))
    num_blocks = sum(-(-end // BLOCK_TOKENS) for _, end in ranges) + 4
    arena = ArenaTensors(ModelSpec((layer, layer), 4, "float32"), num_blocks)
    arena.bytes.fill_(NAN_BYTE)
    streams = arena.layers[1].streams
    memory = KVMemory(streams["key"], streams["value"], *scales or (1.0, 1.0))
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    width = max(-(-end // BLOCK_TOKENS) for _, end in ranges) + 1
    table = torch.zeros(len(ranges), width, dtype=torch.int32)
    keys, values, query_starts = [], [], [0]
    for i, (start, end) in enumerate(ranges):
        for column in range(-(-end // BLOCK_TOKENS)):
            table[i, column] = free.pop()
        k, v = torch.randn(2, end, num_kv_heads, head_dim).to(dtype)
        k_kept, v_kept = k, v
        if scales is not None:
            k_kept, v_kept = (to_e4m3(x, scale) for x, scale in zip((k, v), scales, strict=True))
            k, v = (x.float() * scale for x, scale in zip((k_kept, v_kept), scales, strict=True))
        first = 0 if window_tokens is None else max(0, start - window_tokens + 1)
        for position in range(first, end):
            block = int(table[i, position // BLOCK_TOKENS])
            memory.k_BPGD[block, position % BLOCK_TOKENS].copy_(k_kept[position])
            memory.v_BPGD[block, position % BLOCK_TOKENS].copy_(v_kept[position])
        table[i, : first // BLOCK_TOKENS] = 0
        keys.append(k)
        values.append(v)
        query_starts.append(query_starts[-1] + end - start)
    empty = torch.zeros(0, dtype=torch.int64)
    batch = AttentionBatch(
        query_starts=tuple(query_starts),
        context_lens=tuple(end for _, end in ranges),
        query_starts_N1=torch.tensor(query_starts),
        context_lens_N=torch.tensor([end for _, end in ranges]),
        block_table_NM=table,
        write_blocks_T=empty,
        write_offsets_T=empty,
        is_all_written=False,
    )
    q_THD = torch.randn(query_starts[-1], num_kv_heads * heads_per_key, head_dim).to(dtype)
    return Case(q_THD, memory, batch, keys, values, list(ranges), num_decodes)


def with_sinks(case: Case) -> Case:
    """Add sinks from far below to far above the other scores."""
    sinks_H = torch.linspace(-60, 60, case.q_THD.shape[1]).roll(1)
    return replace(case, memory=replace(case.memory, sinks_H=sinks_H))


def decodes(*context_lens: int) -> list[tuple[int, int]]:
    return [(length - 1, length) for length in context_lens]


def assert_right(case: Case, window_tokens: int | None = None, tolerance: float = FLOAT32_TOLERANCE) -> None:
    torch.testing.assert_close(case.run(window_tokens).float(), case.oracle(window_tokens), rtol=0, atol=tolerance)


LENGTHS = [(1,), (64,), (65,), (7, 7, 7), (1, 63, 64, 65, 128, 129), (700, 3, 641, 2, 300, 1), (512, 1030, 513)]


@pytest.mark.parametrize("context_lens", LENGTHS)
def test_decodes_equal_the_oracle_and_see_no_nan(context_lens: tuple[int, ...]) -> None:
    assert_right(make_case(decodes(*context_lens), len(context_lens)))


@pytest.mark.parametrize("window_tokens", [1, 5, 64, 65, 1000])
@pytest.mark.parametrize("context_lens", LENGTHS)
def test_decodes_with_a_window_read_nothing_before_it(context_lens: tuple[int, ...], window_tokens: int) -> None:
    case = make_case(decodes(*context_lens), len(context_lens), window_tokens=window_tokens)
    assert_right(case, window_tokens)


RANGES = [(0, 1), (0, 63), (0, 64), (0, 129), (5, 6), (64, 128), (63, 65), (70, 400), (1, 300), (640, 670)]


@pytest.mark.parametrize("tokens", RANGES)
def test_prefills_equal_the_oracle_and_see_no_nan(tokens: tuple[int, int]) -> None:
    assert_right(make_case([tokens]))


@pytest.mark.parametrize("window_tokens", [1, 5, 64, 1000])
@pytest.mark.parametrize("tokens", RANGES)
def test_prefills_with_a_window_read_nothing_before_it(tokens: tuple[int, int], window_tokens: int) -> None:
    assert_right(make_case([tokens], window_tokens=window_tokens), window_tokens)


@pytest.mark.parametrize("heads", [(1, 1, 4), (1, 5, 16), (3, 1, 8), (4, 2, 12)])
def test_mixed_steps_keep_the_order_of_rows(heads: tuple[int, int, int]) -> None:
    assert_right(make_case([*decodes(400, 1, 70), (0, 20), (60, 70), (0, 1)], 3, heads=heads))


def test_bfloat16_stays_close_to_the_oracle() -> None:
    # 8 bits of mantissa on values of up to 4: half a unit in the last place is 0.008.
    ranges = [*decodes(400, 1, 1100), (0, 300), (60, 70)]
    assert_right(make_case(ranges, 3, dtype=torch.bfloat16), tolerance=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window_tokens", [None, 600])
def test_a_decodes_bits_depend_on_nothing_else_in_the_step(
    each_version: str, dtype: torch.dtype, window_tokens: int | None
) -> None:
    if each_version == "torch":
        pytest.skip("the number of threads changes torch's bits")
    case = make_case(decodes(1300, 70, 1, 513, 640), 5, dtype=dtype, window_tokens=window_tokens)
    together = case.run(window_tokens)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        by_two = [case.alone(i).run(window_tokens) for i in range(5)]
        torch.set_num_threads(1)
        by_one = [case.alone(i).run(window_tokens) for i in range(5)]
    finally:
        torch.set_num_threads(num_threads)
    assert together.equal(torch.cat(by_two))
    assert together.equal(torch.cat(by_one))


def test_decodes_in_bfloat16_are_rounded_once(each_version: str) -> None:
    if each_version == "torch":
        pytest.skip("torch rounds weights too")
    case = make_case(decodes(400, 1, 1100), 3, heads=(2, 5, 16), dtype=torch.bfloat16)
    expected = case.oracle()
    assert ((case.run().float() - expected).abs() <= expected.abs() * 2**-8 + FLOAT32_TOLERANCE).all()


@pytest.mark.parametrize("window_tokens", [None, 90])
def test_prefills_without_room_for_their_scores_equal_the_oracle(
    each_version: str, monkeypatch: pytest.MonkeyPatch, window_tokens: int | None
) -> None:
    if each_version == "torch":
        pytest.skip("torch keeps no scores")
    monkeypatch.setattr("strandline.kernels.attention.attention_numba.SCORE_BYTES", 4 * 6 * 40 * 200)
    assert_right(make_case([(0, 150), (100, 400)], window_tokens=window_tokens), window_tokens)


SCALES = [(1.0, 1.0), (0.01, 0.02)]
"""Scales of keys and of values. With the second, numbers of 4 and more are limited."""


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("window_tokens", [None, 65])
@pytest.mark.parametrize("heads", [(2, 3, 8), (1, 5, 32), (4, 2, 12)])
def test_e4m3_memory_gives_what_its_values_give(
    heads: tuple[int, int, int], window_tokens: int | None, scales: tuple[float, float]
) -> None:
    ranges = [*decodes(400, 1, 70, 1030), (0, 20), (60, 400), (0, 1)]
    case = make_case(ranges, 4, heads=heads, window_tokens=window_tokens, scales=scales)
    assert_right(case, window_tokens, tolerance=2 * FLOAT32_TOLERANCE)


@pytest.mark.parametrize("scales", SCALES)
def test_e4m3_memory_behind_bfloat16_stays_close(scales: tuple[float, float]) -> None:
    ranges = [*decodes(400, 1, 1100), (0, 300), (60, 70)]
    assert_right(make_case(ranges, 3, dtype=torch.bfloat16, scales=scales), tolerance=0.02)


def test_e4m3_memory_stays_within_its_precision() -> None:
    # Three places behind the point: values differ by up to 1/16, scores by up to 0.3, a sum of 8 products, less.
    torch.manual_seed(0)
    exact = make_case([*decodes(400, 1, 70), (0, 200)], 3)
    torch.manual_seed(0)
    rounded = make_case([*decodes(400, 1, 70), (0, 200)], 3, scales=(1.0, 1.0))
    difference = (rounded.run() - exact.run()).norm() / exact.run().norm()
    assert 0.005 < difference < 0.05


@pytest.mark.parametrize("window_tokens", [None, 1, 9, 64, 300])
def test_rows_that_see_to_the_end_equal_the_oracle(window_tokens: int | None) -> None:
    ranges = [*decodes(70, 3), (130, 147), (0, 5), (60, 66), (10, 400)]
    case = make_case(ranges, 2, window_tokens=window_tokens)
    found, expected = (function(window_tokens, is_causal=False) for function in (case.run, case.oracle))
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("window_tokens", [None, 5, 600])
def test_sinks_take_their_share_of_each_head(window_tokens: int | None) -> None:
    ranges = [*decodes(400, 1, 1100, 70), (0, 20), (0, 300), (60, 70), (0, 1), (640, 700)]
    case = with_sinks(make_case(ranges, 4, heads=(2, 3, 8), window_tokens=window_tokens))
    assert_right(case, window_tokens)


def test_sinks_are_not_scaled_with_keys() -> None:
    case = make_case([*decodes(400, 70), (0, 300)], 2, dtype=torch.bfloat16, scales=(0.5, 2.0))
    assert_right(with_sinks(case), tolerance=0.04)
