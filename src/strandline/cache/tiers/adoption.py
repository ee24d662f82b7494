"""Adoption: the moves to a tier of what files hold that other processes have written, which are done at once.

At start these are the files of an earlier process. In a store that engines share, further ones are found while the
engine runs. Blocks may be found before those that they follow, and snapshots before their blocks: both wait.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from strandline.cache.policy.reuse import TICKS_PER_S
from strandline.cache.tiers.lower_tier import ANY_WORTH, LowerTier
from strandline.cache.tiers.neighbours import saved_tokens
from strandline.cache.tiers.stored import Copy, TierSnapshot
from strandline.cache.tiers.tier_target import TierTarget
from strandline.cache.use import Use, UseHistory
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


class _Group(NamedTuple):
    """Blocks of one file."""

    kept: KeptBlocks
    hashes: list[bytes]
    """Hashes of the paths that end with each block."""

    def up_to(self, index: int) -> bytes:
        """Return the tokens of the blocks up to one."""
        return self.kept.tokens[: (index + 1) * BLOCK_KEY_BYTES]


def last_address(kept: Kept) -> int:
    """Return the highest address in use."""
    return max(_addresses(kept), default=NO_ADDRESS)


def adopt(tier: LowerTier, kept: Kept, reuse: UseHistory) -> None:
    """Enter what a store holds into its empty tier; evict what is worth least if that is too much.

    Snapshots whose blocks are lost are dropped, and so are blocks that no snapshot needs.
    """
    used = adopt_paths(tier, KnownPaths(has_snapshots=tier.has_snapshots).add(kept), reuse)
    unused = set(_addresses(kept)) - used
    tier.free(dict.fromkeys(unused, 0))


def adopt_paths(tier: LowerTier, found: Iterable[FoundPath], reuse: UseHistory) -> set[int]:
    """Enter paths into a tier that it does not have; return the addresses that it uses of them.

    Uses are dated back by how long the files have not been used.
    """
    used = set[int]()
    for path, idle_s in sorted(found, key=lambda each: each.path.position):
        if tier.copy_of(path.tree, path.data, path.position) is None:
            use = Use(reuse.now - int(idle_s * TICKS_PER_S), path.interarrival_bin)
            used.update(_enter(tier, path, use).sizes)
    tier.make_room(0, ANY_WORTH)
    return used


def _enter(tier: LowerTier, path: StoredPath, use: Use) -> TierTarget:
    """Enter a snapshot and the blocks before it that the tier lacks."""
    num_blocks = len(path.addresses)
    home = tier.tree.grow(path.tree, path.data, num_blocks)
    snapshot = TierSnapshot(home, (num_blocks, path.data[num_blocks * BLOCK_KEY_BYTES :]))
    saved = saved_tokens(tier.column, snapshot)
    copy = Copy(snapshot, path.kind, use, saved, is_shared=path.is_shared)
    first = tier.column.last_on_path(snapshot.end).depth
    blocks = StoredBlocks(first, tuple(path.addresses.values())[first:])
    target = TierTarget(tier, copy, replace(path, blocks=blocks))
    tier.num_used += sum(target.sizes.values())
    target.arrive()
    return target


def _addresses(kept: Kept) -> list[int]:
    """Return all addresses; ``NO_ADDRESS`` may be among them."""
    of_snapshots = [(snapshot.address, snapshot.tail_address) for snapshot in kept.snapshots]
    return [address for addresses in (*(x.addresses for x in kept.blocks), *of_snapshots) for address in addresses]


class KnownPaths:
    """What files hold, by hashes, and what waits for blocks that have not been found.

    Args:
        has_snapshots: whether prompts resume at snapshots alone.
    """

    def __init__(self, *, has_snapshots: bool) -> None:
        self._has_snapshots = has_snapshots
        self._block_at: dict[tuple[str, bytes], tuple[_Group, int]] = {}
        """By tree, and the hash of the path that ends with the block: the blocks of its file, and its index there."""
        self._waiting: list[KeptSnapshot | _Group] = []

    def add(self, kept: Kept) -> list[FoundPath]:
        """Take in what files hold; return the paths that are whole now and were not before."""
        for blocks in kept.blocks:
            group = _Group(blocks, block_hashes(blocks.before, blocks.tokens))
            for index, path_hash in enumerate(group.hashes):
                self._block_at[blocks.tree, path_hash] = group, index
            if not self._has_snapshots:
                self._waiting.append(group)
        if self._has_snapshots:
            self._waiting += kept.snapshots
        found, waiting = list[FoundPath](), list[KeptSnapshot | _Group]()
        for each in self._waiting:
            path = self._path_of(each)
            if path is not None:
                found.append(path)
            else:
                waiting.append(each)
        self._waiting = waiting
        return found

    def _path_of(self, end: "KeptSnapshot | _Group") -> FoundPath | None:
        """Return the path of a snapshot or, without snapshots, of blocks; None: not all of it has been found."""
        kept: KeptBlocks | KeptSnapshot
        if isinstance(end, _Group):
            kept, before = end.kept, end.hashes[-1]
            key, addresses, kind = b"", (NO_ADDRESS, NO_ADDRESS), SnapshotKind.GENERATION_END
        else:
            kept, before = end, end.before
            key, addresses, kind = end.key, (end.address, end.tail_address), end.kind
            if bool(end.tail_address) != bool(end.key):
                return None
        found = self._whole_path(kept.tree, before)
        if found is None:
            return None
        data, blocks = found
        path = StoredPath(kept.tree, data + key, blocks, *addresses, kind, kept.interarrival_bin, kept.is_shared)
        return FoundPath(path, kept.idle_s)

    def _whole_path(self, tree: str, path_hash: bytes) -> tuple[bytes, StoredBlocks] | None:
        """Return the path with a hash, encoded, and its blocks; None: not all of them have been found."""
        root, parts, addresses = root_hash(tree), list[bytes](), list[tuple[int, ...]]()
        while path_hash != root:
            found = self._block_at.get((tree, path_hash))
            if found is None:
                return None
            group, index = found
            parts.append(group.up_to(index))
            addresses.append(group.kept.addresses[: index + 1])
            path_hash = group.kept.before
        return b"".join(parts[::-1]), StoredBlocks(0, tuple(chain.from_iterable(addresses[::-1])))
