"""A step without drafts stores the pairs that the draft layer would draft after."""

from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strandline.device.batches.batch import build_host_batch, to_device
from strandline.device.drafters.draft_layer import DraftLayer, pairs_of_step
from strandline.device.steps.drafter import StepRows
from strandline.ids import BLOCK_TOKENS, NO_TOKEN, NULL_BLOCK, NULL_SLOT
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import reference_kernels
from strandline.kernels.sampling.sampling import greedy
from strandline.kernels.sampling.verification import LastStep
from strandline.kernels.step import locate_rows
from strandline.models.layers.protocol import DraftingModel, ModelMemory
from strandline.records.plan import SequencePlan
from tests.cpu.device.test_padded_step import sequence

Kept = dict[tuple[int, int], tuple[int, int]]
"""Token and row of the hidden state, by block and offset."""


class Recorder:
    """Stands for a model with a draft layer: notes what is to be stored. A hidden state is the number of its row."""

    def __init__(self) -> None:
        self.kept: Kept = {}
        self.positions: list[int] = []

    def keep_for_drafts(self, batch: StepBatch, hidden_TE: Tensor, memory: ModelMemory) -> None:
        del memory
        self.positions += batch.positions_T.tolist()
        for (block, offset), pair in zip(
            places_of(batch), zip(batch.token_ids_T.tolist(), hidden_TE[:, 0].tolist(), strict=True), strict=True
        ):
            if block != NULL_BLOCK:
                assert (block, offset) not in self.kept
                self.kept[block, offset] = pair


def places_of(batch: StepBatch) -> list[tuple[int, int]]:
    attention = batch.attention
    return list(zip(attention.write_blocks_T.tolist(), attention.write_offsets_T.tolist(), strict=True))


@st.composite
def steps(draw: st.DrawFn) -> list[SequencePlan]:
    """Draw prompts and parts of them, decodes and whole hits: from the start, resumed or going on."""
    sequences = []
    for index in range(draw(st.integers(1, 5))):
        start = draw(st.one_of(st.just(0), st.integers(1, 200)))
        is_resumed = start > 0 and draw(st.booleans())
        num_tokens = draw(st.integers(0 if is_resumed else 1, 70))
        plan = sequence(index, start, start + num_tokens)
        src = plan.state_src if is_resumed else plan.state_dst if start else NULL_SLOT
        # Shared blocks may go on behind the place where it resumes.
        kv_start = max(start, draw(st.integers(0, start // BLOCK_TOKENS + 1)) * BLOCK_TOKENS)
        is_sampled = num_tokens == 0 or draw(st.booleans())
        next_id = NO_TOKEN if is_sampled else 5000 + index
        sequences.append(plan._replace(state_src=src, kv_start=kv_start, is_sampled=is_sampled, next_id=next_id))
    return sequences


def rows_of(sequences: list[SequencePlan]) -> tuple[int, dict[int, int], dict[int, int]]:
    """Return the number of rows, the first one of each sequence, and those of stored hidden states."""
    num_rows, first_rows = 0, dict[int, int]()
    for index, plan in enumerate(sequences):
        if plan.end > plan.start:
            first_rows[index] = num_rows + 3  # padding lies between them
            num_rows += plan.end - plan.start + 3
    resumed = [index for index, plan in enumerate(sequences) if not plan.has_own_state]
    return (
        num_rows + len(resumed),
        first_rows,
        dict(zip(resumed, range(num_rows, num_rows + len(resumed)), strict=True)),
    )


def keep(rows: StepRows, sampled_P: Tensor) -> Recorder:
    recorder = Recorder()
    last = LastStep.empty(len(sampled_P), 0, sampled_P.device)
    last.tokens_P.copy_(sampled_P)
    kernels = reference_kernels([locate_rows])
    assert DraftLayer(cast(DraftingModel, recorder), cast(ModelMemory, None), last, kernels).follow(rows) is None
    return recorder


@given(steps())
def test_kept_pairs_are_those_that_drafts_follow(sequences: list[SequencePlan]) -> None:
    num_rows, first_rows, stored_row_of = rows_of(sequences)
    hidden_XE = torch.arange(num_rows)[:, None]
    indices = [index for index, plan in enumerate(sequences) if plan.is_sampled]
    sampled_P = 7000 + torch.arange(10)
    rows = StepRows(sequences, hidden_XE, first_rows, stored_row_of, None)
    recorder = keep(rows, sampled_P)

    pairs = pairs_of_step(rows._replace(sampled={index: (7000 + row,) for row, index in enumerate(indices)}))
    host = build_host_batch([pair.plan for pair in pairs], 0)
    batch = to_device(host, torch.device("cpu"), reference_kernels([locate_rows])).step
    hidden_rows = [row for pair in pairs for row in pair.rows().tolist()]
    expected = dict(zip(places_of(batch), zip(batch.token_ids_T.tolist(), hidden_rows, strict=True), strict=False))
    assert recorder.kept == {position: pair for position, pair in expected.items() if position[0] != NULL_BLOCK}
    assert sorted(recorder.positions) == sorted(batch.positions_T.tolist())


@given(steps())
def test_pairs_that_are_repeated_alone_are_the_same(sequences: list[SequencePlan]) -> None:
    repeating = [plan for plan in sequences if plan.reads_stored and plan.end > plan.start]
    num_rows, first_rows, stored_row_of = rows_of(repeating)
    hidden_XE, sampled_P = torch.arange(num_rows)[:, None], torch.zeros(10, dtype=torch.int64)
    rows = StepRows(repeating, hidden_XE, first_rows, stored_row_of, None)
    everything = keep(rows, sampled_P).kept
    alone = keep(rows._replace(first_rows={}), sampled_P).kept
    assert len(alone) == sum(plan.kv_start % BLOCK_TOKENS > 0 for plan in repeating)
    assert {index: everything[index] for index in alone} == alone


def test_pair_that_ends_with_a_pending_token_is_not_repeated() -> None:
    plan = sequence(0, 70, 71)
    assert plan.reads_stored
    assert not sequence(0, 70, 71, pending=2).reads_stored
    assert not plan._replace(state_src=plan.state_dst).reads_stored


def test_nothing_is_launched_for_no_pairs() -> None:
    assert keep(StepRows([], torch.zeros(0, 1), {}, {}, None), torch.zeros(1, dtype=torch.int64)).positions == []


def test_failed_token_is_looked_up_as_token_zero() -> None:
    plan = sequence(0, 70, 71)._replace(state_src=sequence(0, 70, 71).state_dst)
    recorder = keep(StepRows([plan], torch.zeros(1, 1), {0: 0}, {}, None), torch.tensor([NO_TOKEN]))
    assert [token for token, _ in recorder.kept.values()] == [0]


class Drafting(Recorder):
    """Drafts the token after a pair's token; notes positions, and where keys and values are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[StepBatch] = []

    def draft(self, batch: StepBatch, hidden_TE: Tensor, memory: ModelMemory, rows_N: Tensor | None = None) -> Tensor:
        del hidden_TE, memory
        self.batches.append(batch)
        token_T = batch.token_ids_T if rows_N is None else batch.token_ids_T[rows_N]
        return token_T[:, None]

    def draft_logits(self, hidden_NE: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden_NE[:, 0] + 1, 50).float()


def test_sequences_that_want_fewer_drafts_store_nothing_further() -> None:
    plans = [sequence(index, 70, 71)._replace(next_drafts=count) for index, count in enumerate((3, 1, 2))]
    plans = [plan._replace(state_src=plan.state_dst) for plan in plans]
    model, last = Drafting(), LastStep.empty(3, 3, torch.device("cpu"))
    layer = DraftLayer(
        cast(DraftingModel, model), cast(ModelMemory, None), last, reference_kernels([locate_rows, greedy])
    )
    rows = StepRows(plans, torch.zeros(3, 1), {0: 0, 1: 1, 2: 2}, {}, {0: (10,), 1: (20,), 2: (30,)})
    drafts = layer.follow(rows)
    assert drafts is not None
    wanted = {index: drafts.tokens_ND[row, : plans[index].next_drafts].tolist() for index, row in drafts.rows.items()}
    assert wanted == {0: [11, 12, 13], 1: [21], 2: [31, 32]}
    pairs, second, third = model.batches
    assert pairs.positions_T.tolist() == [70, 70, 70]
    assert second.positions_T.tolist() == [71, 70, 71]
    assert third.positions_T.tolist() == [72, 70, 71]
    stored = [[block != NULL_BLOCK for block, _ in places_of(batch)] for batch in model.batches]
    assert stored == [[True] * 3, [True, False, True], [True, False, False]]
