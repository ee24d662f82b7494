"""What the device compares of the tokens that it still has to fill in."""

import numpy as np
import pytest
import torch

from strandline.device.batches.pending import PendingTokens
from strandline.device.sampling.sampling_state import SamplingState
from strandline.ids import NO_TOKEN, RequestId
from strandline.records.plan import MAX_STOP_IDS, NewRequest
from strandline.records.sampling_params import SamplingParams
from tests.cpu.device.test_padded_step import sequence

CPU = torch.device("cpu")
PLANS = [sequence(index, 70, 71) for index in range(2)]


def stops_of(*stop_ids: int) -> bytes:
    new = NewRequest(RequestId("0"), (5,), SamplingParams(), 0, frozenset(stop_ids), ())
    return SamplingState(new, range(9), CPU).stop_ids


def found_stop_ids(*stops: bytes) -> np.ndarray:
    pending = PendingTokens(2, 0, CPU)
    return pending.find_rows(PLANS, stops).stop_ids_NS


def test_each_sequence_has_its_own_stop_tokens() -> None:
    found = found_stop_ids(stops_of(7, 9), stops_of())
    assert [sorted(row) for row in found.tolist()] == [
        [NO_TOKEN] * (MAX_STOP_IDS - 2) + [7, 9],
        [NO_TOKEN] * MAX_STOP_IDS,
    ]


def test_more_stop_tokens_than_the_device_compares_are_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        found_stop_ids(stops_of(*range(MAX_STOP_IDS + 1)), stops_of())
