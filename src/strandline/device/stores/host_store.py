"""Host memory as a store: one arena of pages, pinned on a GPU's host, into which blocks and slots are copied.

A page has the size of a block; a slot takes as many pages as it needs, not necessarily contiguous, so that no
compaction is needed. The cache counts pages exactly as this store does, so that allocations never fail. Slots may be
stored in fewer bits (``snapshot_encoding.py``).

On a GPU the copies run on separate streams. Blocks are gathered in a staging buffer on the device, many at a time, and
cross the bus in the longest stretches that are consecutive in host memory. Where steps may overwrite the originals,
they are gathered on the stream of the steps; where only a load will, the load waits instead, and no step does. Stores
complete before loads that begin after them; pages that were freed while a load reads them are written after it. On a
CPU all copies are synchronous.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strandline.clock import SYSTEM_CLOCK
from strandline.device.hardware.upload import upload
from strandline.device.stores.arena_snapshots import ArenaSnapshots, Windows, copy_pieces
from strandline.device.stores.snapshot_encoding import AS_IS, Encoding
from strandline.device.stores.transfers import Completions
from strandline.errors import CacheInvariantError
from strandline.ids import BlockId, SlotId, TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import Completion, LoadIn, StoreOut
from strandline.specs import ALIGN_BYTES, ModelSpec

STAGED_SLABS: Final = 4
"""Size of the device memory in which evicted entries wait for the bus, in slabs."""
LANDING_SLABS: Final = 1
"""Size of the device memory in which blocks arrive from the bus, in slabs."""
MIN_SLAB_BLOCKS: Final = 4
"""Blocks for which each of these slabs has room at least: without states, a slab may be one block."""
ENCODING_SLABS: Final = 2
"""Device memory that encoding and decoding slots take for a while, at most, in slabs."""

HOST_STORE: Final = "host"
"""Its name in actions."""


def choose_staging_bytes(spec: ModelSpec, snapshot_dtype: str) -> int:
    """Return the device memory that copies to and from pinned memory need."""
    encoding_slabs = 0 if spec.stored(snapshot_dtype) == spec else ENCODING_SLABS
    return (STAGED_SLABS + LANDING_SLABS) * _slab_bytes(spec) + encoding_slabs * spec.slab_bytes


def _slab_bytes(spec: ModelSpec) -> int:
    """Return the size of a slab of staging memory."""
    return max(spec.slab_bytes, MIN_SLAB_BLOCKS * spec.block_bytes)


class StoredBytes(NamedTuple):
    """The content of an address."""

    pieces: list[Tensor]
    """In order."""
    event: torch.cuda.Event | None
    """The bytes are valid after this event; None: they are valid."""


class HostPages:
    """The pages, and their assignment to addresses.

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

    def take(self, address: int, num_bytes: int) -> list[Tensor]:
        """Allocate room under a new address; return it as consecutive pieces.

        Raises:
            CacheInvariantError: there is no room, or the address is in use.
        """
        num_pages = -(-num_bytes // self.page_bytes)
        if address in self._pages_of or num_pages > len(self._free):
            raise CacheInvariantError(
                f"address {address} needs {num_pages} pages of host memory, {len(self._free)} are free"
            )
        self._pages_of[address] = [self._free.pop() for _ in range(num_pages)]
        self._bytes_of[address] = num_bytes
        return self.find([address])

    def find(self, addresses: Sequence[int], start: int = 0) -> list[Tensor]:
        """Return the bytes of addresses from ``start`` on as pieces in order, neighbouring pages in one.

        Args:
            addresses: one, or several whose bytes fill their pages.
        """
        pieces, size = list[Tensor](), self.page_bytes
        left, passed = sum(self._bytes_of[address] for address in addresses), start
        for first, count in stretches(self.pages_of(addresses)):
            piece_X = self.bytes[first * size : first * size + min(left, count * size)]
            left -= len(piece_X)
            if passed < len(piece_X):
                pieces.append(piece_X[passed:])
            passed = max(passed - len(piece_X), 0)
        return pieces

    def pages_of(self, addresses: Iterable[int]) -> list[int]:
        """Return the pages of addresses, in order."""
        return [page for address in addresses for page in self._pages_of[address]]

    def drop(self, addresses: Iterable[int]) -> None:
        """Free addresses. What is stored next takes their pages in this order."""
        freed = list[int]()
        for address in addresses:
            freed += self._pages_of.pop(address)
            del self._bytes_of[address]
        self._free += reversed(freed)


def stretches(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
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
        self._snapshots = ArenaSnapshots(arena, slots)

    def load(self, action: LoadIn, arena: ArenaTensors) -> None:
        """Write blocks and snapshots of the arena."""
        start_s = SYSTEM_CLOCK()
        for block, address in action.blocks:
            copy_pieces(self._pages.find([address]), [arena.block(block)])
        for slot, address, windows in action.snapshots:
            self._snapshots.decode(slot, windows, self._pages.find([address]))
        self._completions.put(Completion(action.transfer, is_done=True, seconds=SYSTEM_CLOCK() - start_s))

    def store(self, action: StoreOut, arena: ArenaTensors) -> None:
        """Read blocks and snapshots of the arena."""
        start_s = SYSTEM_CLOCK()
        for block, address in action.blocks:
            self._store(address, arena.block(block))
        for slot, address, windows in action.snapshots:
            self._store(address, self._snapshots.encode(slot, windows))
        self._completions.put(Completion(action.transfer, is_done=True, seconds=SYSTEM_CLOCK() - start_s))

    def _store(self, address: int, rest_X: Tensor) -> None:
        copy_pieces([rest_X], self._pages.take(address, len(rest_X)))

    def read(self, address: int) -> StoredBytes:
        """Return what an address holds; it stays there until the address is dropped."""
        return StoredBytes(self._pages.find([address]), None)

    def drop(self, addresses: Iterable[int]) -> None:
        """Free addresses."""
        self._pages.drop(addresses)

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
        device, slab_bytes = arena.bytes.device, _slab_bytes(arena.spec)
        self._snapshots = ArenaSnapshots(arena, slots)
        self._device = device
        self._block_BX = arena.bytes.view(arena.num_blocks, arena.spec.block_bytes)
        self._pages = HostPages(num_pages, arena.spec.block_bytes, is_pinned=True)
        self._completions = completions
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._staging = torch.empty(STAGED_SLABS * slab_bytes, dtype=torch.uint8, device=device)
        self._staged_to = 0
        self._staged: deque[tuple[int, int, torch.cuda.Event]] = deque()
        """Ranges of the staging memory, oldest first, and the event after which each is free."""
        self._landing = torch.empty(LANDING_SLABS * slab_bytes, dtype=torch.uint8, device=device)
        self._stored: dict[int, torch.cuda.Event] = {}
        """By address: the event after which it is complete."""
        self._read: dict[int, torch.cuda.Event] = {}
        """By address that has been loaded: the event after which it has been read."""
        self._readers: dict[int, torch.cuda.Event] = {}
        """By free page: the event after which it may be written."""
        self._gathered: torch.cuda.Event | None = None
        """The event after which loads may overwrite what was stored last."""
        self._ended: SimpleQueue[tuple[TransferId, torch.cuda.Event, torch.cuda.Event] | None] = SimpleQueue()
        self._thread = Thread(target=self._report, name="host memory", daemon=True)
        self._thread.start()

    def load(self, action: LoadIn, arena: ArenaTensors) -> None:
        """Write blocks and slots of the arena, after the steps launched so far and the stores of what is loaded."""
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        addresses = action.addresses
        for stored in dict.fromkeys(self._stored[address] for address in addresses):
            self._in.wait_event(stored)
        if self._gathered is not None:
            self._in.wait_event(self._gathered)
        with torch.cuda.stream(self._in):
            begun = _recorded()
            for pairs in _groups(action.blocks, len(self._landing) // self._pages.page_bytes):
                self._load_blocks(pairs)
            for slot, address, windows in action.snapshots:
                self._snapshots.decode(slot, windows, self._pages.find([address]))
            end = _recorded()
        self._read.update(dict.fromkeys(addresses, end))
        self._ended.put((action.transfer, begun, end))

    def _load_blocks(self, pairs: Sequence[tuple[BlockId, int]]) -> None:
        """Copy blocks to the landing memory and from there to their addresses in the arena, on the current stream."""
        size, start = self._pages.page_bytes, 0
        landed_X = self._landing[: len(pairs) * size]
        for first, count in stretches(self._pages.pages_of(address for _, address in pairs)):
            piece_X = self._pages.bytes[first * size : (first + count) * size]
            landed_X[start : start + len(piece_X)].copy_(piece_X, non_blocking=True)
            start += len(piece_X)
        block_N = upload(np.array([block for block, _ in pairs]), self._device)
        _words(self._block_BX).index_copy_(0, block_N, _words(landed_X.view(len(pairs), size)))

    def store(self, action: StoreOut, arena: ArenaTensors) -> None:
        """Read blocks and slots of the arena, and send them across the bus on another stream than the steps'.

        What is held is read on that stream, too, and loads wait for that; the rest on the stream of the steps.
        """
        current = torch.cuda.current_stream(self._device)
        reader = self._out if action.is_held else current
        with torch.cuda.stream(self._out):
            begun = _recorded()
        end = begun
        if action.is_held:
            self._out.wait_stream(current)
        for pairs in _groups(action.blocks, len(self._staging) // 2 // self._pages.page_bytes):
            staged_X, start = self._stage(len(pairs) * self._pages.page_bytes, reader)
            with torch.cuda.stream(reader):
                block_N = upload(np.array([block for block, _ in pairs]), self._device)
                rows_X = _words(staged_X.view(len(pairs), self._pages.page_bytes))
                torch.index_select(_words(self._block_BX), 0, block_N, out=rows_X)
            addresses = [address for _, address in pairs]
            for address in addresses:
                self._pages.take(address, self._pages.page_bytes)
            end = self._send(_Target(addresses, 0), staged_X, start, reader, AS_IS)
        for slot, address, windows in action.snapshots:
            end = self._store_snapshot(slot, address, windows, reader)
        self._ended.put((action.transfer, begun, end))

    def _store_snapshot(
        self, slot: SlotId, address: int, windows: Windows, reader: torch.cuda.Stream
    ) -> torch.cuda.Event:
        """Store a snapshot, part by part: the staging memory may be smaller. Return the event after which it is."""
        self._pages.take(address, self._snapshots.num_bytes(slot, windows))
        stored_bytes = 0
        for part_X, encoding in self._snapshots.parts(slot, windows):
            staged_X, start = self._stage(len(part_X), reader)
            with torch.cuda.stream(reader):
                staged_X.copy_(part_X)
            self._send(_Target([address], stored_bytes), staged_X, start, reader, encoding)
            stored_bytes += encoding.num_bytes(part_X)
        return self._stored[address]

    def _stage(self, num_bytes: int, reader: torch.cuda.Stream) -> tuple[Tensor, int]:
        """Return staging memory, and where it begins; the reader waits for it if the bus is behind."""
        start = self._staged_to if self._staged_to + num_bytes <= len(self._staging) else 0
        end = start + num_bytes
        while any(first < end and start < last for first, last, _ in self._staged):
            reader.wait_event(self._staged.popleft()[2])
        self._staged_to = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        return self._staging[start:end], start

    def _send(
        self, target: "_Target", staged_X: Tensor, start: int, reader: torch.cuda.Stream, encoding: Encoding
    ) -> torch.cuda.Event:
        """Copy what is staged to its target, once the pages have been read that it lies on.

        Returns:
            The event after which it is stored.
        """
        if reader is self._out:
            with torch.cuda.stream(self._out):
                self._gathered = _recorded()
        else:
            self._out.wait_stream(reader)
        with torch.cuda.stream(self._out):
            pages = self._pages.pages_of(target.addresses)
            for read in dict.fromkeys(self._readers.pop(page) for page in pages if page in self._readers):
                self._out.wait_event(read)
            copy_pieces([encoding.encode(staged_X)], self._pages.find(target.addresses, target.start))
            end = _recorded()
        self._staged.append((start, start + len(staged_X), end))
        self._stored.update(dict.fromkeys(target.addresses, end))
        return end

    def read(self, address: int) -> StoredBytes:
        """Return what an address holds, once the event has occurred; it stays there until the address is dropped."""
        return StoredBytes(self._pages.find([address]), self._stored[address])

    def drop(self, addresses: Iterable[int]) -> None:
        """Free addresses."""
        addresses = tuple(addresses)
        for address in addresses:
            del self._stored[address]
            if (read := self._read.pop(address, None)) is not None:
                self._readers.update(dict.fromkeys(self._pages.pages_of([address]), read))
        self._pages.drop(addresses)

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


class _Target(NamedTuple):
    """Where to store something."""

    addresses: Sequence[int]
    """Their pages are allocated."""
    start: int
    """Bytes that come before it."""


def _recorded() -> torch.cuda.Event:
    """Record an event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _groups(pairs: Sequence[tuple[BlockId, int]], most: int) -> Iterator[Sequence[tuple[BlockId, int]]]:
    """Yield the pairs in order, at most ``most`` at a time."""
    for start in range(0, len(pairs), most):
        yield pairs[start : start + most]


def _words(bytes_NX: Tensor) -> Tensor:
    """Return rows of bytes as rows of the widest integers that they consist of, which are copied faster."""
    return bytes_NX.view(torch.int64) if bytes_NX.shape[1] % 8 == 0 else bytes_NX
