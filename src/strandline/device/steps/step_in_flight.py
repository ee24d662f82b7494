"""A step in flight: what it computes is on its way to the host, and is read once the device is done."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from itertools import takewhile

import torch
from torch import Tensor

from strandline.device.hardware.upload import download
from strandline.device.sampling.choice import Chosen
from strandline.device.sampling.failures import catch_failure
from strandline.device.sampling.sampler import LogprobTensors
from strandline.device.steps.drafter import NextDrafts
from strandline.device.steps.prompt_logprobs import PromptLogprobs
from strandline.device.stores.transfers import Transfers
from strandline.ids import NO_TOKEN, RequestId
from strandline.records.plan import RoutedTokens, SequencePlan, StepResult, TokenLogprobs


@dataclass
class StepInFlight:
    """A step that has been launched whole. What it computes is on its way to the host, and is read when it is there."""

    sequences: Sequence[SequencePlan]
    chosen: Chosen
    drafts: NextDrafts | None
    """For the next step; None: no sequence wants any."""
    prompt_logprobs: Sequence[PromptLogprobs]
    hidden_states: tuple[Sequence[int], Tensor] | None
    """Indices in the plan of sequences that ask for final hidden states, and these; None: no sequence does."""
    routed: Mapping[int, tuple[int, Tensor]]
    """The experts of tokens, as of ``fetch_routed``."""
    transfers: Transfers
    device: InitVar[torch.device]
    is_launch_bound: bool = False
    """Whether launching took longer than the device needs to run the step."""

    def __post_init__(self, device: torch.device) -> None:
        """Fetch what has not been fetched, and mark the end of the step on the device."""
        self.chosen.fetch()
        if self.drafts is not None:
            self.drafts = self.drafts._replace(tokens_ND=download(self.drafts.tokens_ND))
        if self.hidden_states is not None:
            indices, hidden_NE = self.hidden_states
            self.hidden_states = indices, download(hidden_NE.float())
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self) -> StepResult:
        """Wait for the device and return the step's result."""
        if self._done is not None:
            self._done.synchronize()
        token_ids: list[tuple[int, ...]] = [()] * len(self.sequences)
        candidates, failures = self.chosen.candidates, dict[RequestId, str]()
        of_prompts = defaultdict[RequestId, list[LogprobTensors]](list)
        for request_id, found in self.prompt_logprobs:
            if isinstance(found, str):
                failures[request_id] = found
            else:
                of_prompts[request_id].append(found)
        failures |= self.chosen.failures
        for each, tokens in zip(candidates, self.chosen.read(), strict=True):
            token_ids[each.plan_index] = tuple(tokens)
        logprobs, prompt_logprobs = dict[int, list[TokenLogprobs]](), dict[int, list[TokenLogprobs]]()
        for index, entries in self.chosen.logprobs.items():
            with catch_failure(failures, self.sequences[index].request_id):
                logprobs[index] = [tensors.read()[0] for tensors in entries]
        if of_prompts:
            for index, sequence in enumerate(self.sequences):
                with catch_failure(failures, sequence.request_id):
                    parts = of_prompts.get(sequence.request_id, ())
                    prompt_logprobs[index] = [entry for tensors in parts for entry in tensors.read()]
        states = [(each.plan_index, each.state) for each in candidates]
        stopping = [(index, state) for index, state in states if state.stop_finder is not None]
        return StepResult(
            tuple(token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            drafts=self._read_drafts(),
            failures=failures,
            stop_strings={index: state.stop_string for index, state in stopping if state.stop_string is not None},
            num_stop_tokens={index: state.num_stop_tokens for index, state in stopping if state.num_stop_tokens},
            is_bound={index: state.is_bound for index, state in states if state.new.thinking is not None},
            hidden_states=self._read_hidden_states(),
            routed={i: RoutedTokens(start, x.numpy().tobytes(), x.shape[1]) for i, (start, x) in self.routed.items()},
            completions=self.transfers.take(),
        )

    def _read_hidden_states(self) -> dict[int, bytes]:
        """Return the hidden states that sequences ask for, by their index."""
        if self.hidden_states is None:
            return {}
        return {index: hidden_E.numpy().tobytes() for index, hidden_E in zip(*self.hidden_states, strict=True)}

    def _read_drafts(self) -> dict[int, tuple[int, ...]]:
        """Return the drafts that sequences want, by their index, up to the first that could not be chosen."""
        if self.drafts is None:
            return {}
        tokens, wanted = self.drafts.tokens_ND.tolist(), [sequence.next_drafts for sequence in self.sequences]
        rows = self.drafts.rows.items()
        return {i: tuple(takewhile(NO_TOKEN.__ne__, tokens[row][: wanted[i]])) for i, row in rows if wanted[i]}
