"""Files of persistent tiers in a directory that all engines of a machine share, such as one in ``/dev/shm``.

Names and folders are those of a bucket (``object_files.py``). A directory has no rules that expire what is old, so its
size is bounded here, over all models, engines and ranks: the engine that writes removes the files that were used least
recently. Loads set the time of use.

Room is reserved under a lock before a file is written: the unfinished file has its full size at once. Its writer holds
a lock of that file, so a file that a killed process has left is recognized and removed. The lock's file has the sum of
all sizes, an upper bound that is counted again when it reaches the limit.
"""

import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import ENOSPC, EPERM
from pathlib import Path
from secrets import token_hex
from typing import Final, NamedTuple

from strandline.errors import ConfigError, cause_of
from strandline.records.account import SnapshotKind
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.tier_stats import DirectoryUse
from strandline.records.tokens import BLOCK_KEY_BYTES
from strandline.transfer.bucket import ObjectInfo
from strandline.transfer.checksum import Buffer
from strandline.transfer.disk_files import ALIGN_BYTES, MODE, DamagedFileError, Header, read_header, write_items
from strandline.transfer.object_files import LAYOUT, folder_of, name_of
from strandline.transfer.stored_files import (
    FILE_NAME,
    FileContents,
    FilePart,
    LostItemsError,
    StoredFile,
    read_in_turn,
    read_part,
)

LOGGER: Final = logging.getLogger("strandline.object_store")
LOCK: Final = "lock"
FOLDER: Final = re.compile(r"[0-9a-f]{32}")
UNFINISHED: Final = re.compile(rf"{FILE_NAME.pattern}\.[0-9a-f]{{16}}\.tmp")
FREED_SHARE: Final = 16
"""When the directory is full, this part of its size is freed at once, so that files are seldom counted."""
MAX_FILE_BYTES: Final = 64 * 2**20
UNUSED_NS: Final = 2**63
"""Instead of the time of last use: the file is being written."""
TICK_NS: Final = 20_000_000
"""Times of change that differ by less may be equal."""
OTHERS: Final = 0o077
"""Permissions of other users."""


class _Entry(NamedTuple):
    """A file of the directory, by its last use."""

    used_ns: int
    num_bytes: int
    path: Path


class SharedDirectory:
    """The files of one layout in a directory. Any thread may call.

    Args:
        root: the directory, created if need be, for its owner alone.
        layout: what must be equal for bytes to mean the same; with several ranks, it names the rank.
        block_bytes: the size of a block.
        snapshot_sizes: sizes that a snapshot may have.
        max_bytes: size of the directory over all layouts.

    Attributes:
        max_file_bytes: most bytes of blocks in a file: a small part of the directory.
        num_threads: how many read and write at once.
        refresh_s: time from one listing to the next, if no file is new or gone: it finds which have been used.
        look_s: time from one look at ``stamp`` to the next.
        max_share: share of a thread's time that listings may take. They hold the GIL, unlike those of a bucket.
    """

    num_threads: Final = 4
    refresh_s: Final = 10.0
    look_s: Final = 0.5
    max_share: Final = 0.1

    def __init__(
        self, root: Path, layout: Mapping[str, str], block_bytes: int, snapshot_sizes: Sequence[int], max_bytes: int
    ) -> None:
        self._root, self._max_bytes = root, max_bytes
        self.max_file_bytes = min(MAX_FILE_BYTES, max_bytes // FREED_SHARE)
        self._contents = FileContents(dict(layout), "", block_bytes, snapshot_sizes)
        folder, self._layout = folder_of(layout)
        self.folder = root / folder
        ranks = range(int(layout["tensor-parallel size"])) if "rank" in layout else ()
        self._folders = [root / folder_of({**layout, "rank": str(rank)})[0] for rank in ranks] or [self.folder]
        """Those of all ranks, which store the same under the same names."""
        self.title = f"object store {root}"

    def require_access(self) -> None:
        """Create the directory, and write what the folder is of.

        Raises:
            ConfigError: the directory is another user's or is readable by others, or it has no room for an entry, or
                its file system none for it.
            OSError: it cannot be read or written.
        """
        self._require_room_for_entry()
        if (fault := self._fault()) is not None:
            raise ConfigError(f"--object-store file://{self._root} {fault}")
        self._create()
        room = os.statvfs(self._root)
        if self._max_bytes > room.f_blocks * room.f_frsize:
            raise ConfigError(
                f"--object-store-size of {self._max_bytes:,} bytes is more than the file system of {self._root} has, "
                f"{room.f_blocks * room.f_frsize:,} bytes; lower it, or enlarge the file system (a container's "
                "/dev/shm with --shm-size)"
            )

    def _require_room_for_entry(self) -> None:
        """Raise a ConfigError if there is no room for the file of a snapshot and that of a block."""
        block_bytes, sizes, blocks = self._contents.block_bytes, self._contents.snapshot_sizes, StoredBlocks(0, (1,))
        path = StoredPath("", bytes(BLOCK_KEY_BYTES), blocks, 2, 3, SnapshotKind.PROMPT_END, 0, is_shared=False)
        files = ((blocks, (block_bytes,)), (None, (max(sizes, default=0), block_bytes)))
        headers = [self._contents.new_header(path, *each) for each in files]
        least_bytes = sum(_rounded(header.offsets()[-1]) for header in headers)
        if self._max_bytes < least_bytes:
            raise ConfigError(
                f"--object-store-size of {self._max_bytes:,} bytes has no room for the files of a snapshot and a block "
                f"of this model; give at least {least_bytes:,} bytes; a useful host tier takes much more"
            )

    def _fault(self) -> str | None:
        """Return what is wrong with the directory, and what to do; None: it can be used, or is not there."""
        try:
            status = os.lstat(self._root)
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a file"
            return f"is {kind}, not a directory; give a directory, which is created if it is not there"
        if status.st_uid != os.geteuid():
            return "belongs to another user; give a new directory"
        if stat.S_IMODE(status.st_mode) & OTHERS:
            names = [name for name in os.listdir(self._root) if name != LOCK and not FOLDER.fullmatch(name)]
            if names or self._root.is_mount():
                return "can be read by other users and has other uses; give a new directory, such as one inside it"
            return f"can be read by other users; give a new directory, or run: chmod 700 {self._root}"
        return None

    def _create(self) -> None:
        """Create the directory and the folder, also where they have been removed meanwhile.

        Raises:
            OSError: they cannot be created, or the directory is another user's.
        """
        if (fault := self._fault()) is not None:
            raise PermissionError(EPERM, f"--object-store file://{self._root} {fault}")
        for path in (self._root, self.folder):  # each with its own mode, which parents do not get
            os.makedirs(path, mode=0o700, exist_ok=True)
        if not (self.folder / LAYOUT).exists():
            (self.folder / LAYOUT).write_bytes(self._layout)

    def list(self) -> list[ObjectInfo]:
        """Return all files of the folder that are whole; none, if it has been removed.

        Raises:
            OSError: it cannot be read.
        """
        found = list[ObjectInfo]()
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if FILE_NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append(ObjectInfo(entry.name, status.st_size, status.st_mtime))
        return found

    def stamp(self) -> int | None:
        """Return a number that changes when files are added or removed, at little cost; None: the folder is gone."""
        now_ns = time.time_ns()
        try:
            changed_ns = os.stat(self.folder).st_mtime_ns
        except OSError:
            return None
        # After a change, further ones in the same tick of the clock would not show.
        return changed_ns if changed_ns < now_ns - TICK_NS else now_ns

    def measure(self) -> DirectoryUse:
        """Return what the directory holds, over all layouts."""
        sizes = list[int]()
        with suppress(FileNotFoundError):
            for folder in filter(FOLDER.fullmatch, os.listdir(self._root)):
                with suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
                    for entry in entries:
                        if FILE_NAME.match(entry.name):
                            with suppress(FileNotFoundError):
                                sizes.append(_rounded(entry.stat(follow_symlinks=False).st_size))
        return DirectoryUse(len(sizes), sum(sizes), max(self._max_bytes - sum(sizes), 0))

    def set_used(self, name: str, used_s: float) -> None:
        """Set the time of a file's last use on all ranks, where it is there and has not been used later."""
        for folder in self._folders:
            with suppress(OSError):
                if os.stat(folder / name, follow_symlinks=False).st_mtime < used_s:
                    os.utime(folder / name, (used_s, used_s), follow_symlinks=False)

    def headers(self, names: Sequence[str]) -> Iterator[Header | OSError | None]:
        """Yield the header of each file, or the error that prevents reading it now; None: it is gone, or of no use."""
        for name in names:
            try:
                with self._opened(name) as file:
                    header: Header | OSError | None = self._read_header(file, name)
            except FileNotFoundError:
                header = None
            except OSError as error:
                header = error
            except DamagedFileError as error:
                LOGGER.warning("%s of the %s is not used: %s", name, self.title, error)
                header = None
            yield header

    def new_file(self, path: StoredPath, blocks: StoredBlocks | None, sizes: tuple[int, ...]) -> StoredFile:
        """Return the file, not written yet, of some of a path's blocks; None: of its snapshot.

        Args:
            sizes: sizes of its items.
        """
        header = self._contents.new_header(path, blocks, sizes)
        return StoredFile(name_of(header), len(sizes), header)

    def write(self, file: StoredFile, items: Iterable[Iterable[Buffer]]) -> None:
        """Write a new file, unless another engine has; that one counts as used now.

        Args:
            items: the bytes of each, in pieces.

        Raises:
            OSError: it cannot be written now; nothing is left.
        """
        header = file.known_header
        path = self.folder / file.name
        try:
            os.utime(path)
        except FileNotFoundError:
            with self._reserved(file.name, header.offsets()[-1]) as (unfinished, descriptor):
                write_items(descriptor, header, items)
                with self._counted():  # a file that is renamed while others count may be missed
                    os.rename(unfinished, path)
        file.header = None

    def read(self, parts: Sequence[FilePart], deadline_s: float) -> Iterator[memoryview]:
        """Return an iterator of the bytes of each part, checked, one after the other.

        Raises:
            LostItemsError: items of the next part are gone or damaged.
            OSError: they cannot be read now, or the deadline has passed.
        """
        return read_in_turn(parts, deadline_s, self._read_part)

    def _read_part(self, part: FilePart) -> memoryview:
        """Read a part with its header: another engine may have written the file again meanwhile."""
        name, all_items = part.file.name, range(len(part.file.is_live))
        try:
            with self._opened(name) as file:
                data = read_part(file, part, self._read_header(file, name))
                with suppress(OSError):
                    os.utime(file)
                return data
        except FileNotFoundError:
            raise LostItemsError(f"{name} is gone", all_items) from None
        except DamagedFileError as error:
            self._unlink(self.folder / name)
            raise LostItemsError(f"{name}: {error}", all_items) from None
        except LostItemsError:
            self._unlink(self.folder / name)
            raise

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        file = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            yield file
        finally:
            os.close(file)

    def _read_header(self, file: int, name: str) -> Header:
        """Read the header of an open file.

        Raises:
            DamagedFileError: it is of no use.
            OSError: it cannot be read now.
        """
        header = read_header(file)
        self._contents.require_same(header)
        if os.fstat(file).st_uid != os.geteuid():
            raise DamagedFileError("it belongs to another user")
        if name_of(header) != name:
            raise DamagedFileError("it has the content of another file")
        return self._contents.whole_part(header, os.fstat(file).st_size)

    # Room

    @contextmanager
    def _reserved(self, name: str, num_bytes: int) -> Iterator[tuple[Path, int]]:
        """Make room for a file and create it under another name; remove it unless it is renamed.

        Raises:
            OSError: it is larger than the directory, or cannot be created or written now.
        """
        unfinished = self.folder / f"{name}.{token_hex(8)}.tmp"
        self._create()
        with self._counted() as lock:
            used = _read_count(lock)
            if used + _rounded(num_bytes) > self._max_bytes:
                used = self._make_room(self._max_bytes - _rounded(num_bytes))
            _write_count(lock, used + _rounded(num_bytes))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(unfinished, flags, MODE)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.ftruncate(descriptor, num_bytes)
        try:
            yield unfinished, descriptor
        except OSError as error:
            self._unlink(unfinished)
            if error.errno != ENOSPC:
                raise
            self._free_part()
            room = os.statvfs(self._root)
            raise OSError(
                ENOSPC,
                f"a file of {num_bytes:,} bytes does not fit in the file system of {self._root}, of whose "
                f"{room.f_blocks * room.f_frsize:,} bytes other files take a part; {room.f_bavail * room.f_frsize:,} "
                f"bytes are free now. Remove some, or lower --object-store-size of {self._max_bytes:,} bytes",
            ) from error
        finally:
            self._unlink(unfinished)
            os.close(descriptor)

    @contextmanager
    def _counted(self) -> Iterator[int]:
        """Lock the directory against other writers; the file that is locked has the sum of its sizes."""
        lock = os.open(self._root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    def _free_part(self) -> None:
        """Remove a part of the files, as other programs use the file system, too."""
        with self._counted() as lock, suppress(OSError):  # all may be being written
            _write_count(lock, self._make_room(sum(each.num_bytes for each in self._entries()) - 1))

    def _make_room(self, max_bytes: int) -> int:
        """Remove the files that were used least recently, if there are more bytes; return how many remain.

        Raises:
            OSError: what is being written leaves no room.
        """
        entries = sorted(self._entries())
        used = sum(each.num_bytes for each in entries)
        most = used if used <= max_bytes else max_bytes - self._max_bytes // FREED_SHARE
        for entry in entries:
            if used <= most or entry.used_ns == UNUSED_NS:
                break
            self._unlink(entry.path)
            used -= entry.num_bytes
        if used > max(max_bytes, 0):
            text = f"--object-store-size of {self._max_bytes:,} bytes leaves no room for a file of"
            sizes = f"{self._max_bytes - max_bytes:,} bytes while {used:,} bytes are being written; raise it"
            raise OSError(ENOSPC, f"{text} {sizes}")
        return used

    def _entries(self) -> Iterator[_Entry]:
        """Yield all files of all layouts; remove what a killed process has left unfinished."""
        for folder in filter(FOLDER.fullmatch, os.listdir(self._root)):
            with suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
                for entry in entries:
                    is_unfinished = UNFINISHED.fullmatch(entry.name)
                    if not (is_unfinished or FILE_NAME.fullmatch(entry.name)):
                        continue
                    with suppress(FileNotFoundError):
                        if is_unfinished and _is_abandoned(entry.path):
                            self._unlink(Path(entry.path))
                        else:
                            status = entry.stat(follow_symlinks=False)
                            used_ns = UNUSED_NS if is_unfinished else status.st_mtime_ns
                            yield _Entry(used_ns, _rounded(status.st_size), Path(entry.path))

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            LOGGER.warning("cannot remove %s from the %s: %s", path.name, self.title, cause_of(error))

    def shrink(self, file: StoredFile) -> None:
        """Do nothing: other engines may use it."""

    def remove(self, file: StoredFile) -> None:
        """Do nothing: other engines may use it."""

    def measure_free_bytes(self) -> int | None:
        """Return None: room is made by removing files."""
        return None

    def close(self) -> None:
        """Do nothing: nothing is open between calls."""


def _rounded(num_bytes: int) -> int:
    """Return what a file of some bytes takes."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _read_count(lock: int) -> int:
    """Return the sum of sizes that the lock's file has; 0: it is new."""
    data = os.pread(lock, 20, 0).strip()
    return int(data) if data.isdigit() else 0


def _write_count(lock: int, num_bytes: int) -> None:
    os.pwrite(lock, f"{num_bytes:20}".encode(), 0)


def _is_abandoned(path: str) -> bool:
    """Return whether no process is writing a file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
