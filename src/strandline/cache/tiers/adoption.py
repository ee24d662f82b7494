"""Adoption: the moves to a tier of what files hold that other processes have written, which are done at once.

At start these are the files of an earlier process. In a store that engines share, further ones are found while the
engine runs (``known_paths.py``), and what is gone is evicted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from strandline.cache.policy.reuse import TICKS_PER_S
from strandline.cache.tiers.known_paths import FoundPath, KnownPaths, LostPath, LostSnapshot
from strandline.cache.tiers.lower_tier import ANY_WORTH, LowerTier
from strandline.cache.tiers.neighbours import saved_tokens
from strandline.cache.tiers.stored import Copy, TierSnapshot
from strandline.cache.tiers.tier_target import TierTarget
from strandline.cache.use import Use, UseHistory
from strandline.ids import NO_ADDRESS
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.persisted import PersistedEntries
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

MAX_EVICTED: Final = 64
"""Most snapshots that are evicted at once because files are gone: a directory may be removed with all that it has."""


def last_address(persisted: PersistedEntries) -> int:
    """Return the highest address in use."""
    return max(_addresses(persisted), default=NO_ADDRESS)


def adopt(tier: LowerTier, persisted: PersistedEntries, reuse: UseHistory) -> None:
    """Enter what a store holds into its empty tier; evict what is worth least if that is too much.

    Snapshots whose blocks are lost are dropped, and so are blocks that no snapshot needs.
    """
    known = KnownPaths(has_snapshots=tier.has_snapshots)
    known.add(persisted)
    used = adopt_paths(tier, known.take(len(persisted.blocks) + len(persisted.snapshots)), reuse)
    unused = set(_addresses(persisted)) - used
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


def forget_paths(tier: LowerTier, lost: Sequence[LostPath]) -> Sequence[LostPath]:
    """Evict what needs blocks and snapshots that are gone, in whichever file the tier has them.

    Returns:
        What is left, as ``MAX_EVICTED`` snapshots have been evicted.
    """
    num_left = MAX_EVICTED
    for index, path in enumerate(lost):
        copies = list(islice(_copies_with(tier, path), num_left))
        for copy in copies:
            tier.evict(copy)
        num_left -= len(copies)
        if not num_left:
            return lost[index:]
    return ()


def _copies_with(tier: LowerTier, lost: LostPath) -> Iterable[Copy]:
    """Return the tier's copies of snapshots that need what is lost."""
    num_blocks = len(lost.data) // BLOCK_KEY_BYTES
    if isinstance(lost, LostSnapshot):
        copy = tier.copy_of(lost.tree, lost.data, len(lost.data) // TOKEN_BYTES)
        return () if copy is None else (copy,)
    end = tier.tree.find(lost.tree, lost.data, num_blocks)
    return () if end is None else tier.column.below(end.run, num_blocks)


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


def _addresses(persisted: PersistedEntries) -> list[int]:
    """Return all addresses; ``NO_ADDRESS`` may be among them."""
    of_snapshots = [(snapshot.address, snapshot.tail_address) for snapshot in persisted.snapshots]
    return [address for addresses in (*(x.addresses for x in persisted.blocks), *of_snapshots) for address in addresses]
