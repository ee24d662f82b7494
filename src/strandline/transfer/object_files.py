"""Files of persistent tiers in a bucket, which all engines with the same model share.

Each layout has a folder of its own, so that models share a bucket, and each rank of tensor parallelism has one, too. A
file is named by what it is computed from, so that engines which store the same write the same name: the second one
finds the file and writes nothing. No file is changed or removed here. A bucket's own rules expire what is old.

Headers are read when a file is first read, and must be of the content that the file is named by. Where one does not
fit what follows, another engine has replaced the file with its own result for the same tokens meanwhile, and the header
is read once more.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b, sha256
from itertools import islice
from typing import Any, Final

import numpy as np

from strandline.clock import SYSTEM_CLOCK
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.transfer.bucket import Bucket, ObjectInfo
from strandline.transfer.checksum import Buffer, Checksum, checksum
from strandline.transfer.disk_files import FIRST_READ_BYTES, DamagedFileError, Header, decode_header, encode_header
from strandline.transfer.stored_files import (
    FILE_NAME,
    FileContents,
    FilePart,
    LostItemsError,
    StoredFile,
    require_sizes,
    split_target,
)

LOGGER: Final = logging.getLogger("strandline.object_store")
SALT_KEY: Final = b"strandline object store"
"""What salts are hashed with: the same in all engines. A secret in the bucket could be read with the rest of it."""
LAYOUT: Final = "layout.json"
"""Says what the files of a folder are of."""
MAX_READS: Final = 16
"""Most reads of one load at a time: a server sends a single one at a small part of what it can send. So much of a load
is in memory at most, in pieces of ``PIECE_BYTES``, or in snapshots."""


class ObjectFiles:
    """The files of one layout. Any thread may call.

    Args:
        url: ``s3://BUCKET/PREFIX``.
        layout: what must be equal for bytes to mean the same; with several ranks, it names the rank.
        block_bytes: the size of a block.
        snapshot_sizes: sizes that a snapshot may have.

    Attributes:
        max_file_bytes: most bytes of blocks in a file, which is assembled in memory.
        num_threads: how many read and write at once.
        refresh_s: time from one listing to the next, at least: a request for every thousand files.
        look_s: time from one look at ``stamp`` to the next.
        max_share: share of a thread's time that listings may take; the next one of a large bucket comes later.

    Raises:
        ConfigError: the URL is wrong, or a package is not installed.
    """

    max_file_bytes: Final = 64 * 2**20
    num_threads: Final = 16
    refresh_s: Final = 10.0
    look_s: Final = 10.0
    max_share: Final = 0.25

    def __init__(self, url: str, layout: Mapping[str, str], block_bytes: int, snapshot_sizes: Sequence[int]) -> None:
        self._bucket = Bucket(url)
        self._contents = FileContents(dict(layout), "", block_bytes, snapshot_sizes)
        self.folder, self._layout = folder_of(layout)
        self.title = f"object store {url}"
        self._damaged = set[str]()
        """Names of files whose items are not what their headers say, to be written again."""

    def require_access(self) -> None:
        """Write what the folder is of, unless it is there.

        Raises:
            OSError: the bucket cannot be read or written.
        """
        name = f"{self.folder}/{LAYOUT}"
        try:
            self._bucket.run(self._bucket.read(name, 0, 1))
        except FileNotFoundError:
            self._bucket.write(name, self._layout)

    def list(self) -> list[ObjectInfo]:
        """Return all files; what else lies in the folder is ignored.

        Raises:
            OSError: the server does not answer, or refuses.
        """
        return [each for each in self._bucket.list(self.folder) if FILE_NAME.fullmatch(each.name)]

    def stamp(self) -> int | None:
        """Return None: only a listing says whether there are other files."""
        return None

    def measure(self) -> None:
        """Return None: listing all folders of a bucket would take long."""

    def set_used(self, name: str, used_s: float) -> None:
        """Do nothing: a bucket's rules do not depend on when objects were used."""

    def headers(self, names: Sequence[str]) -> Iterator[Header | OSError | None]:
        """Yield the header of each file, or the error that prevents reading it now; None: it is gone, or of no use.

        If ``MAX_READS`` files in turn cannot be read, the server does not answer or refuses, and no more are read.
        """

        async def read(name: str) -> Header | OSError | None:
            try:
                return await self._read_header(name)
            except FileNotFoundError:
                return None
            except OSError as error:
                return error
            except DamagedFileError as error:
                LOGGER.warning("%s of the %s is not used: %s", name, self.title, error)
                return None

        for start in range(0, len(names), MAX_READS):
            some = names[start : start + MAX_READS]
            try:
                headers = self._bucket.run(_gathered([read(name) for name in some]))
            except OSError as error:
                headers = [error] * len(some)
            yield from headers
            if len(some) == MAX_READS and all(isinstance(header, OSError) for header in headers):
                return

    def new_file(self, path: StoredPath, blocks: StoredBlocks | None, sizes: tuple[int, ...]) -> StoredFile:
        """Return the file, not written yet, of some of a path's blocks; None: of its snapshot.

        Args:
            sizes: sizes of its items.
        """
        header = self._contents.new_header(path, blocks, sizes)
        return StoredFile(name_of(header), len(sizes), header)

    def write(self, file: StoredFile, items: Iterable[Iterable[Buffer]]) -> None:
        """Write a new file, unless another engine has, and it has not been found damaged.

        Args:
            items: the bytes of each, in pieces.

        Raises:
            OSError: it cannot be written now.
        """
        header = file.known_header
        with suppress(FileNotFoundError, DamagedFileError):
            there = self._bucket.run(self._read_header(file.name))
            if there.sizes == header.sizes and file.name not in self._damaged:
                file.header = there._replace(tokens=b"")
                return
        data, checksums, end = bytearray(header.start + sum(header.sizes)), list[int](), header.start
        for pieces in items:
            of_item = Checksum()
            for piece in pieces:
                of_item.add(piece)
                data[end : end + len(piece)] = piece
                end += len(piece)
            checksums.append(of_item.value)
        header = header._replace(checksums=tuple(checksums))
        encoded = encode_header(header)
        data[: len(encoded)] = encoded
        self._bucket.write(f"{self.folder}/{file.name}", data)
        file.header = header._replace(tokens=b"")
        self._damaged.discard(file.name)

    def read(self, parts: Sequence[FilePart], deadline_s: float) -> Iterator[memoryview]:
        """Yield the bytes of each part, checked, one after the other.

        Raises:
            LostItemsError: items of the next part are gone or damaged.
            OSError: they cannot be read now, or the deadline has passed.
        """
        locks = {part.file: asyncio.Lock() for part in parts}
        futures = (self._bucket.begin(self._read_part(part, locks[part.file])) for part in parts)
        waiting = deque(islice(futures, MAX_READS))
        try:
            while waiting:
                left_s = deadline_s - SYSTEM_CLOCK()
                try:
                    data = waiting[0].result(None if left_s == float("inf") else max(left_s, 0.0))
                except TimeoutError:
                    raise TimeoutError("computing takes less time") from None
                waiting.popleft()
                waiting.extend(islice(futures, 1))
                yield data
        finally:
            for future in waiting:
                future.cancel()

    async def _read_part(self, part: FilePart, lock: asyncio.Lock) -> memoryview:
        """Read a part, with the header if that is not known."""
        file = part.file
        try:
            async with lock:
                was_known = file.header is not None
                header = file.header = file.header or (await self._read_header(file.name))._replace(tokens=b"")
            try:
                return await self._read_items(part, header)
            except LostItemsError:
                if not was_known:
                    raise
            file.header = header = (await self._read_header(file.name))._replace(tokens=b"")
            data = await self._read_items(part, header)
            self._damaged.discard(file.name)
            return data
        except FileNotFoundError:
            raise LostItemsError(f"{file.name} is gone", range(len(file.is_live))) from None
        except DamagedFileError as error:
            raise LostItemsError(f"{file.name}: {error}", range(len(file.is_live))) from None

    async def _read_items(self, part: FilePart, header: Header) -> memoryview:
        """Read the items of a part, those that follow one another at once."""
        require_sizes(part, header)
        file, data = part.file, np.empty(sum(part.sizes), np.uint8).data
        targets, offsets = dict(split_target(part, data)), header.offsets()
        for items in _consecutive(part.items):
            start, end = offsets[items[0]], offsets[items[-1] + 1]
            read, _ = await self._bucket.read(f"{self.folder}/{file.name}", start, end)
            if len(read) < end - start:
                raise LostItemsError(f"{file.name}: it ends too early", items)
            for item in items:
                targets[item][:] = read[offsets[item] - start : offsets[item + 1] - start]
                if checksum(targets[item]) != header.checksums[item]:
                    self._damaged.add(file.name)
                    raise LostItemsError(f"{file.name}: a checksum is wrong", [item])
        return data

    async def _read_header(self, name: str) -> Header:
        """Read the header of a file.

        Raises:
            FileNotFoundError: the file is gone.
            DamagedFileError: it is of no use.
            OSError: it cannot be read now.
        """
        path = f"{self.folder}/{name}"
        first, file_bytes = await self._bucket.read(path, 0, FIRST_READ_BYTES)
        data = bytes(first)
        wanted = list[int]()

        def read_more(num_bytes: int) -> bytes:
            wanted.append(num_bytes)
            return b""

        try:
            header = decode_header(data, file_bytes, read_more)
        except DamagedFileError:
            if not wanted:
                raise
            more, _ = await self._bucket.read(path, len(data), len(data) + wanted[0])
            header = decode_header(data + bytes(more), file_bytes, read_more)
        self._contents.require_same(header)
        if name_of(header) != name:
            raise DamagedFileError("it has the content of another file")
        return self._contents.whole_part(header, file_bytes)

    def shrink(self, file: StoredFile) -> None:
        """Do nothing: other engines may use it."""

    def remove(self, file: StoredFile) -> None:
        """Do nothing: other engines may use it."""

    def measure_free_bytes(self) -> int | None:
        """Return None: nothing says what there is room for."""
        return None

    def close(self) -> None:
        """End what reads."""
        self._bucket.close()


def folder_of(layout: Mapping[str, str]) -> tuple[str, bytes]:
    """Return the name of a layout's folder, and what says there what it is of."""
    text = json.dumps(dict(layout), sort_keys=True, indent=1).encode()
    return sha256(text).hexdigest()[:32], text


def name_of(header: Header) -> str:
    """Return the name of a file: what it is computed from, as a hash."""
    kind, tree, before = (header.description[each] for each in ("kind", "tree", "before"))
    content = blake2b(b"\0".join((tree.encode(), before.encode(), header.tokens)), digest_size=16)
    return f"{content.hexdigest()}.{kind}"


async def _gathered(reads: Sequence[Coroutine[Any, Any, Header | OSError | None]]) -> list[Header | OSError | None]:
    """Return what several reads return, which run at the same time."""
    return await asyncio.gather(*reads)


def _consecutive(items: Sequence[int]) -> Iterator[list[int]]:
    """Yield items in groups that follow one another in the file."""
    group = list[int]()
    for item in items:
        if group and item != group[-1] + 1:
            yield group
            group = []
        group.append(item)
    if group:
        yield group
