"""A step as the runner lays it out: what is computed, and which rows of hidden states tokens are chosen from.

Shape suffixes: R rows that tokens are chosen from, N sequences that compute something.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final, Generic, NamedTuple, TypeVar

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

Indices = TypeVar("Indices", Sequence[int], Tensor)


class StepIndices(NamedTuple, Generic[Indices]):
    """What a step picks by index: lists on the host, int64 on the device. All are empty for a step of decodes and their
    drafts."""

    stored_slots: Indices
    """The slots of the stored hidden states that the step needs."""
    rows_R: Indices
    """The rows of hidden states from which tokens are chosen; empty: all in turn, but for padding."""
    wanted_rows: Indices
    """The rows of hidden states that requests ask for."""


class HiddenRows(NamedTuple):
    """Where hidden states are among those of a step: its final ones, with padding, and then stored ones."""

    first: Mapping[int, int]
    """The first row of each sequence that computes something, by index in the plan."""
    stored: Mapping[int, int]
    """The row of each stored hidden state, by index in the plan: to choose from, or for a drafter."""
    num_rows: int

    def pick(
        self,
        sequences: Sequence[SequencePlan],
        candidates: Sequence[Candidates],
        wanted: Sequence[Candidates],
        *,
        ends_in_padding: bool,
    ) -> StepIndices[Sequence[int]]:
        """Return what a step picks: a row of each sequence that is sampled, and one for each of its drafts.

        Args:
            wanted: those whose hidden states requests ask for.
            ends_in_padding: whether all rows after those of the candidates are padding.
        """
        chosen = list[int]()
        for index, _, draft_ids, *_ in candidates:
            num_tokens = sequences[index].end - sequences[index].start
            end = self.first[index] + num_tokens if num_tokens else self.stored[index] + 1
            chosen += range(end - 1 - len(draft_ids), end)
        is_whole = ends_in_padding or len(chosen) == self.num_rows
        picked = [] if is_whole and chosen == list(range(len(chosen))) else chosen
        slots = [sequences[index].state_src for index in self.stored]
        return StepIndices(slots, picked, [chosen[each.first_row] for each in wanted])


@dataclass(frozen=True, slots=True)
class HostStep:
    """The sequences of a plan, laid out.

    Hidden states come from a captured step, or from kernels that are launched one by one. Tokens are then found by a
    captured step of decodes (``decodes``), by one that verifies drafts (``verification``), or by launched kernels (both
    are None).
    """

    sequences: Sequence[SequencePlan]
    batch: HostBatch | None
    """None: nothing is computed."""
    captured: CapturedStep | None
    """What is replayed; None: kernels are launched one by one."""
    decodes: CapturedStep | None
    """The captured step, if it has logits of all rows: every sequence decodes, without drafts."""
    verification: CapturedStep | None
    """The captured step, if it compares drafts."""
    is_plain: bool
    """Whether it computes as if there were no drafts."""
    is_decoding: bool
    """Whether every sequence decodes, so that tokens are chosen from all rows."""
    candidates: Sequence[Candidates]
    """Those of the sequences that are sampled, in the plan's order or, if a padded step may verify drafts, the batch's.
    """
    wanted: Sequence[Candidates]
    """The sequences whose hidden states requests ask for: of the prompt's last token."""
    rows: HiddenRows
    indices: StepIndices[Sequence[int]]
    sampled_rows: Mapping[int, int]
    """Rows in ``LastStep``, by index in the plan, of the sequences whose next steps may be planned before their tokens
    are known."""


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
        batch = captured = None
        if order:
            ordered, verified = [sequences[index] for index in order], candidates if is_verification else None
            batch = self._host_batch(ordered, num_decodes, verified, is_pending=is_pending)
            captured = None if graphs is None else graphs.find(batch, verifies=is_verification)
            if is_verification and captured is None:
                # Kernels that are launched one by one take these decodes as prompts.
                batch, num_decodes = replace(batch, num_decodes=0, num_decode_rows=0), 0
        verification = captured if is_verification else None
        if follows_drafts and verification is None:
            raise EngineError("a step was planned before its drafts were known, and no CUDA graph can complete it")
        is_decoding = num_decodes == len(sequences) == len(candidates)
        decodes = captured if is_plain and is_decoding and not is_verification else None
        stored = [i for i, x in enumerate(sequences) if x.end == x.start or (self._keeps_pairs and x.reads_stored)]
        rows, padded_rows = _find_rows(order, batch, captured, stored)
        wanted = [each for each in candidates if each.state.wants_hidden_state]
        ends_in_padding = decodes is not None or (verification is not None and num_decodes == len(order))
        if verification is not None:
            sampled_rows = {each.plan_index: padded_rows[each.plan_index] for each in candidates}
        else:
            sampled_rows = {each.plan_index: row for row, each in enumerate(candidates)} if is_plain else {}
        return HostStep(
            sequences,
            batch,
            captured,
            decodes,
            verification,
            is_plain,
            is_decoding,
            candidates,
            wanted,
            rows,
            rows.pick(sequences, candidates, wanted, ends_in_padding=ends_in_padding),
            sampled_rows,
        )

    def _host_batch(
        self,
        ordered: Sequence[SequencePlan],
        num_decodes: int,
        verified: Sequence[Candidates] | None,
        *,
        is_pending: bool,
    ) -> HostBatch:
        """Return the batch of sequences that compute something, decodes first.

        Args:
            verified: the candidates, if a padded step may verify drafts.
        """
        is_verification = verified is not None
        if is_verification and any(x.log and not x.is_prefill for x in ordered[:num_decodes]):
            raise EngineError("a step that verifies drafts was planned with a log of decoded tokens")
        pending = self._pending_rows(ordered, is_verification) if is_pending or is_verification else None
        batch = build_host_batch(ordered, num_decodes, pending, self._log_tokens)
        verdicts = [x for each in verified or () for x in each.verdicts]
        return replace(batch, adapter_slots_N=self._adapters.begin_step(ordered, self._states), verdicts=verdicts)

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


def _find_rows(
    order: Sequence[int], batch: HostBatch | None, captured: CapturedStep | None, stored: Sequence[int]
) -> tuple[HiddenRows, Mapping[int, int]]:
    """Return the rows of a step, and the index of each sequence in the captured one, by index in the plan.

    Args:
        order: indices in the plan of the sequences of the batch.
        stored: indices in the plan of sequences whose stored hidden states are needed.
    """
    starts, indices, num_rows = list[int](), list[int](), 0
    if batch is not None and captured is not None:
        size = captured.padded.size
        (starts, indices), num_rows = size.address_sequences(batch), size.num_rows
    elif batch is not None:
        *starts, num_rows = batch.query_starts_N1.tolist()
    stored_rows = {index: num_rows + row for row, index in enumerate(stored)}
    rows = HiddenRows(dict(zip(order, starts, strict=True)), stored_rows, num_rows + len(stored))
    return rows, dict(zip(order, indices, strict=False))


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
