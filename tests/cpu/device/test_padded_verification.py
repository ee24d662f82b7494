"""Steps that verify drafts, padded: rows, logs and drafts are in their places; what agrees is counted on the device."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strandline.device.batch import block_tables
from strandline.device.padded_verification import (
    CHUNKS_OF_SEQUENCE,
    LastVerification,
    PaddedVerification,
    VerificationSize,
    single_rows,
)
from strandline.device.verification import Verdict
from strandline.device.verification_graphs import accept
from strandline.ids import BLOCK_TOKENS, NO_TOKEN, LogId, PendingToken, SlotId
from strandline.kernels.batch import ReplayBatch
from strandline.kernels.binding import reference_kernels
from strandline.kernels.replay import insert_logged, of_step
from strandline.kernels.step import locate_rows
from strandline.records.plan import SequencePlan
from tests.cpu.device.test_padded_step import sequence

DEPTH = 3


@st.composite
def verifications(draw: st.DrawFn) -> list[SequencePlan]:
    """Draw sequences of a certain token and drafts, behind logs of any length."""
    sequences = []
    for index in range(draw(st.integers(1, 6))):
        num_drafts, num_logged = draw(st.integers(0, DEPTH)), draw(st.integers(0, DEPTH))
        start = draw(st.integers(num_logged, 200))
        has_log = num_drafts or num_logged
        drawn = sequence(index, start, start + 1 + num_drafts, log=index + 1 if has_log else 0)
        own = drawn._replace(state_src=drawn.state_dst, num_drafts=num_drafts, num_logged=num_logged)
        sequences.append(own._replace(num_folded=1 + num_logged, next_drafts=0))
    return sequences


def as_planned_before(sequence: SequencePlan, num_accepted: int) -> SequencePlan:
    """Return a sequence as it is planned before it is known how many drafts of the step before are accepted."""
    return sequence._replace(
        start=sequence.start - num_accepted,
        end=sequence.end - num_accepted,
        token_ids=(7,) * len(sequence.token_ids),
        num_logged=0,
        pending=PendingToken.MAY_STOP,
    )


@given(verifications(), st.integers(0, 3), st.data())
def test_every_row_is_in_its_place(sequences: list[SequencePlan], num_spare: int, data: st.DataObject) -> None:
    assert all(sequence.is_verification for sequence in sequences)
    size = VerificationSize(len(sequences) + num_spare, max(plan.num_drafts for plan in sequences), DEPTH)
    assert size.has_room_for(sequences)
    padded = PaddedVerification(size)
    buffer_I = torch.zeros(padded.num_integers, dtype=torch.int64)
    # What the host does not know of some sequences lies on the device, in rows of any order.
    last = LastVerification(20, DEPTH, torch.device("cpu"))
    rows_before = data.draw(st.permutations(range(20)))
    planned, stop = list(sequences), 9999
    for index, plan in enumerate(sequences):
        if plan.log and plan.num_drafts and data.draw(st.booleans()):
            planned[index] = as_planned_before(plan, plan.num_logged)
            row = rows_before[index]
            last.num_accepted_P[row], last.tokens_P[row] = plan.num_logged, plan.token_ids[0]
            last.drafts_PD[row, : plan.num_drafts] = torch.tensor(plan.token_ids[1:])
            if data.draw(st.booleans()):
                # It has ended: nothing is stored.
                last.tokens_P[row] = data.draw(st.sampled_from([stop, NO_TOKEN]))
                token_ids = (max(int(last.tokens_P[row]), 0), *plan.token_ids[1:])
                sequences[index] = plan._replace(state_dst=SlotId(0), token_ids=token_ids)
    padded.fill(buffer_I.numpy(), planned)
    padded.part(buffer_I.numpy(), "source_row")[: len(sequences)] = rows_before[: len(sequences)]
    last.correct(padded, buffer_I, torch.tensor([[stop]]))
    kernels = reference_kernels([locate_rows, insert_logged])
    table_NM = torch.zeros(size.num_sequences + 1, size.num_blocks(300), dtype=torch.int32)
    tables = block_tables(sequences, [len(sequence.block_table) // 4 for sequence in sequences])
    table_NM[: len(sequences), : tables.shape[1]] = torch.from_numpy(tables)
    batch = padded.batch(buffer_I, table_NM, 300, kernels)
    attention, chunks, replay = batch.attention, batch.recurrent.chunks, batch.recurrent.replay
    assert isinstance(replay, ReplayBatch)
    starts = attention.query_starts_N1.tolist()
    assert (starts[0], starts[-1], starts) == (0, size.num_rows, sorted(starts))
    # The rows of a layer with one channel: its number, and what lies in the log.
    inputs_TX = torch.arange(size.num_rows, dtype=torch.float32)[:, None]
    log_JX = 1000 + torch.arange((1 + len(sequences)) * DEPTH, dtype=torch.float32)[:, None]
    before_JX = log_JX.clone()
    (rows_RX,) = insert_logged.reference(replay, (log_JX,), (inputs_TX,))
    assert len(rows_RX) == size.num_replayed_rows
    # What a recurrence gives: all rows of chunks, and what it leaves unwritten.
    is_computed_R = torch.zeros(len(rows_RX), dtype=torch.bool)
    for start, length in zip(chunks.starts_C.tolist(), chunks.lengths_C.tolist(), strict=True):
        is_computed_R[start : start + length] = True
    num_rows = sum(len(sequence.token_ids) for sequence in sequences)
    out_TX = of_step(replay, torch.where(is_computed_R[:, None], rows_RX, torch.nan))
    assert torch.equal(out_TX[:num_rows], inputs_TX[:num_rows])
    assert torch.equal(out_TX[num_rows:], torch.zeros_like(out_TX[num_rows:]))
    for index, plan in enumerate(sequences):
        rows = slice(starts[index], starts[index + 1])
        num_rows = plan.end - plan.start
        assert rows.stop - rows.start == num_rows
        assert batch.token_ids_T[rows].tolist() == list(plan.token_ids)
        assert batch.positions_T[rows].tolist() == list(range(plan.start, plan.end))
        assert (attention.write_blocks_T[rows] // 1000 == index).all()
        first, end = chunks.first_chunks_N1[index : index + 2].tolist()
        assert 0 < end - first <= CHUNKS_OF_SEQUENCE
        start = int(chunks.starts_C[first])
        lengths = chunks.lengths_C[first:end]
        assert int(lengths.sum()) == plan.num_logged + num_rows
        logged = before_JX[plan.log * DEPTH :][: plan.num_logged]
        own_RX = rows_RX[start : start + plan.num_logged + num_rows]
        assert torch.equal(own_RX, torch.cat((logged, inputs_TX[rows])))
        drafts = log_JX[plan.log * DEPTH :][: plan.num_drafts]
        if plan.state_dst:
            assert torch.equal(drafts, inputs_TX[rows][1:] if plan.num_drafts else drafts[:0])
        else:
            assert torch.equal(drafts, before_JX[plan.log * DEPTH :][: plan.num_drafts])
        cuts = {
            int(lengths[: place + 1].sum()): int(slot)
            for place, slot in enumerate(chunks.cut_slots_C[first:end])
            if slot
        }
        if plan.num_drafts:
            assert cuts == ({plan.num_logged + 1: plan.state_dst} if plan.state_dst else {})
            assert batch.recurrent.dst_N[index] == 0
        else:
            assert not cuts
            assert batch.recurrent.dst_N[index] == plan.state_dst
    spare = slice(len(sequences), None)
    assert not attention.write_blocks_T[starts[len(sequences)] :].any()
    assert not batch.recurrent.dst_N[spare].any()
    assert (chunks.first_chunks_N1[spare].diff() == 0).all()
    last_chunk = int(chunks.first_chunks_N1[-1])
    assert last_chunk < size.num_chunks
    assert not chunks.lengths_C[last_chunk:].any()


def test_all_rows_of_an_empty_step_are_the_fillers() -> None:
    padded = PaddedVerification(VerificationSize(3, 2, 4))
    buffer_I = torch.zeros(padded.num_integers, dtype=torch.int64)
    padded.fill(buffer_I.numpy(), [])
    batch = padded.batch(
        buffer_I, torch.zeros(4, 2, dtype=torch.int32), 128, reference_kernels([locate_rows, insert_logged])
    )
    assert batch.attention.query_starts_N1.tolist() == [0, 0, 0, 0, 9]
    assert batch.attention.context_lens_N.tolist() == [0, 0, 0, 9]
    assert batch.positions_T.tolist() == list(range(9))
    assert not batch.attention.write_blocks_T.any()
    assert batch.recurrent.chunks is not None
    assert not batch.recurrent.chunks.lengths_C.any()


def test_steps_that_are_larger_do_not_fit() -> None:
    plan = sequence(0, 70, 73, log=1)._replace(num_drafts=2, num_logged=0)
    assert VerificationSize(1, 2, 2).has_room_for([plan])
    assert not VerificationSize(1, 1, 2).has_room_for([plan])
    assert not VerificationSize(1, 2, 2).has_room_for([plan._replace(next_drafts=3)])
    assert not VerificationSize(1, 2, 2).has_room_for([plan, plan._replace(log=LogId(2))])


def test_prompts_resumed_sequences_and_cuts_are_no_verification() -> None:
    plan = sequence(0, 70, 71)._replace(state_src=sequence(0, 70, 71).state_dst)
    assert plan.is_verification
    assert not plan._replace(end=73).is_verification
    assert not plan._replace(is_sampled=False).is_verification
    assert not sequence(0, 70, 71).is_verification
    assert not plan._replace(cuts=((71, plan.state_dst),)).is_verification


@given(st.data())
def test_drafts_count_up_to_the_first_that_differs_or_stops(data: st.DataObject) -> None:
    drafts = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=DEPTH), min_size=1, max_size=4))
    stop = data.draw(st.sampled_from([NO_TOKEN, 2]))
    token_ids, chosen, verdicts, first_rows, expected = list[int](), list[int](), list[int](), list[int](), list[int]()
    for sequence_drafts in drafts:
        count = len(sequence_drafts)
        first_rows.append(len(token_ids))
        token_ids += [9, *sequence_drafts]
        own = data.draw(st.lists(st.integers(0, 3), min_size=count + 1, max_size=count + 1))
        said = [*data.draw(st.lists(st.sampled_from(Verdict), min_size=count, max_size=count)), Verdict.COMPARE]
        chosen += own
        verdicts += said
        num_accepted = 0
        for draft, token, verdict in zip(sequence_drafts, own, said, strict=False):
            is_right = {Verdict.COMPARE: draft == token, Verdict.ACCEPT: True, Verdict.REJECT: False}[verdict]
            if not is_right or draft == stop:
                break
            num_accepted += 1
        expected.append(num_accepted)
    tokens_T = torch.tensor([*chosen, 0])
    found = accept(
        tokens_T,
        torch.tensor([*token_ids, 0]),
        torch.tensor([*first_rows, len(token_ids)]),
        torch.tensor([*map(len, drafts), 0]),
        torch.full((len(drafts) + 1, 2), stop),
        torch.tensor([*verdicts, 0]),
        DEPTH,
    )
    assert found.tolist() == [*expected, 0]
    forced = np.array([verdict == Verdict.ACCEPT for verdict in verdicts])
    assert tokens_T[:-1][forced].tolist() == np.array([*token_ids[1:], 0])[forced].tolist()


@pytest.mark.parametrize("is_written", [True, False])
def test_single_rows_write_where_there_is_room(is_written: bool) -> None:
    plans = [sequence(index, 62 + index, 63 + index) for index in range(4)]
    padded = PaddedVerification(VerificationSize(4, DEPTH, DEPTH))
    buffer_I = torch.zeros(padded.num_integers, dtype=torch.int64)
    padded.fill(buffer_I.numpy(), plans)
    table_NM = torch.arange(10).to(torch.int32).view(5, 2)
    kernels = reference_kernels([locate_rows, insert_logged])
    batch = padded.batch(buffer_I, table_NM, 128, kernels)
    position_N = torch.tensor([62, 63, 64, 65])
    single = single_rows(batch, position_N, torch.full((4,), is_written), torch.arange(4), kernels)
    assert single.positions_T.tolist() == position_N.tolist()
    assert single.attention.context_lens_N.tolist() == (position_N + 1).tolist()
    blocks = table_NM[torch.arange(4), position_N // BLOCK_TOKENS] if is_written else torch.zeros(4)
    assert single.attention.write_blocks_T.tolist() == blocks.tolist()
