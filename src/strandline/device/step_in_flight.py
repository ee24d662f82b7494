"""A step in flight: sampled tokens come to the host at its end, and are read once the device is done."""

from collections.abc import Sequence

import torch
from torch import Tensor

from strandline.device.failures import catch_failure
from strandline.device.sampler import ChosenTokens, LogprobTensors, SamplingState
from strandline.device.transfers import Transfers
from strandline.device.upload import download
from strandline.device.verification import Verified, VerifiedOnDevice
from strandline.ids import NO_TOKEN, RequestId
from strandline.records.plan import SequencePlan, StepResult, TokenLogprobs


class StepInFlight:
    """A step in flight."""

    def __init__(self, sequences: Sequence[SequencePlan], device: torch.device, transfers: Transfers) -> None:
        self.is_launch_bound = False
        """Whether launching took longer than the device needs to run the step."""
        self._sequences = sequences
        self._device = device
        self._transfers = transfers
        self._tokens_N: Tensor | None = None
        self._sampled: list[tuple[int, SamplingState]] = []
        self._logprobs: dict[int, list[LogprobTensors]] = {}
        self._verified: list[Verified] = []
        self._verified_on_device: VerifiedOnDevice | None = None
        self.drafts: dict[int, tuple[int, ...]] = {}
        """For the next step, by index of the sequence."""
        self._prompt_logprobs: dict[RequestId, list[LogprobTensors]] = {}
        self.failures: dict[RequestId, str] = {}
        """Why requests have failed so far."""
        self._done: torch.cuda.Event | None = None

    def take_tokens(
        self, chosen: ChosenTokens, sampled: list[tuple[int, SamplingState]], host_tokens_N: Tensor | None = None
    ) -> None:
        """Fetch the sampled tokens.

        Args:
            sampled: index of the sequence in the plan and its state, per row of what was chosen.
            host_tokens_N: the tokens on the host, once the device is done; None: they are copied.
        """
        self._tokens_N = download(chosen.tokens_N) if host_tokens_N is None else host_tokens_N
        self._sampled = sampled
        self._logprobs = {sampled[row][0]: [tensors] for row, tensors in chosen.logprobs.items()}
        self.failures |= {sampled[row][1].new.request_id: text for row, text in chosen.failures.items()}

    def take_verified(self, verified: list[Verified]) -> None:
        """Take what was sampled in a step with drafts; the host knows it already."""
        self._verified = verified
        self._logprobs = {sequence.index: sequence.logprobs for sequence in verified if sequence.logprobs}
        self.failures |= {x.state.new.request_id: x.failure for x in verified if x.failure is not None}

    def take_verified_later(self, verified: VerifiedOnDevice) -> None:
        """Take what was sampled in a step with drafts, once the device is done."""
        self._verified_on_device = verified
        self.take_verified(verified.sequences)

    def take_prompt_logprobs(self, request_id: RequestId, tensors: LogprobTensors) -> None:
        """Fetch the log-probabilities of the next tokens of a sequence's prompt."""
        self._prompt_logprobs.setdefault(request_id, []).append(tensors)

    def close(self) -> None:
        """Mark the end of the step on the device."""
        if self._device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self) -> StepResult:
        """Wait for the device and return the step's result."""
        if self._done is not None:
            self._done.synchronize()
        if self._verified_on_device is not None:
            self.drafts = self._verified_on_device.read()
        token_ids: list[tuple[int, ...]] = [()] * len(self._sequences)
        for verified in self._verified:
            token_ids[verified.index] = tuple(verified.token_ids)
        if self._tokens_N is not None:
            for (index, state), token in zip(self._sampled, self._tokens_N.tolist(), strict=True):
                token_ids[index] = (token,)
                if token != NO_TOKEN:
                    state.append(token)
        logprobs, prompt_logprobs = dict[int, list[TokenLogprobs]](), dict[int, list[TokenLogprobs]]()
        for index, entries in self._logprobs.items():
            with catch_failure(self.failures, self._sequences[index].request_id):
                logprobs[index] = [tensors.read()[0] for tensors in entries]
        if self._prompt_logprobs:
            for index, sequence in enumerate(self._sequences):
                with catch_failure(self.failures, sequence.request_id):
                    parts = self._prompt_logprobs.get(sequence.request_id, ())
                    prompt_logprobs[index] = [entry for tensors in parts for entry in tensors.read()]
        states = [*self._sampled, *((verified.index, verified.state) for verified in self._verified)]
        stopping = [(index, state) for index, state in states if state.stop_finder is not None]
        return StepResult(
            tuple(token_ids),
            logprobs,
            prompt_logprobs,
            self.drafts,
            self.failures,
            {index: state.stop_string for index, state in stopping if state.stop_string is not None},
            {index: state.num_stop_tokens for index, state in stopping if state.num_stop_tokens},
            {index: state.is_bound for index, state in states if state.new.thinking is not None},
            self._transfers.take(),
        )
