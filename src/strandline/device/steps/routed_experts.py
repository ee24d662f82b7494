"""The experts that tokens are routed to, fetched from their blocks: those of a prefix that was hit are there, too.

Shape suffixes: M blocks of a sequence, B blocks, P tokens of a block, C bytes of a token, T tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from strandline.device.hardware.upload import upload_together
from strandline.device.sampling.sampling_state import SamplingState
from strandline.device.steps.step_in_flight import RoutedSpan, StepInFlight
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.plan import SequencePlan


def fetch_routed(
    sequences: Sequence[SequencePlan],
    memory_BPC: Tensor,
    states: Mapping[RequestId, SamplingState],
    launched: StepInFlight,
) -> None:
    """Fetch the experts of those tokens of a step's sequences that are new to the host, where requests ask for them.

    They come when a token is sampled after them: those of a whole prompt, and then those of each step. Those of drafts
    come with the step that verifies them, and again with the next one, from the first draft on.
    """
    wanted, blocks, offsets = list[RoutedSpan](), list[np.ndarray](), list[np.ndarray]()
    for index, sequence in enumerate(sequences):
        state = states[sequence.request_id]
        if not state.new.params.returns_routed_experts:
            continue
        start = state.num_routed = min(state.num_routed, sequence.start)  # less if it was preempted
        if not sequence.is_sampled:
            continue
        state.num_routed = sequence.start + sequence.num_certain
        position_T = np.arange(start, sequence.end)
        wanted.append(RoutedSpan(index, start, len(position_T)))
        blocks.append(np.frombuffer(sequence.block_table, dtype=np.int32)[position_T // BLOCK_TOKENS])
        offsets.append(position_T % BLOCK_TOKENS)
    if wanted:
        block_T, offset_T = upload_together([np.concatenate(blocks), np.concatenate(offsets)], memory_BPC.device)
        launched.take_routed(wanted, memory_BPC[block_T, offset_T])
