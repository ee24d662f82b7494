"""What the files of a persistent tier hold, by hashes, as far as it is known: which paths are whole.

Blocks may be found before those that they follow, and snapshots before their blocks: both wait. Files may overlap, as
engines write what each of them has evicted. When a file is gone, what follows its blocks is taken out of the tier, and
found again if other files have the same blocks.

All that is known is of files that are there: it does not grow with the number of files that come and go.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from strandline.ids import NO_ADDRESS
from strandline.records.account import SnapshotKind
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.kept import Kept, KeptBlocks, KeptSnapshot
from strandline.records.path_hashes import block_hashes, root_hash
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
class _Group:
    """Blocks of one file."""

    kept: KeptBlocks
    hashes: list[bytes]
    """Hashes of the paths that end with each block."""
    is_whole: bool = False
    """Whether all blocks before it have been found."""

    @property
    def name(self) -> int:
        return self.kept.addresses[0]

    def up_to(self, path_hash: bytes) -> tuple[bytes, tuple[int, ...]]:
        """Return the tokens and the addresses of the blocks up to one."""
        end = self.hashes.index(path_hash) + 1
        return self.kept.tokens[: end * BLOCK_KEY_BYTES], self.kept.addresses[:end]


_File = _Group | KeptSnapshot


@dataclass(slots=True)
class _Tree:
    """The files of one tree, by the hash of a path."""

    root: bytes
    groups_at: dict[bytes, tuple[_Group, ...]] = field(default_factory=dict)
    """Those that have the path's last block."""
    after: dict[bytes, dict[int, _File]] = field(default_factory=dict)
    """Those that continue the path, by their first addresses."""

    def whole_at(self, path_hash: bytes) -> _Group | None:
        """Return blocks that end a path, or go on after it, and that have been found with all before them."""
        return next((group for group in self.groups_at.get(path_hash, ()) if group.is_whole), None)

    def is_whole(self, path_hash: bytes) -> bool:
        """Return whether all blocks of a path have been found."""
        return path_hash == self.root or self.whole_at(path_hash) is not None

    def files_after(self, hashes: Iterable[bytes]) -> Iterator[tuple[int, _File]]:
        """Yield the files that continue one of some paths."""
        return chain.from_iterable(self.after.get(path_hash, {}).items() for path_hash in hashes)


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

    def add(self, kept: Kept) -> None:
        """Take in what files hold."""
        for blocks in kept.blocks:
            self._add_group(_Group(blocks, block_hashes(blocks.before, blocks.tokens)))
        for snapshot in kept.snapshots if self._has_snapshots else ():
            if bool(snapshot.tail_address) == bool(snapshot.key):
                tree = self._enter(snapshot.address, snapshot, snapshot)
                if tree.is_whole(snapshot.before):
                    self._new[snapshot.address] = snapshot

    def _enter(self, name: int, file: _File, kept: KeptBlocks | KeptSnapshot) -> _Tree:
        tree = self._trees.get(kept.tree)
        if tree is None:
            tree = self._trees[kept.tree] = _Tree(root_hash(kept.tree))
        self._files[name] = tree.after.setdefault(kept.before, {})[name] = file
        return tree

    def _add_group(self, group: _Group) -> None:
        tree = self._enter(group.name, group, group.kept)
        for path_hash in group.hashes:
            tree.groups_at[path_hash] = (*tree.groups_at.get(path_hash, ()), group)
        if tree.is_whole(group.kept.before):
            self._make_whole(tree, group)

    def _make_whole(self, tree: _Tree, first: _Group) -> None:
        """Mark a group as whole, since all blocks before it have been found, and all that waited for it."""
        waiting = [first]
        while waiting:
            group = waiting.pop()
            if group.is_whole:
                continue
            # What follows blocks that are whole in another file has been found before.
            hashes = [path_hash for path_hash in group.hashes if tree.whole_at(path_hash) is None]
            group.is_whole = True
            if not self._has_snapshots:
                self._new[group.name] = group
            for name, file in tree.files_after(hashes):
                if isinstance(file, _Group):
                    waiting.append(file)
                else:
                    self._new[name] = file

    def forget(self, name: int) -> LostPath | None:
        """Forget a file that is gone; return what a tier loses that has taken paths with it.

        What follows lost blocks is lost with them. If it is whole in other files, it can be taken once more.
        """
        file = self._files.pop(name, None)
        if file is None:
            return None
        kept = file.kept if isinstance(file, _Group) else file
        tree, lost = self._trees[kept.tree], None
        if isinstance(file, _Group):
            lost = self._lose(tree, file)
        elif self._is_taken(tree, name, file) and (found := self._before(tree, file.before)) is not None:
            lost = LostSnapshot(kept.tree, found[0] + file.key)
        self._new.pop(name, None)
        _take_out(tree, name, file)
        if not tree.after:
            del self._trees[kept.tree]
        return lost

    def _is_taken(self, tree: _Tree, name: int, file: _File) -> bool:
        """Return whether a file is the end of a path that has been taken, and is whole."""
        is_end = isinstance(file, KeptSnapshot) == self._has_snapshots
        return is_end and name not in self._new and tree.is_whole(_before(file))

    def _lose(self, tree: _Tree, gone: _Group) -> LostPath | None:
        """Take out what follows blocks that are gone; return the first of these, if anything there has been taken."""
        before = self._before(tree, gone.kept.before)
        if before is None:
            return None
        below = list(self._below(tree, gone))
        is_taken = any(self._is_taken(tree, *each) for each in below)
        gone.is_whole, waiting = False, [gone]
        while waiting:
            hashes = [path_hash for path_hash in waiting.pop().hashes if tree.whole_at(path_hash) is None]
            for _, file in tree.files_after(hashes):
                if isinstance(file, _Group) and file.is_whole:
                    file.is_whole = False
                    waiting.append(file)
        for name, file in below:
            self._new.pop(name, None)
            is_end = file is not gone and isinstance(file, KeptSnapshot) == self._has_snapshots
            if is_end and tree.is_whole(_before(file)):
                self._new[name] = file
        return LostBlock(gone.kept.tree, before[0] + gone.kept.tokens[:BLOCK_KEY_BYTES]) if is_taken else None

    def _below(self, tree: _Tree, first: _Group) -> Iterator[tuple[int, _File]]:
        """Yield the files that have some of a group's blocks, and all that are after these."""
        waiting, seen = [first.hashes], set[int]()
        while waiting:
            for path_hash in waiting.pop():
                for group in tree.groups_at.get(path_hash, ()):
                    if group.name not in seen:
                        seen.add(group.name)
                        yield group.name, group
                        waiting.append(group.hashes[group.hashes.index(path_hash) :])
                for name, file in tree.files_after([path_hash]):
                    if name not in seen:
                        seen.add(name)
                        yield name, file
                        waiting += [file.hashes] if isinstance(file, _Group) else []

    def take(self, max_paths: int) -> list[FoundPath]:
        """Return paths that are whole, each once."""
        found = list[FoundPath]()
        while self._new and len(found) < max_paths:
            name = next(iter(self._new))
            path = self._path_of(self._new.pop(name))
            if path is not None:
                found.append(path)
        return found

    def _path_of(self, end: _File) -> FoundPath | None:
        """Return the path of a snapshot or, without snapshots, of blocks; None: not all of it is known."""
        if isinstance(end, _Group):
            kept: KeptBlocks | KeptSnapshot = end.kept
            before = end.hashes[-1]
            key, addresses, kind = b"", (NO_ADDRESS, NO_ADDRESS), SnapshotKind.GENERATION_END
        else:
            kept, before = end, end.before
            key, addresses, kind = end.key, (end.address, end.tail_address), end.kind
        found = self._before(self._trees[kept.tree], before)
        if found is None:
            return None
        data, blocks = found
        path = StoredPath(kept.tree, data + key, blocks, *addresses, kind, kept.interarrival_bin, kept.is_shared)
        return FoundPath(path, kept.idle_s)

    def _before(self, tree: _Tree, path_hash: bytes) -> tuple[bytes, StoredBlocks] | None:
        """Return the path with a hash, encoded, and its blocks; None: not all of them are known."""
        parts, addresses = list[bytes](), list[tuple[int, ...]]()
        while path_hash != tree.root:
            group = tree.whole_at(path_hash)
            if group is None:
                return None
            tokens, numbers = group.up_to(path_hash)
            parts.append(tokens)
            addresses.append(numbers)
            path_hash = group.kept.before
        return b"".join(parts[::-1]), StoredBlocks(0, tuple(chain.from_iterable(addresses[::-1])))

    def before(self, name: int) -> Iterator[int]:
        """Yield the files with the blocks before those of a file, the nearest first, as far as they are known."""
        file = self._files.get(name)
        while file is not None:
            kept = file.kept if isinstance(file, _Group) else file
            file = self._trees[kept.tree].whole_at(kept.before)
            if file is not None:
                yield file.name


def _before(file: _File) -> bytes:
    """Return the hash of the path that a file continues."""
    return file.kept.before if isinstance(file, _Group) else file.before


def _take_out(tree: _Tree, name: int, file: _File) -> None:
    """Take a file out of a tree."""
    before = _before(file)
    if isinstance(file, _Group):
        for path_hash in file.hashes:
            left = tuple(group for group in tree.groups_at[path_hash] if group is not file)
            if left:
                tree.groups_at[path_hash] = left
            else:
                del tree.groups_at[path_hash]
    del tree.after[before][name]
    if not tree.after[before]:
        del tree.after[before]
