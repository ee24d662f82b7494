"""The experts that tokens are routed to, fetched from their blocks: those of a prefix that was hit are there, too.

Shape suffixes: M blocks of a sequence, B blocks, P tokens of a block, C bytes of a token, T tokens.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from strandline.device.hardware.upload import download, upload_together
from strandline.device.sampling.sampling_state import SamplingState
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.plan import RoutedTokens, SequencePlan


class Routed(NamedTuple):
    """The experts of tokens, on their way to the host."""

    spans: Mapping[int, tuple[int, int]]
    """The first of a sequence's tokens and their number, by index in the plan."""
    routed_TC: Tensor
    """Those of one span after another."""

    def read(self) -> dict[int, RoutedTokens]:
        """Return them, by index in the plan; the device must be done."""
        parts = self.routed_TC.split([num_tokens for _, num_tokens in self.spans.values()])
        spans = zip(self.spans.items(), parts, strict=True)
        return {index: RoutedTokens(start, x.numpy().tobytes(), x.shape[1]) for (index, (start, _)), x in spans}


def fetch_routed(
    sequences: Sequence[SequencePlan], memory_BPC: Tensor | None, states: Mapping[RequestId, SamplingState]
) -> Routed | None:
    """Fetch the experts of those tokens of a step's sequences that are new to the host, where requests ask for them.

    They come when a token is sampled after them: those of a whole prompt, and then those of each step. Those of drafts
    come with the step that verifies them, and again with the next one, from the first draft on.

    Args:
        memory_BPC: what blocks hold of their tokens; None: nothing.
    """
    if memory_BPC is None:
        return None
    spans, blocks, offsets = dict[int, tuple[int, int]](), list[np.ndarray](), list[np.ndarray]()
    for index, sequence in enumerate(sequences):
        state = states[sequence.request_id]
        if not state.new.params.returns_routed_experts:
            continue
        start = state.num_routed = min(state.num_routed, sequence.start)  # less if it was preempted
        if not sequence.is_sampled:
            continue
        state.num_routed = sequence.start + sequence.num_certain
        position_T = np.arange(start, sequence.end)
        spans[index] = start, len(position_T)
        block_M = np.frombuffer(sequence.block_table, dtype=np.int32).astype(np.int64)
        blocks.append(block_M[position_T // BLOCK_TOKENS])
        offsets.append(position_T % BLOCK_TOKENS)
    if not spans:
        return None
    block_T, offset_T = upload_together([np.concatenate(blocks), np.concatenate(offsets)], memory_BPC.device)
    return Routed(spans, download(memory_BPC[block_T, offset_T]))
