"""The tokens that the last step sampled, on the device, and the stop tokens to compare them with.

Invariant: a request with more than ``MAX_STOP_IDS`` stop tokens never has a pending token.

Shape suffixes: N sequences, P rows of the last step, X sets of stop tokens, I stop tokens of a set.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strandline.device.batches.prompt_room import MAX_PROMPTS
from strandline.device.hardware.upload import upload
from strandline.errors import EngineError
from strandline.ids import NO_TOKEN, RequestId
from strandline.kernels.binding import Kernels
from strandline.kernels.sampling.verification import LastStep, PlannedStep, VerificationTables, resolve_pending
from strandline.records.plan import MAX_STOP_IDS, SequencePlan

MAX_STOP_SETS = 512
"""Different sets of stop tokens that the table holds, or as many as a step may have sequences, if these are more. When
it is full, it starts anew with those of the step."""

NO_STOPS = frozenset[int]()


class PendingTokens:
    """Each request's last tokens on the device. Its tensors have fixed addresses, for graphs.

    Args:
        draft_tokens: most drafts of a sequence in a step.
    """

    def __init__(self, max_num_seqs: int, draft_tokens: int, device: torch.device, kernels: Kernels) -> None:
        self._resolve = kernels[resolve_pending]
        self._device = device
        # A padded step also has rows for prompts that are not there.
        self.last = LastStep.empty(max_num_seqs + MAX_PROMPTS + 1, draft_tokens, device)
        shape = (max(MAX_STOP_SETS, max_num_seqs), MAX_STOP_IDS)
        self.stop_ids_XI = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device)
        self._row_of: dict[RequestId, int] = {}
        """Each request's row in ``last``."""
        self.may_follow_drafts = False
        """Whether the last step has compared drafts on the device, so that it is unknown how many tokens it sampled."""
        self._set_of: dict[frozenset[int], int] = {}

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

    def resolve(self, planned: PlannedStep, log_tokens: int = 0) -> VerificationTables | None:
        """Complete sequences on the device, as ``resolve_pending`` does."""
        return self._resolve(planned, self.last, self.stop_ids_XI, log_tokens)

    def locate(
        self, sequences: Sequence[SequencePlan], stops: Sequence[frozenset[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each sequence's row in the last step, if its token is pending, and its set of stop tokens.

        Raises:
            EngineError: a pending token was not sampled by the last step.
        """
        row_of = self._row_of
        missing = [s.request_id for s in sequences if s.pending and s.request_id not in row_of]
        if missing:
            raise EngineError(f"tokens of {missing} are pending, but the last step sampled those of {[*row_of]}")
        rows = [row_of[s.request_id] if s.pending else 0 for s in sequences]
        return np.array(rows, dtype=np.int64), np.array(self.stop_sets(stops), dtype=np.int64)

    def stop_sets(self, stops: Sequence[frozenset[int]]) -> list[int]:
        """Return the rows of ``stop_ids_XI`` that hold these sets of stop tokens."""
        self._learn(stops)
        set_of = self._set_of
        return [set_of[stop] for stop in stops]

    def _learn(self, stops: Sequence[frozenset[int]]) -> None:
        """Enter sets that the table lacks."""
        new = set(stops) - self._set_of.keys()
        if not new:
            return
        if len(self._set_of) + len(new) > len(self.stop_ids_XI):
            self._set_of, new = {}, set(stops)
        first = len(self._set_of)
        rows = np.full((len(new), MAX_STOP_IDS), NO_TOKEN, dtype=np.int64)
        for index, stop in enumerate(new):
            rows[index, : len(stop)] = list(stop)
            self._set_of[stop] = first + index
        self.stop_ids_XI[first : first + len(new)].copy_(upload(rows, self._device))
