"""Padded steps that verify drafts: rows, logs and drafts are where they belong; agreement is counted on the device."""

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.device.batches.batch import DeviceBatch, HostBatch, build_host_batch
from strandline.device.batches.padded_step import PaddedStep, StepSize, fill_buffer
from strandline.device.batches.pending import PendingRows
from strandline.device.drafters.draft_layer import single_rows
from strandline.ids import BLOCK_TOKENS, NO_TOKEN, LogId, PendingToken, SlotId
from strandline.kernels.batch import RerunBatch
from strandline.kernels.binding import reference_kernels
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences.rerun import insert_logged, of_step
from strandline.kernels.sampling.verification import (
    CHUNKS_OF_SEQUENCE,
    LastStep,
    Verdict,
    VerificationTables,
    accept_drafts,
    resolve_pending,
)
from strandline.kernels.step import PlannedStep, SequenceColumns, locate_rows
from strandline.records.plan import MAX_STOP_IDS, SequencePlan
from tests.cpu.device.test_padded_step import sequence
from tests.interpreter import prepare_interpreter

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


def host_of(plans: Sequence[SequencePlan], num_prompts: int = 0, pending: PendingRows | None = None) -> HostBatch:
    """Return a step whose sequences verify drafts, but for the last ones."""
    return build_host_batch(plans, len(plans) - num_prompts, pending, DEPTH)


def as_planned_before(sequence: SequencePlan, num_accepted: int) -> SequencePlan:
    """Return a sequence as it is planned before it is known how many drafts of the step before are accepted."""
    return sequence._replace(
        start=sequence.start - num_accepted,
        end=sequence.end - num_accepted,
        token_ids=(7,) * len(sequence.token_ids),
        num_logged=0,
        pending=PendingToken.MAY_STOP,
    )


def version_of(operation: Operation[..., Any], backend: str) -> Callable[..., Any]:
    """Return an operation's reference implementation, or its Triton version in the interpreter."""
    if backend == "torch":
        return operation.reference
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in Triton's interpreter")
    from strandline.kernels.sampling import verification_triton

    prepare_interpreter()
    function: Callable[..., Any] = getattr(verification_triton, operation.name)
    return function


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=settings().max_examples // 2)
@given(verifications(), st.integers(0, 3), st.data())
def test_every_row_is_where_it_belongs(
    backend: str, sequences: list[SequencePlan], num_spare: int, data: st.DataObject
) -> None:
    resolve = version_of(resolve_pending, backend)
    assert all(sequence.is_verification for sequence in sequences)
    size = StepSize(
        len(sequences) + num_spare, draft_tokens=max(plan.num_drafts for plan in sequences), log_tokens=DEPTH
    )
    padded = PaddedStep(size, torch.zeros(size.num_integers, dtype=torch.int64))
    # What the host does not know of some sequences lies on the device, in rows of any order.
    last = LastStep.empty(20, DEPTH, torch.device("cpu"))
    rows_before = data.draw(st.permutations(range(20)))
    planned, stop = list(sequences), 9999
    for index, plan in enumerate(sequences):
        if data.draw(st.booleans()):
            planned[index] = as_planned_before(plan, plan.num_logged)
            row = rows_before[index]
            last.num_accepted_P[row], last.tokens_P[row] = plan.num_logged, plan.token_ids[0]
            last.drafts_PD[row, : plan.num_drafts] = torch.tensor(plan.token_ids[1:])
            if data.draw(st.booleans()):
                # It has ended: nothing is stored.
                last.tokens_P[row] = data.draw(st.sampled_from([stop, NO_TOKEN]))
                token_ids = (max(int(last.tokens_P[row]), 0), *plan.token_ids[1:])
                sequences[index] = plan._replace(state_dst=SlotId(0), token_ids=token_ids)
    sources = np.array(rows_before[: len(sequences)])
    host = host_of(planned, 0, PendingRows(sources, np.full((len(sequences), MAX_STOP_IDS), stop)))
    assert size.has_room_for(host)
    fill_buffer(size, padded.buffer_I.numpy(), host)
    tables = resolve(padded.planned_parts()[0], last, DEPTH)
    kernels = reference_kernels([locate_rows, insert_logged])
    table_NM = torch.zeros(size.num_sequences, size.num_blocks(300), dtype=torch.int32)
    blocks_NM = host.block_tables[0]
    table_NM[: len(sequences), : blocks_NM.shape[1]] = torch.from_numpy(blocks_NM)
    batch = padded.batch([table_NM], 300, kernels, tables).step
    attention, chunks, rerun = batch.attention, batch.recurrent.chunks, batch.recurrent.rerun
    assert isinstance(rerun, RerunBatch)
    starts = attention.query_starts_N1.tolist()
    assert (starts[0], starts[-1], starts) == (0, size.num_rows, sorted(starts))
    # The rows of a layer with one channel: its number, and what lies in the log.
    inputs_TX = torch.arange(size.num_rows, dtype=torch.float32)[:, None]
    log_JX = 1000 + torch.arange((1 + len(sequences)) * DEPTH, dtype=torch.float32)[:, None]
    before_JX = log_JX.clone()
    (rows_RX,) = insert_logged.reference(rerun, (log_JX,), (inputs_TX,))
    assert len(rows_RX) == size.num_rerun_rows
    # What a recurrence gives: all rows of chunks, and what it leaves unwritten.
    is_computed_R = torch.zeros(len(rows_RX), dtype=torch.bool)
    for start, length in zip(chunks.starts_C.tolist(), chunks.lengths_C.tolist(), strict=True):
        is_computed_R[start : start + length] = True
    num_rows = sum(len(sequence.token_ids) for sequence in sequences)
    out_TX = of_step(rerun, torch.where(is_computed_R[:, None], rows_RX, torch.nan))
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
        # The same in other words, row by row.
        assert isinstance(rerun.source_R, torch.Tensor)
        assert isinstance(rerun.entry_R, torch.Tensor)
        own_R = slice(start, start + plan.num_logged + num_rows)
        first_entry = plan.log * DEPTH
        logged_sources = [-1 - entry for entry in range(first_entry, first_entry + plan.num_logged)]
        assert rerun.source_R[own_R].tolist() == [*logged_sources, *range(rows.start, rows.stop)]
        num_certain = plan.num_logged + num_rows - plan.num_drafts
        kept = [first_entry + index if plan.state_dst else -1 for index in range(plan.num_drafts)]
        assert rerun.entry_R[own_R].tolist() == [-1] * num_certain + kept
        drafts = log_JX[plan.log * DEPTH :][: plan.num_drafts]
        if plan.state_dst:
            assert torch.equal(drafts, inputs_TX[rows][1:] if plan.num_drafts else drafts[:0])
        else:
            assert torch.equal(drafts, before_JX[plan.log * DEPTH :][: plan.num_drafts])
        cuts = {
            int(lengths[: index + 1].sum()): int(slot)
            for index, slot in enumerate(chunks.cut_slots_C[first:end])
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
    assert last_chunk < len(chunks.starts_C)
    assert not chunks.lengths_C[last_chunk:].any()


def filled(size: StepSize, host: HostBatch) -> tuple[PaddedStep, DeviceBatch]:
    """Return a padded step and its batch; no token is pending."""
    padded = PaddedStep(size, torch.zeros(size.num_integers, dtype=torch.int64))
    assert size.has_room_for(host)
    fill_buffer(size, padded.buffer_I.numpy(), host)
    table_NM = torch.zeros(size.num_sequences, 6, dtype=torch.int32)
    for index, blocks in zip(size.address_sequences(host)[1], host.block_tables[0], strict=True):
        table_NM[index, : len(blocks)] = torch.from_numpy(blocks)
    tables = tables_of(padded) if size.has_drafts else None
    kernels = reference_kernels([locate_rows, insert_logged])
    return padded, padded.batch([table_NM], 300, kernels, tables)


def tensors_of(record: Any) -> dict[str, Any]:
    """Return the tensors and host values of a record and those in it, by name."""
    if is_dataclass(record) or hasattr(record, "_fields"):
        names = getattr(record, "_fields", None) or [each.name for each in fields(record)]
        return {f"{name}.{key}": each for name in names for key, each in tensors_of(getattr(record, name)).items()}
    return {"": record.tolist() if isinstance(record, torch.Tensor) else record}


@given(verifications(), st.integers(0, 2), st.integers(0, 70), st.data())
def test_drafts_and_prompts_are_laid_out_as_alone(
    verified: list[SequencePlan], num_spare: int, num_spare_rows: int, data: st.DataObject
) -> None:
    prompts = []
    for index in range(len(verified), len(verified) + data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, 150))
        end = start + data.draw(st.integers(1, 90))
        cuts = sorted(data.draw(st.sets(st.integers(start + 1, end), max_size=2)))
        prompts.append(sequence(index, start, end, tuple(cuts))._replace(next_id=9000 + index))
    num_rows = sum(plan.end - plan.start for plan in prompts) + num_spare_rows
    size = StepSize(len(verified) + num_spare, num_rows, draft_tokens=DEPTH, log_tokens=DEPTH)
    padded, both = filled(size, host_of([*verified, *prompts], len(prompts)))
    verified_alone = filled(replace(size, num_prompt_rows=0), host_of(verified))[1].step
    prompts_alone = filled(StepSize(0, num_rows), build_host_batch(prompts, 0))[1].step
    batch = both.step
    assert batch.parts is not None
    for part, attention, alone in zip(batch.parts, batch.attention.parts, (verified_alone, prompts_alone), strict=True):
        assert tensors_of(attention) == tensors_of(alone.attention)
        assert tensors_of(part.recurrent) == tensors_of(replace(alone.recurrent, log=None))
    rows = size.num_decode_rows
    for name in ("token_ids_T", "positions_T"):
        alone_T = torch.cat([getattr(verified_alone, name), getattr(prompts_alone, name)])
        assert torch.equal(getattr(batch, name), alone_T)
    assert batch.num_verified_rows == rows
    assert batch.attention.query_starts_N1[size.first_prompt] == rows
    named, sampled = padded.named, both.planned.columns
    next_ids = [token for plan in prompts for token in (*plan.token_ids[1:], plan.next_id)]
    assert named["next_ids"][rows:].tolist() == next_ids + [0] * num_spare_rows
    ends = np.cumsum([plan.end - plan.start for plan in prompts]) + rows - 1
    assert sampled.last_row[size.first_prompt :][: len(prompts)].tolist() == ends.tolist()
    assert len(sampled.last_row) == size.num_sequences - 1


def tables_of(padded: PaddedStep) -> VerificationTables:
    """Return the tables of a step in which no token is pending."""
    size = padded.size
    last = LastStep.empty(size.num_decodes, size.log_tokens, torch.device("cpu"))
    return resolve_pending.reference(padded.planned_parts()[0], last, size.log_tokens)


def test_all_rows_of_an_empty_step_are_the_fillers() -> None:
    size = StepSize(3, draft_tokens=2, log_tokens=4)
    padded = PaddedStep(size, torch.zeros(size.num_integers, dtype=torch.int64))
    fill_buffer(size, padded.buffer_I.numpy(), None)
    table_NM = torch.zeros(4, 2, dtype=torch.int32)
    kernels = reference_kernels([locate_rows, insert_logged])
    batch = padded.batch([table_NM], 128, kernels, tables_of(padded)).step
    assert batch.attention.query_starts_N1.tolist() == [0, 0, 0, 0, 9]
    assert batch.attention.context_lens_N.tolist() == [0, 0, 0, 9]
    assert batch.positions_T.tolist() == list(range(9))
    assert not batch.attention.write_blocks_T.any()
    assert batch.recurrent.chunks is not None
    assert not batch.recurrent.chunks.lengths_C.any()


def test_steps_that_are_larger_do_not_fit() -> None:
    plan = sequence(0, 70, 73, log=1)._replace(num_drafts=2, num_logged=0)

    def has_room(size: StepSize, *plans: SequencePlan) -> bool:
        return size.has_room_for(host_of(plans))

    assert has_room(StepSize(1, draft_tokens=2, log_tokens=2), plan)
    assert not has_room(StepSize(1, draft_tokens=1, log_tokens=2), plan)
    assert not has_room(StepSize(1, draft_tokens=2, log_tokens=2), plan._replace(next_drafts=3))
    assert not has_room(StepSize(1, draft_tokens=2, log_tokens=2), plan, plan._replace(log=LogId(2)))


def test_prompts_and_cuts_are_no_verification() -> None:
    plan = sequence(0, 70, 71)
    assert plan.is_verification
    assert not plan._replace(end=73).is_verification
    assert not plan._replace(is_sampled=False).is_verification
    assert not plan._replace(cuts=((71, plan.state_dst),)).is_verification


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=settings().max_examples // 2)
@given(st.data())
def test_drafts_count_up_to_the_first_that_differs_or_stops(backend: str, data: st.DataObject) -> None:
    drafts = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=DEPTH), min_size=1, max_size=4))
    stop = data.draw(st.sampled_from([NO_TOKEN, 2]))
    token_ids, chosen, verdicts, starts, expected = list[int](), list[int](), list[int](), [0], list[int]()
    for sequence_drafts in drafts:
        count = len(sequence_drafts)
        token_ids += [9, *sequence_drafts]
        starts.append(len(token_ids))
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
    # As many rows as there may be; one sequence is empty.
    num_sequences = len(drafts) + 1
    num_rows = num_sequences * (1 + DEPTH)
    num_spare = num_rows - len(token_ids)
    tokens_T = torch.tensor([*chosen, *[0] * num_spare])
    zero_N = torch.zeros(num_sequences, dtype=torch.int64)
    token_ids_T = torch.tensor([*token_ids, *[0] * num_spare])
    verdicts_T = torch.tensor([*verdicts, *[0] * num_spare])
    columns = dict.fromkeys(SequenceColumns._fields, zero_N)
    columns |= {
        "last_row": torch.tensor([*(end - 1 for end in starts[1:]), 0]),
        "num_drafts": torch.tensor([*map(len, drafts), 0]),
        "stop_ids": torch.full((num_sequences, 2), stop),
    }
    last = LastStep.empty(num_sequences, DEPTH, torch.device("cpu"))
    table_NM = torch.zeros(num_sequences + 1, 1, dtype=torch.int32)
    accept = version_of(accept_drafts, backend)
    sampled = PlannedStep(token_ids_T, torch.tensor([*starts, num_rows]), SequenceColumns(**columns))
    found = accept(sampled, verdicts_T, tokens_T, last, table_NM, DEPTH)
    assert found.num_accepted_N.tolist() == last.num_accepted_P.tolist() == [*expected, 0]
    assert found.last_row_N.tolist() == [*(start + count for start, count in zip(starts, expected, strict=False)), 0]
    forced = np.array([verdict == Verdict.ACCEPT for verdict in verdicts])
    assert tokens_T[: len(token_ids)][forced].tolist() == np.array([*token_ids[1:], 0])[forced].tolist()
    assert last.tokens_P.tolist() == tokens_T[found.last_row_N].tolist()
    assert torch.equal(found.next_tokens_T, tokens_T)


@pytest.mark.parametrize("num_wanted", [DEPTH, 1])
def test_single_rows_write_where_there_is_room(num_wanted: int) -> None:
    plans = [sequence(index, 62 + index, 63 + index)._replace(next_drafts=num_wanted) for index in range(4)]
    padded, _ = filled(StepSize(4, draft_tokens=DEPTH, log_tokens=DEPTH), host_of(plans))
    table_NM = torch.arange(10).to(torch.int32).view(5, 2)
    kernels = reference_kernels([locate_rows, insert_logged])
    batch = padded.batch([table_NM], 128, kernels, tables_of(padded))
    last = LastStep.empty(4, DEPTH, torch.device("cpu"))
    tokens_T = torch.zeros(padded.size.num_rows, dtype=torch.int64)
    accepted = accept_drafts.reference(batch.planned, padded.named["verdicts"], tokens_T, last, table_NM, DEPTH)
    single = single_rows(batch.step, accepted, 0, torch.arange(5), torch.arange(4))
    is_wanted = num_wanted > 1
    position_N = torch.tensor([62, 63, 64, 65]) + is_wanted
    assert single.positions_T.tolist() == position_N.tolist()
    assert single.attention.context_lens_N.tolist() == (position_N + 1).tolist()
    blocks = table_NM[torch.arange(4), position_N // BLOCK_TOKENS] if is_wanted else torch.zeros(4)
    assert single.attention.write_blocks_T.tolist() == blocks.tolist()
    assert single.attention.write_offsets_T.tolist() == (position_N % BLOCK_TOKENS).tolist()
