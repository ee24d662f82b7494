"""Adoption: rebuilds what a store has of the tree from the descriptions of files that an earlier process has written.

Snapshots whose blocks are lost are dropped, and so are blocks that no snapshot needs. Uses are dated back by how long
the files have not been used.
"""

from collections.abc import Iterator
from typing import NamedTuple

from strandline.cache.policy.reuse import TICKS_PER_S
from strandline.cache.tiers.lower_tier import ANY_WORTH, LowerTier
from strandline.cache.tiers.neighbours import position_above
from strandline.cache.tiers.part import NO_ADDRESS
from strandline.cache.tiers.tier_tree import Copy, TierSnapshot
from strandline.cache.use import Use, UseHistory
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import SnapshotKind
from strandline.records.kept import Kept, KeptBlocks, KeptSnapshot
from strandline.records.path_hashes import block_hashes, root_hash
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES


class _Block(NamedTuple):
    """A block that a store holds."""

    before: bytes
    """The hash of the path before it."""
    tokens: bytes
    """Encoded."""
    address: int


class _Path(NamedTuple):
    """A whole path of blocks."""

    data: bytes
    """Its tokens, encoded."""
    addresses: list[int]


Known = dict[tuple[str, bytes], _Block]
"""By tree, and the hash of the path that ends with the block."""
Entry = tuple[Copy, str, _Path]
"""A snapshot, the name of its tree and the whole blocks before it."""


def last_address(kept: Kept) -> int:
    """Return the highest address in use."""
    return max(_addresses(kept), default=NO_ADDRESS)


def adopt(tier: LowerTier, kept: Kept, reuse: UseHistory) -> None:
    """Enter what a store holds into its empty tier; evict what is worth least if that is too much."""
    known = _known_blocks(kept)
    entries = list(_snapshots(kept, known, reuse) if tier.has_snapshots else _ends(kept, known, reuse))
    sizes = dict.fromkeys(_addresses(kept), 1)
    sizes |= {demoted.address: tier.snapshot_blocks(demoted.position) for demoted, *_ in entries}
    sizes.pop(NO_ADDRESS, None)
    tier.num_used = sum(sizes.values())
    for demoted, tree, path in sorted(entries, key=lambda entry: entry[0].position):
        data = path.data + demoted.snapshot.key
        if tier.copy_of(tree, data, demoted.position) is None:
            demoted.saved_tokens -= position_above(tier.column, tier.tree.root(tree), data, demoted.position)
            tier.enter(demoted, tree, data)
            for address in (demoted.address, demoted.tail_address):
                sizes.pop(address, None)
            for run, start, end in demoted.snapshot.whole_blocks:
                addresses = tier.column.part(run).addresses
                for index in range(start, end):
                    addresses[index] = path.addresses[run.start_block + index]
                    sizes.pop(addresses[index], None)
    tier.free(sizes)
    tier.make_room(0, ANY_WORTH)


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


def _path(known: Known, tree: str, path_hash: bytes) -> _Path | None:
    """Return the path with a hash, or None if not all of its blocks are known."""
    root, blocks = root_hash(tree), list[_Block]()
    while path_hash != root:
        block = known.get((tree, path_hash))
        if block is None:
            return None
        blocks.append(block)
        path_hash = block.before
    return _Path(b"".join([block.tokens for block in blocks[::-1]]), [block.address for block in blocks[::-1]])


def _snapshots(kept: Kept, known: Known, reuse: UseHistory) -> Iterator[Entry]:
    """Yield the snapshots that have all blocks that they need."""
    for snapshot in kept.snapshots:
        path = _path(known, snapshot.tree, snapshot.before)
        if path is None or bool(snapshot.tail_address) != bool(snapshot.key):
            continue
        position, use = len(path.addresses) * BLOCK_TOKENS + len(snapshot.key) // TOKEN_BYTES, _use(snapshot, reuse)
        stored = TierSnapshot(position, snapshot.key)
        demoted = Copy(stored, snapshot.kind, use, position, is_shared=snapshot.is_shared)
        demoted.address, demoted.tail_address = snapshot.address, snapshot.tail_address
        yield demoted, snapshot.tree, path


def _ends(kept: Kept, known: Known, reuse: UseHistory) -> Iterator[Entry]:
    """Yield an end for each group of blocks that were stored together, where prompts resume without snapshots."""
    for blocks in kept.blocks:
        path = _path(known, blocks.tree, [blocks.before, *block_hashes(blocks.before, blocks.tokens)][-1])
        if path is not None:
            position, use = len(path.addresses) * BLOCK_TOKENS, _use(blocks, reuse)
            end, kind = TierSnapshot(position, b""), SnapshotKind.GENERATION_END
            yield Copy(end, kind, use, position, is_shared=blocks.is_shared), blocks.tree, path


def _use(entry: KeptBlocks | KeptSnapshot, reuse: UseHistory) -> Use:
    return Use(reuse.now - int(entry.idle_s * TICKS_PER_S), entry.interarrival_bin)
