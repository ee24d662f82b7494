"""Log-probabilities of prompts' tokens, fetched behind the step that computes them.

Shape suffixes: T rows of the step, N prompt tokens, P part of the vocabulary, E hidden size.
"""

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

from strandline.device.batches.batch import HostBatch
from strandline.device.hardware.upload import upload_together
from strandline.device.sampling.failures import catch_failure
from strandline.device.sampling.sampler import LogprobTensors, SamplingState
from strandline.device.steps.host_step import StepHidden
from strandline.device.steps.step_in_flight import StepInFlight
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.kernels.binding import Kernels

LOGPROB_ROWS: Final = 256
"""Prompt tokens whose logits are in memory at a time: a step's scratch memory must not depend on requests' options."""


def fetch_prompt_logprobs(
    host: HostBatch,
    hidden: StepHidden,
    logits: Callable[[Tensor], Tensor],
    states: Mapping[RequestId, SamplingState],
    kernels: Kernels,
    launched: StepInFlight,
) -> None:
    """Fetch the log-probabilities of prompts' tokens, of those sequences that ask for them.

    Deterministic, they are computed by whole blocks: torch's order of sums depends on the number of rows.
    """
    max_rows = BLOCK_TOKENS if kernels.workload.is_deterministic else LOGPROB_ROWS
    rows = host.query_starts_N1[:-1] + (hidden.first_prompt_row - host.num_decode_rows)
    rows[: host.num_decodes] = host.query_starts_N1[: host.num_decodes]
    for row, sequence in zip(rows.tolist(), host.sequences, strict=True):
        state = states[sequence.request_id]
        num_top = state.params.prompt_logprobs
        prompt = state.new.prompt_ids
        end = min(sequence.end, len(prompt) - 1)
        if num_top is None or end <= sequence.start:
            continue
        (tokens_N,) = upload_together([prompt[sequence.start + 1 : end + 1]], hidden.hidden_XE.device)
        rows_NE = hidden.hidden_XE[row : row + len(tokens_N)]
        with catch_failure(launched.failures, sequence.request_id):
            for hidden_NE, token_N in zip(rows_NE.split(max_rows), tokens_N.split(max_rows), strict=True):
                logits_NP, tops = logits(hidden_NE), [num_top] * len(token_N)
                tensors = LogprobTensors.of(logits_NP, token_N, tops, kernels.ranks)
                launched.take_prompt_logprobs(sequence.request_id, tensors)
