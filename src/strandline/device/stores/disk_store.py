"""A disk as a store: threads that write and read the files of a directory.

Loads come before stores, and one thread is reserved for them. Waiting for the device or the disk and computing a
checksum release the GIL, so that steps continue. Failures are reported and logged; after a failed store, storing pauses
for a while, but for one attempt before the process ends.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EIO
from functools import partial
from threading import Condition, Lock, Thread
from typing import Final, NamedTuple, Protocol

import numpy as np

from strandline.clock import SYSTEM_CLOCK
from strandline.device.stores.arena_copies import ArenaCopies, Entries, Fence
from strandline.device.stores.host_store import StoredBytes
from strandline.device.stores.transfers import Completions
from strandline.errors import EngineError, cause_of
from strandline.ids import BlockId, TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import Completion, LoadIn, SnapshotCopy, StoredBlocks, StoredPath, StoreOut
from strandline.transfer.disk_directory import DiskDirectory, Located, StoredFile
from strandline.transfer.disk_files import DamagedFileError, cut_off, open_for_reading, read_item, write_file

LOGGER: Final = logging.getLogger("strandline.disk_cache")
DISK_STORE: Final = "disk"
"""Its name in actions."""
NUM_THREADS: Final = 4
PIECE_BYTES: Final = 8 * 2**20
"""At most this many bytes of blocks are copied to the device at a time."""
PAUSE_S: Final = 30.0
"""Pause of all stores after one has failed."""
NO_TRANSFER: Final = TransferId(0)
LOG_EVERY_S: Final = 60.0
"""Minimum interval between log messages about failed loads."""


class Item(NamedTuple):
    """A block or snapshot to write."""

    num_bytes: int
    read: Callable[[], Iterator[memoryview]]
    """Yields its bytes in pieces."""


class Source(Protocol):
    """The store that entries are read from."""

    def read(self, address: int) -> StoredBytes:
        """Return the content of an address; it stays valid until the address is dropped."""


class _Wanted(NamedTuple):
    """A block or snapshot to read."""

    located: Located | None
    """None: its address is unknown."""
    address: int
    block: BlockId | None
    state: SnapshotCopy | None


class _LostError(Exception):
    """Addresses that will never be read; the message is the reason."""

    def __init__(self, reason: str, addresses: tuple[int, ...]) -> None:
        super().__init__(reason)
        self.addresses = addresses


class DiskStore:
    """The files of a directory, by address. All methods belong to the thread that launches steps.

    Args:
        addresses: locations of all entries in the directory.
        source: the store above.
        completions: queue for the ends of transfers.
    """

    def __init__(
        self,
        directory: DiskDirectory,
        addresses: dict[int, Located],
        source: Source,
        copies: ArenaCopies,
        completions: Completions,
    ) -> None:
        self._directory = directory
        self._addresses = addresses
        self._source = source
        self._copies = copies
        self._completions = completions
        self._loads: deque[tuple[TransferId, Callable[[], None]]] = deque()
        """By transfer; files to be removed or cut off are ``NO_TRANSFER``."""
        self._stores: deque[Callable[[], None]] = deque()
        self._num_storing = 0
        self._is_closed = False
        self._changed = Condition()
        """Guards everything above, and the addresses."""
        self._shrinking = Lock()
        self._paused_until_s = self._logged_s = float("-inf")
        self._pause_cause = ""
        self._is_ending = False
        self._threads = [Thread(target=self._run, name="disk cache", daemon=True) for _ in range(NUM_THREADS)]
        for thread in self._threads:
            thread.start()

    def rename(self, addresses: Mapping[int, int]) -> None:
        """Rename the addresses of the entries found, and remove those without a new name. Called before any action."""
        unused = [address for address in self._addresses if address not in addresses]
        if unused:
            text = "%d blocks and snapshots of the disk cache %s are of no use: other ranks lack them"
            LOGGER.warning(text, len(unused), self._directory.path)
        self.drop(unused)
        with self._changed:
            self._addresses = {addresses[address]: located for address, located in self._addresses.items()}

    def load(self, action: LoadIn, arena: ArenaTensors) -> None:
        """Begin to write blocks and slots of the arena."""
        fence = self._copies.fence()
        with self._changed:
            wanted = [_Wanted(self._addresses.get(address), address, block, None) for block, address in action.blocks]
            wanted += [
                _Wanted(self._addresses.get(each.address), each.address, None, each) for each in action.snapshots
            ]
            self._loads.append((action.transfer, partial(self._load, action.transfer, wanted, fence)))
            self._changed.notify()

    def store(self, action: StoreOut, arena: ArenaTensors) -> None:
        """Begin to write a path's blocks and its snapshot to files."""
        path, fence = action.path, self._copies.fence()
        if path is None:
            raise EngineError(f"what is stored to {DISK_STORE!r} needs a path")
        if action.is_final and not self._is_ending:
            self._is_ending, self._paused_until_s = True, float("-inf")
        if SYSTEM_CLOCK() < self._paused_until_s:
            self._completions.put(Completion(action.transfer, is_done=False, cause=self._pause_cause))
            return
        sources = {address: _host_item(self._source.read(source)) for source, address in action.stored}
        num_bytes = arena.spec.raw_block_bytes
        sources |= {address: Item(num_bytes, partial(self._block, block, fence)) for block, address in action.blocks}
        for each in action.snapshots:
            num_bytes = self._copies.snapshots.num_bytes(each.slot, each.windows)
            sources[each.address] = Item(num_bytes, partial(self._snapshot, each, fence))
        with self._changed:
            self._stores.append(partial(self._store, action.transfer, path, sources))
            self._changed.notify()

    def drop(self, addresses: Iterable[int]) -> None:
        """Free addresses: remove their files or, of blocks that others come before, cut their files off."""
        with self._changed:
            dropped = [self._addresses.pop(address) for address in addresses if address in self._addresses]
            for file, item in dropped:
                file.is_live[item] = False
            self._loads += [
                (NO_TRANSFER, partial(self._shrink, file)) for file in dict.fromkeys(x.file for x in dropped)
            ]
            self._changed.notify_all()

    def cancel(self, transfer: TransferId) -> None:
        """End a load that has not begun."""
        with self._changed:
            waiting = [task for task in self._loads if task[0] == transfer]
            for task in waiting:
                self._loads.remove(task)
        for _ in waiting:
            self._completions.put(Completion(transfer, is_done=False))

    def close(self) -> None:
        """Wait for running reads and writes, drop the rest, and release the directory to other processes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._directory.close()

    # In the threads

    def _run(self) -> None:
        self._copies.enter_thread()
        while (task := self._next()) is not None:
            work, is_store = task
            try:
                work()
            except Exception:
                # The edge of the thread: the others go on.
                LOGGER.exception("the disk cache could not do what it was asked to")
            finally:
                with self._changed:
                    self._num_storing -= is_store
                    self._changed.notify()

    def _next(self) -> tuple[Callable[[], None], bool] | None:
        """Wait for work; return it, and whether it is a store. None: the store is closed."""
        with self._changed:
            while not self._is_closed:
                if self._loads:
                    return self._loads.popleft()[1], False
                if self._stores and self._num_storing < NUM_THREADS - 1:
                    self._num_storing += 1
                    return self._stores.popleft(), True
                self._changed.wait()
            return None

    def _load(self, transfer: TransferId, wanted: Sequence[_Wanted], fence: Fence) -> None:
        """Read and report."""
        start_s, is_done = SYSTEM_CLOCK(), False
        lost: tuple[int, ...] = ()
        try:
            self._read(wanted, fence)
            is_done = True
        except _LostError as error:
            lost = error.addresses
            self._warn_of_load(str(error))
        except OSError as error:
            self._warn_of_load(cause_of(error))
        finally:
            # Without a completion, requests would wait forever.
            self._completions.put(Completion(transfer, is_done, SYSTEM_CLOCK() - start_s, lost))

    def _warn_of_load(self, reason: str) -> None:
        if SYSTEM_CLOCK() >= self._logged_s + LOG_EVERY_S:
            self._logged_s = SYSTEM_CLOCK()
            LOGGER.warning("a prefix could not be read from the disk cache and is computed: %s", reason)

    def _read(self, wanted: Sequence[_Wanted], fence: Fence) -> None:
        """Copy the requested items from the files to the device.

        Raises:
            _LostError: some of it is gone or damaged.
            OSError: it cannot be read now.
        """
        parts_of = dict[StoredFile, list[_Wanted]]()
        for part in wanted:
            if part.located is None:
                raise _LostError("its address is not known", (part.address,))
            parts_of.setdefault(part.located.file, []).append(part)
        for file, parts in parts_of.items():
            try:
                descriptor = open_for_reading(self._directory.descriptor, file.name)
            except FileNotFoundError:
                raise _LostError(f"{file.name} is gone", tuple(part.address for part in parts)) from None
            try:
                for pieces in _pieces(parts):
                    self._read_pieces(descriptor, file, pieces, fence)
                with suppress(OSError):  # the disk may be read-only
                    os.utime(descriptor)
            finally:
                os.close(descriptor)

    def _read_pieces(self, descriptor: int, file: StoredFile, parts: Sequence[_Wanted], fence: Fence) -> None:
        """Copy items of one file to the device at once."""
        indices = [part.located.item for part in parts if part.located is not None]
        data = np.empty(sum(file.header.sizes[index] for index in indices), np.uint8)
        start, target = 0, data.data
        for part, index in zip(parts, indices, strict=True):
            end = start + file.header.sizes[index]
            try:
                read_item(descriptor, file.header, index, file.offsets[index], target[start:end])
            except DamagedFileError as error:
                raise _LostError(f"{file.name}: {error}", (part.address,)) from None
            except OSError as error:
                if error.errno != EIO:
                    raise
                raise _LostError(f"{file.name}: {cause_of(error)}", (part.address,)) from error
            start = end
        if (state := parts[0].state) is not None:
            if len(target) != self._copies.snapshots.num_bytes(state.slot, state.windows):
                raise _LostError(f"{file.name}: its snapshot has another window", (state.address,))
            self._copies.write_snapshot(state.slot, state.windows, target, fence)
        else:
            self._copies.write(Entries([part.block for part in parts if part.block is not None]), target, fence)

    def _store(self, transfer: TransferId, path: StoredPath, sources: Mapping[int, Item]) -> None:
        """Write and report."""
        start_s, is_done, cause = SYSTEM_CLOCK(), False, ""
        try:
            self._write(path, sources)
            is_done = True
        except OSError as error:
            self._pause_cause = cause = cause_of(error)
            self._paused_until_s = SYSTEM_CLOCK() + PAUSE_S
            text = "nothing is stored in the disk cache %s for %d s: %s"
            LOGGER.warning(text, self._directory.path, PAUSE_S, cause)
        finally:
            self._completions.put(Completion(transfer, is_done, SYSTEM_CLOCK() - start_s, cause=cause))

    def _write(self, path: StoredPath, sources: Mapping[int, Item]) -> None:
        """Write a path's blocks, then its snapshot: blocks alone are of no use, but do no harm."""
        parts: list[tuple[StoredBlocks | None, tuple[int, ...]]] = []
        if path.blocks is not None:
            parts.append((path.blocks, path.blocks.addresses))
        if path.address:
            parts.append((None, (path.address, *[path.tail_address] * bool(path.tail_address))))
        addresses = dict[int, Located]()
        try:
            for blocks, numbers in parts:
                items = [sources[address] for address in numbers]
                file = self._directory.new_file(path, blocks, tuple(item.num_bytes for item in items))
                pieces = [item.read() for item in items]
                file.header = write_file(self._directory.descriptor, file.name, file.header, pieces)
                addresses |= {address: Located(file, index) for index, address in enumerate(numbers)}
        except BaseException:
            for file in dict.fromkeys(located.file for located in addresses.values()):
                self._remove(file)
            raise
        with self._changed:
            self._addresses |= addresses

    def _block(self, block: BlockId, fence: Fence) -> Iterator[memoryview]:
        """Yield the bytes of a block of the device."""
        yield self._copies.read(Entries([block]), fence)

    def _snapshot(self, state: SnapshotCopy, fence: Fence) -> Iterator[memoryview]:
        """Yield the stored bytes of a snapshot of the device."""
        yield self._copies.read_snapshot(state.slot, state.windows, fence)

    def _shrink(self, file: StoredFile) -> None:
        """Remove a file, or cut it off after the last item that is needed."""
        with self._shrinking:
            num_live = max((index + 1 for index, is_live in enumerate(file.is_live) if is_live), default=0)
            if not num_live:
                self._remove(file)
            elif num_live < len(file.is_live):
                try:
                    cut_off(self._directory.descriptor, file.name, file.offsets[num_live])
                except OSError as error:
                    LOGGER.warning("cannot shorten %s in the disk cache: %s", file.name, cause_of(error))

    def _remove(self, file: StoredFile) -> None:
        try:
            os.unlink(file.name, dir_fd=self._directory.descriptor)
        except FileNotFoundError:
            pass
        except OSError as error:
            LOGGER.warning("cannot remove %s from the disk cache: %s", file.name, cause_of(error))


def _host_item(source: StoredBytes) -> Item:
    """Return what an address in the store above holds, as an item."""
    return Item(sum(map(len, source.pieces)), partial(_host, source))


def _host(source: StoredBytes) -> Iterator[memoryview]:
    """Yield the bytes of an address in the store above in pieces, once they are there."""
    if source.event is not None:
        source.event.synchronize()
    for piece in source.pieces:
        yield piece.numpy().data


def _pieces(parts: Iterable[_Wanted]) -> Iterator[list[_Wanted]]:
    """Yield the parts of one file in groups of few bytes; a snapshot by itself."""
    group, num_bytes = list[_Wanted](), 0
    for part in parts:
        size = 0 if part.located is None else part.located.file.header.sizes[part.located.item]
        if group and (part.state is not None or group[-1].state is not None or num_bytes + size > PIECE_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(part)
        num_bytes += size
    if group:
        yield group
