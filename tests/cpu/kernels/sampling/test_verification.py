"""Pending tokens; and Triton's tables of steps that verify drafts, and what it accepts, against torch's, of any step.

The ``check_`` functions run on any device. Shape suffixes as in ``kernels/sampling/verification.py``.
"""

import os
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strandline.ids import BLOCK_TOKENS, NO_TOKEN, PendingToken
from strandline.kernels.sampling import verification
from strandline.kernels.sampling.verification import (
    AcceptedDrafts,
    LastStep,
    Verdict,
    VerificationTables,
)
from strandline.kernels.step import PlannedStep, SequenceColumns
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.sampling.verification_triton import BLOCK_SEQUENCES, accept_drafts, resolve_pending

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")

MOST_BLOCKS = 5
TOKENS = st.integers(NO_TOKEN, 4)
"""Few, so that drafts agree and stop."""


SIZES = st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 3)).map(lambda x: (x[0], x[1], x[1] + x[2]))


class Step(NamedTuple):
    """A step, and what the one before left."""

    planned: PlannedStep
    last: LastStep
    log_tokens: int
    sampled: PlannedStep
    verdicts_T: Tensor
    tokens_T: Tensor
    block_table_NM: Tensor
    draft_tokens: int

    def to(self, device: str) -> "Step":
        """Return a copy."""

        def copied(planned: PlannedStep) -> PlannedStep:
            columns = SequenceColumns(*map(copy, planned.columns))
            return PlannedStep(copy(planned.token_ids_T), copy(planned.query_starts_N1), columns)

        def copy(tensor: Tensor) -> Tensor:
            return tensor.clone().to(device)

        return self._replace(
            planned=copied(self.planned),
            last=LastStep(*map(copy, self.last)),
            sampled=copied(self.sampled),
            verdicts_T=copy(self.verdicts_T),
            tokens_T=copy(self.tokens_T),
            block_table_NM=copy(self.block_table_NM),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a step may change."""
        planned = (tensor for *rows, columns in (self.planned, self.sampled) for tensor in (*rows, *columns))
        return (*planned, *self.last, self.verdicts_T, self.tokens_T, self.block_table_NM)

    @property
    def outcome(self) -> tuple[PlannedStep, Tensor, Tensor, LastStep, Tensor, int]:
        """What ``accept_drafts`` takes."""
        return self.sampled, self.verdicts_T, self.tokens_T, self.last, self.block_table_NM, self.draft_tokens


def columns_of(count: int, **named: Tensor) -> SequenceColumns[Tensor]:
    """Return the columns of some sequences, zeros but for those that are named."""
    zeros = dict.fromkeys(SequenceColumns._fields, torch.zeros(count, dtype=torch.int64))
    return SequenceColumns(**{**zeros, **named})


PROMPTS = st.lists(st.integers(1, 99), max_size=3)


@st.composite
def steps(
    draw: st.DrawFn,
    sizes: st.SearchStrategy[tuple[int, int, int]] = SIZES,
    prompts: st.SearchStrategy[list[int]] = PROMPTS,
) -> Step:
    """Draw a step of any padding, drafts and logs, behind a step of at least as many.

    Args:
        sizes: numbers of sequences, of drafts of each, and of a log's tokens.
        prompts: their rows.
    """
    count, depth, log_tokens = draw(sizes)
    num_real = draw(st.integers(0, count))
    # What is drawn for each of many sequences would be too much.
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def random(most: int | Tensor, *shape: int, least: int = 0) -> Tensor:
        """Return integers from ``least`` to ``most``."""
        most_X = torch.as_tensor(most).expand(shape)
        return least + (torch.rand(shape, generator=numbers, dtype=torch.float64) * (most_X + 1 - least)).long()

    is_real_N = torch.arange(count) < num_real
    num_drafts_N = random(depth, count) * is_real_N
    num_rows = count * (1 + depth)
    ends_N = ((1 + num_drafts_N) * is_real_N).cumsum(0)
    query_starts = torch.cat((torch.tensor([0]), ends_N, torch.tensor([num_rows])))
    prompt_rows = torch.tensor(draw(prompts), dtype=torch.int64)
    num_prompts = len(prompt_rows)
    num_before = count + num_prompts + 3
    last = LastStep(
        random(log_tokens, num_before),
        random(4, num_before, least=NO_TOKEN),
        random(4, num_before, log_tokens, least=NO_TOKEN),
    )
    pending = random(1, count) * PendingToken.MAY_STOP * is_real_N
    source_row = torch.randperm(num_before, generator=numbers)[:count] * is_real_N
    num_logged = random(log_tokens - last.num_accepted_P[source_row] * (pending > 0), count) * is_real_N
    start = (num_logged + random(150, count)) * is_real_N
    verdicts = random(2, num_rows)
    verdicts[query_starts[1:-1] - 1] = Verdict.COMPARE
    verdicts[-1] = Verdict.COMPARE
    # Any of these may be a sequence's.
    stop_ids_XS = torch.tensor([[NO_TOKEN, NO_TOKEN], [3, NO_TOKEN], [0, 2]])
    columns = columns_of(
        count,
        start=start,
        end=start + ends_N.diff(prepend=torch.tensor([0])),
        state_dst=random(9, count) * is_real_N,
        log=(1 + torch.randperm(count, generator=numbers)) * is_real_N,
        num_logged=num_logged,
        num_drafts=num_drafts_N,
        pending=pending,
        source_row=source_row,
        stop_ids=stop_ids_XS[random(2, count) * is_real_N],
    )
    planned = PlannedStep(random(4, num_rows), query_starts, columns)
    # Prompts, after the rows of no sequence.
    prompt_ends_N = prompt_rows.cumsum(0)
    num_all = num_rows + int(prompt_rows.sum())
    none_N = torch.zeros(num_prompts, dtype=torch.int64)
    last_row = torch.cat(((ends_N - 1) * is_real_N, num_rows + prompt_ends_N - 1))
    verdicts_T = torch.cat((verdicts, torch.zeros(num_all - num_rows, dtype=torch.int64)))
    token_ids_T = torch.cat((planned.token_ids_T, random(4, num_all - num_rows)))
    sampled_columns = columns_of(
        count + num_prompts,
        last_row=last_row,
        end=torch.cat((columns.end, prompt_rows + random(100, num_prompts))),
        num_drafts=torch.cat((num_drafts_N, none_N)),
        next_drafts=random(depth, count + num_prompts),
        rotary_delta=-random(100, count + num_prompts),
        stop_ids=torch.cat((columns.stop_ids, stop_ids_XS[random(2, num_prompts)])),
    )
    sampled = PlannedStep(token_ids_T, query_starts, sampled_columns)
    tokens_T = random(4, num_all, least=NO_TOKEN)
    if draw(st.booleans()):
        # Most drafts agree.
        tokens_T = torch.where(random(3, num_all) > 0, token_ids_T.roll(-1), tokens_T)
    block_table_NM = random(10**6, count + num_prompts + 1, MOST_BLOCKS, least=1).to(torch.int32)
    return Step(planned, last, log_tokens, sampled, verdicts_T, tokens_T, block_table_NM, depth)


def check_tables(step: Step, device: str) -> None:
    expected_of, found_of = step.to("cpu"), step.to(device)
    expected = verification.resolve_pending.reference(*expected_of[:3])
    with poisoned_memory():
        found = resolve_pending(*found_of[:3])
    assert_equal_steps(found_of, expected_of)
    assert_equal_tables(found, expected)


def assert_equal_tables(found: VerificationTables | None, expected: VerificationTables | None) -> None:
    """Check that all tables are equal, but for rows in no chunk where these are undefined."""
    if found is None or expected is None:
        assert found is expected
        return
    is_row_R = torch.zeros(len(expected.source_rows), dtype=torch.bool)
    for start, length in zip(expected.starts.tolist(), expected.lengths.tolist(), strict=True):
        is_row_R[start : start + length] = True
    undefined = ("source_rows", "log_entries")
    for name in VerificationTables._fields:
        mask = is_row_R if name in undefined else slice(None)
        assert torch.equal(getattr(found, name).cpu()[mask], getattr(expected, name)[mask]), name


def check_accepted(step: Step, device: str) -> None:
    expected_of, found_of = step.to("cpu"), step.to(device)
    expected = verification.accept_drafts.reference(*expected_of.outcome)
    with poisoned_memory():
        found = accept_drafts(*found_of.outcome)
    assert_equal_steps(found_of, expected_of)
    for name in AcceptedDrafts._fields:
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


def assert_equal_steps(found: Step, expected: Step) -> None:
    """Check that all tensors are equal, those that were changed in place among them."""
    for index, (own, other) in enumerate(zip(found.tensors, expected.tensors, strict=True)):
        assert torch.equal(own.cpu(), other), index


def plain_step(lengths: list[int], pending: list[int], source_row: list[int], stop_ids: list[list[int]]) -> PlannedStep:
    """Return a step without drafts of sequences of some lengths: tokens from 70 on, and slots from 11 on."""
    count = len(lengths)
    query_starts = torch.tensor([0, *accumulate(lengths)])
    named = {"pending": pending, "source_row": source_row, "stop_ids": stop_ids, "state_dst": [*range(11, 11 + count)]}
    columns = columns_of(count, **{name: torch.tensor(values) for name, values in named.items()})
    return PlannedStep(torch.arange(70, 70 + sum(lengths)), query_starts, columns)


VERSIONS = pytest.mark.parametrize(
    "resolve",
    [verification.resolve_pending.reference, pytest.param(resolve_pending, marks=interpreted)],
    ids=["torch", "triton"],
)


@VERSIONS
def test_pending_tokens_are_filled_and_stop_token_keeps_state(resolve: Callable[..., None]) -> None:
    last = LastStep.empty(3, 0, torch.device("cpu"))._replace(tokens_P=torch.tensor([8, 9, 5]))
    none, one, two = [NO_TOKEN, NO_TOKEN], [5, NO_TOKEN], [3, 8]
    pending = [0, *[PendingToken.MAY_STOP] * 3, 0]
    planned = plain_step([1, 1, 1, 1, 2], pending, [0, 2, 2, 1, 0], [two, none, one, one, two])
    assert resolve(planned, last) is None
    assert planned.token_ids_T.tolist() == [70, 5, 5, 9, 74, 75]
    assert planned.columns.state_dst.tolist() == [11, 12, 0, 14, 15]


@VERSIONS
@pytest.mark.parametrize("pending", [PendingToken.MAY_STOP, PendingToken.GOES_ON])
def test_sequence_without_a_sampled_token_keeps_its_state(resolve: Callable[..., None], pending: PendingToken) -> None:
    """As the host, too, ends it: also where no stop token would."""
    last = LastStep.empty(2, 3, torch.device("cpu"))._replace(tokens_P=torch.tensor([NO_TOKEN, 5]))
    planned = plain_step([1, 1, 1], [pending, 0, PendingToken.GOES_ON], [0, 0, 1], [[NO_TOKEN]] * 3)
    resolve(planned, last)
    assert planned.token_ids_T.tolist() == [0, 71, 5]
    assert planned.columns.state_dst.tolist() == [0, 12, 13]


@interpreted
@given(steps())
@settings(max_examples=settings().max_examples // 2)
def test_tables_and_corrections_are_torchs(step: Step) -> None:
    check_tables(step, "cpu")


@interpreted
@given(steps())
@settings(max_examples=settings().max_examples // 2)
def test_accepted_drafts_are_torchs(step: Step) -> None:
    check_accepted(step, "cpu")


@interpreted
@given(steps(st.just((BLOCK_SEQUENCES + 7, 2, 3))))
@settings(max_examples=settings().max_examples // 50)
def test_many_sequences_give_torchs_tables(step: Step) -> None:
    check_tables(step, "cpu")


def test_further_drafts_are_written_where_blocks_are_reserved() -> None:
    zero, position = torch.zeros(1, dtype=torch.int64), BLOCK_TOKENS - 1
    values = {"last_row": 1, "end": position + 1, "num_drafts": 1, "next_drafts": 3, "rotary_delta": -4}
    named = {name: zero + value for name, value in values.items()}
    columns = columns_of(1, **named, stop_ids=torch.tensor([[NO_TOKEN]]))
    sampled = PlannedStep(torch.tensor([5, 6, 0, 0, 0]), torch.tensor([0, 2]), columns)
    verdicts_T = torch.zeros(5, dtype=torch.int64)
    tokens_T = torch.tensor([6, NO_TOKEN, 1, 2, 3])
    table_NM = torch.tensor([[11, 12], [0, 0]], dtype=torch.int32)
    last = LastStep.empty(1, 4, torch.device("cpu"))
    accepted = verification.accept_drafts.reference(sampled, verdicts_T, tokens_T, last, table_NM, 4)
    assert accepted.num_accepted_N.tolist() == [1]
    assert accepted.last_row_N.tolist() == [1]
    assert accepted.next_tokens_T.tolist() == [6, 0, 1, 2, 3]
    # Three drafts are wanted, so two of them precede another.
    assert accepted.rotary_FN[:, 0].tolist() == [position - 3, position - 2, position - 2]
    assert accepted.context_lens_FN[:, 0].tolist() == [position + 2, position + 3, position + 3]
    assert accepted.write_blocks_FN[:, 0].tolist() == [12, 12, 0]
    assert accepted.write_offsets_FN[:, 0].tolist() == [0, 1, 1]
    assert (last.num_accepted_P.tolist(), last.tokens_P.tolist()) == ([1], [NO_TOKEN])
