"""The runner of steps on one device: it applies the cache's actions, runs the model and samples.

The runner follows the plan, and holds nothing of a request but its sampling state. Every sequence's final hidden state
is stored in its slot, so that a slot that becomes a snapshot can give its next token without a forward pass.

``launch`` does not wait for the device: sampled tokens stay there, for the next step to read, and are copied to the
host after the step.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from strandline.device.batches.batch import to_device
from strandline.device.batches.encoded_pictures import MAX_SHARED_TOKENS, EncodedPictures
from strandline.device.batches.padded_step import StepSize
from strandline.device.batches.pending import PendingTokens
from strandline.device.drafters.block_drafts import BlockDrafts
from strandline.device.drafters.draft_layer import DraftLayer
from strandline.device.hardware.heap import keep_scratch_memory
from strandline.device.hardware.threads import one_thread
from strandline.device.hardware.upload import upload_together
from strandline.device.sampling.allowed_tokens import AllowedMatcher
from strandline.device.sampling.choice import Chosen, choose
from strandline.device.sampling.divided_sampling import SAMPLING_OPERATIONS
from strandline.device.sampling.grammar_mask import GuardedMatcher
from strandline.device.sampling.sampling_state import SamplingState
from strandline.device.steps.adapter_pool import AdapterPool
from strandline.device.steps.cache_actions import CacheActions
from strandline.device.steps.drafter import NextDrafts, StepDrafter, StepRows
from strandline.device.steps.forward import Forward
from strandline.device.steps.graphs import CapturedStep, StepGraphs
from strandline.device.steps.host_step import HostStep, Layout, StepIndices
from strandline.device.steps.prompt_logprobs import PromptLogprobs, fetch_prompt_logprobs
from strandline.device.steps.routed_experts import fetch_routed
from strandline.device.steps.step_in_flight import StepInFlight
from strandline.device.stores.transfers import Transfers
from strandline.errors import EngineError
from strandline.gc_policy import gc_paused
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.kernels.ranks import columns_of
from strandline.kernels.recurrences.rerun import insert_logged
from strandline.kernels.sampling.verification import LastStep, accept_drafts, resolve_pending
from strandline.kernels.step import fetch_integers, hand_over_drafts, hand_over_tokens, locate_rows, store_hidden
from strandline.models.layers.protocol import DraftingModel, LanguageModel, ModelMemory
from strandline.records.actions import Action
from strandline.records.constraints import OutputConstraints, StopFinder
from strandline.records.plan import NewRequest, PictureToEncode, SequencePlan, StepPlan, StepResult, num_tokens_ahead

RUNNER_OPERATIONS: Final[tuple[Operation[..., Any], ...]] = (
    locate_rows,
    resolve_pending,
    store_hidden,
    fetch_integers,
    hand_over_tokens,
    hand_over_drafts,
    insert_logged,
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
        kernels: kernels of the model, and ``RUNNER_OPERATIONS``; the model uses them.
        constraints: constraints of outputs; None: there is no tokenizer.
        poison: fill freed memory with NaN, so that tests notice when it is read.
        synthetic_rates: see ``draw_verdicts``.
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
        self.adapters = AdapterPool(model.adapters)
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
        self.kernels = kernels
        self._pending = PendingTokens(max_num_seqs, draft_tokens, device)
        self._poison, self._encoder_tokens = poison, encoder_tokens
        self.use_model(model)
        self._columns = columns_of(model.vocab_size, kernels.ranks.rank, kernels.ranks.size)
        self._is_exact_on_cpu = device.type == "cpu" and kernels.workload.is_deterministic
        self._states: dict[RequestId, SamplingState] = {}
        self._layout = Layout(
            self._states,
            self.adapters,
            self._pending,
            draft_tokens,
            synthetic_rates,
            keeps_pairs=self._drafter is not None and self._drafter.keeps_pairs,
        )

    def use_model(self, model: LanguageModel) -> None:
        """Compute with a model from now on, in the same memory; it uses the runner's kernels, and no step is in flight.

        Captured graphs are of the model before, and are given up.
        """
        self.model, kernels = model, self.kernels
        self._memory = model.bind(self.arena)
        self._encoded: EncodedPictures | None = None
        if model.tower is not None:
            dtype = getattr(torch, model.spec.hidden_dtype)
            memory_XE = torch.zeros(self._encoder_tokens, model.embedding_size, dtype=dtype, device=self.device)
            self._memory = replace(self._memory, pictures=memory_XE)
            max_tokens = 0 if kernels.workload.is_deterministic else MAX_SHARED_TOKENS
            self._encoded = EncodedPictures(model.tower, memory_XE, max_tokens, kernels.ranks)
        self._actions = CacheActions(self.arena, self._memory, self.transfers, kernels, poison=self._poison)
        self._drafter = _new_drafter(model, self._memory, self._pending.last, kernels)
        self._forward = Forward(model, self._memory, self.arena, self.adapters, kernels)
        self._graphs: StepGraphs | None = None

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
        return self._compute_one_by_one(plan.sequences) if self._is_exact_on_cpu else self._compute(plan)

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

    def close(self) -> None:
        """End transfers, and give up graphs: NCCL waits for those of its operations before it disconnects."""
        self.transfers.close()
        self.drop_graphs()

    def drop_graphs(self) -> None:
        """Give up captured graphs, and their memory."""
        self._graphs = None

    def capture_graphs(self, sizes: Iterable[StepSize], max_model_len: int, *, progress: bool = False) -> None:
        """Capture CUDA graphs of steps of these sizes, to replay them from now on."""
        with torch.inference_mode(), gc_paused():
            self._graphs = StepGraphs(
                self._forward,
                self._pending.last,
                self._drafter,
                sizes=sizes,
                max_model_len=max_model_len,
                progress=progress,
            )

    def _compute(self, plan: StepPlan) -> StepInFlight:
        with self._threads(plan.num_tokens):
            step, indices, hidden_XE = self._run(plan.sequences, self._graphs)
            chosen = self._choose(step, indices, hidden_XE)
            row_of = {plan.sequences[index].request_id: row for index, row in step.sampled_rows.items()}
            self._pending.remember(row_of, None if step.verification else chosen.tokens_R)
            drafts = self._draft(step, hidden_XE, chosen)
            wanted = [each.plan_index for each in step.wanted]
            # A drafter's features may follow the model's own.
            own_XE = hidden_XE[:, : self.model.embedding_size]
            is_short = step.captured is None and 0 < plan.num_tokens <= LAUNCH_BOUND_TOKENS
            return StepInFlight(
                plan.sequences,
                chosen,
                drafts,
                prompt_logprobs=fetch_prompt_logprobs(step, hidden_XE, self.model.logits, self._states, self.kernels),
                hidden_states=(wanted, own_XE[indices.wanted_rows]) if wanted else None,
                routed=fetch_routed(plan.sequences, self._memory.routing, self._states),
                transfers=self.transfers,
                device=self.device,
                is_launch_bound=is_short and self.device.type == "cuda",
            )

    def _run(
        self, sequences: Sequence[SequencePlan], graphs: StepGraphs | None
    ) -> tuple[HostStep, StepIndices[Tensor], Tensor]:
        """Lay a step out and run the model; return its rows of hidden states, and then stored ones."""
        step = self._layout.lay_out_step(sequences, graphs)
        host, captured, parts = step.batch, step.captured, list[Tensor]()
        if host is not None and captured is None:
            batch = to_device(host, self.device, self.kernels, step.indices)
            if host.has_pending:
                self.kernels[resolve_pending](batch.planned, self._pending.last)
            parts.append(self._forward.run(batch))
            indices = StepIndices(*batch.others)
        else:
            indices = StepIndices(*upload_together(step.indices, self.device))
            if host is not None and captured is not None:
                parts.append(captured.replay(host))
        if step.rows.stored:
            parts.append(self.arena.hidden_SE[indices.stored_slots])
        return step, indices, parts[0] if len(parts) == 1 else torch.cat(parts)

    def _choose(self, step: HostStep, indices: StepIndices[Tensor], hidden_XE: Tensor) -> Chosen:
        """Choose tokens; where the host has to compare drafts, do so."""
        candidates, verification, decodes = step.candidates, step.verification, step.decodes
        if not candidates:
            return Chosen.joined({})
        count = candidates[-1].first_row + candidates[-1].num_rows
        rows: slice | Tensor = indices.rows_R if step.indices.rows_R else slice(count)
        positions_R = None
        if verification is not None:
            hidden_XE = verification.hidden_TE
            if not all(each.state.is_plain_greedy for each in candidates):
                positions_R = verification.batch.step.positions_T[rows] + 1
        greedy_R = None if decodes is None else self._pending.last.tokens_P[:count]
        logits_RV = self._logits(decodes, hidden_XE, rows)[:count]
        chosen = choose(logits_RV, candidates, self.kernels, positions_R=positions_R, greedy_R=greedy_R)
        chosen.rows = rows
        if decodes is not None and chosen.tokens_R is greedy_R and not chosen.failures:
            chosen.host_tokens_R = decodes.host_results_I[:count]
        may_have_drafts = verification is not None or not step.is_plain
        is_compared_on_device = verification is not None and all(x.state.is_compared_on_device for x in candidates)
        if may_have_drafts and not is_compared_on_device:
            chosen.read()
        return chosen

    def _logits(self, decodes: CapturedStep | None, hidden_XE: Tensor, rows: slice | Tensor) -> Tensor:
        """Return logits of rows, perhaps with padding after them, whose number the kernels have met."""
        if decodes is not None:
            return decodes.logits_NV
        return self.model.logits(hidden_XE if isinstance(rows, slice) else hidden_XE[rows])

    def _draft(self, step: HostStep, hidden_XE: Tensor, chosen: Chosen) -> NextDrafts | None:
        """Let the drafter store what it needs, and draft for the next step; None: no sequence wants drafts."""
        verification, drafts = step.verification, None
        captured = step.decodes or verification
        if self._drafter is not None:
            first_rows = step.rows.first if captured is None else {}
            sampled = None if step.is_plain or verification else chosen.known
            rows = StepRows(step.sequences, hidden_XE, first_rows, step.rows.stored, sampled)
            drafts = self._drafter.follow(rows)
        if captured is not None:
            captured.finish(chosen)
        if verification is not None:
            drafts = NextDrafts(step.sampled_rows, verification.next_drafts_ND)
        return drafts

    def _compute_one_by_one(self, sequences: Sequence[SequencePlan]) -> StepInFlight:
        """Compute each sequence by itself, a prompt block by block, so that its bits depend on nothing else.

        A CPU's GEMMs round by their number of rows, its vectorised functions by where a number is among others. Here
        what computes a token is called with the same shapes in whatever step that happens.
        """
        chosen, hidden_states, logprobs = dict[int, Chosen](), dict[int, Tensor](), list[PromptLogprobs]()
        for index, sequence in enumerate(sequences):
            for part in split_by_blocks(sequence):
                with self._threads(part.end - part.start):
                    step, indices, hidden_XE = self._run([part], None)
                    logprobs += fetch_prompt_logprobs(step, hidden_XE, self.model.logits, self._states, self.kernels)
                if part.end < sequence.end:
                    continue
                if step.wanted:
                    hidden_states[index] = hidden_XE[-1]
                if sequence.is_sampled:
                    with one_thread():
                        chosen[index] = self._choose(step, indices, hidden_XE)
        together = Chosen.joined(chosen)
        self._pending.remember(
            {sequences[index].request_id: row for row, index in enumerate(chosen)}, together.tokens_R
        )
        routed = fetch_routed(sequences, self._memory.routing, self._states)
        wanted = ([*hidden_states], torch.stack([*hidden_states.values()])) if hidden_states else None
        return StepInFlight(sequences, together, None, logprobs, wanted, routed, self.transfers, self.device)

    def _threads(self, num_tokens: int) -> AbstractContextManager[None]:
        """Return a context that sets the number of threads for a step of this size."""
        return one_thread() if self.device.type == "cpu" and num_tokens <= SERIAL_STEP_TOKENS else nullcontext()

    @torch.inference_mode()
    def carry_out(self, actions: Iterable[Action]) -> None:
        """Apply the cache's actions in order; consecutive folds together."""
        self._actions.carry_out(actions)


def _new_drafter(model: LanguageModel, memory: ModelMemory, last: LastStep, kernels: Kernels) -> StepDrafter | None:
    """Return what drafts after a step with the model's drafter; None: the model has none."""
    if model.drafter is None:
        return None
    kind = DraftLayer if model.drafter.block is None else BlockDrafts
    return kind(cast(DraftingModel, model), memory, last, kernels)


def split_by_blocks(sequence: SequencePlan) -> Iterator[SequencePlan]:
    """Yield the parts of a sequence that keeps no log, each within one block, to be computed one after the other.

    A sequence without tokens to compute is its own only part.
    """
    start, src, is_over = sequence.start, sequence.state_src, False
    while not is_over:
        end = min((start // BLOCK_TOKENS + 1) * BLOCK_TOKENS, sequence.end)
        yield sequence._replace(
            start=start,
            end=end,
            token_ids=sequence.token_ids[start - sequence.start : end - sequence.start],
            state_src=src,
            cuts=tuple(cut for cut in sequence.cuts if start < cut[0] <= end),
            num_folded=end - start,
        )
        start, src, is_over = end, sequence.state_dst, end == sequence.end
