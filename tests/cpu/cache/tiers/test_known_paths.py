"""Paths in files that come and go, against a search of all files that are there."""

import random
from itertools import count

import pytest

from strandline.cache.tiers.known_paths import KnownPaths, LostBlock
from strandline.records.account import SnapshotKind
from strandline.records.path_hashes import block_hashes, root_hash
from strandline.records.persisted import PersistedBlocks, PersistedEntries, PersistedSnapshot
from strandline.records.tokens import BLOCK_KEY_BYTES, encode

TREE = "tree"
Path = tuple[int, ...]
"""A path by the first tokens of its blocks."""


def data_of(path: Path) -> bytes:
    return encode([block for block in path for _ in range(64)])


def hash_of(path: Path) -> bytes:
    return [root_hash(TREE), *block_hashes(root_hash(TREE), data_of(path))][-1]


class Files:
    """Files that are there, and what a tier has taken of them."""

    def __init__(self, *, has_snapshots: bool) -> None:
        self.known = KnownPaths(has_snapshots=has_snapshots)
        self._has_snapshots = has_snapshots
        self._addresses = count(1, 100)
        self.blocks: dict[int, tuple[Path, int]] = {}
        """By first address: the path up to the last block, and the index of the first one."""
        self.snapshots: dict[int, Path] = {}
        self.taken: dict[bytes, tuple[int, ...]] = {}
        """By path: addresses of its blocks."""

    def add(self, path: Path, first: int) -> None:
        """Add a file of the blocks of a path from one on; if none is left, of its snapshot."""
        address, before, tokens = next(self._addresses), hash_of(path[:first]), data_of(path[first:])
        if tokens:
            self.blocks[address] = path, first
            addresses = tuple(range(address, address + len(path) - first))
            entries = PersistedEntries((PersistedBlocks(TREE, before, tokens, addresses, 0, 0.0, is_shared=False),), ())
        elif self._has_snapshots:
            self.snapshots[address] = path
            kind = SnapshotKind.PROMPT_END
            entries = PersistedEntries(
                (), (PersistedSnapshot(TREE, before, b"", address, 0, kind, 0, 0.0, is_shared=False),)
            )
        else:
            return
        self.known.add(entries)

    def forget(self, name: int) -> None:
        self.blocks.pop(name, None)
        self.snapshots.pop(name, None)
        if (lost := self.known.forget(name)) is not None:
            for data in list(self.taken):
                if data == lost.data or (isinstance(lost, LostBlock) and data.startswith(lost.data)):
                    del self.taken[data]

    def take(self) -> None:
        for path, _ in self.known.take(1000):
            assert path.blocks is not None
            assert not self._has_snapshots or path.data not in self.taken, "it has been taken"
            self.taken.setdefault(path.data, path.blocks.addresses)

    def whole_ends(self) -> set[bytes]:
        """Search for all paths that are whole."""
        whole, num_whole = {()}, 0
        while len(whole) > num_whole:
            num_whole = len(whole)
            for path, first in self.blocks.values():
                if path[:first] in whole:
                    whole |= {path[:end] for end in range(first, len(path) + 1)}
        if self._has_snapshots:
            return {data_of(path) for path in self.snapshots.values() if path in whole}
        return {data_of(path) for path, first in self.blocks.values() if path[:first] in whole}

    def check(self) -> None:
        self.take()
        assert set(self.taken) == self.whole_ends()
        for data, addresses in self.taken.items():
            for index, address in enumerate(addresses):
                path, first = self.blocks[address - (address - 1) % 100]
                own = first + (address - 1) % 100
                assert own == index, "a path has files that are there, at their blocks"
                assert data_of(path).startswith(data[: (own + 1) * BLOCK_KEY_BYTES])


@pytest.mark.parametrize("has_snapshots", [True, False], ids=["snapshots", "blocks"])
def test_what_is_taken_is_what_a_search_finds(*, has_snapshots: bool) -> None:
    choose = random.Random(str(has_snapshots))
    files, most = Files(has_snapshots=has_snapshots), 0
    for _ in range(800):
        names = [*files.blocks, *files.snapshots]
        if len(names) < 12 or (len(names) < 20 and choose.random() < 0.5):
            path = tuple(choose.randrange(2) for _ in range(choose.randrange(7)))
            kept = {(each, first) for each, first in files.blocks.values()}
            kept |= {(each, len(each)) for each in files.snapshots.values()}
            if path and (each := (path, choose.choice([0, 0, *range(len(path) + 1), len(path)]))) not in kept:
                files.add(*each)
        else:
            files.forget(choose.choice(names))
        if choose.random() < 0.7:
            files.check()
        most = max(most, len(files.taken))
    assert most > 4, "enough paths were whole"
    for name in [*files.blocks, *files.snapshots]:
        files.forget(name)
    files.check()
    assert (len(files.known), files.known.num_new, files.known._trees) == (0, 0, {})


def test_what_follows_lost_blocks_is_found_in_other_files() -> None:
    files = Files(has_snapshots=True)
    files.add((1, 2), 0)
    files.add((1, 2), 2)
    files.check()
    [addresses] = files.taken.values()
    files.add((1, 2, 3), 0)
    files.check()
    assert list(files.taken.values()) == [addresses], "it is not taken twice"
    files.forget(addresses[0])
    assert files.taken == {}
    files.check()
    assert [len(each) for each in files.taken.values()] == [2]


def test_files_before_another_are_named_nearest_first() -> None:
    files = Files(has_snapshots=True)
    for path, first in (((1, 2), 0), ((1, 2, 3), 2), ((1, 2, 3), 3)):
        files.add(path, first)
    assert list(files.known.before(201)) == [101, 1]
    assert list(files.known.before(1)) == []
