"""The tokens that the last step sampled, on the device, and the stop tokens to compare them with.

Invariant: a request with more than ``MAX_STOP_IDS`` stop tokens never has a pending token.

Shape suffixes: N sequences, P tokens that the last step sampled, X sets of stop tokens, I stop tokens of a set.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from strandline.device.batch import SequenceColumns
from strandline.device.sampler import SamplingState
from strandline.device.upload import upload
from strandline.ids import NO_TOKEN, PendingToken, RequestId
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.step import resolve_pending
from strandline.records.plan import MAX_STOP_IDS, SequencePlan

MAX_STOP_SETS = 512
"""Different sets of stop tokens that the table holds, or as many as a step may have sequences, if these are more. When
it is full, it starts anew with those of the step."""

NO_STOPS = frozenset[int]()


class PendingTokens:
    """Location of each request's last token on the device. Its tensors have fixed addresses, for graphs."""

    def __init__(self, max_num_seqs: int, device: torch.device, kernels: Kernels) -> None:
        self._resolve = kernels[resolve_pending]
        self._device = device
        self.sampled_P = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        shape = (max(MAX_STOP_SETS, max_num_seqs), MAX_STOP_IDS)
        self.stop_ids_XI = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device)
        self.row_of: dict[RequestId, int] = {}
        """Where each request's token is among those sampled last; empty if the last step verified drafts."""
        self._set_of: dict[frozenset[int], int] = {}

    def remember(self, tokens_P: Tensor, request_ids: Sequence[RequestId]) -> None:
        """Store the tokens that a step samples."""
        if tokens_P.data_ptr() != self.sampled_P.data_ptr():
            self.sampled_P[: len(tokens_P)].copy_(tokens_P)
        self.row_of = {request_id: row for row, request_id in enumerate(request_ids)}

    def forget(self) -> None:
        """Take no token of the steps so far for pending any more."""
        self.row_of = {}

    def resolve(self, step: StepBatch, columns: SequenceColumns[Tensor]) -> None:
        """Fill in a step's pending tokens, on the device."""
        self._resolve(
            step.token_ids_T,
            columns.state_dst,
            columns.last_row,
            columns.pending,
            columns.source_row,
            self.sampled_P,
            columns.stop_set,
            self.stop_ids_XI,
        )

    def locate(
        self, sequences: Sequence[SequencePlan], states: Mapping[RequestId, SamplingState]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return each sequence's row among the tokens sampled last, and its set of stop tokens; None: none pends."""
        if not any(s.pending for s in sequences):
            return None
        row_of = self.row_of
        rows = [row_of[s.request_id] if s.pending else 0 for s in sequences]
        stops = [
            states[s.request_id].new.stop_ids if s.pending is PendingToken.MAY_STOP else NO_STOPS for s in sequences
        ]
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
