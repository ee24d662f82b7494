"""Transfers: which store carries out which, and how their ends are reported."""

from collections.abc import Iterable
from threading import Thread

import pytest

from strandline.device.stores.transfers import Completions, Transfers
from strandline.errors import EngineError
from strandline.ids import BlockId, SlotId, TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import CancelTransfer, Completion, DropStored, LoadIn, SnapshotCopy, StoreOut
from strandline.specs import LayerSpec, ModelSpec, TensorSpec

SPEC = ModelSpec((LayerSpec(streams=(TensorSpec("key", (2,), "float32"),)),), 4, "float32")


class Recorder:
    """A store that carries out nothing, and ends transfers when told to."""

    def __init__(self, completions: Completions) -> None:
        self.completions = completions
        self.calls: list[object] = []

    def load(self, action: LoadIn, arena: ArenaTensors) -> None:
        self.calls.append(action)

    def store(self, action: StoreOut, arena: ArenaTensors) -> None:
        self.calls.append(action)

    def drop(self, addresses: Iterable[int]) -> None:
        self.calls.append(tuple(addresses))

    def cancel(self, transfer: TransferId) -> None:
        self.calls.append(transfer)
        self.completions.put(Completion(transfer, is_done=False))

    def close(self) -> None:
        self.calls.append("closed")


def load_in(number: int, store: str = "here") -> LoadIn:
    return LoadIn(TransferId(number), store, ((BlockId(1), 5),), (SnapshotCopy(SlotId(1), 6),))


@pytest.fixture
def transfers() -> Transfers:
    return Transfers(ArenaTensors(SPEC, 2))


def test_each_transfer_goes_to_the_store_it_names(transfers: Transfers) -> None:
    here, there = Recorder(transfers.completions), Recorder(transfers.completions)
    transfers.attach("here", here)
    transfers.attach("there", there)
    out = StoreOut(TransferId(2), "there", (), ())
    for action in (load_in(1), out, DropStored("here", (5, 6)), CancelTransfer(TransferId(2))):
        transfers.begin(action)
    assert here.calls == [load_in(1), (5, 6)]
    assert there.calls == [out, 2]
    assert transfers.take() == (Completion(TransferId(2), is_done=False),)
    transfers.begin(CancelTransfer(TransferId(2)))
    assert there.calls == [out, 2], "a transfer that was reported is not cancelled"
    transfers.close()
    assert here.calls[-1] == there.calls[-1] == "closed"


def test_unknown_stores_are_refused(transfers: Transfers) -> None:
    with pytest.raises(EngineError, match=r"names the store 'nowhere'; attached are \[\]"):
        transfers.begin(load_in(1, "nowhere"))


def test_wait_returns_with_the_first_end(transfers: Transfers) -> None:
    assert transfers.wait(0.0) == ()
    ended = Completion(TransferId(1), is_done=True, seconds=0.5)
    thread = Thread(target=lambda: transfers.completions.put(ended))
    thread.start()
    assert transfers.wait(60.0) == (ended,)
    thread.join()
    assert transfers.take() == ()
