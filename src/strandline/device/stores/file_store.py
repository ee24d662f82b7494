"""Files as a store: threads that write and read those of a directory or of a bucket.

Loads come before stores, and one thread is reserved for them. Waiting for the device, a disk or a server and computing
a checksum release the GIL, so that steps continue. Failures are reported and logged; after a failed store, storing
pauses for a while, but for one attempt before the process ends. A load ends at the latest when computing would have
ended.
"""

import logging
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from threading import Condition, Thread
from typing import Final, NamedTuple, Protocol

from strandline.clock import SYSTEM_CLOCK
from strandline.device.stores.arena_copies import ArenaCopies, Entries, Fence
from strandline.device.stores.host_store import StoredBytes
from strandline.device.stores.transfers import Completions
from strandline.errors import EngineError, cause_of
from strandline.ids import BlockId, TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import (
    Completion,
    FoundFile,
    LoadIn,
    SnapshotCopy,
    StoredBlocks,
    StoredPath,
    StoreOut,
)
from strandline.transfer.checksum import Buffer
from strandline.transfer.stored_files import PIECE_BYTES, FilePart, Located, LostItemsError, StoredFile

LOGGER: Final = logging.getLogger("strandline.tiers")
MAX_STORES: Final = 3
"""Most stores that are written at once."""
PAUSE_S: Final = 30.0
"""Pause of all stores after one has failed."""
NO_TRANSFER: Final = TransferId(0)
LOG_EVERY_S: Final = 60.0
"""Minimum interval between log messages about failed loads."""


class Files(Protocol):
    """Where files are kept. Any thread may call.

    Attributes:
        title: what messages call it.
        max_file_bytes: most bytes of blocks in a file.
        num_threads: how many threads read and write at once; one more than ``MAX_STORES`` at least.
    """

    @property
    def title(self) -> str: ...

    @property
    def max_file_bytes(self) -> int: ...

    @property
    def num_threads(self) -> int: ...

    def new_file(self, path: StoredPath, blocks: StoredBlocks | None, sizes: tuple[int, ...]) -> StoredFile:
        """Return the file, not written yet, of some of a path's blocks; None: of its snapshot.

        Args:
            sizes: sizes of its items.
        """

    def write(self, file: StoredFile, items: Iterable[Iterable[Buffer]]) -> None:
        """Write a new file.

        Args:
            items: the bytes of each, in pieces.

        Raises:
            OSError: it cannot be written now; nothing is left.
        """

    def read(self, parts: Sequence[FilePart], deadline_s: float) -> Iterator[memoryview]:
        """Yield the bytes of each part, checked, one after the other.

        Raises:
            LostItemsError: items of the next part are gone or damaged.
            OSError: they cannot be read now, or the deadline has passed.
        """

    def shrink(self, file: StoredFile) -> None:
        """Remove what is not needed of a file, if it belongs to this process alone."""

    def remove(self, file: StoredFile) -> None:
        """Remove a file that was written and is of no use, if it belongs to this process alone."""

    def measure_free_bytes(self) -> int | None:
        """Return what there is room for on the disk; None: unknown."""

    def close(self) -> None:
        """Let other processes use it."""


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
    num_bytes: int
    block: BlockId | None
    state: SnapshotCopy | None


class _Failure(NamedTuple):
    """Why a store failed."""

    cause: str = ""
    max_free_bytes: int | None = None

    def completion(self, transfer: TransferId) -> Completion:
        """Return the end of a store that fails for this reason."""
        return Completion(transfer, is_done=False, cause=self.cause, max_free_bytes=self.max_free_bytes)


class _LostError(Exception):
    """Addresses that will never be read; the message is the reason."""

    def __init__(self, reason: str, addresses: tuple[int, ...]) -> None:
        super().__init__(reason)
        self.addresses = addresses


class FileStore:
    """Blocks and snapshots in files, by address. All methods belong to the thread that launches steps.

    Args:
        name: in actions.
        addresses: locations of all entries that the files hold.
        source: the store above.
        completions: queue for the ends of transfers.
    """

    def __init__(
        self,
        name: str,
        files: Files,
        addresses: dict[int, Located],
        source: Source,
        copies: ArenaCopies,
        completions: Completions,
    ) -> None:
        self._name = name
        self._files = files
        self._addresses = addresses
        self._source = source
        self._copies = copies
        self._completions = completions
        self._entered: dict[int, Located] = {}
        """By address: what others have written and is there, also after it was dropped, as it may be needed again."""
        self._loads: deque[tuple[TransferId, Callable[[], None]]] = deque()
        """By transfer; files to be removed or cut off are ``NO_TRANSFER``."""
        self._stores: deque[Callable[[], None]] = deque()
        self._num_storing = 0
        self._is_closed = False
        self._changed = Condition()
        """Guards everything above, and the addresses."""
        self._paused_until_s = self._logged_s = float("-inf")
        self._failure = _Failure()
        self._is_ending = False
        self._threads = [Thread(target=self._run, name=files.title, daemon=True) for _ in range(files.num_threads)]
        for thread in self._threads:
            thread.start()

    def rename(self, addresses: Mapping[int, int]) -> None:
        """Rename the addresses of the entries found, and remove those without a new name. Called before any action."""
        unused = [address for address in self._addresses if address not in addresses]
        if unused:
            text = "%d blocks and snapshots of the %s are of no use: other ranks lack them"
            LOGGER.warning(text, len(unused), self._files.title)
        self.drop(unused)
        with self._changed:
            self._addresses = {addresses[address]: located for address, located in self._addresses.items()}

    def enter(self, files: Iterable[FoundFile]) -> None:
        """Take in files that others have written, whose items can be loaded from now on."""
        with self._changed:
            for name, first, num_items in files:
                file = StoredFile(name, num_items)
                self._entered |= {first + item: Located(file, item) for item in range(num_items)}

    def forget(self, files: Iterable[FoundFile]) -> None:
        """Forget files that others had written and that are gone. Loads that have begun go on."""
        with self._changed:
            for _, first, num_items in files:
                for item in range(num_items):
                    self._entered.pop(first + item, None)

    def load(self, action: LoadIn, arena: ArenaTensors) -> None:
        """Begin to write blocks and slots of the arena."""
        fence, deadline_s = self._copies.fence(), SYSTEM_CLOCK() + action.limit_s
        num_bytes, sizes = arena.spec.raw_block_bytes, self._copies.snapshots.num_bytes
        find = ChainMap(self._addresses, self._entered).get
        with self._changed:
            wanted = [_Wanted(find(address), address, num_bytes, block, None) for block, address in action.blocks]
            for each in action.snapshots:
                size = sizes(each.slot, each.windows)
                wanted.append(_Wanted(find(each.address), each.address, size, None, each))
            self._loads.append((action.transfer, partial(self._load, action.transfer, wanted, fence, deadline_s)))
            self._changed.notify()

    def store(self, action: StoreOut, arena: ArenaTensors) -> None:
        """Begin to write a path's blocks and its snapshot to files."""
        path, fence = action.path, self._copies.fence()
        if path is None:
            raise EngineError(f"what is stored to {self._name!r} needs a path")
        if action.is_final and not self._is_ending:
            self._is_ending, self._paused_until_s = True, float("-inf")
        if SYSTEM_CLOCK() < self._paused_until_s:
            self._completions.put(self._failure.completion(action.transfer))
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
                (NO_TRANSFER, partial(self._files.shrink, file)) for file in dict.fromkeys(x.file for x in dropped)
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
        """Wait for running reads and writes, drop the rest, and let other processes use the files."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._files.close()

    # In the threads

    def _run(self) -> None:
        self._copies.enter_thread()
        while (task := self._next()) is not None:
            work, is_store = task
            try:
                work()
            except Exception:
                # The edge of the thread: the others go on.
                LOGGER.exception("the %s could not do what it was asked to", self._files.title)
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
                if self._stores and self._num_storing < MAX_STORES:
                    self._num_storing += 1
                    return self._stores.popleft(), True
                self._changed.wait()
            return None

    def _load(self, transfer: TransferId, wanted: Sequence[_Wanted], fence: Fence, deadline_s: float) -> None:
        """Read and report."""
        start_s, is_done = SYSTEM_CLOCK(), False
        lost: tuple[int, ...] = ()
        try:
            self._read(wanted, fence, deadline_s)
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
            LOGGER.warning("a prefix could not be read from the %s and is computed: %s", self._files.title, reason)

    def _read(self, wanted: Sequence[_Wanted], fence: Fence, deadline_s: float) -> None:
        """Copy the requested items from the files to the device.

        Raises:
            _LostError: some of it is gone or damaged.
            OSError: it cannot be read now, or not before the deadline.
        """
        groups = list(_groups(wanted))
        parts = self._files.read([_part(group) for group in groups], deadline_s)
        for group in groups:
            try:
                data = next(parts)
            except LostItemsError as error:
                lost = tuple(each.address for each in group if each.located and each.located.item in error.items)
                raise _LostError(str(error), lost) from error
            if (state := group[0].state) is not None:
                self._copies.write_snapshot(state.slot, state.windows, data, fence)
            else:
                self._copies.write(Entries([each.block for each in group if each.block is not None]), data, fence)

    def _store(self, transfer: TransferId, path: StoredPath, sources: Mapping[int, Item]) -> None:
        """Write and report."""
        start_s = SYSTEM_CLOCK()
        if start_s < self._paused_until_s and not self._is_ending:
            # Another one has failed since this one began to wait.
            self._completions.put(self._failure.completion(transfer))
            return
        ended = Completion(transfer, is_done=False)
        try:
            self._write(path, sources)
            ended = Completion(transfer, is_done=True)
        except OSError as error:
            self._pause(cause_of(error))
            ended = self._failure.completion(transfer)
        finally:
            self._completions.put(ended._replace(seconds=SYSTEM_CLOCK() - start_s))

    def _pause(self, cause: str) -> None:
        """Pause all stores, unless another one that was written at the same time has failed first."""
        failure = _Failure(cause, self._files.measure_free_bytes())
        with self._changed:
            if SYSTEM_CLOCK() < self._paused_until_s:
                return
            self._failure = failure
            self._paused_until_s = SYSTEM_CLOCK() + PAUSE_S
        LOGGER.warning("nothing is stored in the %s for %d s: %s", self._files.title, PAUSE_S, cause)

    def _write(self, path: StoredPath, sources: Mapping[int, Item]) -> None:
        """Write a path's blocks, then its snapshot: blocks alone are of no use, but do no harm."""
        parts: list[tuple[StoredBlocks | None, tuple[int, ...]]] = []
        for blocks in _split(path.blocks, sources, self._files.max_file_bytes):
            parts.append((blocks, blocks.addresses))
        if path.address:
            parts.append((None, (path.address, *[path.tail_address] * bool(path.tail_address))))
        addresses = dict[int, Located]()
        try:
            for some, numbers in parts:
                items = [sources[address] for address in numbers]
                file = self._files.new_file(path, some, tuple(item.num_bytes for item in items))
                self._files.write(file, [item.read() for item in items])
                addresses |= {address: Located(file, index) for index, address in enumerate(numbers)}
        except BaseException:
            for file in dict.fromkeys(located.file for located in addresses.values()):
                self._files.remove(file)
            raise
        with self._changed:
            self._addresses |= addresses

    def _block(self, block: BlockId, fence: Fence) -> Iterator[memoryview]:
        """Yield the bytes of a block of the device."""
        yield self._copies.read(Entries([block]), fence)

    def _snapshot(self, state: SnapshotCopy, fence: Fence) -> Iterator[memoryview]:
        """Yield the stored bytes of a snapshot of the device."""
        yield self._copies.read_snapshot(state.slot, state.windows, fence)


def _host_item(source: StoredBytes) -> Item:
    """Return what an address in the store above holds, as an item."""
    return Item(sum(map(len, source.pieces)), partial(_host, source))


def _host(source: StoredBytes) -> Iterator[memoryview]:
    """Yield the bytes of an address in the store above in pieces, once they are there."""
    if source.event is not None:
        source.event.synchronize()
    for piece in source.pieces:
        yield piece.numpy().data


def _split(blocks: StoredBlocks | None, sources: Mapping[int, Item], max_bytes: int) -> Iterator[StoredBlocks]:
    """Yield blocks in groups of ``max_bytes`` at most, but one block at least."""
    if blocks is None:
        return
    most = max(max_bytes // sources[blocks.addresses[0]].num_bytes, 1)
    for start in range(0, len(blocks.addresses), most):
        yield StoredBlocks(blocks.first + start, blocks.addresses[start : start + most])


def _groups(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """Yield what is wanted of each file in groups of few bytes; a snapshot by itself.

    Raises:
        _LostError: an address is unknown.
    """
    parts_of = dict[StoredFile, list[_Wanted]]()
    for part in wanted:
        if part.located is None:
            raise _LostError("its address is not known", (part.address,))
        parts_of.setdefault(part.located.file, []).append(part)
    for parts in parts_of.values():
        group, num_bytes = list[_Wanted](), 0
        for part in parts:
            is_alone = part.state is not None or (group and group[-1].state is not None)
            if group and (is_alone or num_bytes + part.num_bytes > PIECE_BYTES):
                yield group
                group, num_bytes = [], 0
            group.append(part)
            num_bytes += part.num_bytes
        yield group


def _part(group: Sequence[_Wanted]) -> FilePart:
    """Return what to read for a group, whose items are all of one file."""
    located = [each.located for each in group if each.located is not None]
    return FilePart(located[0].file, tuple(each.item for each in located), tuple(each.num_bytes for each in group))
