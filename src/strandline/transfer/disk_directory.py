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
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import Final, NamedTuple

from strandline.errors import ConfigError, cause_of
from strandline.records.account import SnapshotKind
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.kept import Kept, KeptBlocks, KeptSnapshot
from strandline.records.path_hashes import block_hashes, root_hash
from strandline.records.tokens import BLOCK_KEY_BYTES
from strandline.transfer.disk_files import (
    MODE,
    DamagedFileError,
    Header,
    new_header,
    num_whole_items,
    open_for_reading,
    read_header,
)
from strandline.transfer.layout import differences

LOGGER: Final = logging.getLogger("strandline.disk_cache")
LOCK: Final = "lock"
KEY: Final = "key"
KEY_BYTES: Final = 32
BLOCKS: Final = "blocks"
SNAPSHOT: Final = "snapshot"
NAME: Final = re.compile(rf"[0-9a-f]{{32}}\.({BLOCKS}|{SNAPSHOT})(\.tmp)?")
"""Names of the files that hold blocks and snapshots."""
RANK: Final = re.compile(r"rank-([1-9]\d*)")
"""Names of the directories of ranks after the first."""
NESTED: Final = re.compile(r"(rank|engine)-[1-9]\d*")
"""Names of the directories of ranks and engines after the first."""
OTHERS: Final = 0o077
"""Permissions of other users."""


class StoredFile:
    """A file that is whole."""

    __slots__ = ("header", "is_live", "name", "offsets")

    def __init__(self, name: str, header: Header) -> None:
        self.name = name
        self.header = header
        self.offsets = header.offsets()
        self.is_live = [True] * len(header.sizes)
        """Which items are needed."""


class Located(NamedTuple):
    """Where an address is."""

    file: StoredFile
    item: int
    """The number of the item."""


class Found(NamedTuple):
    """What a directory holds."""

    kept: Kept
    addresses: dict[int, Located]


class DiskDirectory:
    """An open, locked directory.

    Args:
        path: created if need be, for its owner alone, and with it the directory of the rank.
        layout: what must be equal for bytes to mean the same (``transfer/layout.py``).
        block_bytes: the size of a block.
        snapshot_sizes: those that a snapshot may have.
        rank: whose files it holds.

    Attributes:
        path: of the rank's directory.

    Raises:
        ConfigError: it cannot be created, read or written, other users have access to it, or it is in use.
    """

    def __init__(
        self, path: Path, layout: Mapping[str, str], block_bytes: int, snapshot_sizes: Sequence[int], rank: int = 0
    ) -> None:
        self.path = path / f"rank-{rank}" if rank else path
        self._layout = dict(layout)
        self._block_bytes = block_bytes
        self._snapshot_sizes = snapshot_sizes
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
        self._key_id = blake2b(b"name of the key", key=self.key, digest_size=8).hexdigest()

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

    def close(self) -> None:
        """Let other processes use it."""
        os.close(self._lock)
        os.close(self.descriptor)

    def new_file(self, path: StoredPath, blocks: StoredBlocks | None, sizes: tuple[int, ...]) -> StoredFile:
        """Return the file, not written yet, of some of a path's blocks; None: of its snapshot.

        Args:
            sizes: those of its items.
        """
        kind = SNAPSHOT if blocks is None else BLOCKS
        hashes = [root_hash(path.tree)]
        hashes += block_hashes(hashes[0], path.data)
        if blocks is not None:
            tokens = path.data[blocks.first * BLOCK_KEY_BYTES : blocks.end * BLOCK_KEY_BYTES]
            before = hashes[blocks.first]
        else:
            tokens = path.data[(len(hashes) - 1) * BLOCK_KEY_BYTES :]
            before = hashes[-1]
        description = {
            "layout": self._layout,
            "key": self._key_id,
            "kind": kind,
            "tree": path.tree,
            "before": before.hex(),
            "snapshot": path.kind.value,
            "interarrival_bin": path.interarrival_bin,
            "is_shared": path.is_shared,
        }
        return StoredFile(f"{token_hex(16)}.{kind}", new_header(description, tokens, sizes))

    # What is there

    def scan(self, progress: Callable[[int], object] = lambda _: None) -> Found:
        """Read the headers of all files; remove what is of no use, leave what cannot be read now, and log why.

        Args:
            progress: called with 1 for each file.
        """
        addresses, blocks, snapshots = dict[int, Located](), list[KeptBlocks](), list[KeptSnapshot]()
        reasons, unread, numbers, now_s = Counter[str](), Counter[str](), count(1), time.time()
        for name in filter(NAME.fullmatch, sorted(os.listdir(self.descriptor))):
            progress(1)
            try:
                stored, idle_s = self._read(name, now_s)
            except DamagedFileError as error:
                reasons[cause_of(error)] += 1
                self._remove(name)
                continue
            except OSError as error:
                unread[cause_of(error)] += 1
                continue
            located = {next(numbers): Located(stored, index) for index in range(len(stored.is_live))}
            addresses |= located
            kept = _kept(stored.header, tuple(located), idle_s)
            if isinstance(kept, KeptBlocks):
                blocks.append(kept)
            else:
                snapshots.append(kept)
        for reason, number in reasons.items():
            LOGGER.warning("removed %s of the disk cache %s: %s", _files(number), self.path, reason)
        for reason, number in unread.items():
            text = "%s of the disk cache %s could not be read and %s not used before the next start: %s"
            LOGGER.warning(text, _files(number), self.path, "is" if number == 1 else "are", reason)
        return Found(Kept(tuple(blocks), tuple(snapshots)), addresses)

    def remove_ranks_from(self, num_ranks: int) -> None:
        """Remove what ranks of this number and higher have left, as they count towards the size. For the first rank."""
        numbers = [int(match[1]) for match in map(RANK.fullmatch, os.listdir(self.descriptor)) if match]
        for rank in sorted(number for number in numbers if number >= num_ranks):
            try:
                other = DiskDirectory(self.path, self._layout, self._block_bytes, self._snapshot_sizes, rank)
            except ConfigError as error:
                LOGGER.warning("files of rank %d in the disk cache %s are left: %s", rank, self.path, error)
            else:
                other.scan()
                other.close()

    def _read(self, name: str, now_s: float) -> tuple[StoredFile, float]:
        """Read a file's header; return the file, and for how many seconds it has not been used.

        Raises:
            DamagedFileError: the file cannot be used; the message is the reason.
            OSError: it cannot be read.
        """
        if name.endswith(".tmp"):
            raise DamagedFileError("a process ended while it wrote them")
        file = open_for_reading(self.descriptor, name)
        try:
            header = read_header(file)
            description = header.description
            if description["layout"] != self._layout:
                what = differences(self._layout, description["layout"])
                raise DamagedFileError(f"they are another model's, or were computed in another way ({what})")
            if description["key"] != self._key_id:
                raise DamagedFileError("the key that they were written with is gone")
            num_items = num_whole_items(file, header)
            if description["kind"] == BLOCKS:
                header = header._replace(
                    tokens=header.tokens[: num_items * BLOCK_KEY_BYTES],
                    sizes=header.sizes[:num_items],
                    checksums=header.checksums[:num_items],
                )
                is_whole = num_items > 0 and header.sizes == (self._block_bytes,) * num_items
            else:
                tail_sizes = (self._block_bytes,) * (len(header.tokens) > 0)
                is_whole = any(header.sizes == (size, *tail_sizes) for size in self._snapshot_sizes)
                is_whole &= num_items == len(header.sizes) and len(header.tokens) < BLOCK_KEY_BYTES
            if not is_whole:
                raise DamagedFileError("they are torn")
            return StoredFile(name, header), max(now_s - os.fstat(file).st_mtime, 0.0)
        finally:
            os.close(file)

    def _remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except OSError as error:
            LOGGER.warning("cannot remove %s from the disk cache %s: %s", name, self.path, cause_of(error))


def _kept(header: Header, addresses: tuple[int, ...], idle_s: float) -> KeptBlocks | KeptSnapshot:
    """Return what a file holds, as data."""
    about = header.description
    before, past_bin, is_shared = bytes.fromhex(about["before"]), about["interarrival_bin"], about["is_shared"]
    if about["kind"] == BLOCKS:
        return KeptBlocks(about["tree"], before, header.tokens, addresses, past_bin, idle_s, is_shared)
    address, tail_address = (*addresses, 0)[:2]
    kind = SnapshotKind(about["snapshot"])
    return KeptSnapshot(about["tree"], before, header.tokens, address, tail_address, kind, past_bin, idle_s, is_shared)


def _files(number: int) -> str:
    return f"{number:,} file{'s' if number != 1 else ''}"
