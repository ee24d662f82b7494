"""Carries out a step: moves what the cache asked for, runs the model, samples.

The runner obeys the plan. It keeps nothing of a request but its sampling state. Every sequence's final hidden
state is stored in its slot, so that a slot that becomes a snapshot can give its next token without a forward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from strandline.cache import Action, CopyTokens, DropBlock, DropSlot, MoveBlock
from strandline.engine.batch import build_batch, is_decode
from strandline.engine.heap import keep_scratch_memory
from strandline.engine.plan import NewRequest, SequencePlan, StepPlan, StepResult, TokenLogprobs
from strandline.engine.sampler import SamplingState, choose_tokens, token_logprobs
from strandline.engine.structured import Grammars, Matcher
from strandline.errors import EngineError
from strandline.ids import RequestId
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import LayerMemory, StepBatch
from strandline.specs import ModelSpec

SERIAL_STEP_TOKENS = 4
"""Steps of so few tokens run on one CPU thread. Their operations are too small to gain from more, and on a busy
machine each would wait for the others to be scheduled: 690 ms a step were seen where one thread takes 4."""


class LanguageModel(Protocol):
    """What the runner needs of a model (rows ``T``, hidden size ``E``, vocabulary ``V``)."""

    spec: ModelSpec
    vocab_size: int
    max_position: int

    def forward(self, batch: StepBatch, memory: Sequence[LayerMemory]) -> Tensor:
        """Return the final, normalised hidden state of every row, ``[T, E]``."""

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return float32 logits ``[N, V]``."""


class Runner:
    """Runs steps on one device.

    Args:
        poison: fill what the cache drops with NaN, so that reading it is found out.
    """

    def __init__(self, model: LanguageModel, num_slabs: int, device: torch.device, *, poison: bool = False) -> None:
        self.model = model
        self.device = device
        self.grammars: Grammars | None = None
        """What compiles the grammars of requests; there is none without a tokenizer."""
        if device.type == "cpu":
            keep_scratch_memory()
        self.arena = ArenaTensors(model.spec, num_slabs, device)
        self._poison = poison
        self._states: dict[RequestId, SamplingState] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Carry out a plan."""
        for request_id in plan.gone:
            del self._states[request_id]
        for new in plan.new:
            self._states[new.request_id] = SamplingState(new, self.model.vocab_size, self.device, self._matcher(new))
        for action in plan.actions:
            self._apply(action)
        if self.device.type == "cpu" and plan.num_tokens <= SERIAL_STEP_TOKENS:
            with _one_thread():
                return self._compute(plan)
        return self._compute(plan)

    def _matcher(self, new: NewRequest) -> Matcher | None:
        wanted = new.params.structured_outputs
        if wanted is None:
            return None
        if self.grammars is None:
            raise EngineError("a request with structured outputs came to a runner without a tokenizer")
        return self.grammars.matcher(wanted, new.stop_ids)

    def _compute(self, plan: StepPlan) -> StepResult:
        order, num_decodes = _order(plan.sequences)
        result = StepResult([None] * len(plan.sequences))
        hidden_NE = self._last_hidden(plan.sequences, order, num_decodes, result)
        self._sample(plan.sequences, hidden_NE, result)
        return result

    def _apply(self, action: Action) -> None:
        match action:
            case CopyTokens(src, dst, num_tokens):
                self.arena.copy_block(src, dst, num_tokens)
            case MoveBlock(src, dst):
                self.arena.move_block(src, dst)
                if self._poison:
                    self.arena.poison([src], [])
            case DropBlock(block) if self._poison:
                self.arena.poison([block], [])
            case DropSlot(slot) if self._poison:
                self.arena.poison([], [slot])

    def _last_hidden(
        self, sequences: Sequence[SequencePlan], order: list[int], num_decodes: int, result: StepResult
    ) -> Tensor:
        """Run the model; return the hidden state behind each sequence's next token, in the plan's order."""
        if not order:
            return self.arena.hidden_SE[[sequence.state_src for sequence in sequences]]
        ordered = [sequences[index] for index in order]
        batch = build_batch(ordered, num_decodes, self.device)
        hidden_TE = self.model.forward(batch, self.arena.layers)
        last_rows = batch.attention.query_starts_N1[1:] - 1
        last_NE = hidden_TE[last_rows]
        self.arena.hidden_SE[batch.recurrent.dst_N] = last_NE
        self._store_cut_hidden(ordered, batch.attention.query_starts, hidden_TE)
        self._prompt_logprobs(ordered, order, batch.attention.query_starts, hidden_TE, result)
        if order == list(range(len(sequences))):
            return last_NE
        hidden_NE = self.arena.hidden_SE[[sequence.state_src for sequence in sequences]]
        hidden_NE[order] = last_NE
        return hidden_NE

    def _store_cut_hidden(self, sequences: list[SequencePlan], rows: Sequence[int], hidden_TE: Tensor) -> None:
        pairs = [
            (row + position - sequence.start - 1, slot)
            for row, sequence in zip(rows, sequences, strict=False)
            for position, slot in sequence.cuts
        ]
        if pairs:
            cut_rows, slots = (list(column) for column in zip(*pairs, strict=True))
            self.arena.hidden_SE[slots] = hidden_TE[cut_rows]

    def _prompt_logprobs(
        self,
        sequences: list[SequencePlan],
        order: list[int],
        rows: Sequence[int],
        hidden_TE: Tensor,
        result: StepResult,
    ) -> None:
        for row, sequence, index in zip(rows, sequences, order, strict=False):
            state = self._states[sequence.request_id]
            num_top = state.params.prompt_logprobs
            prompt = state.new.prompt_ids
            end = min(sequence.end, len(prompt) - 1)
            if num_top is None or end <= sequence.start:
                continue
            logits_NV = self.model.logits(hidden_TE[row : row + end - sequence.start])
            tokens_N = torch.tensor(prompt[sequence.start + 1 : end + 1], dtype=torch.int64, device=self.device)
            entries: list[TokenLogprobs] = token_logprobs(logits_NV, tokens_N, [num_top] * len(tokens_N))
            result.prompt_logprobs[index] = entries

    def _sample(self, sequences: Sequence[SequencePlan], hidden_NE: Tensor, result: StepResult) -> None:
        sampled = [index for index, sequence in enumerate(sequences) if sequence.is_sampled]
        if not sampled:
            return
        if len(sampled) < len(sequences):
            hidden_NE = hidden_NE[sampled]
        states = [self._states[sequences[index].request_id] for index in sampled]
        tokens, logprobs = choose_tokens(self.model.logits(hidden_NE), states)
        for index, token in zip(sampled, tokens, strict=True):
            result.token_ids[index] = token
        result.logprobs = {sampled[row]: entry for row, entry in logprobs.items()}


def _order(sequences: Sequence[SequencePlan]) -> tuple[list[int], int]:
    """Return the indices of the sequences that compute something, decodes first, and how many are decodes."""
    decodes = [index for index, sequence in enumerate(sequences) if is_decode(sequence)]
    if len(decodes) == len(sequences):
        return decodes, len(decodes)
    prefills = [
        index for index, sequence in enumerate(sequences) if sequence.end > sequence.start and not is_decode(sequence)
    ]
    return decodes + prefills, len(decodes)


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
