"""A step in flight: sampled tokens come to the host at its end, and are read once the device is done."""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from strandline.device.hardware.upload import download
from strandline.device.sampling.choice import Chosen
from strandline.device.sampling.failures import catch_failure
from strandline.device.sampling.sampler import LogprobTensors
from strandline.device.steps.drafter import Drafts
from strandline.device.stores.transfers import Transfers
from strandline.ids import NO_TOKEN, RequestId
from strandline.records.plan import RoutedTokens, SequencePlan, StepResult, TokenLogprobs


class RoutedSpan(NamedTuple):
    """Tokens of a sequence whose experts are fetched."""

    sequence: int
    """Its index in the plan."""
    start: int
    num_tokens: int


class StepInFlight:
    """A step in flight."""

    def __init__(self, sequences: Sequence[SequencePlan], device: torch.device, transfers: Transfers) -> None:
        self.is_launch_bound = False
        """Whether launching took longer than the device needs to run the step."""
        self._sequences = sequences
        self._device = device
        self._transfers = transfers
        self._chosen = Chosen((), torch.empty(0, dtype=torch.int64), token_ids=[])
        self._drafts: Drafts | None = None
        self._prompt_logprobs: dict[RequestId, list[LogprobTensors]] = {}
        self._hidden_states: list[tuple[Sequence[int], Tensor]] = []
        """Indices in the plan, and their rows."""
        self._routed: tuple[Sequence[RoutedSpan], Tensor] | None = None
        self.failures: dict[RequestId, str] = {}
        """Why requests have failed so far."""
        self._done: torch.cuda.Event | None = None

    def take(self, chosen: Chosen, drafts: Drafts | None = None) -> None:
        """Fetch the tokens of the step, and the drafts after it."""
        chosen.fetch()
        self._chosen = chosen
        self._drafts = None if drafts is None else drafts._replace(tokens_ND=download(drafts.tokens_ND))
        self.failures |= chosen.failures

    def take_prompt_logprobs(self, request_id: RequestId, tensors: LogprobTensors) -> None:
        """Fetch the log-probabilities of the next tokens of a sequence's prompt."""
        self._prompt_logprobs.setdefault(request_id, []).append(tensors)

    def take_hidden_states(self, indices: Sequence[int], hidden_NE: Tensor) -> None:
        """Fetch the hidden states of sequences, by their indices in the plan."""
        self._hidden_states.append((indices, download(hidden_NE.float())))

    def take_routed(self, spans: Sequence[RoutedSpan], routed_TC: Tensor) -> None:
        """Fetch the experts of tokens, those of one span after another."""
        self._routed = spans, download(routed_TC)

    def close(self) -> None:
        """Mark the end of the step on the device."""
        if self._device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self) -> StepResult:
        """Wait for the device and return the step's result."""
        if self._done is not None:
            self._done.synchronize()
        token_ids: list[tuple[int, ...]] = [()] * len(self._sequences)
        candidates = self._chosen.candidates
        for each, tokens in zip(candidates, self._chosen.read(), strict=True):
            token_ids[each.plan_index] = tuple(tokens)
        logprobs, prompt_logprobs = dict[int, list[TokenLogprobs]](), dict[int, list[TokenLogprobs]]()
        for index, entries in self._chosen.logprobs.items():
            with catch_failure(self.failures, self._sequences[index].request_id):
                logprobs[index] = [tensors.read()[0] for tensors in entries]
        if self._prompt_logprobs:
            for index, sequence in enumerate(self._sequences):
                with catch_failure(self.failures, sequence.request_id):
                    parts = self._prompt_logprobs.get(sequence.request_id, ())
                    prompt_logprobs[index] = [entry for tensors in parts for entry in tensors.read()]
        states = [(each.plan_index, each.state) for each in candidates]
        stopping = [(index, state) for index, state in states if state.stop_finder is not None]
        return StepResult(
            tuple(token_ids),
            logprobs,
            prompt_logprobs,
            self._read_drafts(),
            self.failures,
            {index: state.stop_string for index, state in stopping if state.stop_string is not None},
            {index: state.num_stop_tokens for index, state in stopping if state.num_stop_tokens},
            {index: state.is_bound for index, state in states if state.new.thinking is not None},
            {
                index: row_E.numpy().tobytes()
                for indices, rows_NE in self._hidden_states
                for index, row_E in zip(indices, rows_NE, strict=True)
            },
            self._read_routed(),
            self._transfers.take(),
        )

    def _read_drafts(self) -> dict[int, tuple[int, ...]]:
        """Return the drafts that sequences want, by their index, up to the first that could not be chosen."""
        if self._drafts is None:
            return {}
        tokens, wanted = self._drafts.tokens_ND.tolist(), [sequence.next_drafts for sequence in self._sequences]
        rows = self._drafts.rows.items()
        return {i: tuple(takewhile(NO_TOKEN.__ne__, tokens[row][: wanted[i]])) for i, row in rows if wanted[i]}

    def _read_routed(self) -> dict[int, RoutedTokens]:
        """Return the experts that were fetched, by index of the sequence."""
        if self._routed is None:
            return {}
        spans, routed_TC = self._routed
        parts = routed_TC.split([span.num_tokens for span in spans])
        pairs = zip(spans, parts, strict=True)
        return {span.sequence: RoutedTokens(span.start, x.numpy().tobytes(), x.shape[1]) for span, x in pairs}
