"""What files of persistent tiers say, wherever they are kept, and what makes them usable.

Files are kept in a directory (``disk_directory.py``), in a bucket (``object_files.py``) or in a directory that engines
share (``shared_directory.py``). All write the same bytes (``disk_files.py``).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from errno import EIO
from typing import Any, Final, NamedTuple

import numpy as np

from strandline.clock import SYSTEM_CLOCK
from strandline.errors import cause_of
from strandline.records.account import SnapshotKind
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.path_hashes import block_hashes, root_hash
from strandline.records.persisted import PersistedBlocks, PersistedEntries, PersistedSnapshot
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES
from strandline.transfer.disk_files import DamagedFileError, Header, new_header, read_item
from strandline.transfer.layout import differences

BLOCKS: Final = "blocks"
SNAPSHOT: Final = "snapshot"
FILE_NAME: Final = re.compile(rf"[0-9a-f]{{32}}\.({BLOCKS}|{SNAPSHOT})")
"""Names of files that are whole."""
FIELDS: Final[Mapping[str, type]] = {
    "layout": dict,
    "key": str,
    "kind": str,
    "tree": str,
    "before": str,
    "snapshot": str,
    "interarrival_bin": int,
    "is_shared": bool,
}
"""What descriptions say."""
PIECE_BYTES: Final = 8 * 2**20
"""At most this many bytes of blocks are read at a time."""


class StoredFile:
    """A file that is whole.

    Args:
        header: None: it is read when it is needed.
    """

    __slots__ = ("_header", "is_live", "name", "offsets")

    def __init__(self, name: str, num_items: int, header: Header | None = None) -> None:
        self.name = name
        self.is_live = [True] * num_items
        """Which items are needed."""
        self.offsets: list[int] = []
        """Where each item begins and, last, where the file ends, once the header is known."""
        self.header = header

    @property
    def header(self) -> Header | None:
        return self._header

    @header.setter
    def header(self, header: Header | None) -> None:
        self._header = header
        self.offsets = [] if header is None else header.offsets()

    @property
    def known_header(self) -> Header:
        """The header of a file that was read or is to be written.

        Raises:
            DamagedFileError: it is not known.
        """
        if self._header is None:
            raise DamagedFileError(f"{self.name} has no header")
        return self._header

    @property
    def num_live(self) -> int:
        """The number of items up to the last one that is needed."""
        return max((index + 1 for index, is_live in enumerate(self.is_live) if is_live), default=0)


class Located(NamedTuple):
    """Where an address is."""

    file: StoredFile
    item: int
    """The number of the item."""


class Found(NamedTuple):
    """What files hold."""

    persisted: PersistedEntries
    addresses: dict[int, Located]


class FilePart(NamedTuple):
    """Items of a file that are read at once."""

    file: StoredFile
    items: tuple[int, ...]
    sizes: tuple[int, ...]
    """Those that they must have."""


class LostItemsError(Exception):
    """Items of a part that will never be read; the message is the reason."""

    def __init__(self, reason: str, items: Sequence[int]) -> None:
        super().__init__(reason)
        self.items = tuple(items)


class FileContents(NamedTuple):
    """What the files of a tier must agree on to be of use.

    Args:
        layout: what must be equal for bytes to mean the same (``transfer/layout.py``).
        key_id: names the key that salts are hashed with.
        block_bytes: the size of a block.
        snapshot_sizes: sizes that a snapshot may have.
    """

    layout: Mapping[str, str]
    key_id: str
    block_bytes: int
    snapshot_sizes: Sequence[int]

    def new_header(self, path: StoredPath, blocks: StoredBlocks | None, sizes: tuple[int, ...]) -> Header:
        """Return the header of a file, not written yet, of some of a path's blocks; None: of its snapshot.

        Args:
            sizes: sizes of its items.
        """
        hashes = [root_hash(path.tree)]
        hashes += block_hashes(hashes[0], path.data)
        if blocks is not None:
            tokens = path.data[blocks.first * BLOCK_KEY_BYTES : blocks.end * BLOCK_KEY_BYTES]
            before = hashes[blocks.first]
        else:
            tokens = path.data[(len(hashes) - 1) * BLOCK_KEY_BYTES :]
            before = hashes[-1]
        description = {
            "layout": self.layout,
            "key": self.key_id,
            "kind": SNAPSHOT if blocks is None else BLOCKS,
            "tree": path.tree,
            "before": before.hex(),
            "snapshot": path.kind.value,
            "interarrival_bin": path.interarrival_bin,
            "is_shared": path.is_shared,
        }
        return new_header(description, tokens, sizes)

    def require_same(self, header: Header) -> None:
        """Raise ``DamagedFileError`` if a file is another model's or its key is gone; the message is the reason."""
        description = header.description
        _require_fields(description)
        if description["layout"] != self.layout:
            what = differences(self.layout, description["layout"])
            raise DamagedFileError(f"they are another model's, or were computed in another way ({what})")
        if description["key"] != self.key_id:
            raise DamagedFileError("the key that they were written with is gone")

    def whole_part(self, header: Header, file_bytes: int) -> Header:
        """Return the header of what a file holds: blocks at its end may have been cut off.

        Raises:
            DamagedFileError: the file is torn.
        """
        num_items = sum(end <= file_bytes for end in header.offsets()[1:])
        if header.description["kind"] == BLOCKS:
            header = header._replace(
                tokens=header.tokens[: num_items * BLOCK_KEY_BYTES],
                sizes=header.sizes[:num_items],
                checksums=header.checksums[:num_items],
            )
            is_whole = num_items > 0 and header.sizes == (self.block_bytes,) * num_items
            is_whole &= len(header.tokens) == num_items * BLOCK_KEY_BYTES
        else:
            tail_sizes = (self.block_bytes,) * (len(header.tokens) > 0)
            is_whole = any(header.sizes == (size, *tail_sizes) for size in self.snapshot_sizes)
            is_whole &= num_items == len(header.sizes) and len(header.tokens) in range(0, BLOCK_KEY_BYTES, TOKEN_BYTES)
        if not is_whole:
            raise DamagedFileError("they are torn")
        return header


def _require_fields(description: Mapping[str, Any]) -> None:
    """Raise ``DamagedFileError`` if a description does not say what this version writes."""
    try:
        is_known = all(isinstance(description[name], kind) for name, kind in FIELDS.items())
        is_known &= description["kind"] in (BLOCKS, SNAPSHOT)
        bytes.fromhex(description["before"])
        SnapshotKind(description["snapshot"])
    except (KeyError, TypeError, ValueError):
        is_known = False
    if not is_known:
        raise DamagedFileError("their headers do not say what this version writes")


def entry_of(header: Header, addresses: Sequence[int], idle_s: float) -> PersistedBlocks | PersistedSnapshot:
    """Return what a file holds, as data."""
    about = header.description
    before, past_bin, is_shared = bytes.fromhex(about["before"]), about["interarrival_bin"], about["is_shared"]
    if about["kind"] == BLOCKS:
        return PersistedBlocks(about["tree"], before, header.tokens, tuple(addresses), past_bin, idle_s, is_shared)
    address, tail_address = (*addresses, 0)[:2]
    kind = SnapshotKind(about["snapshot"])
    return PersistedSnapshot(
        about["tree"], before, header.tokens, address, tail_address, kind, past_bin, idle_s, is_shared
    )


def joined(each: Sequence[PersistedBlocks | PersistedSnapshot]) -> PersistedEntries:
    """Return what several files hold."""
    blocks = tuple(entry for entry in each if isinstance(entry, PersistedBlocks))
    return PersistedEntries(blocks, tuple(entry for entry in each if isinstance(entry, PersistedSnapshot)))


def read_in_turn(
    parts: Sequence[FilePart], deadline_s: float, read: Callable[[FilePart], memoryview]
) -> Iterator[memoryview]:
    """Yield the bytes of each part, one after the other.

    Raises:
        TimeoutError: the deadline has passed.
    """
    for part in parts:
        if SYSTEM_CLOCK() >= deadline_s:
            raise TimeoutError("computing takes less time")
        yield read(part)


def read_part(file: int, part: FilePart, header: Header) -> memoryview:
    """Read items of an open file, and check them.

    Raises:
        LostItemsError: they are damaged, or of other sizes.
        OSError: they cannot be read now.
    """
    require_sizes(part, header)
    data, offsets = np.empty(sum(part.sizes), np.uint8).data, header.offsets()
    for item, target in split_target(part, data):
        try:
            read_item(file, header, item, offsets[item], target)
        except DamagedFileError as error:
            raise LostItemsError(f"{part.file.name}: {error}", [item]) from None
        except OSError as error:
            if error.errno != EIO:
                raise
            raise LostItemsError(f"{part.file.name}: {cause_of(error)}", [item]) from error
    return data


def require_sizes(part: FilePart, header: Header) -> None:
    """Raise ``LostItemsError`` if items of a part have other sizes than they must have."""
    sizes = dict(enumerate(header.sizes))
    if tuple(map(sizes.get, part.items)) != part.sizes:
        raise LostItemsError(f"{part.file.name}: its items have other sizes, or are cut off", part.items)


def split_target(part: FilePart, target: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield each item of a part, and the bytes of a target that it fills."""
    start = 0
    for item, size in zip(part.items, part.sizes, strict=True):
        yield item, target[start : start + size]
        start += size
