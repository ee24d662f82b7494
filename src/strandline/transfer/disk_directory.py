"""The directory of a disk cache: its lock, its key, and what earlier processes left in it.

One process uses a directory at a time. A key that is drawn once per directory hides salts: a tree is named by the keyed
hash of its salt. Files of another model, dtype, format or key are removed, as they count towards the size, and so is
what a process that was killed left unfinished. Files that no disk cache has written are left alone.

Each rank of tensor parallelism is a process with files of its own: the first one's lie in the directory itself, and
the others' in directories below it.
"""

import fcntl
import logging
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from pathlib import Path
from secrets import token_bytes, token_hex
from threading import Lock
from typing import Final

from strandline.errors import ConfigError, cause_of
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.persisted import PersistedBlocks, PersistedSnapshot
from strandline.transfer.checksum import Buffer
from strandline.transfer.disk_files import (
    MODE,
    DamagedFileError,
    Header,
    cut_off,
    open_for_reading,
    read_header,
    write_file,
)
from strandline.transfer.stored_files import (
    BLOCKS,
    FILE_NAME,
    FileContents,
    FilePart,
    Found,
    Located,
    LostItemsError,
    StoredFile,
    entry_of,
    joined,
    read_in_turn,
    read_part,
)

LOGGER: Final = logging.getLogger("strandline.disk_cache")
LOCK: Final = "lock"
KEY: Final = "key"
KEY_BYTES: Final = 32
NAME: Final = re.compile(rf"{FILE_NAME.pattern}(\.tmp)?")
"""Names of the files that hold blocks and snapshots."""
RANK: Final = re.compile(r"rank-([1-9]\d*)")
"""Names of the directories of ranks after the first."""
NESTED: Final = re.compile(r"(rank|engine)-[1-9]\d*")
"""Names of the directories of ranks and engines after the first."""
NO_LIMIT_BYTES: Final = 2**63
OTHERS: Final = 0o077
"""Permissions of other users."""


class DiskDirectory:
    """An open, locked directory.

    Args:
        path: created if need be, for its owner alone, and with it the directory of the rank.
        layout: what must be equal for bytes to mean the same (``transfer/layout.py``).
        block_bytes: the size of a block.
        snapshot_sizes: sizes that a snapshot may have.
        rank: whose files it holds.

    Attributes:
        path: of the rank's directory.
        max_file_bytes: most bytes of blocks in a file.
        num_threads: how many read and write at once.

    Raises:
        ConfigError: it cannot be created, read or written, other users have access to it, or it is in use.
    """

    max_file_bytes: Final = NO_LIMIT_BYTES
    num_threads: Final = 4

    def __init__(
        self, path: Path, layout: Mapping[str, str], block_bytes: int, snapshot_sizes: Sequence[int], rank: int = 0
    ) -> None:
        self.path = path / f"rank-{rank}" if rank else path
        self._shrinking = Lock()
        try:
            for each in (path, self.path):
                os.makedirs(each, mode=0o700, exist_ok=True)
            self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"--disk-cache {self.path} cannot be used: {cause_of(error)}") from error
        try:
            self._require_private()
            self._lock = self._take_lock()
            self.key = self._read_key()
        except OSError as error:
            raise ConfigError(f"--disk-cache {self.path} cannot be written: {cause_of(error)}") from error
        key_id = blake2b(b"name of the key", key=self.key, digest_size=8).hexdigest()
        self._contents = FileContents(dict(layout), key_id, block_bytes, snapshot_sizes)

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"disk cache {self.path}"

    def _require_private(self) -> None:
        status = os.fstat(self.descriptor)
        if status.st_uid != os.geteuid():
            raise ConfigError(f"--disk-cache {self.path} belongs to another user; give a directory of your own")
        if stat.S_IMODE(status.st_mode) & OTHERS:
            # Other ranks and engines may come first.
            names = [name for name in os.listdir(self.descriptor) if not NESTED.fullmatch(name)]
            if names and LOCK not in names:
                raise ConfigError(
                    f"--disk-cache {self.path} can be read by other users and holds other files; give a new directory"
                )
            os.fchmod(self.descriptor, 0o700)

    def _take_lock(self) -> int:
        lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE, dir_fd=self.descriptor)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            os.close(lock)
            raise ConfigError(
                f"--disk-cache {self.path} is in use by process {holder or 'unknown'}; give each server a directory of "
                "its own"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def _read_key(self) -> bytes:
        try:
            file = open_for_reading(self.descriptor, KEY)
        except FileNotFoundError:
            key = b""
        else:
            key = os.read(file, KEY_BYTES + 1)
            os.close(file)
        if len(key) == KEY_BYTES:
            return key
        key, name = token_bytes(KEY_BYTES), f"{token_hex(16)}.{BLOCKS}.tmp"
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE, dir_fd=self.descriptor)
        os.write(file, key)
        os.close(file)
        os.rename(name, KEY, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        return key

    def measure_free_bytes(self) -> int | None:
        """Return what there is room for on the disk; None: unknown."""
        try:
            status = os.fstatvfs(self.descriptor)
        except OSError:
            return None
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Let other processes use it."""
        os.close(self._lock)
        os.close(self.descriptor)

    def new_file(self, path: StoredPath, blocks: StoredBlocks | None, sizes: tuple[int, ...]) -> StoredFile:
        """Return the file, not written yet, of some of a path's blocks; None: of its snapshot.

        Args:
            sizes: sizes of its items.
        """
        header = self._contents.new_header(path, blocks, sizes)
        return StoredFile(f"{token_hex(16)}.{header.description['kind']}", len(sizes), header)

    def write(self, file: StoredFile, items: Iterable[Iterable[Buffer]]) -> None:
        """Write a new file.

        Args:
            items: the bytes of each, in pieces.

        Raises:
            OSError: it cannot be written now; nothing is left.
        """
        file.header = write_file(self.descriptor, file.name, file.known_header, items)

    def read(self, parts: Sequence[FilePart], deadline_s: float) -> Iterator[memoryview]:
        """Return an iterator of the bytes of each part, checked, one after the other.

        Raises:
            LostItemsError: items of the next part are gone or damaged.
            OSError: they cannot be read now, or the deadline has passed.
        """
        return read_in_turn(parts, deadline_s, self._read_part)

    def _read_part(self, part: FilePart) -> memoryview:
        file, header = part.file, part.file.known_header
        try:
            descriptor = open_for_reading(self.descriptor, file.name)
        except FileNotFoundError:
            raise LostItemsError(f"{file.name} is gone", range(len(file.is_live))) from None
        try:
            data = read_part(descriptor, part, header)
            with suppress(OSError):  # the disk may be read-only
                os.utime(descriptor)
        finally:
            os.close(descriptor)
        return data

    def shrink(self, file: StoredFile) -> None:
        """Remove a file, or cut it off after the last item that is needed."""
        with self._shrinking:
            num_live = file.num_live
            if not num_live:
                self.remove(file)
            elif num_live < len(file.is_live):
                try:
                    cut_off(self.descriptor, file.name, file.offsets[num_live])
                except OSError as error:
                    LOGGER.warning("cannot shorten %s in the disk cache: %s", file.name, cause_of(error))

    def remove(self, file: StoredFile) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self._remove(file.name)

    # What is there

    def scan(self, progress: Callable[[int], object] = lambda _: None) -> Found:
        """Read the headers of all files; remove what is of no use, leave what cannot be read now, and log why.

        Args:
            progress: called with 1 for each file.
        """
        addresses, found = dict[int, Located](), list[PersistedBlocks | PersistedSnapshot]()
        reasons, unread, numbers, now_s = Counter[str](), Counter[str](), count(1), time.time()
        for name in filter(NAME.fullmatch, sorted(os.listdir(self.descriptor))):
            progress(1)
            try:
                header, idle_s = self._read_header(name, now_s)
            except DamagedFileError as error:
                reasons[cause_of(error)] += 1
                self._remove(name)
                continue
            except OSError as error:
                unread[cause_of(error)] += 1
                continue
            stored = StoredFile(name, len(header.sizes), header)
            located = {next(numbers): Located(stored, index) for index in range(len(stored.is_live))}
            addresses |= located
            found.append(entry_of(header, tuple(located), idle_s))
        for reason, number in reasons.items():
            LOGGER.warning("removed %s of the disk cache %s: %s", _files(number), self.path, reason)
        for reason, number in unread.items():
            text = "%s of the disk cache %s could not be read and %s not used before the next start: %s"
            LOGGER.warning(text, _files(number), self.path, "is" if number == 1 else "are", reason)
        return Found(joined(found), addresses)

    def remove_ranks_from(self, num_ranks: int) -> None:
        """Remove what ranks of this number and higher have left, as they count towards the size. For the first rank."""
        numbers = [int(match[1]) for match in map(RANK.fullmatch, os.listdir(self.descriptor)) if match]
        for rank in sorted(number for number in numbers if number >= num_ranks):
            try:
                contents = self._contents
                other = DiskDirectory(self.path, contents.layout, contents.block_bytes, contents.snapshot_sizes, rank)
            except ConfigError as error:
                LOGGER.warning("files of rank %d in the disk cache %s are left: %s", rank, self.path, error)
            else:
                other.scan()
                other.close()

    def _read_header(self, name: str, now_s: float) -> tuple[Header, float]:
        """Read a file's header; return it, and for how many seconds the file has not been used.

        Raises:
            DamagedFileError: the file cannot be used; the message is the reason.
            OSError: it cannot be read.
        """
        if name.endswith(".tmp"):
            raise DamagedFileError("a process ended while it wrote them")
        file = open_for_reading(self.descriptor, name)
        try:
            header, status = read_header(file), os.fstat(file)
            self._contents.require_same(header)
            return self._contents.whole_part(header, status.st_size), max(now_s - status.st_mtime, 0.0)
        finally:
            os.close(file)

    def _remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except OSError as error:
            LOGGER.warning("cannot remove %s from the disk cache %s: %s", name, self.path, cause_of(error))


def _files(number: int) -> str:
    return f"{number:,} file{'s' if number != 1 else ''}"
