"""A step as the runner lays it out: what is computed, and which rows of hidden states tokens are chosen from.

Shape suffixes: R rows that tokens are chosen from, N sequences that compute something.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Final, NamedTuple

from torch import Tensor

from strandline.device.batches.batch import HostBatch, build_host_batch
from strandline.device.batches.pending import PendingRows, PendingTokens
from strandline.device.sampling.choice import Candidates
from strandline.device.sampling.sampling_state import NO_STOPS, SamplingState
from strandline.device.steps.adapter_pool import AdapterPool
from strandline.device.steps.graphs import CapturedStep, StepGraphs
from strandline.errors import EngineError
from strandline.ids import PendingToken, RequestId
from strandline.kernels.sampling.verification import Verdict
from strandline.records.plan import SequencePlan
from strandline.speculative_config import MAX_DRAFT_TOKENS

_IS_DECODE, _IS_VERIFICATION = attrgetter("is_decode"), attrgetter("is_verification")

WORD: Final = 2**64 - 1


class StepIndices(NamedTuple):
    """What a step picks by index, on the device: int64. Of a step of decodes and their drafts, all are empty."""

    stored_slots: Tensor
    """The slots of the stored hidden states that the step needs."""
    rows_R: Tensor
    """The rows of hidden states from which tokens are chosen."""
    wanted_rows: Tensor
    """The rows of hidden states that requests ask for."""


@dataclass(frozen=True)
class HostStep:
    """The sequences of a plan, laid out. Rows are those of the step's final hidden states, then stored ones."""

    sequences: Sequence[SequencePlan]
    order: Sequence[int]
    """Indices of the sequences that compute something, as in the batch."""
    batch: HostBatch | None
    """None: nothing is computed."""
    captured: CapturedStep | None
    """What is replayed; None: kernels are launched one by one."""
    stored: Sequence[int]
    """Indices of the sequences whose stored hidden states are needed: to choose from, or for a drafter."""
    candidates: Sequence[Candidates]
    """Those of the sequences that are sampled, in the plan's order or, if a padded step may verify drafts, the batch's.
    """
    wanted: Sequence[Candidates]
    """The sequences whose hidden states requests ask for: of the prompt's last token."""
    is_plain: bool
    """Whether it computes as if there were no drafts."""

    @property
    def num_decodes(self) -> int:
        """How many sequences decode, or verify drafts in a padded step."""
        return 0 if self.batch is None else self.batch.num_decodes

    @property
    def is_decoding(self) -> bool:
        """Whether every sequence decodes, so that tokens are chosen from all rows."""
        return self.num_decodes == len(self.sequences) == len(self.candidates)

    @property
    def verification(self) -> CapturedStep | None:
        """The captured step, if its tail compares drafts."""
        return self.captured if self.captured is not None and self.captured.padded.size.has_drafts else None

    @property
    def captured_decodes(self) -> CapturedStep | None:
        """The captured step, if it has logits of all rows of a step that decodes without drafts."""
        return self.captured if self.verification is None and self.is_plain and self.is_decoding else None

    @property
    def padded_rows(self) -> Mapping[int, int]:
        """The index that each sequence has in the captured step, by index in the plan."""
        if self.captured is None or self.batch is None:
            return {}
        return dict(zip(self.order, self.captured.padded.size.sequence_indices(self.batch), strict=True))

    @property
    def sampled_rows(self) -> dict[RequestId, int]:
        """The row in ``LastStep`` of each request whose next token the step after this may be planned without."""
        if self.verification is not None:
            rows = ((self.sequences[index], row) for index, row in self.padded_rows.items())
            return {sequence.request_id: row for sequence, row in rows if sequence.is_sampled}
        return {each.state.new.request_id: row for row, each in enumerate(self.candidates)} if self.is_plain else {}

    @property
    def num_rows(self) -> int:
        """Rows that are computed, padding included."""
        if self.batch is None or self.captured is None:
            return 0 if self.batch is None else len(self.batch.token_ids_T)
        return self.captured.padded.size.num_rows

    @cached_property
    def first_rows(self) -> Mapping[int, int]:
        """Where the rows of sequences that compute something begin, by index in the plan."""
        batch = self.batch
        if batch is None:
            return {}
        starts_N = batch.query_starts_N1[:-1].copy()
        starts_N[batch.num_decodes :] += 0 if self.captured is None else self.captured.padded.size.gap(batch)
        return dict(zip(self.order, starts_N.tolist(), strict=True))

    @cached_property
    def stored_rows(self) -> Mapping[int, int]:
        """The rows of stored hidden states, by index in the plan."""
        return {index: self.num_rows + row for row, index in enumerate(self.stored)}

    @cached_property
    def rows(self) -> list[int]:
        """The rows from which tokens are chosen: of each sequence that is sampled one, and one for each draft."""
        rows = list[int]()
        for index, _, draft_ids, *_ in self.candidates:
            num_tokens = self.sequences[index].end - self.sequences[index].start
            end = self.first_rows[index] + num_tokens if num_tokens else self.stored_rows[index] + 1
            rows += range(end - 1 - len(draft_ids), end)
        return rows

    @property
    def is_chosen_from_all(self) -> bool:
        """Whether tokens are chosen from all rows in turn, but for padding."""
        num_others = self.num_rows + len(self.stored) - len(self.rows)
        has_prompts = self.num_decodes < len(self.order)
        is_whole = num_others == 0 if self.verification is None else not has_prompts
        return is_whole and self.rows == list(range(len(self.rows)))

    @property
    def verdicts(self) -> list[int]:
        """A ``Verdict`` for each row of drafts in a padded step that verifies them; empty: none is forced."""
        return [] if self.verification is None else [x for each in self.candidates for x in each.verdicts]

    @property
    def indices(self) -> Sequence[Sequence[int]]:
        """The ``StepIndices`` on the host."""
        slots = [self.sequences[index].state_src for index in self.stored]
        rows = [] if self.is_chosen_from_all else self.rows
        return slots, rows, [self.rows[each.first_row] for each in self.wanted]


class Layout:
    """Lays out the steps of a runner.

    Args:
        states: states of its requests.
        adapters: are put into slots as steps need them.
        log_tokens: drafts that a log has room for.
        keeps_pairs: as of the ``StepDrafter``.
        synthetic_rates: see ``draw_verdicts``.
    """

    def __init__(
        self,
        states: Mapping[RequestId, SamplingState],
        adapters: AdapterPool,
        pending: PendingTokens,
        log_tokens: int,
        synthetic_rates: Sequence[float] | None,
        *,
        keeps_pairs: bool,
    ) -> None:
        self._states, self._adapters, self._pending, self._log_tokens = states, adapters, pending, log_tokens
        self._synthetic_rates, self._keeps_pairs = synthetic_rates, keeps_pairs

    def lay_out_step(self, sequences: Sequence[SequencePlan], graphs: StepGraphs | None) -> HostStep:
        """Lay out a step.

        Args:
            graphs: to choose from, if one has room; None: kernels are launched one by one.

        Raises:
            EngineError: it was planned ahead, or with a log, although its sequences do not allow it.
        """
        is_plain, is_pending = all(x.is_plain for x in sequences), any(x.pending for x in sequences)
        follows_drafts = is_pending and self._pending.may_follow_drafts
        has_drafts = follows_drafts or not is_plain
        is_verification = graphs is not None and has_drafts and _can_verify(sequences)
        order, num_decodes = _order(sequences, _IS_VERIFICATION if is_verification else _IS_DECODE)
        in_order = order if is_verification else range(len(sequences))
        candidates = self._candidates(sequences, in_order, self._synthetic_rates if has_drafts else None)
        stored = [i for i, x in enumerate(sequences) if x.end == x.start or (self._keeps_pairs and x.reads_stored)]
        batch = None
        if order:
            ordered = [sequences[index] for index in order]
            if is_verification and any(x.log and not x.is_prefill for x in ordered[:num_decodes]):
                raise EngineError("a step that verifies drafts was planned with a log of decoded tokens")
            pending = self._pending_rows(ordered, is_verification) if is_pending or is_verification else None
            batch = build_host_batch(ordered, num_decodes, pending, self._log_tokens)
            slots_N = self._adapters.begin_step(ordered, self._states)
            batch = replace(batch, adapter_slots_N=slots_N)
        captured = None if graphs is None or batch is None else graphs.find(batch, verifies=is_verification)
        if follows_drafts and (captured is None or not captured.padded.size.has_drafts):
            raise EngineError("a step was planned before its drafts were known, and no CUDA graph can complete it")
        if batch is not None and is_verification and captured is None:
            # Kernels that are launched one by one take these decodes as prompts.
            batch = replace(batch, num_decodes=0, num_decode_rows=0)
        wanted = [each for each in candidates if each.state.wants_hidden_state]
        return HostStep(sequences, order, batch, captured, stored, candidates, wanted, is_plain)

    def _pending_rows(self, ordered: Sequence[SequencePlan], is_verification: bool) -> PendingRows:
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
        stops = [state.stop_ids if yes else NO_STOPS for state, yes in zip(states, are_compared, strict=True)]
        return self._pending.find_rows(ordered, stops)

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


def _order(sequences: Sequence[SequencePlan], is_decode: Callable[[SequencePlan], bool]) -> tuple[list[int], int]:
    """Return the indices of the sequences that compute something, decodes first, and how many are decodes."""
    are_decodes = list(map(is_decode, sequences))
    decodes = [index for index, is_first in enumerate(are_decodes) if is_first]
    if len(decodes) == len(sequences):
        return decodes, len(decodes)
    prefills = [index for index, plan in enumerate(sequences) if plan.end > plan.start and not are_decodes[index]]
    return decodes + prefills, len(decodes)


def draw_verdicts(state: SamplingState, num_drafts: int, rates: Sequence[float] | None) -> tuple[Verdict, ...]:
    """Draw which drafts of a step are accepted whatever is chosen, for benchmarks.

    Args:
        rates: by index in a step, how often drafts are accepted; None: those that agree are.
    """
    if rates is None:
        return ()
    state.num_verified += 1
    verdicts = [
        Verdict.ACCEPT if _is_accepted_at(state, index, rates) else Verdict.REJECT for index in range(num_drafts)
    ]
    return (*verdicts, Verdict.COMPARE)


def _is_accepted_at(state: SamplingState, index: int, rates: Sequence[float]) -> bool:
    """Draw whether a draft after accepted ones is accepted, given how often drafts at each index are in all."""
    before = rates[index - 1] if index else 1.0
    return draw(state.new.seed, state.num_verified * MAX_DRAFT_TOKENS + index) * before < rates[index]


def draw(seed: int, index: int) -> float:
    """Return a pseudorandom number in ``[0, 1)`` of a seed's sequence.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (SplitMix64). To seed a generator of
    the standard library for each draw takes longer.
    """
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & WORD
    return ((state ^ state >> 31) >> 11) / 2**53
