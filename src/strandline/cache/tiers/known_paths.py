"""What the files of a persistent tier hold, by hashes: which paths are whole, and which a tier has taken.

A file has blocks of a path, or a snapshot at its end. Either *continues* the path before it, whose hash names that.
A path is *whole* when files with all of its blocks have been found. Files are found in any order, so some wait for
those before them.

A path can be *taken* once, to enter a tier, by its *end*: a snapshot or, where prompts resume without one, blocks.
Files may overlap, as engines write what each of them has evicted. When a file is gone, the tier loses all that follows
its blocks, and can take again what is whole in other files.

What is known depends on the files that are there, not on how many have come and gone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from strandline.ids import NO_ADDRESS
from strandline.records.account import SnapshotKind
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.path_hashes import block_hashes, root_hash
from strandline.records.persisted import PersistedBlocks, PersistedEntries, PersistedSnapshot
from strandline.records.tokens import BLOCK_KEY_BYTES


class FoundPath(NamedTuple):
    """A snapshot in files or, without snapshots, the end of a path, with all whole blocks before it."""

    path: StoredPath
    idle_s: float
    """Seconds since its last use, when it was found."""


class LostBlock(NamedTuple):
    """The end of a path, whose last block is gone."""

    tree: str
    data: bytes
    """Its tokens, encoded."""


class LostSnapshot(NamedTuple):
    """The end of a path, at which a snapshot is gone."""

    tree: str
    data: bytes
    """Its tokens, encoded."""


LostPath = LostBlock | LostSnapshot


@dataclass(slots=True, eq=False)
class _Blocks:
    """A file of blocks."""

    entry: PersistedBlocks
    hashes: list[bytes]
    """Hashes of the paths that end with each block."""
    is_whole: bool = False
    """Whether the path before them is whole."""

    @property
    def name(self) -> int:
        return self.entry.addresses[0]

    def up_to(self, path_hash: bytes) -> tuple[bytes, tuple[int, ...]]:
        """Return the tokens and the addresses of the blocks up to one."""
        end = self.hashes.index(path_hash) + 1
        return self.entry.tokens[: end * BLOCK_KEY_BYTES], self.entry.addresses[:end]


@dataclass(slots=True, eq=False)
class _Snapshot:
    """A file of a snapshot."""

    entry: PersistedSnapshot
    hashes: tuple[()] = ()
    """It has no blocks that others continue."""

    @property
    def name(self) -> int:
        return self.entry.address


_File = _Blocks | _Snapshot


@dataclass(slots=True)
class _Tree:
    """The files of one tree, by the hash of a path."""

    root: bytes
    """The hash of the path without blocks."""
    blocks_at: dict[bytes, tuple[_Blocks, ...]] = field(default_factory=dict)
    """Files that have the path's last block."""
    after: dict[bytes, dict[int, _File]] = field(default_factory=dict)
    """Files that continue the path, by name."""

    def whole_at(self, path_hash: bytes) -> _Blocks | None:
        """Return a file that has the last block of a path, if the path is whole with it."""
        return next((blocks for blocks in self.blocks_at.get(path_hash, ()) if blocks.is_whole), None)

    def is_whole(self, path_hash: bytes) -> bool:
        """Return whether a path is whole."""
        return path_hash == self.root or self.whole_at(path_hash) is not None

    def files_after(self, hashes: Iterable[bytes]) -> Iterator[_File]:
        """Yield the files that continue one of some paths."""
        return chain.from_iterable(self.after.get(path_hash, {}).values() for path_hash in hashes)

    def enter(self, file: _File) -> None:
        """Add a file."""
        self.after.setdefault(file.entry.before, {})[file.name] = file
        if isinstance(file, _Blocks):
            for path_hash in file.hashes:
                self.blocks_at[path_hash] = (*self.blocks_at.get(path_hash, ()), file)

    def remove(self, file: _File) -> None:
        """Remove a file."""
        for path_hash in file.hashes:
            left = tuple(blocks for blocks in self.blocks_at[path_hash] if blocks is not file)
            if left:
                self.blocks_at[path_hash] = left
            else:
                del self.blocks_at[path_hash]
        after = self.after[file.entry.before]
        del after[file.name]
        if not after:
            del self.after[file.entry.before]


class KnownPaths:
    """What files hold. A file is named by its first address.

    Args:
        has_snapshots: whether prompts resume at snapshots alone.
    """

    def __init__(self, *, has_snapshots: bool) -> None:
        self._has_snapshots = has_snapshots
        self._trees: dict[str, _Tree] = {}
        self._files: dict[int, _File] = {}
        self._new: dict[int, _File] = {}
        """Ends of paths that are whole and have not been taken since."""

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_new(self) -> int:
        """The number of paths to take."""
        return len(self._new)

    def add(self, entries: PersistedEntries) -> None:
        """Take in what files hold."""
        for blocks in entries.blocks:
            self._add(_Blocks(blocks, block_hashes(blocks.before, blocks.tokens)))
        for snapshot in entries.snapshots if self._has_snapshots else ():
            if bool(snapshot.tail_address) == bool(snapshot.key):
                self._add(_Snapshot(snapshot))

    def _add(self, file: _File) -> None:
        entry = file.entry
        tree = self._trees.setdefault(entry.tree, _Tree(root_hash(entry.tree)))
        self._files[file.name] = file
        tree.enter(file)
        if tree.is_whole(entry.before):
            self._make_whole(tree, file)

    def _make_whole(self, tree: _Tree, first: _File) -> None:
        """Mark the path before a file as whole, and so those before the files that continue it."""
        waiting = [first]
        while waiting:
            file = waiting.pop()
            if isinstance(file, _Snapshot):
                self._new[file.name] = file
            elif not file.is_whole:
                # What continues blocks that another whole file has is whole already.
                hashes = [path_hash for path_hash in file.hashes if tree.whole_at(path_hash) is None]
                file.is_whole = True
                if not self._has_snapshots:
                    self._new[file.name] = file
                waiting += tree.files_after(hashes)

    def forget(self, name: int) -> LostPath | None:
        """Forget a file that is gone; return what a tier loses that has taken paths with it.

        What follows lost blocks is lost with them. If it is whole in other files, it can be taken once more.
        """
        file = self._files.pop(name, None)
        if file is None:
            return None
        tree = self._trees[file.entry.tree]
        lost = self._lose_blocks(tree, file) if isinstance(file, _Blocks) else self._lose_snapshot(tree, file)
        self._new.pop(name, None)
        tree.remove(file)
        if not tree.after:
            del self._trees[file.entry.tree]
        return lost

    def _is_end(self, file: _File) -> bool:
        return isinstance(file, _Snapshot) == self._has_snapshots

    def _is_taken(self, tree: _Tree, file: _File) -> bool:
        """Return whether a file is the end of a path that is whole and has been taken."""
        return self._is_end(file) and file.name not in self._new and tree.is_whole(file.entry.before)

    def _lose_snapshot(self, tree: _Tree, gone: _Snapshot) -> LostPath | None:
        before = self._path(tree, gone.entry.before) if self._is_taken(tree, gone) else None
        return None if before is None else LostSnapshot(gone.entry.tree, before[0] + gone.entry.key)

    def _lose_blocks(self, tree: _Tree, gone: _Blocks) -> LostPath | None:
        """Take out what follows blocks that are gone; return the first of these, if anything there has been taken."""
        before = self._path(tree, gone.entry.before)
        if before is None:
            return None
        below = list(self._below(tree, gone))
        is_taken = any(self._is_taken(tree, file) for file in below)
        gone.is_whole, waiting = False, [gone]
        while waiting:
            hashes = [path_hash for path_hash in waiting.pop().hashes if tree.whole_at(path_hash) is None]
            for file in tree.files_after(hashes):
                if isinstance(file, _Blocks) and file.is_whole:
                    file.is_whole = False
                    waiting.append(file)
        for file in below:
            self._new.pop(file.name, None)
            if file is not gone and self._is_end(file) and tree.is_whole(file.entry.before):
                self._new[file.name] = file
        return LostBlock(gone.entry.tree, before[0] + gone.entry.tokens[:BLOCK_KEY_BYTES]) if is_taken else None

    def _below(self, tree: _Tree, first: _Blocks) -> Iterator[_File]:
        """Yield the files that have some of a file's blocks, that one included, and all that are after these."""
        waiting, seen = [first.hashes], set[int]()
        while waiting:
            for path_hash in waiting.pop():
                for blocks in tree.blocks_at.get(path_hash, ()):
                    if blocks.name not in seen:
                        seen.add(blocks.name)
                        yield blocks
                        waiting.append(blocks.hashes[blocks.hashes.index(path_hash) :])
                for file in tree.files_after([path_hash]):
                    if file.name not in seen:
                        seen.add(file.name)
                        yield file
                        waiting += [file.hashes] if isinstance(file, _Blocks) else []

    def take(self, max_paths: int) -> list[FoundPath]:
        """Return paths that are whole, each once."""
        found = list[FoundPath]()
        while self._new and len(found) < max_paths:
            path = self._path_of(self._new.pop(next(iter(self._new))))
            if path is not None:
                found.append(path)
        return found

    def _path_of(self, end: _File) -> FoundPath | None:
        """Return the path with an end; None: it is not whole."""
        entry = end.entry
        if isinstance(end, _Blocks):
            path_hash, key, addresses, kind = end.hashes[-1], b"", (NO_ADDRESS, NO_ADDRESS), SnapshotKind.GENERATION_END
        else:
            own = end.entry
            path_hash, key, addresses, kind = own.before, own.key, (own.address, own.tail_address), own.kind
        found = self._path(self._trees[entry.tree], path_hash)
        if found is None:
            return None
        data, blocks = found
        path = StoredPath(entry.tree, data + key, blocks, *addresses, kind, entry.interarrival_bin, entry.is_shared)
        return FoundPath(path, entry.idle_s)

    def _path(self, tree: _Tree, path_hash: bytes) -> tuple[bytes, StoredBlocks] | None:
        """Return the tokens of a path, encoded, and its blocks; None: it is not whole."""
        parts, addresses = list[bytes](), list[tuple[int, ...]]()
        while path_hash != tree.root:
            file = tree.whole_at(path_hash)
            if file is None:
                return None
            tokens, numbers = file.up_to(path_hash)
            parts.append(tokens)
            addresses.append(numbers)
            path_hash = file.entry.before
        return b"".join(parts[::-1]), StoredBlocks(0, tuple(chain.from_iterable(addresses[::-1])))

    def before(self, name: int) -> Iterator[int]:
        """Yield the files with the blocks before those of a file, the nearest first, as far as they are known."""
        file = self._files.get(name)
        while file is not None:
            file = self._trees[file.entry.tree].whole_at(file.entry.before)
            if file is not None:
                yield file.name
