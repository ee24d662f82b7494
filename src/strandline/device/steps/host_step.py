"""A step as the runner lays it out: what is computed, and which rows of hidden states tokens are chosen from.

Shape suffixes: T rows of the step, X rows to choose from: those of the step, then stored ones; E hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from torch import Tensor

from strandline.device.batches.batch import HostBatch, batch_order, build_host_batch
from strandline.device.batches.pending import NO_STOPS, PendingTokens
from strandline.device.sampling.choice import Candidates, draw_verdicts
from strandline.device.sampling.sampler import SamplingState
from strandline.device.steps.adapter_pool import AdapterPool
from strandline.device.steps.graphs import CapturedStep
from strandline.errors import EngineError
from strandline.ids import PendingToken, RequestId
from strandline.records.plan import SequencePlan

_IS_DECODE, _IS_VERIFICATION = attrgetter("is_decode"), attrgetter("is_verification")


class StepHidden(NamedTuple):
    """The final hidden states of a step."""

    hidden_XE: Tensor
    first_prompt_row: int
    """The row where the batch's prefills begin."""
    replayed: CapturedStep | None = None
    """The captured step that has computed them; None: they were computed kernel by kernel."""

    @property
    def verification(self) -> CapturedStep | None:
        """The captured step, if its tail compares drafts."""
        return None if self.replayed is None or not self.replayed.padded.size.has_drafts else self.replayed

    def graph_of_decodes(self, step: "HostStep") -> CapturedStep | None:
        """The captured step, if it has logits of all rows of a step that decodes without drafts."""
        return self.replayed if self.verification is None and step.is_plain and step.is_decoding else None


@dataclass(frozen=True, slots=True)
class HostStep:
    """The sequences of a plan, laid out."""

    sequences: Sequence[SequencePlan]
    order: Sequence[int]
    """Indices of the sequences that compute something, as in the batch."""
    batch: HostBatch | None
    """None: nothing is computed."""
    stored: Sequence[int]
    """Indices of the sequences whose stored hidden states are needed: to choose from, or for a drafter."""
    candidates: Sequence[Candidates]
    """Those of the sequences that are sampled, in the plan's order or, if a padded step may verify drafts, the batch's.
    """
    follows_drafts: bool
    """Whether it continues a step whose accepted drafts the host did not know: a graph has to complete it."""
    is_plain: bool
    """Whether it computes as if there were no drafts."""

    @property
    def num_decodes(self) -> int:
        """How many sequences decode, or verify drafts in a padded step."""
        return 0 if self.batch is None else self.batch.num_decodes

    @property
    def has_prompts(self) -> bool:
        """Whether other sequences compute something."""
        return self.num_decodes < len(self.order)

    @property
    def is_decoding(self) -> bool:
        """Whether every sequence decodes, so that tokens are chosen from all rows."""
        return self.num_decodes == len(self.sequences) == len(self.candidates)

    def padded_rows(self, captured: CapturedStep) -> Mapping[int, int]:
        """Return the index that each sequence has in a captured step, by index in the plan."""
        indices = [] if self.batch is None else captured.padded.sequence_indices(self.batch)
        return dict(zip(self.order, indices, strict=True))

    @property
    def positions(self) -> list[int]:
        """The positions of the tokens that are chosen, if none is pending."""
        ends = ((self.sequences[each.plan_index].end, each.num_rows) for each in self.candidates)
        return [position for end, count in ends for position in range(end + 1 - count, end + 1)]

    @property
    def request_ids(self) -> Iterator[RequestId]:
        """The requests that are sampled."""
        return (self.sequences[each.plan_index].request_id for each in self.candidates)

    def first_rows(self, hidden: StepHidden) -> Mapping[int, int]:
        """Return where the rows of sequences that compute something begin, by index in the plan."""
        batch = self.batch
        if batch is None:
            return {}
        starts_N = batch.query_starts_N1[:-1].copy()
        starts_N[batch.num_decodes :] += hidden.first_prompt_row - batch.num_decode_rows
        return dict(zip(self.order, starts_N.tolist(), strict=True))

    def stored_rows(self, hidden: StepHidden) -> Mapping[int, int]:
        """Return the rows of stored hidden states, by index in the plan."""
        end = len(hidden.hidden_XE)
        return dict(zip(self.stored, range(end - len(self.stored), end), strict=True))

    def candidate_rows(self, hidden: StepHidden) -> list[int]:
        """Return the rows of hidden states from which tokens are chosen: one, and one for each draft."""
        first_rows, stored_rows, rows = self.first_rows(hidden), self.stored_rows(hidden), list[int]()
        for index, _, draft_ids, *_ in self.candidates:
            num_tokens = self.sequences[index].end - self.sequences[index].start
            end = first_rows[index] + num_tokens if num_tokens else stored_rows[index] + 1
            rows += range(end - 1 - len(draft_ids), end)
        return rows


def reads_stored(sequence: SequencePlan) -> bool:
    """Whether a draft layer reads the stored hidden state of a sequence, whose next token is the sequence's first.

    It does after a shared snapshot, unless that token is pending: then the step before has read it.
    """
    return not sequence.has_own_state and not sequence.pending


class Layout:
    """Lays out the steps of a runner.

    Args:
        states: of its requests.
        adapters: are put into slots as steps need them.
        log_tokens: drafts that a log has room for.
        reads_stored: whether stored hidden states of sequences that resume are read.
        synthetic_rates: as of ``draw_verdicts``.
    """

    def __init__(
        self,
        states: Mapping[RequestId, SamplingState],
        adapters: AdapterPool,
        pending: PendingTokens,
        log_tokens: int,
        synthetic_rates: Sequence[float] | None,
        *,
        reads_stored: bool,
    ) -> None:
        self._states, self._adapters, self._pending, self._log_tokens = states, adapters, pending, log_tokens
        self._synthetic_rates, self._reads_stored = synthetic_rates, reads_stored

    def lay_out(self, sequences: Sequence[SequencePlan], *, has_graphs: bool) -> HostStep:
        """Lay out a step.

        Raises:
            EngineError: it was planned ahead, or with a log, although its sequences do not allow it.
        """
        is_plain, is_pending = all(x.is_plain for x in sequences), any(x.pending for x in sequences)
        follows_drafts = is_pending and self._pending.may_follow_drafts
        has_drafts = follows_drafts or not is_plain
        is_verification = has_graphs and has_drafts and _can_verify(sequences)
        order, num_decodes = batch_order(sequences, _IS_VERIFICATION if is_verification else _IS_DECODE)
        in_order = order if is_verification else range(len(sequences))
        batch = None
        if order:
            ordered = [sequences[index] for index in order]
            if is_verification and any(x.log and not x.is_prefill for x in ordered[:num_decodes]):
                raise EngineError("a step that verifies drafts was planned with a log of decoded tokens")
            pending = self._locate(ordered, is_verification) if is_pending or is_verification else None
            batch = build_host_batch(ordered, num_decodes, pending, self._log_tokens)
            slots_N = self._adapters.begin_step(ordered, self._states)
            batch = replace(batch, is_verification=is_verification, adapter_slots_N=slots_N)
        return HostStep(
            sequences,
            order,
            batch,
            stored=[i for i, x in enumerate(sequences) if x.end == x.start or (self._reads_stored and reads_stored(x))],
            candidates=self._candidates(sequences, in_order, self._synthetic_rates if has_drafts else None),
            follows_drafts=follows_drafts,
            is_plain=is_plain,
        )

    def _locate(self, ordered: Sequence[SequencePlan], is_verification: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return where the last step left pending tokens, and the stop tokens to compare on the device."""
        states = [self._states[sequence.request_id] for sequence in ordered]
        are_compared = [sequence.pending is PendingToken.MAY_STOP for sequence in ordered]
        if is_verification:
            are_compared = [all(state.is_compared_on_device for state in states)] * len(states)
            pending = [sequence.request_id for sequence in ordered if sequence.pending]
            if pending and not are_compared[0]:
                raise EngineError(
                    f"requests {pending} were planned before tokens were known that the host has to compare"
                )
        stops = [state.new.stop_ids if yes else NO_STOPS for state, yes in zip(states, are_compared, strict=True)]
        return self._pending.locate(ordered, stops)

    def _candidates(
        self, sequences: Sequence[SequencePlan], order: Sequence[int], rates: Sequence[float] | None
    ) -> list[Candidates]:
        candidates, row = list[Candidates](), 0
        for index in order:
            if (sequence := sequences[index]).is_sampled:
                state, num_drafts = self._states[sequence.request_id], sequence.num_drafts
                draft_ids = sequence.token_ids[-num_drafts:] if num_drafts else ()
                candidates.append(Candidates(index, state, draft_ids, row, draw_verdicts(state, num_drafts, rates)))
                row += 1 + num_drafts
        return candidates


def _can_verify(sequences: Sequence[SequencePlan]) -> bool:
    """Whether a padded step can verify drafts of sequences: all compute something."""
    return any(x.is_verification for x in sequences) and all(x.end > x.start for x in sequences)
