"""The tokens that the last step sampled, on the device.

Invariant: a request with more than ``MAX_STOP_IDS`` stop tokens never has a pending token.

Shape suffixes: N sequences, P rows of the last step, S stop tokens of a sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strandline.device.batches.prompt_room import MAX_PROMPTS
from strandline.errors import EngineError
from strandline.ids import RequestId
from strandline.kernels.sampling.verification import LastStep
from strandline.records.plan import MAX_STOP_IDS, SequencePlan


class PendingRows(NamedTuple):
    """How the device completes the pending tokens of a step; int64."""

    source_row_N: np.ndarray
    """Each sequence's row in the last step; 0 if its token is not pending."""
    stop_ids_NS: np.ndarray
    """Stop tokens to compare with the pending one; ``NO_TOKEN``: none."""


class PendingTokens:
    """Each request's last tokens on the device. Its tensors have fixed addresses, for graphs.

    Args:
        draft_tokens: most drafts of a sequence in a step.
    """

    def __init__(self, max_num_seqs: int, draft_tokens: int, device: torch.device) -> None:
        # A padded step also has rows for prompts that are not there.
        self.last = LastStep.empty(max_num_seqs + MAX_PROMPTS + 1, draft_tokens, device)
        self._row_of: dict[RequestId, int] = {}
        """Each request's row in ``last``."""
        self.may_follow_drafts = False
        """Whether the last step has compared drafts on the device, so that it is unknown how many tokens it sampled."""

    def remember(self, row_of: dict[RequestId, int], tokens_P: Tensor | None) -> None:
        """Note the rows of the last step of requests whose next tokens may be pending.

        Args:
            tokens_P: the tokens that it samples, to be stored; None: a graph stores them, and the numbers of drafts
                accepted before them (``accept_drafts``).
        """
        if tokens_P is not None:
            tokens = self.last.tokens_P[: len(row_of)]
            if tokens_P.data_ptr() != tokens.data_ptr():
                tokens.copy_(tokens_P[: len(row_of)])
            if self.may_follow_drafts:
                self.last.num_accepted_P.zero_()
        self._row_of, self.may_follow_drafts = row_of, tokens_P is None

    def find_rows(self, sequences: Sequence[SequencePlan], stops: Sequence[bytes]) -> PendingRows:
        """Find what the device needs to complete sequences with pending tokens.

        Args:
            stops: stop tokens of each sequence, ``MAX_STOP_IDS`` int64.

        Raises:
            EngineError: a pending token was not sampled by the last step.
        """
        row_of = self._row_of
        missing = [s.request_id for s in sequences if s.pending and s.request_id not in row_of]
        if missing:
            raise EngineError(f"tokens of {missing} are pending, but the last step sampled those of {[*row_of]}")
        rows = [row_of[s.request_id] if s.pending else 0 for s in sequences]
        stop_ids_NS = np.frombuffer(bytearray().join(stops), dtype=np.int64).reshape(len(sequences), MAX_STOP_IDS)
        return PendingRows(np.array(rows, dtype=np.int64), stop_ids_NS)
