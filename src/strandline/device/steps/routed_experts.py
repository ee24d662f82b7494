"""The experts that tokens are routed to, fetched from their blocks: those of a prefix that was hit are there, too.

Shape suffixes: M blocks of a sequence, B blocks, P tokens of a block, C bytes of a token, T tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from strandline.device.hardware.upload import download, upload_together
from strandline.device.sampling.sampling_state import SamplingState
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.plan import SequencePlan


def fetch_routed(
    sequences: Sequence[SequencePlan], memory_BPC: Tensor | None, states: Mapping[RequestId, SamplingState]
) -> dict[int, tuple[int, Tensor]]:
    """Fetch the experts of those tokens of a step's sequences that are new to the host, where requests ask for them.

    They come when a token is sampled after them: those of a whole prompt, and then those of each step. Those of drafts
    come with the step that verifies them, and again with the next one, from the first draft on.

    Args:
        memory_BPC: what blocks hold of their tokens; None: nothing.

    Returns:
        The first of a sequence's tokens, and the experts ``[T, C]`` of it and the next ones, by index in the plan.
    """
    starts, blocks, offsets = dict[int, int](), list[np.ndarray](), list[np.ndarray]()
    if memory_BPC is None:
        return {}
    for index, sequence in enumerate(sequences):
        state = states[sequence.request_id]
        if not state.new.params.returns_routed_experts:
            continue
        start = state.num_routed = min(state.num_routed, sequence.start)  # less if it was preempted
        if not sequence.is_sampled:
            continue
        state.num_routed = sequence.start + sequence.num_certain
        position_T = np.arange(start, sequence.end)
        starts[index] = start
        block_M = np.frombuffer(sequence.block_table, dtype=np.int32).astype(np.int64)
        blocks.append(block_M[position_T // BLOCK_TOKENS])
        offsets.append(position_T % BLOCK_TOKENS)
    if not starts:
        return {}
    block_T, offset_T = upload_together([np.concatenate(blocks), np.concatenate(offsets)], memory_BPC.device)
    parts = download(memory_BPC[block_T, offset_T]).split(list(map(len, offsets)))
    return {index: (start, part_TC) for (index, start), part_TC in zip(starts.items(), parts, strict=True)}
