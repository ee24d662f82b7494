"""Adoption: the moves to an empty tier of what its files hold from an earlier process, which are done at once.

Snapshots whose blocks are lost are dropped, and so are blocks that no snapshot needs. Uses are dated back by how long
the files have not been used.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from strandline.cache.policy.reuse import TICKS_PER_S
from strandline.cache.tiers.lower_tier import ANY_WORTH, LowerTier
from strandline.cache.tiers.neighbours import position_above
from strandline.cache.tiers.tier_target import TierTarget
from strandline.cache.tiers.tier_tree import Copy, TierSnapshot
from strandline.cache.use import Use, UseHistory
from strandline.ids import NO_ADDRESS
from strandline.records.account import SnapshotKind
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.kept import Kept, KeptBlocks, KeptSnapshot
from strandline.records.path_hashes import block_hashes, root_hash
from strandline.records.tokens import BLOCK_KEY_BYTES


class _Block(NamedTuple):
    """A block that a store holds."""

    before: bytes
    """The hash of the path before it."""
    tokens: bytes
    """Encoded."""
    address: int


Known = dict[tuple[str, bytes], _Block]
"""By tree, and the hash of the path that ends with the block."""
Entry = tuple[StoredPath, Use]
"""A snapshot with all whole blocks before it, and its last use."""


def last_address(kept: Kept) -> int:
    """Return the highest address in use."""
    return max(_addresses(kept), default=NO_ADDRESS)


def adopt(tier: LowerTier, kept: Kept, reuse: UseHistory) -> None:
    """Enter what a store holds into its empty tier; evict what is worth least if that is too much."""
    known = _known_blocks(kept)
    entries = list(_snapshots(kept, known, reuse) if tier.has_snapshots else _ends(kept, known, reuse))
    sizes = dict.fromkeys(_addresses(kept), 1)
    sizes |= {path.address: tier.snapshot_blocks(path.position) for path, _ in entries}
    sizes.pop(NO_ADDRESS, None)
    tier.num_used = sum(sizes.values())
    for path, use in sorted(entries, key=lambda entry: entry[0].position):
        if tier.copy_of(path.tree, path.data, path.position) is None:
            for address in _enter(tier, path, use).sizes:
                del sizes[address]
    tier.free(sizes)
    tier.make_room(0, ANY_WORTH)


def _enter(tier: LowerTier, path: StoredPath, use: Use) -> TierTarget:
    """Enter a snapshot and the blocks before it that the tier lacks."""
    position, num_blocks = path.position, len(path.addresses)
    above = position_above(tier.column, path.tree, path.data, position)
    snapshot = TierSnapshot(position, path.data[num_blocks * BLOCK_KEY_BYTES :])
    copy = Copy(snapshot, path.kind, use, position - above, is_shared=path.is_shared)
    end = tier.tree.walk(path.tree, path.data, num_blocks)
    first = 0 if end is None else tier.column.last_on_path(end).depth
    blocks = StoredBlocks(first, tuple(path.addresses.values())[first:])
    target = TierTarget(tier, copy, replace(path, blocks=blocks))
    target.arrive()
    return target


def _addresses(kept: Kept) -> list[int]:
    """Return all addresses; ``NO_ADDRESS`` may be among them."""
    of_snapshots = [(snapshot.address, snapshot.tail_address) for snapshot in kept.snapshots]
    return [address for addresses in (*(x.addresses for x in kept.blocks), *of_snapshots) for address in addresses]


def _known_blocks(kept: Kept) -> Known:
    """Return all blocks."""
    known: Known = {}
    for blocks in kept.blocks:
        before = blocks.before
        for index, (path_hash, address) in enumerate(
            zip(block_hashes(before, blocks.tokens), blocks.addresses, strict=True)
        ):
            tokens = blocks.tokens[index * BLOCK_KEY_BYTES : (index + 1) * BLOCK_KEY_BYTES]
            known.setdefault((blocks.tree, path_hash), _Block(before, tokens, address))
            before = path_hash
    return known


def _whole_path(known: Known, tree: str, path_hash: bytes) -> tuple[bytes, StoredBlocks] | None:
    """Return the path with a hash, encoded, and its blocks, or None if not all of them are known."""
    root, blocks = root_hash(tree), list[_Block]()
    while path_hash != root:
        block = known.get((tree, path_hash))
        if block is None:
            return None
        blocks.append(block)
        path_hash = block.before
    data = b"".join([block.tokens for block in blocks[::-1]])
    return data, StoredBlocks(0, tuple(block.address for block in blocks[::-1]))


def _snapshots(kept: Kept, known: Known, reuse: UseHistory) -> Iterator[Entry]:
    """Yield the snapshots that have all blocks that they need."""
    for each in kept.snapshots:
        found = _whole_path(known, each.tree, each.before)
        if found is not None and bool(each.tail_address) == bool(each.key):
            data, blocks = found
            addresses, kind, past_bin = (each.address, each.tail_address), each.kind, each.interarrival_bin
            path = StoredPath(each.tree, data + each.key, blocks, *addresses, kind, past_bin, each.is_shared)
            yield path, _use(each, reuse)


def _ends(kept: Kept, known: Known, reuse: UseHistory) -> Iterator[Entry]:
    """Yield an end for each group of blocks that were stored together, where prompts resume without snapshots."""
    kind, no_addresses = SnapshotKind.GENERATION_END, (NO_ADDRESS, NO_ADDRESS)
    for each in kept.blocks:
        found = _whole_path(known, each.tree, [each.before, *block_hashes(each.before, each.tokens)][-1])
        if found is not None:
            path = StoredPath(each.tree, *found, *no_addresses, kind, each.interarrival_bin, each.is_shared)
            yield path, _use(each, reuse)


def _use(entry: KeptBlocks | KeptSnapshot, reuse: UseHistory) -> Use:
    return Use(reuse.now - int(entry.idle_s * TICKS_PER_S), entry.interarrival_bin)
