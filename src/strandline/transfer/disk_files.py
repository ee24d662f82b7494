"""Files of persistent tiers: a header that describes the contents and the model, and the bytes, with checksums.

A file holds consecutive whole blocks of a path, or one snapshot with the block that it lies inside: its *items*. It is
written under another name and renamed when it is whole. A file of blocks is cut off at its end when its last blocks are
not needed any more.

Layout: ``PREFIX``; the description as JSON; the tokens; size and checksum of each item; zeros to a multiple of
``ALIGN_BYTES``; the items. The prefix has a checksum of all that lies between it and the zeros.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple

from strandline.transfer.checksum import Buffer, Checksum, checksum

FORMAT: Final = 2
"""Format of the files. Files of other formats cannot be used."""
MAGIC: Final = b"strandln"
PREFIX: Final = Struct("<8sIIIIQ")
"""Magic, format, lengths of description and tokens, number of items, checksum."""
ITEM: Final = Struct("<QQ")
"""Size and checksum."""
ALIGN_BYTES: Final = 4096
FIRST_READ_BYTES: Final = 2**15
"""Most headers are not longer."""
MODE: Final = 0o600
"""Readable by the owner alone."""


class DamagedFileError(Exception):
    """A file's contents differ from its name or its header; the message is the reason."""


class Header(NamedTuple):
    """The description of a file."""

    description: Mapping[str, Any]
    tokens: bytes
    sizes: tuple[int, ...]
    """Sizes of the items in bytes."""
    checksums: tuple[int, ...]
    start: int
    """Where the items begin."""

    def offsets(self) -> list[int]:
        """Return where each item begins and, last, where the file ends."""
        return list(accumulate(self.sizes, initial=self.start))


def new_header(description: Mapping[str, Any], tokens: bytes, sizes: tuple[int, ...]) -> Header:
    """Return the header of a file that is not written yet, without checksums."""
    end = PREFIX.size + len(_encoded(description)) + len(tokens) + ITEM.size * len(sizes)
    return Header(description, tokens, sizes, (0,) * len(sizes), _aligned(end))


def _aligned(end: int) -> int:
    return -(-end // ALIGN_BYTES) * ALIGN_BYTES


def _encoded(description: Mapping[str, Any]) -> bytes:
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def encode_header(header: Header) -> bytes:
    """Return the bytes of a header."""
    description = _encoded(header.description)
    items = b"".join(ITEM.pack(*item) for item in zip(header.sizes, header.checksums, strict=True))
    rest = description + header.tokens + items
    prefix = PREFIX.pack(MAGIC, FORMAT, len(description), len(header.tokens), len(header.sizes), checksum(rest))
    return prefix + rest


def read_header(file: int) -> Header:
    """Read the header of an open file.

    Raises:
        DamagedFileError: there is none, or it is damaged or of another format.
        OSError: it cannot be read now.
    """
    data = os.pread(file, FIRST_READ_BYTES, 0)
    file_bytes = os.fstat(file).st_size
    return decode_header(data, file_bytes, lambda num_bytes: os.pread(file, num_bytes, len(data)))


def decode_header(data: bytes, file_bytes: int, read_more: Callable[[int], bytes]) -> Header:
    """Decode the header of a file.

    Args:
        data: the file's first bytes, up to ``FIRST_READ_BYTES``.
        read_more: called with the number of bytes that are needed after these.

    Raises:
        DamagedFileError: there is none, or it is damaged or of another format.
    """
    try:
        magic, version, num_description, num_tokens, num_items, expected = PREFIX.unpack_from(data)
    except StructError:
        raise DamagedFileError("it is too short for a header") from None
    if magic != MAGIC:
        raise DamagedFileError("it does not begin as files of caches do")
    if version != FORMAT:
        raise DamagedFileError(f"it has format {version}, this version writes {FORMAT}")
    end = PREFIX.size + num_description + num_tokens + ITEM.size * num_items
    if end > file_bytes:
        raise DamagedFileError("its header is torn or damaged")
    if end > len(data):
        data += read_more(end - len(data))
    rest = data[PREFIX.size : end]
    if len(data) < end or checksum(rest) != expected:
        raise DamagedFileError("the checksum of its header is wrong")
    try:
        description = json.loads(rest[:num_description])
    except ValueError:
        # The checksum does not cover the lengths.
        raise DamagedFileError("its header cannot be read") from None
    items = list(ITEM.iter_unpack(rest[num_description + num_tokens :]))
    tokens = rest[num_description : num_description + num_tokens]
    sizes, checksums = tuple(size for size, _ in items), tuple(number for _, number in items)
    return Header(description, tokens, sizes, checksums, _aligned(end))


def write_file(directory: int, name: str, header: Header, items: Iterable[Iterable[Buffer]]) -> Header:
    """Write a file and, when it is whole, give it its name.

    Args:
        directory: file descriptor of the directory.
        header: without checksums.
        items: the bytes of each, in pieces.

    Returns:
        The header with checksums.

    Raises:
        OSError: the disk is full, the directory is gone or read-only, or the like; nothing is left.
    """
    unfinished = f"{name}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(unfinished, flags, MODE, dir_fd=directory)
    try:
        try:
            header = write_items(file, header, items)
        finally:
            os.close(file)
        os.rename(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished, dir_fd=directory)
        raise
    return header


def write_items(file: int, header: Header, items: Iterable[Iterable[Buffer]]) -> Header:
    """Write the items of an open file, then its header. Arguments, result and errors are those of ``write_file``."""
    checksums, end = [], header.start
    for pieces in items:
        of_item = Checksum()
        for piece in pieces:
            of_item.add(piece)
            end += _write(file, piece, end)
        checksums.append(of_item.value)
    header = header._replace(checksums=tuple(checksums))
    _write(file, encode_header(header), 0)
    return header


def _write(file: int, data: Buffer, offset: int) -> int:
    """Write all of some bytes; return how many."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
    return len(data)


def read_item(file: int, header: Header, index: int, offset: int, target: memoryview) -> None:
    """Read an item, and check it.

    Args:
        offset: where it begins.
        target: as large as the item.

    Raises:
        DamagedFileError: it is torn, or its checksum is wrong.
    """
    left = target
    while left:
        num_read = os.preadv(file, [left], offset)
        if not num_read:
            raise DamagedFileError("it ends too early")
        left, offset = left[num_read:], offset + num_read
    if checksum(target) != header.checksums[index]:
        raise DamagedFileError("a checksum is wrong")


def open_for_reading(directory: int, name: str) -> int:
    """Open a file of a directory; return its descriptor."""
    return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)


def cut_off(directory: int, name: str, size: int) -> None:
    """Keep the first bytes of a file alone."""
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.ftruncate(file, size)
    finally:
        os.close(file)
