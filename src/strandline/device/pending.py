"""The tokens that the last step sampled, on the device, and the stop tokens to compare them with.

Invariant: a request with more than ``MAX_STOP_IDS`` stop tokens never has a pending token.

Shape suffixes: N sequences, M rows that the last step sampled, X sets of stop tokens, I stop tokens of a set.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from strandline.device.batch import DeviceBatch
from strandline.device.sampler import SamplingState
from strandline.device.upload import upload, upload_together
from strandline.ids import PendingToken, RequestId
from strandline.kernels.step import NO_TOKEN, resolve_pending
from strandline.records.plan import MAX_STOP_IDS, SequencePlan

MAX_STOP_SETS = 512
"""Different sets of stop tokens that the table holds; when it is full, it starts anew with those of the step."""

NO_STOPS = frozenset[int]()


class PendingTokens:
    """Remembers where on the device each request's last token is. Its tensors stay where they are, for graphs."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self.sampled_M = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.stop_ids_XI = torch.full((MAX_STOP_SETS, MAX_STOP_IDS), NO_TOKEN, dtype=torch.int64, device=device)
        self._row_of: dict[RequestId, int] = {}
        self._set_of: dict[frozenset[int], int] = {}

    def remember(self, tokens_M: Tensor, request_ids: Sequence[RequestId]) -> None:
        """Take note of what a step samples."""
        if tokens_M.data_ptr() != self.sampled_M.data_ptr():
            self.sampled_M[: len(tokens_M)].copy_(tokens_M)
        self._row_of = {request_id: row for row, request_id in enumerate(request_ids)}

    def resolve(
        self, batch: DeviceBatch, sequences: Sequence[SequencePlan], states: Mapping[RequestId, SamplingState]
    ) -> None:
        """Fill in a batch's pending tokens, on the device."""
        sources, sets = upload_together(self.places(sequences, states), self._device)
        step = batch.step
        resolve_pending(
            step.token_ids_T,
            step.recurrent.dst_N,
            batch.last_rows_N,
            batch.pending_N,
            sources,
            self.sampled_M,
            sets,
            self.stop_ids_XI,
        )

    def places(
        self, sequences: Sequence[SequencePlan], states: Mapping[RequestId, SamplingState]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each sequence's row among the tokens sampled last, and its set of stop tokens."""
        row_of = self._row_of
        rows = [row_of[s.request_id] if s.pending else 0 for s in sequences]
        stops = [
            states[s.request_id].new.stop_ids if s.pending is PendingToken.MAY_STOP else NO_STOPS for s in sequences
        ]
        self._learn(stops)
        set_of = self._set_of
        return np.array(rows, dtype=np.int64), np.array([set_of[stop] for stop in stops], dtype=np.int64)

    def _learn(self, stops: Sequence[frozenset[int]]) -> None:
        """Enter sets that the table lacks."""
        new = set(stops) - self._set_of.keys()
        if not new:
            return
        if len(self._set_of) + len(new) > MAX_STOP_SETS:
            self._set_of, new = {}, set(stops)
        first = len(self._set_of)
        rows = np.full((len(new), MAX_STOP_IDS), NO_TOKEN, dtype=np.int64)
        for index, stop in enumerate(new):
            rows[index, : len(stop)] = list(stop)
            self._set_of[stop] = first + index
        self.stop_ids_XI[first : first + len(new)].copy_(upload(rows, self._device))
