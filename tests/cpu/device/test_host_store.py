"""Host memory: its pages, and the order of the pinned store's copies, on stand-ins for a GPU's streams and events.

A copy is done when it is launched. Each is recorded with its stream and the bytes that it reads and writes. A copy that
writes bytes must wait for all that read or wrote them before, and one that reads them for all that wrote them: by the
order of its stream, or by the events that this has waited for.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from strandline.device.stores import host_store
from strandline.device.stores.host_store import HostPages, PinnedStore, stretches
from strandline.device.stores.transfers import Transfers
from strandline.ids import BlockId, SlotId, TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import LoadIn, SnapshotCopy, StoreOut
from strandline.specs import LayerSpec, ModelSpec, TensorSpec

SPEC = ModelSpec(
    (
        LayerSpec(streams=(TensorSpec("key", (2,), "float32"),)),
        LayerSpec(states=(TensorSpec("state", (2, 300), "float32"),)),
    ),
    4,
    "float32",
)


def test_pages_freed_together_are_consecutive_again() -> None:
    pages = HostPages(12, 16, is_pinned=False)
    for address in range(1, 7):
        pages.take(address, 16)
    assert list(stretches(pages.pages_of(range(1, 7)))) == [(0, 6)]
    pages.drop((2, 3, 4, 5))
    for address in (12, 13, 14, 15):
        pages.take(address, 16)
    assert list(stretches(pages.pages_of((12, 13, 14, 15)))) == [(1, 4)]


class Stream:
    """A stream, with how far it has waited for each one."""

    def __init__(self, _: object = None) -> None:
        self.done: dict[Stream, int] = {self: 0}

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(Event.on(other))

    def wait_event(self, event: "Event") -> None:
        for stream, count in event.done.items():
            self.done[stream] = max(self.done.get(stream, 0), count)


class Event:
    """A point in the order of a stream."""

    def __init__(self, **_: object) -> None:
        self.done: dict[Stream, int] = {}

    @classmethod
    def on(cls, stream: Stream) -> "Event":
        event = cls()
        event.done = dict(stream.done)
        return event

    def record(self) -> None:
        self.done = dict(Gpu.current.done)

    def synchronize(self) -> None:
        """Do nothing: all copies are done."""

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


class Access(NamedTuple):
    """A stretch of bytes that a copy reads or writes."""

    stream: Stream
    number: int
    start: int
    end: int
    is_write: bool


class Gpu:
    """The streams, and everything that was copied."""

    current = Stream()

    def __init__(self) -> None:
        Gpu.current = Stream()
        self.accesses: list[Access] = []
        self.num_copies = 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, Gpu.current = Gpu.current, stream
        yield
        Gpu.current = before

    def copy(self, read: list[Tensor], written: list[Tensor]) -> None:
        """Record a copy on the current stream."""
        stream = Gpu.current
        stream.done[stream] += 1
        self.num_copies += 1
        for parts, is_write in ((read, False), (written, True)):
            for part in parts:
                start = part.data_ptr()
                access = Access(stream, stream.done[stream], start, start + part.nbytes, is_write)
                for other in self.accesses:
                    if other.start < access.end and access.start < other.end and (other.is_write or is_write):
                        assert stream.done.get(other.stream, 0) >= other.number, "a copy overtakes another"
                self.accesses.append(access)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    copy, select, index_copy = Tensor.copy_, torch.index_select, Tensor.index_copy_

    def copy_(target: Tensor, source: Tensor, **_: Any) -> Tensor:
        gpu.copy([source], [target])
        return copy(target, source)

    def index_select(rows: Tensor, dim: int, index: Tensor, *, out: Tensor) -> Tensor:
        gpu.copy([rows[row] for row in index.tolist()], [out])
        return select(rows, dim, index, out=out)

    def index_copy_(rows: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        gpu.copy([source], [rows[row] for row in index.tolist()])
        return index_copy(rows, dim, index, source)

    def make_pages(num_pages: int, page_bytes: int, *, is_pinned: bool) -> HostPages:
        assert is_pinned
        return HostPages(num_pages, page_bytes, is_pinned=False)

    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(Tensor, "index_copy_", index_copy_)
    monkeypatch.setattr(torch, "index_select", index_select)
    monkeypatch.setattr(host_store, "HostPages", make_pages)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Gpu.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return gpu


class Scene:
    """An arena of 24 slabs, and a pinned store."""

    def __init__(self, gpu: Gpu, num_pages: int) -> None:
        self.gpu = gpu
        self.arena = ArenaTensors(SPEC, 24)
        self.transfers = Transfers(self.arena)
        self.store = PinnedStore(self.arena, num_pages, self.transfers.completions)
        self._num_transfers = self._num_addresses = 0

    def _transfer(self) -> TransferId:
        self._num_transfers += 1
        return TransferId(self._num_transfers)

    def write(self, block: int, value: int) -> None:
        """Write a block in a step."""
        self.gpu.copy([], [self.arena.block(BlockId(block))])
        self.arena.block(BlockId(block)).fill_(value)

    def put_away(self, blocks: list[int], slots: list[int] = [], *, is_held: bool = False) -> list[int]:  # noqa: B006
        """Store blocks and slots; return their addresses."""
        first = self._num_addresses + 1
        self._num_addresses += len(blocks) + len(slots)
        addresses = list(range(first, self._num_addresses + 1))
        pairs = tuple((BlockId(block), address) for block, address in zip(blocks, addresses, strict=False))
        slot_pairs = tuple(
            SnapshotCopy(SlotId(slot), address) for slot, address in zip(slots, addresses[len(blocks) :], strict=True)
        )
        self.store.store(StoreOut(self._transfer(), "host", pairs, slot_pairs, is_held=is_held), self.arena)
        return addresses

    def bring_back(self, addresses: list[int], blocks: list[int]) -> None:
        """Load blocks, and free their addresses at once."""
        pairs = tuple((BlockId(block), address) for block, address in zip(blocks, addresses, strict=True))
        self.store.load(LoadIn(self._transfer(), "host", pairs, ()), self.arena)
        self.store.drop(addresses)

    def complete(self) -> None:
        """Let the loads end before what is launched next."""
        Gpu.current.wait_event(Event.on(self.store._in))  # type: ignore[arg-type]

    def values(self, blocks: list[int]) -> list[int]:
        """Return the value that each of these blocks is filled with."""
        found = [self.arena.block(BlockId(block)).unique().tolist() for block in blocks]
        assert all(len(values) == 1 for values in found)
        return [values[0] for values in found]


def test_full_memories_are_exchanged_in_order(gpu: Gpu) -> None:
    """Exchange what the arena and the store hold, a few blocks at a time, with room for one group of them."""
    size, count = SPEC.blocks_per_slab, 4 * SPEC.blocks_per_slab
    choose = random.Random(1)
    scene = Scene(gpu, count + size)
    blocks = list(range(size, size + count))
    for value, block in enumerate(blocks):
        scene.write(block, value)
    resting, values_at_rest = scene.put_away(blocks), list(range(count))
    for value, block in enumerate(blocks, 100):
        scene.write(block, value)
    values_here = list(range(100, 100 + count))
    for _ in range(6):
        choose.shuffle(blocks)
        values_here = scene.values(blocks)
        new = list[int]()
        for start in range(0, count, size):
            some = blocks[start : start + size]
            new += scene.put_away(some, is_held=choose.random() < 0.7)
            scene.bring_back(resting[start : start + size], some)
        scene.complete()
        assert scene.values(blocks) == values_at_rest
        resting, values_at_rest = new, values_here
        scene.write(blocks[0], values_at_rest[0] + 1)
        scene.write(blocks[0], scene.values(blocks)[0])


def test_steps_may_overwrite_what_is_put_away(gpu: Gpu) -> None:
    size = SPEC.blocks_per_slab
    scene = Scene(gpu, 40 * size)
    kept = list[tuple[int, int]]()
    for value in range(1, 9):
        for block in range(size, 3 * size):
            scene.write(block, value)
        addresses = scene.put_away(list(range(size, 3 * size)), [5])
        kept.append((addresses[0], value))
    scene.bring_back([address for address, _ in kept], list(range(6 * size, 6 * size + len(kept))))
    assert scene.values(list(range(6 * size, 6 * size + len(kept)))) == [value for _, value in kept]


def test_neighbours_are_copied_together(gpu: Gpu) -> None:
    size = SPEC.blocks_per_slab
    scene = Scene(gpu, 4 * size)
    before = gpu.num_copies
    addresses = scene.put_away(list(range(3 * size - 1, 2 * size - 1, -1)))
    assert gpu.num_copies - before == 2, "all are gathered, and cross the bus"
    before = gpu.num_copies
    scene.bring_back(addresses, list(range(4 * size, 5 * size)))
    assert gpu.num_copies - before == 2


def test_held_blocks_do_not_keep_steps_waiting(gpu: Gpu) -> None:
    """Store more than the staging memory holds: the steps' stream waits only where their own evictions do."""
    size = SPEC.blocks_per_slab
    for is_held in (True, False):
        scene = Scene(gpu, 20 * size)
        steps = Gpu.current
        for _ in range(8):
            scene.put_away(list(range(size, 3 * size)), is_held=is_held)
        assert (len(steps.done) == 1) is is_held
        Gpu.current = Stream()
