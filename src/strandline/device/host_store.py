"""Host memory as a store: one arena of pages, pinned on a GPU's host, into which blocks and slots are copied.

A page has the size of a block; a slot takes as many pages as it needs, not necessarily contiguous, so that no
compaction is needed. The cache counts pages exactly as this store does, so that allocations never fail. Slots may be
stored in fewer bits (``snapshot_encoding.py``).

On a GPU the copies run on separate streams. Entries are first copied to a staging buffer on the device, on the stream
of the steps, because later steps may overwrite the original while the copy crosses the bus. Stores complete before
loads that begin after them. On a CPU all copies are synchronous.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread
from typing import Final, NamedTuple

import torch
from torch import Tensor

from strandline.cache import Completion, LoadIn, StoreOut
from strandline.clock import SYSTEM_CLOCK
from strandline.device.snapshot_encoding import AsIs, Encoding
from strandline.device.transfers import Completions
from strandline.errors import CacheInvariantError
from strandline.ids import TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.specs import ModelSpec

STAGED_SLABS: Final = 4
"""Size of the device memory in which evicted entries wait for the bus, in slabs."""
ENCODING_SLABS: Final = 2
"""Device memory that encoding and decoding slots take for a while, at most, in slabs."""
AS_IS: Final = AsIs()

HOST_STORE: Final = "host"
"""Its name in actions."""


def choose_staging_bytes(spec: ModelSpec, snapshot_dtype: str) -> int:
    """Return the device memory that copies to and from pinned memory need."""
    encoding_slabs = 0 if spec.at_rest(snapshot_dtype) == spec else ENCODING_SLABS
    return (STAGED_SLABS + encoding_slabs) * spec.slab_bytes


class StoredBytes(NamedTuple):
    """The content of a place."""

    pieces: list[Tensor]
    """In order."""
    event: torch.cuda.Event | None
    """The bytes are valid after this event; None: they are valid."""


class HostPages:
    """The pages, and their assignment to places.

    Args:
        num_pages: how many.
        page_bytes: the size of each, a block's.
    """

    def __init__(self, num_pages: int, page_bytes: int, *, is_pinned: bool) -> None:
        self.page_bytes = page_bytes
        self.bytes = torch.empty(num_pages * page_bytes, dtype=torch.uint8)
        if is_pinned:
            # Torch's own pinned tensors take the next power of two.
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostRegister(self.bytes.data_ptr(), len(self.bytes), 0))
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages_of: dict[int, list[int]] = {}
        self._bytes_of: dict[int, int] = {}

    def take(self, place: int, num_bytes: int) -> list[Tensor]:
        """Allocate room under a new place; return it as consecutive pieces.

        Raises:
            CacheInvariantError: there is no room, or the place is in use.
        """
        num_pages = -(-num_bytes // self.page_bytes)
        if place in self._pages_of or num_pages > len(self._free):
            raise CacheInvariantError(
                f"place {place} needs {num_pages} pages of host memory, {len(self._free)} are free"
            )
        self._pages_of[place] = [self._free.pop() for _ in range(num_pages)]
        self._bytes_of[place] = num_bytes
        return self.find(place, num_bytes)

    def find(self, place: int, num_bytes: int) -> list[Tensor]:
        """Return the first bytes of a place as pieces in order, neighbouring pages in one."""
        pieces = []
        pages, size = self._pages_of[place], self.page_bytes
        left = num_bytes
        for first, count in _stretches(pages):
            taken = min(left, count * size)
            pieces.append(self.bytes[first * size : first * size + taken])
            left -= taken
        return pieces

    def whole(self, place: int) -> list[Tensor]:
        """Return all bytes of a place as pieces in order."""
        return self.find(place, self._bytes_of[place])

    def drop(self, places: Iterable[int]) -> None:
        """Free places."""
        for place in places:
            self._free += reversed(self._pages_of.pop(place))
            del self._bytes_of[place]


def _stretches(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first page and the length of each stretch of consecutive pages."""
    first, count = pages[0], 1
    for before, page in pairwise(pages):
        if page == before + 1:
            count += 1
        else:
            yield first, count
            first, count = page, 1
    yield first, count


class HostStore:
    """Copies between the arena of a CPU and its store, at once.

    Args:
        num_pages: the size of the store, in blocks.
        completions: where ends are reported.
        slots: how slots rest.
    """

    def __init__(self, arena: ArenaTensors, num_pages: int, completions: Completions, slots: Encoding = AS_IS) -> None:
        self._pages = HostPages(num_pages, arena.spec.block_bytes, is_pinned=False)
        self._completions = completions
        self._slots = slots

    def load(self, action: LoadIn, arena: ArenaTensors) -> None:
        """Write blocks and slots of the arena."""
        start_s = SYSTEM_CLOCK()
        for target, place, encoding in _parts(action, arena, self._slots):
            _load(self._pages, place, target, encoding)
        self._completions.put(Completion(action.transfer, is_done=True, seconds=SYSTEM_CLOCK() - start_s))

    def store(self, action: StoreOut, arena: ArenaTensors) -> None:
        """Read blocks and slots of the arena."""
        start_s = SYSTEM_CLOCK()
        for source, place, encoding in _parts(action, arena, self._slots):
            _store(self._pages, place, source, encoding)
        self._completions.put(Completion(action.transfer, is_done=True, seconds=SYSTEM_CLOCK() - start_s))

    def read(self, place: int) -> StoredBytes:
        """Return what a place holds; it stays there until the place is dropped."""
        return StoredBytes(self._pages.whole(place), None)

    def drop(self, places: Iterable[int]) -> None:
        """Free places."""
        self._pages.drop(places)

    def cancel(self, transfer: TransferId) -> None:
        """Do nothing: every transfer has ended when it begins."""

    def close(self) -> None:
        """Do nothing: memory is freed with the store."""


class PinnedStore:
    """Copies between a GPU's arena and pinned host memory, on streams of their own.

    Args:
        num_pages: the size of the store, in blocks.
        completions: where ends are reported.
        slots: how slots rest. They are encoded and decoded on the streams of the copies.
    """

    def __init__(self, arena: ArenaTensors, num_pages: int, completions: Completions, slots: Encoding = AS_IS) -> None:
        device = arena.bytes.device
        self._slots = slots
        self._device = device
        self._pages = HostPages(num_pages, arena.spec.block_bytes, is_pinned=True)
        self._completions = completions
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._staging = torch.empty(STAGED_SLABS * arena.spec.slab_bytes, dtype=torch.uint8, device=device)
        self._staged_to = 0
        self._staged: deque[tuple[int, int, torch.cuda.Event]] = deque()
        """Ranges of the staging memory, oldest first, and the event after which each is free."""
        self._stored: dict[int, torch.cuda.Event] = {}
        """By place: the event after which it is complete."""
        self._ended: SimpleQueue[tuple[TransferId, torch.cuda.Event, torch.cuda.Event] | None] = SimpleQueue()
        self._thread = Thread(target=self._report, name="host memory", daemon=True)
        self._thread.start()

    def load(self, action: LoadIn, arena: ArenaTensors) -> None:
        """Write blocks and slots of the arena, after the steps launched so far and the stores of what is loaded."""
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        for _, place in (*action.blocks, *action.slots):
            self._in.wait_event(self._stored[place])
        with torch.cuda.stream(self._in):
            begun = _recorded()
            for target, place, encoding in _parts(action, arena, self._slots):
                _load(self._pages, place, target, encoding)
            self._ended.put((action.transfer, begun, _recorded()))

    def store(self, action: StoreOut, arena: ArenaTensors) -> None:
        """Read blocks and slots of the arena: aside on the stream of the steps, across the bus on another."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._out):
            begun = _recorded()
        end = begun
        for source, place, encoding in _parts(action, arena, self._slots):
            staged, start = self._stage(len(source), current)
            staged.copy_(source)
            self._out.wait_stream(current)
            with torch.cuda.stream(self._out):
                _store(self._pages, place, staged, encoding)
                end = _recorded()
            self._staged.append((start, start + len(source), end))
            self._stored[place] = end
        self._ended.put((action.transfer, begun, end))

    def _stage(self, num_bytes: int, current: torch.cuda.Stream) -> tuple[Tensor, int]:
        """Return staging memory, and where it begins; the steps wait for it if the bus is behind."""
        start = self._staged_to if self._staged_to + num_bytes <= len(self._staging) else 0
        end = start + num_bytes
        while any(first < end and start < last for first, last, _ in self._staged):
            current.wait_event(self._staged.popleft()[2])
        self._staged_to = end
        return self._staging[start:end], start

    def read(self, place: int) -> StoredBytes:
        """Return what a place holds, once the event has occurred; it stays there until the place is dropped."""
        return StoredBytes(self._pages.whole(place), self._stored[place])

    def drop(self, places: Iterable[int]) -> None:
        """Free places."""
        places = tuple(places)
        self._pages.drop(places)
        for place in places:
            del self._stored[place]

    def cancel(self, transfer: TransferId) -> None:
        """Do nothing: a transfer takes milliseconds."""

    def close(self) -> None:
        """End the thread, once all transfers have ended, and unpin the memory."""
        self._ended.put(None)
        self._thread.join()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._pages.bytes.data_ptr()))

    def _report(self) -> None:
        torch.cuda.set_device(self._device)
        while (ended := self._ended.get()) is not None:
            transfer, begun, end = ended
            end.synchronize()
            seconds = begun.elapsed_time(end) / 1000 if begun is not end else 0.0
            self._completions.put(Completion(transfer, is_done=True, seconds=seconds))


def _recorded() -> torch.cuda.Event:
    """Record an event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _parts(action: LoadIn | StoreOut, arena: ArenaTensors, slots: Encoding) -> Iterator[tuple[Tensor, int, Encoding]]:
    """Yield the bytes of each block and each slot, its place, and how it rests there."""
    for block, place in action.blocks:
        yield arena.block(block), place, AS_IS
    for slot, place in action.slots:
        yield arena.slot(slot), place, slots


def _store(pages: HostPages, place: int, entry_X: Tensor, encoding: Encoding) -> None:
    """Encode an entry and copy it to a new place."""
    rest_X = encoding.encode(entry_X)
    start = 0
    for piece in pages.take(place, len(rest_X)):
        piece.copy_(rest_X[start : start + len(piece)], non_blocking=True)
        start += len(piece)


def _load(pages: HostPages, place: int, entry_X: Tensor, encoding: Encoding) -> None:
    """Copy an entry from its place and decode it."""
    rest_X = encoding.room(entry_X)
    start = 0
    for piece in pages.find(place, len(rest_X)):
        rest_X[start : start + len(piece)].copy_(piece, non_blocking=True)
        start += len(piece)
    encoding.decode(rest_X, entry_X)
