"""Log-probabilities of prompts' tokens, fetched after the step that computes them.

Shape suffixes: X rows of hidden states, N prompt tokens, P part of the vocabulary, E hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torch import Tensor

from strandline.device.hardware.upload import upload_together
from strandline.device.sampling.failures import catch_failure
from strandline.device.sampling.sampler import LogprobTensors
from strandline.device.sampling.sampling_state import SamplingState
from strandline.device.steps.host_step import HostStep
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.kernels.binding import Kernels

LOGPROB_ROWS: Final = 256
"""Prompt tokens whose logits are in memory at a time: a step's scratch memory must not depend on requests' options."""


PromptLogprobs = tuple[RequestId, LogprobTensors | str]
"""Log-probabilities of next tokens of a request's prompt, on their way to the host; or why they cannot be computed: an
exception concerned the request alone."""


def fetch_prompt_logprobs(
    step: HostStep,
    hidden_XE: Tensor,
    logits: Callable[[Tensor], Tensor],
    states: Mapping[RequestId, SamplingState],
    kernels: Kernels,
) -> list[PromptLogprobs]:
    """Fetch the log-probabilities of prompts' tokens, of those sequences that ask for them.

    Deterministic, they are computed by whole blocks: torch's order of sums depends on the number of rows.
    """
    max_rows = BLOCK_TOKENS if kernels.workload.is_deterministic else LOGPROB_ROWS
    asked, tokens = list[tuple[int, SamplingState]](), list[Sequence[int]]()
    found, failures = list[PromptLogprobs](), dict[RequestId, str]()
    if step.is_decoding:
        return found
    for index, row in step.rows.first.items():
        sequence = step.sequences[index]
        state = states[sequence.request_id]
        prompt = state.new.prompt_ids
        end = min(sequence.end, len(prompt) - 1)
        if state.params.prompt_logprobs is not None and end > sequence.start:
            asked.append((row, state))
            tokens.append(prompt[sequence.start + 1 : end + 1])
    for (row, state), tokens_N in zip(asked, upload_together(tokens, hidden_XE.device), strict=True):
        rows_NE, num_top = hidden_XE[row : row + len(tokens_N)], state.params.prompt_logprobs or 0
        with catch_failure(failures, state.new.request_id):
            for hidden_NE, token_N in zip(rows_NE.split(max_rows), tokens_N.split(max_rows), strict=True):
                logits_NP, tops = logits(hidden_NE), [num_top] * len(token_N)
                found.append((state.new.request_id, LogprobTensors.of(logits_NP, token_N, tops, kernels.ranks)))
    return [*found, *failures.items()]
