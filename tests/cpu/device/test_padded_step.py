"""Padded steps: real sequences are in their places, and the rest is filler or null."""

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strandline.device.batches.batch import NUM_PLANNED, HostBatch, build_host_batch
from strandline.device.batches.padded_step import PaddedStep, StepSize, fill_buffer
from strandline.device.batches.pending import PendingRows
from strandline.device.batches.prompt_room import MAX_CAPTURED_PREFIX, MAX_PROMPTS, SPARE_CHUNKS, PromptRoom
from strandline.device.steps.graph_sizes import graph_sizes, prompt_room, verification_sizes
from strandline.ids import BLOCK_TOKENS, BlockId, LogId, PendingToken, RequestId, SlotId
from strandline.kernels.binding import reference_kernels
from strandline.kernels.chunk_table import CHUNK_TOKENS
from strandline.kernels.step import SequenceColumns, locate_rows
from strandline.records.plan import MAX_STOP_IDS, SequencePlan

PLACES = {"token_ids", "positions", "write_blocks", "write_offsets"}


def sequence(
    index: int, start: int, end: int, cuts: tuple[int, ...] = (), *, log: int = 0, pending: int = 0
) -> SequencePlan:
    """Return a sequence whose ids all tell which it is."""
    num_blocks = -(-end // BLOCK_TOKENS)
    return SequencePlan(
        request_id=RequestId(f"{index}"),
        start=start,
        end=end,
        token_ids=tuple(range(100 * index + start, 100 * index + end)),
        block_table=array("i", (BlockId(1000 * index + block) for block in range(1, 1 + num_blocks))).tobytes(),
        kv_start=start,
        state_src=SlotId(10 * index + 1),
        state_dst=SlotId(10 * index + 2),
        cuts=tuple((position, SlotId(10 * index + 4)) for position in cuts),
        is_sampled=True,
        pending=PendingToken(pending),
        is_prefill=False,
        log=LogId(log),
        num_logged=log % 8,
        num_folded=0 if log else end - start,
    )


def places_of(host: HostBatch, size: StepSize) -> np.ndarray:
    """Return the index of each sequence in the padded step."""
    return np.arange(host.num_sequences) + (size.num_decodes - host.num_decodes) * (
        np.arange(host.num_sequences) >= host.num_decodes
    )


def padded(sequences: list[SequencePlan], num_decodes: int, size: StepSize) -> dict[str, np.ndarray]:
    """Return the parts of a filled buffer."""
    step = PaddedStep(size, torch.zeros(size.num_integers, dtype=torch.int64))
    sources = np.arange(1, 1 + len(sequences))
    host = build_host_batch(
        sequences, num_decodes, PendingRows(sources, np.repeat(sources[:, None], MAX_STOP_IDS, axis=1))
    )
    assert size.has_room_for(host)
    fill_buffer(size, step.buffer_I.numpy(), host)
    # What is left of an earlier step is not written to.
    table_NM = torch.full((size.num_sequences, size.num_blocks(512)), -1, dtype=torch.int32)
    table_NM[-1:] = 0
    for index, row in zip(places_of(host, size), torch.from_numpy(host.block_tables[0]), strict=True):
        table_NM[index, : len(row)] = row
    rows = step.batch([table_NM], 512, reference_kernels([locate_rows])).step
    places = {
        "positions": rows.positions_T,
        "write_blocks": rows.attention.write_blocks_T,
        "write_offsets": rows.attention.write_offsets_T,
    }
    return {name: part.numpy() for name, part in {**step.named, **places}.items()}


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[SequencePlan], int, StepSize]:
    """Draw decodes, prompts and a size that has room for them."""
    num_decodes = draw(st.integers(0, 4))
    sequences = []
    for index in range(num_decodes):
        start = draw(st.integers(0, 200))
        log, pending = draw(st.integers(0, 9)), draw(st.integers(0, 2))
        sequences.append(sequence(index, start, start + 1, log=log, pending=pending))
    for index in range(num_decodes, num_decodes + draw(st.integers(1, 6))):
        start = draw(st.integers(0, 200))
        end = start + draw(st.integers(1, 90))
        cuts = sorted(draw(st.sets(st.integers(start + 1, end), max_size=3)))
        sequences.append(sequence(index, start, end, tuple(cuts)))
    num_rows = sum(s.end - s.start for s in sequences[num_decodes:])
    padded_rows = draw(st.integers(num_rows, num_rows + 200))
    size = StepSize(num_decodes + draw(st.integers(0, 3)), padded_rows)
    return sequences, num_decodes, size


@given(steps())
def test_real_sequences_keep_their_values_and_padding_is_null(
    drawn: tuple[list[SequencePlan], int, StepSize],
) -> None:
    sequences, num_decodes, size = drawn
    found = padded(sequences, num_decodes, size)
    starts = found["query_starts"].tolist()
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, size.num_rows)
    is_free_row = np.ones(size.num_rows, dtype=bool)
    is_free = np.ones(size.num_sequences, dtype=bool)
    for index, plan in enumerate(sequences):
        position = index if index < num_decodes else size.num_decodes + index - num_decodes
        rows = slice(starts[position], starts[position + 1])
        is_free[position] = is_free_row[rows] = False
        positions = np.arange(plan.start, plan.end)
        assert found["token_ids"][rows].tolist() == list(plan.token_ids)
        assert found["positions"][rows].tolist() == positions.tolist()
        assert found["write_offsets"][rows].tolist() == (positions % BLOCK_TOKENS).tolist()
        assert (found["write_blocks"][rows] // 1000 == index).all()
        assert found["last_row"][position] == starts[position + 1] - 1
        assert found["source_row"][position] == index + 1
        assert found["stop_ids"][position].tolist() == [index + 1] * MAX_STOP_IDS
        for name in SequenceColumns._fields[:NUM_PLANNED]:
            assert found[name][position] == getattr(plan, name)
    for name in ("state_src", "state_dst", "log", "pending"):
        assert not found[name][is_free].any()
    assert not found["write_blocks"][is_free_row].any()
    assert not found["end"][: size.num_decodes][num_decodes:].any()
    assert found["end"][-1] == starts[-1] - starts[-2]


@given(steps())
def test_chunks_cover_all_rows_of_prompts_in_order(drawn: tuple[list[SequencePlan], int, StepSize]) -> None:
    sequences, num_decodes, size = drawn
    found = padded(sequences, num_decodes, size)
    starts = found["query_starts"][size.num_decodes :] - size.num_decodes
    firsts = found["first_chunks"]
    for prompt in range(size.num_prompts):
        chunks = slice(firsts[prompt], firsts[prompt + 1])
        ends = found["starts"][chunks] + found["lengths"][chunks]
        edges = [int(starts[prompt]), *ends.tolist()]
        assert edges == [*found["starts"][chunks].tolist(), int(starts[prompt + 1])]
        assert all(0 < length <= CHUNK_TOKENS for length in found["lengths"][chunks])
    assert not found["lengths"][firsts[-1] :].any()
    assert not found["cut_slots"][firsts[-2] :].any()
    for index, plan in enumerate(sequences[num_decodes:]):
        chunks = slice(firsts[index], firsts[index + 1])
        is_cut = found["cut_slots"][chunks] != 0
        ends = found["cut_rows"][chunks][is_cut] + 1 - size.num_decodes - starts[index] + plan.start
        pairs = zip(ends.tolist(), found["cut_slots"][chunks][is_cut].tolist(), strict=True)
        assert tuple(pairs) == plan.cuts


def test_decodes_fit_only_sizes_without_prompts() -> None:
    decodes = build_host_batch([sequence(index, 5, 6) for index in range(3)], 3)
    prompts = build_host_batch([sequence(0, 5, 6), sequence(1, 0, 10)], 1)
    assert StepSize(3).has_room_for(decodes)
    assert not StepSize(2).has_room_for(decodes)
    assert not StepSize(4, 64).has_room_for(decodes)
    assert StepSize(1, 64).has_room_for(prompts)
    assert not StepSize(2).has_room_for(prompts)
    assert not StepSize(0, 64).has_room_for(prompts)
    assert not StepSize(1, 9).has_room_for(prompts)


def test_too_many_prompts_or_chunks_do_not_fit() -> None:
    many = [sequence(index, 0, 1) for index in range(MAX_PROMPTS + 1)]
    assert StepSize(0, 64).has_room_for(build_host_batch(many[:-1], 0))
    assert not StepSize(0, 64).has_room_for(build_host_batch(many, 0))
    cut = [sequence(0, 0, 64, tuple(range(1, 65)))]
    assert not StepSize(0, 64).has_room_for(build_host_batch(cut, 0))
    cut = [sequence(0, 0, 64, tuple(range(1, SPARE_CHUNKS)))]
    assert StepSize(0, 64).has_room_for(build_host_batch(cut, 0))


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(1, 64), (8, 128), (256, 8192), (100, 100)])
def test_graph_sizes_are_distinct_and_cover_all_decodes(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    sizes = graph_sizes(max_num_seqs, max_num_batched_tokens)
    assert len(set(sizes)) == len(sizes)
    assert max(size.num_decodes for size in sizes if not size.num_prompt_rows) == max_num_seqs
    beside = {size.num_decodes for size in sizes if size.num_prompt_rows}
    assert {0, max_num_seqs} <= beside
    assert max(beside) == max_num_seqs
    assert all(size.num_prompt_rows <= max(64, 2 * max_num_batched_tokens) for size in sizes)


def test_steps_of_thousands_of_tokens_are_captured_beside_any_decodes() -> None:
    many = [size for size in graph_sizes(256, 8192) if size.num_prompt_rows > 1024]
    assert {(size.num_decodes, size.num_prompt_rows) for size in many} == {
        (count, num_rows) for count in (16, 256) for num_rows in (1536, 2048, 3072, 4096)
    }
    assert {size.num_decodes for size in graph_sizes(8, 8192) if size.num_prompt_rows > 1024} == {8}
    assert max(size.num_prompt_rows for size in graph_sizes(256, 8192, num_ranks=2)) == 8192
    assert max(size.num_prompt_rows for size in graph_sizes(256, 2048, num_ranks=2)) == 3072


def test_steps_that_verify_drafts_have_room_for_prompts() -> None:
    plain = graph_sizes(256, 8192)
    sizes = verification_sizes(plain, 3)
    assert len(set(sizes)) == len(sizes)
    assert {(size.num_decodes, size.draft_tokens) for size in sizes if not size.num_prompt_rows} == {
        (size.num_decodes, depth) for size in plain if not size.num_prompt_rows for depth in (1, 2, 3)
    }
    mixed = [size for size in sizes if size.num_prompt_rows]
    assert {(size.num_decodes, size.num_prompt_rows) for size in mixed} == {
        (size.num_decodes, size.num_prompt_rows) for size in plain if size.num_decodes and size.num_prompt_rows
    }
    assert all(size.draft_tokens == size.log_tokens == 3 for size in mixed)
    assert prompt_room(sizes) == (4096, MAX_PROMPTS)
    assert prompt_room(plain) == (0, 0)


def test_prompts_with_drafts_have_room_where_a_graph_has() -> None:
    room, long = PromptRoom(2048, 3), MAX_CAPTURED_PREFIX + 1
    assert room.has_room_for([])
    assert room.has_room_for([(0, 1024), (9, 1033)])
    assert not room.has_room_for([(0, 1024), (9, 1034)])
    assert not room.has_room_for([(0, 1), (0, 1), (0, 1), (0, 1)])
    assert not room.has_room_for([(0, 1), (7, 7)])
    assert room.has_room_for([(long, long + 1024)])
    assert not room.has_room_for([(long, long + 1024), (0, 1)])
    assert PromptRoom().has_room_for([])
    assert not PromptRoom().has_room_for([(0, 1)])
