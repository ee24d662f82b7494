"""The table of stop tokens has room for those of any step."""

from typing import Any

import torch

from strandline.device.batches.pending import MAX_STOP_SETS, PendingTokens
from strandline.kernels.sampling.verification import resolve_pending
from strandline.records.plan import MAX_STOP_IDS


def test_each_sequence_may_have_its_own_stop_tokens() -> None:
    kernels: Any = {resolve_pending: resolve_pending}
    for num_sequences in (3, MAX_STOP_SETS + 100):
        pending = PendingTokens(num_sequences, 0, torch.device("cpu"), kernels)
        for first in range(0, 4 * MAX_STOP_SETS, num_sequences):
            stops = [frozenset({first + index}) for index in range(num_sequences)]
            rows = pending.stop_ids_XI[pending.stop_sets(stops)].tolist()
            assert rows == [[*stop, *[-1] * (MAX_STOP_IDS - 1)] for stop in stops]
