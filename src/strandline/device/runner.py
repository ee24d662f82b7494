"""The runner of steps on one device: it applies the cache's actions, runs the model and samples.

The runner follows the plan and keeps only the sampling state of each request. Every sequence's final hidden state is
stored in its slot, so that a slot that becomes a snapshot can give its next token without a forward pass.

``launch`` does not wait for the device: sampled tokens stay there, for the next step to read, and are copied to the
host behind the step.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from strandline.device.allowed_tokens import AllowedMatcher
from strandline.device.batch import HostBatch, batch_order, build_host_batch, split_by_blocks, to_device
from strandline.device.cache_actions import CacheActions
from strandline.device.divided_sampling import SAMPLING_OPERATIONS
from strandline.device.draft_layer import (
    Pairs,
    keep_pairs,
    make_drafts,
    pairs_of_step,
    repeated_pairs,
    repeats_pair,
)
from strandline.device.encoded_pictures import MAX_SHARED_TOKENS, EncodedPictures
from strandline.device.grammar_mask import GuardedMatcher
from strandline.device.graphs import Decoded, StepGraphs, StepHidden
from strandline.device.heap import keep_scratch_memory
from strandline.device.padded_step import StepSize
from strandline.device.padded_verification import VerificationSize
from strandline.device.pending import NO_STOPS, PendingTokens
from strandline.device.prompt_logprobs import fetch_prompt_logprobs
from strandline.device.sampler import ChosenTokens, SamplingState, choose_independently, choose_tokens
from strandline.device.step_in_flight import StepInFlight
from strandline.device.threads import one_thread
from strandline.device.transfers import Transfers
from strandline.device.upload import download, upload_together
from strandline.device.verification import Verified, VerifiedOnDevice, sample_and_verify, verify_chosen
from strandline.device.verification_graphs import VerificationGraphs
from strandline.errors import EngineError
from strandline.gc_policy import gc_paused
from strandline.ids import RequestId
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.kernels.ranks import columns_of
from strandline.kernels.recurrences.replay import insert_logged
from strandline.kernels.sampling.verification import accept_drafts, complete_verification
from strandline.kernels.step import fetch_integers, hand_over_tokens, locate_rows, resolve_pending, store_hidden
from strandline.models.layers.protocol import DraftingModel, LanguageModel
from strandline.records.actions import Action
from strandline.records.constraints import OutputConstraints
from strandline.records.plan import NewRequest, PictureToEncode, SequencePlan, StepPlan, StepResult, num_tokens_ahead
from strandline.records.stop_strings import StopFinder

RUNNER_OPERATIONS: Final[tuple[Operation[..., Any], ...]] = (
    locate_rows,
    resolve_pending,
    store_hidden,
    fetch_integers,
    hand_over_tokens,
    insert_logged,
    complete_verification,
    accept_drafts,
    *SAMPLING_OPERATIONS,
)
"""Operations that the runner uses in addition to the model's."""

LAUNCH_BOUND_TOKENS = 4096
"""Up to this many tokens a GPU runs a step in less time than its kernels take to launch one by one."""

SERIAL_STEP_TOKENS = 4
"""Up to this many tokens a step runs on one CPU thread. Its operations are too small to gain from more, and on a busy
machine each would wait for the others to be scheduled: a step took 690 ms where one thread takes 4."""


class Capacity(NamedTuple):
    """How much a runner has room for."""

    num_slabs: int
    max_num_seqs: int
    keeps_logs: bool = False
    """Whether decoding sequences keep logs of decoded tokens; the scheduler must know."""
    draft_tokens: int = 0
    """Most drafts of a sequence in a step, and in a log of drafts."""
    encoder_tokens: int = 0
    """Rows of the memory of encoded pictures."""


class Runner:
    """Runs steps on one device.

    Args:
        kernels: those of the model, and ``RUNNER_OPERATIONS``; the model uses them.
        constraints: of outputs; None without a tokenizer.
        poison: fill freed memory with NaN, so that tests notice when it is read.
        synthetic_rates: as of ``Verified``.
    """

    def __init__(
        self,
        model: LanguageModel,
        kernels: Kernels,
        device: torch.device,
        capacity: Capacity,
        constraints: OutputConstraints | None = None,
        *,
        poison: bool = False,
        synthetic_rates: Sequence[float] | None = None,
    ) -> None:
        self.model = model
        self._synthetic_rates = synthetic_rates
        self.device = device
        self._constraints = constraints
        num_slabs, max_num_seqs, keeps_logs, draft_tokens, encoder_tokens = capacity
        self._tokens_ahead = num_tokens_ahead(draft_tokens)
        if device.type == "cpu":
            keep_scratch_memory()
        self.arena = ArenaTensors(
            model.spec,
            num_slabs,
            device,
            num_logs=1 + max_num_seqs if keeps_logs else 0,
            num_draft_logs=1 + max_num_seqs if draft_tokens else 0,
            draft_tokens=draft_tokens,
        )
        self.transfers = Transfers(self.arena)
        """Copies to and from stores; none is attached at first."""
        self._memory = model.bind(self.arena)
        self._encoded: EncodedPictures | None = None
        if model.tower is not None:
            dtype = getattr(torch, model.spec.hidden_dtype)
            memory_XE = torch.zeros(encoder_tokens, model.spec.hidden_size, dtype=dtype, device=device)
            self._memory = replace(self._memory, pictures=memory_XE)
            max_tokens = 0 if kernels.workload.is_deterministic else MAX_SHARED_TOKENS
            self._encoded = EncodedPictures(model.tower, memory_XE, max_tokens, kernels.ranks)
        self._actions = CacheActions(self.arena, self._memory, self.transfers, kernels, poison=poison)
        self._pending = PendingTokens(max_num_seqs, device, kernels)
        self._kernels, self._store = kernels, kernels[store_hidden]
        self._columns = columns_of(model.vocab_size, kernels.ranks.rank, kernels.ranks.size)
        self._is_exact_on_cpu = device.type == "cpu" and kernels.workload.is_deterministic
        self._graphs: StepGraphs | None = None
        self._verification_graphs: VerificationGraphs | None = None
        self._verified_rows: dict[RequestId, int] = {}
        """Where each sequence was in the last step that ``_verification_graphs`` replayed."""
        self._states: dict[RequestId, SamplingState] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step, and wait for its result."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepInFlight:
        """Launch a step without waiting for the device. Its actions and writes come after those of earlier steps."""
        for request_id in plan.gone:
            del self._states[request_id]
        for new in plan.new:
            self._states[new.request_id] = SamplingState(
                new, self._columns, self.device, self._matcher(new), self._stop_finder(new), self._tokens_ahead
            )
        self.carry_out(plan.actions)
        if plan.pictures:
            self._encode(plan.pictures)
        launched = StepInFlight(plan.sequences, self.device, self.transfers)
        if self._is_exact_on_cpu:
            self._compute_one_by_one(plan.sequences, launched)
        else:
            with self._threads(plan.num_tokens):
                self._compute(plan.sequences, launched)
        launched.close()
        return launched

    def _encode(self, pictures: Sequence[PictureToEncode]) -> None:
        if self._encoded is None:
            raise EngineError("pictures came to a runner of a model without a vision tower")
        self._encoded.encode(pictures)

    def _matcher(self, new: NewRequest) -> GuardedMatcher | None:
        if new.params.structured_outputs is None and new.thinking is None:
            return None
        if self._constraints is None:
            raise EngineError("a request with a grammar or a budget came to a runner without a tokenizer")
        make = self._constraints.matcher
        if new.params.structured_outputs is None or new.params.allowed_token_ids is None:
            return GuardedMatcher(lambda: make(new))
        return GuardedMatcher(lambda: AllowedMatcher(make(new), new))

    def _stop_finder(self, new: NewRequest) -> StopFinder | None:
        if not new.params.stop_strings:
            return None
        if self._constraints is None:
            raise EngineError("a request with stop strings came to a runner without a tokenizer")
        return self._constraints.stop_finder(new)

    def forget_requests(self) -> None:
        """Drop all sampling states; no step may be in flight."""
        self._states.clear()

    def capture_graphs(
        self,
        sizes: Iterable[StepSize],
        max_model_len: int,
        *,
        verifications: Sequence[VerificationSize] = (),
        progress: bool = False,
    ) -> None:
        """Capture CUDA graphs of steps of these sizes, to replay them from now on."""
        with torch.inference_mode(), gc_paused():
            if verifications:
                self._verification_graphs = VerificationGraphs(
                    self.model,
                    self._memory,
                    self._forward,
                    self.arena,
                    self._pending.stop_ids_XI,
                    self._kernels,
                    sizes=verifications,
                    max_model_len=max_model_len,
                    progress=progress,
                )
            self._graphs = StepGraphs(
                self._forward,
                self.model.logits,
                self.arena,
                self._pending,
                self._kernels,
                sizes=sizes,
                max_model_len=max_model_len,
                keep_for_drafts=None if self._memory.draft is None else self._keep_decoded,
                progress=progress,
            )

    def _compute(self, sequences: Sequence[SequencePlan], launched: StepInFlight) -> None:
        is_plain = all(sequence.is_plain for sequence in sequences)
        is_behind_drafts = not self._pending.row_of and any(sequence.pending for sequence in sequences)
        if (not is_plain or is_behind_drafts) and self._replay_verification(sequences, launched):
            return
        self._verified_rows = {}
        if is_behind_drafts:
            raise EngineError("a step was planned before its drafts were known, and no CUDA graph can complete it")
        order, num_decodes = batch_order(sequences)
        if is_plain and self._replay_decodes(sequences, num_decodes, launched):
            return
        hidden_XE, first_rows, stored_row_of = self._hidden_of_rows(sequences, order, num_decodes, launched)
        verified, rows = list[Verified](), list[int]()
        rates = None if is_plain else self._synthetic_rates
        for index, sequence in enumerate(sequences):
            if sequence.is_sampled:
                num_tokens, drafts = sequence.end - sequence.start, sequence.token_ids[sequence.num_certain :]
                end = first_rows[index] + num_tokens if num_tokens else 1 + stored_row_of[index]
                state = self._states[sequence.request_id]
                verified.append(Verified(index, state, drafts, len(rows), synthetic_rates=rates))
                rows += range(end - 1 - len(drafts), end)
        if verified:
            logits_RV = self.model.logits(self._rows_of(hidden_XE, rows))
            if is_plain:
                self._sample(sequences, logits_RV, launched)
            else:
                sample_and_verify(logits_RV, verified, self._kernels)
                launched.take_verified(verified)
        if self._memory.draft is not None:
            chosen = None if is_plain else {sequence.index: sequence.token_ids for sequence in verified}
            pairs = pairs_of_step(sequences, chosen, first_rows, stored_row_of)
            if is_plain:
                self._keep_pairs(pairs, hidden_XE)
            else:
                model = cast(DraftingModel, self.model)
                launched.drafts = make_drafts(model, self._memory, self._kernels, pairs, hidden_XE)

    def _rows_of(self, hidden_XE: Tensor, rows: Sequence[int]) -> Tensor:
        """Return some rows; no copy if they are all."""
        if rows == list(range(len(hidden_XE))):
            return hidden_XE
        (rows_N,) = upload_together([rows], self.device)
        return hidden_XE[rows_N]

    def _keep_pairs(self, pairs: Sequence[Pairs], hidden_XE: Tensor) -> None:
        keep_pairs(cast(DraftingModel, self.model), self._memory, pairs, hidden_XE, self._pending.sampled_P)

    def _keep_decoded(self, batch: StepBatch, hidden_TE: Tensor) -> None:
        """Make the pairs of decodes, each ending with the token that was sampled after it."""
        pairs = replace(batch, token_ids_T=self._pending.sampled_P[: len(hidden_TE)].clamp_min(0))
        cast(DraftingModel, self.model).keep_for_drafts(pairs, hidden_TE, self._memory)

    def _repeat_pairs(self, sequences: Sequence[SequencePlan]) -> None:
        """Make the pairs again that end with the first tokens of sequences that resume from shared snapshots."""
        repeating = [sequence for sequence in sequences if repeats_pair(sequence)]
        if repeating:
            self._keep_pairs(repeated_pairs(repeating), self._stored_hidden(repeating))

    def _hidden_of_rows(
        self, sequences: Sequence[SequencePlan], order: list[int], num_decodes: int, launched: StepInFlight
    ) -> tuple[Tensor, dict[int, int], dict[int, int]]:
        """Run the model; return hidden states, and where they are.

        Returns:
            The hidden states of all rows, and those of snapshots that are needed: to sample from, or to repeat a pair;
            by index in the plan, the first row of each sequence that computes something; and of each that was stored.
        """
        has_layer = self._memory.draft is not None
        stored = [i for i, x in enumerate(sequences) if x.end == x.start or (has_layer and repeats_pair(x))]
        first_rows, parts = dict[int, int](), list[Tensor]()
        if order:
            host, hidden = self._run([sequences[index] for index in order], num_decodes, launched)
            starts_N = host.query_starts_N1[:-1].copy()
            starts_N[host.num_decodes :] += hidden.first_prompt_row - host.num_decode_rows
            first_rows = dict(zip(order, starts_N.tolist(), strict=True))
            parts.append(hidden.hidden_TE)
        num_rows = sum(map(len, parts))
        if stored:
            parts.append(self._stored_hidden([sequences[index] for index in stored]))
        hidden_XE = parts[0] if len(parts) == 1 else torch.cat(parts)
        return hidden_XE, first_rows, dict(zip(stored, range(num_rows, num_rows + len(stored)), strict=True))

    def _compute_one_by_one(self, sequences: Sequence[SequencePlan], launched: StepInFlight) -> None:
        """Compute each sequence by itself, a prompt block by block, so that its bits depend on nothing else.

        A CPU's GEMMs round by their number of rows, its vectorised functions by where a number lies among others.
        Here what computes a token is called with the same shapes in whatever step that happens.
        """
        sampled, chosen = list[tuple[int, SamplingState]](), list[ChosenTokens]()
        for index, sequence in enumerate(sequences):
            hidden_1E = [self._hidden_of_part(part, launched) for part in split_by_blocks(sequence)][-1]
            if sequence.is_sampled:
                state = self._states[sequence.request_id]
                with one_thread():
                    chosen.append(choose_tokens(self.model.logits(hidden_1E), [state], self._kernels))
                sampled.append((index, state))
        if sampled:
            self._take(ChosenTokens.of_rows(chosen), sampled, launched)

    def _hidden_of_part(self, part: SequencePlan, launched: StepInFlight) -> Tensor:
        with self._threads(part.end - part.start):
            return self._hidden_of_rows([part], *batch_order([part]), launched)[0][-1:].clone()

    def _threads(self, num_tokens: int) -> AbstractContextManager[None]:
        """Return a context that sets the number of threads for a step of this size."""
        return one_thread() if self.device.type == "cpu" and num_tokens <= SERIAL_STEP_TOKENS else nullcontext()

    def _replay_decodes(self, sequences: Sequence[SequencePlan], num_decodes: int, launched: StepInFlight) -> bool:
        """Replay a step of decodes that are all sampled; whether it was one, and a graph had room for it."""
        if self._graphs is None or num_decodes < len(sequences) or not all(s.is_sampled for s in sequences):
            return False
        host = build_host_batch(sequences, num_decodes, self._pending.locate(sequences, self._states))
        decoded = self._graphs.decode(host)
        if decoded is None:
            return False
        if self._memory.draft is not None:
            self._repeat_pairs(sequences)
        self._sample(sequences, decoded.logits_NV, launched, decoded)
        self._graphs.keep_for_drafts(host)
        return True

    def _replay_verification(self, sequences: Sequence[SequencePlan], launched: StepInFlight) -> bool:
        """Replay a step of certain tokens and drafts alone; whether it was one, and graphs had room for it."""
        graphs = self._verification_graphs
        if graphs is None or not all(sequence.is_verification for sequence in sequences):
            return False
        if any(sequence.log and not sequence.is_prefill for sequence in sequences):
            raise EngineError("a step that verifies drafts was planned with a log of decoded tokens")
        *first_rows, num_rows = accumulate((1 + sequence.num_drafts for sequence in sequences), initial=0)
        states = [self._states[sequence.request_id] for sequence in sequences]
        verified = [
            Verified(index, state, sequence.token_ids[1:], row, synthetic_rates=self._synthetic_rates)
            for index, (state, sequence, row) in enumerate(zip(states, sequences, first_rows, strict=True))
        ]
        verdicts = None
        if self._synthetic_rates is not None:
            verdicts = [verdict for sequence in verified for verdict in sequence.verdicts]
        is_independent = all(state.is_independent for state in states)
        is_compared_here = not is_independent or any(state.stop_finder is not None for state in states)
        stops = [NO_STOPS if is_compared_here else state.new.stop_ids for state in states]
        pending = [sequence.request_id for sequence in sequences if sequence.pending]
        if pending and is_compared_here:
            raise EngineError(f"requests {pending} were planned before tokens were known that the host has to compare")
        if pending and not self._verified_rows:
            self._verified_rows = self._pending.row_of
            graphs.take_sampled(self._pending.sampled_P[: len(self._verified_rows)])
        row_of = self._verified_rows
        if not all(request_id in row_of for request_id in pending):
            raise EngineError(f"of requests {pending} are drafts awaited, but the last step verified only {[*row_of]}")
        source_rows = [row_of[sequence.request_id] if sequence.pending else 0 for sequence in sequences]
        step = graphs.verify(sequences, source_rows, self._pending.stop_sets(stops), verdicts)
        if step is None:
            return False
        self._pending.forget()
        self._verified_rows = {sequence.request_id: row for row, sequence in enumerate(sequences)}
        if self._memory.draft is not None:
            self._repeat_pairs(sequences)
        logits_TV = self.model.logits(step.hidden_TE)[:num_rows]
        if is_independent:
            by_row = [state for sequence, state in zip(verified, states, strict=True) for _ in range(sequence.num_rows)]
            if not all(state.is_plain_greedy for state in states):
                logits_TV = logits_TV.float()
            positions_T = step.batch.positions_T[:num_rows] + 1
            step.tokens_T[:num_rows].copy_(choose_independently(logits_TV, by_row, positions_T, self._kernels))
            if is_compared_here:
                verify_chosen(step.tokens_T.tolist(), verified)
        else:
            sample_and_verify(logits_TV, verified, self._kernels)
        if is_compared_here:
            graphs.take_chosen(step, verified)
        step.drafting.replay()
        count = len(sequences)
        tokens_T, num_accepted_N = download(step.tokens_T[:num_rows]), download(step.num_accepted_N[:count])
        drafts_ND = download(step.drafts_ND[:count])
        next_drafts = [sequence.next_drafts for sequence in sequences]
        launched.take_verified_later(VerifiedOnDevice(verified, tokens_T, num_accepted_N, drafts_ND, next_drafts))
        return True

    @torch.inference_mode()
    def carry_out(self, actions: Iterable[Action]) -> None:
        """Apply the cache's actions in order; consecutive folds together."""
        self._actions.carry_out(actions)

    def _forward(self, batch: StepBatch) -> Tensor:
        return self.model.forward(batch, self._memory)

    def _run(
        self, ordered: list[SequencePlan], num_decodes: int, launched: StepInFlight
    ) -> tuple[HostBatch, StepHidden]:
        """Run the model over sequences in the batch's order, and fetch prompts' log-probabilities."""
        pending = self._pending.locate(ordered, self._states)
        host = build_host_batch(ordered, num_decodes, pending, self.arena.draft_tokens)
        hidden = None if self._graphs is None else self._graphs.prefill(host)
        if hidden is None:
            launched.is_launch_bound = self._is_launch_bound(host)
            hidden = self._run_eagerly(host)
        fetch_prompt_logprobs(ordered, host, hidden, self.model.logits, self._states, self._kernels, launched)
        return host, hidden

    def _is_launch_bound(self, host: HostBatch) -> bool:
        return self.device.type == "cuda" and len(host.token_ids_T) <= LAUNCH_BOUND_TOKENS

    def _run_eagerly(self, host: HostBatch) -> StepHidden:
        """Launch the model's kernels one by one; store hidden states: of sequences' ends and cuts in slots, of drafts
        in logs.
        """
        batch = to_device(host, self.device, self._kernels)
        if host.has_pending:
            self._pending.resolve(batch.step, batch.columns)
        hidden_TE, arena, recurrent = self._forward(batch.step), self.arena, batch.step.recurrent
        self._store(hidden_TE, batch.columns.last_row, arena.hidden_SE, batch.columns.state_dst)
        if any(host.chunks.cut_slots):
            self._store(hidden_TE, batch.cut_rows_C, arena.hidden_SE, recurrent.chunks.cut_slots_C)
        if recurrent.replay is not None and arena.hidden_drafts_JE is not None:
            rows_K, places_K = recurrent.replay.draft_rows_K, recurrent.replay.draft_places_K
            self._store(hidden_TE, rows_K + host.num_decode_rows, arena.hidden_drafts_JE, places_K)
        return StepHidden(hidden_TE, host.num_decode_rows)

    def _stored_hidden(self, sequences: Sequence[SequencePlan]) -> Tensor:
        """Return the hidden states that lie in the sequences' source slots."""
        (slots_N,) = upload_together([[sequence.state_src for sequence in sequences]], self.device)
        return self.arena.hidden_SE[slots_N]

    def _sample(
        self,
        sequences: Sequence[SequencePlan],
        logits_NV: Tensor,
        launched: StepInFlight,
        decoded: Decoded | None = None,
    ) -> None:
        """Choose a token for each sequence that is sampled, and fetch it.

        Args:
            logits_NV: a row for each of them.
            decoded: where the logits come from, if it is a replayed step of decodes.
        """
        sampled = [
            (index, self._states[sequence.request_id])
            for index, sequence in enumerate(sequences)
            if sequence.is_sampled
        ]
        greedy_N, host_greedy_N = (None, None) if decoded is None else (decoded.likeliest_N, decoded.host_likeliest_N)
        chosen = choose_tokens(logits_NV, [state for _, state in sampled], self._kernels, greedy_N)
        is_on_host = chosen.tokens_N is greedy_N and not chosen.failures
        self._take(chosen, sampled, launched, host_greedy_N if is_on_host else None)

    def _take(
        self,
        chosen: ChosenTokens,
        sampled: list[tuple[int, SamplingState]],
        launched: StepInFlight,
        host_tokens_N: Tensor | None = None,
    ) -> None:
        """Keep what was sampled for the next step, and fetch it, unless the device brings it to the host itself."""
        self._pending.remember(chosen.tokens_N, [state.new.request_id for _, state in sampled])
        launched.take_tokens(chosen, sampled, host_tokens_N)
