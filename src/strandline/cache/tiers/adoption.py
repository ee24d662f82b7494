"""Adoption: rebuilds what a store has of the tree from the descriptions of files that an earlier process has written.

Snapshots whose blocks are lost are dropped, and so are blocks that no snapshot needs. Where attention has windows,
snapshots need only the blocks of their windows, and have the tokens of the others. Uses are dated back by how long the
files have not been used.
"""

from collections import defaultdict
from collections.abc import Iterator

from strandline.cache.policy.reuse import TICKS_PER_S
from strandline.cache.tiers.lower_tier import ANY_WORTH, LowerTier
from strandline.cache.tiers.tier_tree import NO_ADDRESS, Copy, TierBlock, TierSnapshot, nodes_from, position_above
from strandline.cache.use import Use, UseHistory
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import SnapshotKind
from strandline.records.kept import Kept, KeptBlocks, KeptSnapshot
from strandline.records.path_hashes import block_hashes, root_hash
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

Nodes = dict[tuple[str, bytes], tuple[TierBlock, int]]
"""By tree and hash of a path: its last block, and how many there are."""


def last_address(kept: Kept) -> int:
    """Return the highest address in use."""
    return max(_sizes(kept, 1), default=NO_ADDRESS)


def adopt(tier: LowerTier, kept: Kept, reuse: UseHistory) -> None:
    """Enter what a store holds into its empty tier; evict what is worth least if that is too much."""
    sizes = _sizes(kept, tier.slot_blocks)
    tier.num_used = sum(sizes.values())
    nodes = _link(tier, kept)
    entries = _snapshots(tier, kept, nodes, reuse) if tier.slot_blocks else _ends(kept, nodes, reuse)
    for demoted, tree, block in sorted(entries, key=lambda entry: entry[0].position):
        if tier.copy_of(block, demoted.snapshot.key) is None:
            data = _path_of(block) + demoted.snapshot.key
            demoted.saved_tokens -= position_above(tier.column, tier.tree.root(tree), data, demoted.position)
            tier.enter(demoted, tree, data)
    for demoted in tier.snapshots():
        sizes.pop(demoted.address, None)
        sizes.pop(demoted.tail_address, None)
    for node, _ in nodes.values():
        if tier.is_needed(node):
            sizes.pop(tier.address(node), None)
        else:
            tier.column.addresses[node.row] = NO_ADDRESS
    for node, _ in nodes.values():
        tier.tree.prune(node)
    tier.free(sizes)
    tier.make_room(0, ANY_WORTH)


def _sizes(kept: Kept, slot_blocks: int) -> dict[int, int]:
    """Return the sizes of all addresses."""
    sizes = {address: 1 for blocks in kept.blocks for address in blocks.addresses}
    for snapshot in kept.snapshots:
        sizes |= {snapshot.slot: slot_blocks, snapshot.tail: 1}
    sizes.pop(NO_ADDRESS, None)
    return sizes


def _link(tier: LowerTier, kept: Kept) -> Nodes:
    """Build the trees of blocks, as far as paths are whole."""
    waiting = defaultdict[tuple[str, bytes], list[KeptBlocks]](list)
    for blocks in (*kept.blocks, *map(_path_without_addresses, kept.snapshots)):
        waiting[blocks.tree, blocks.before].append(blocks)
    nodes: Nodes = {}
    for tree in dict.fromkeys([*(x.tree for x in kept.blocks), *(x.tree for x in kept.snapshots)]):
        root = tier.tree.root(tree)
        reached = [(root_hash(tree), root, 0)]
        while reached:
            before, node, num_blocks = reached.pop()
            nodes[tree, before] = node, num_blocks
            for blocks in waiting.pop((tree, before), ()):
                reached += _append(tier, node, num_blocks, blocks)
    return nodes


def _append(
    tier: LowerTier, node: TierBlock, num_blocks: int, blocks: KeptBlocks
) -> Iterator[tuple[bytes, TierBlock, int]]:
    """Append blocks to a path; yield the hash, the node and the number of blocks of each path that there is now."""
    hashes = block_hashes(blocks.before, blocks.tokens)
    for index, (path_hash, address) in enumerate(zip(hashes, blocks.addresses, strict=True)):
        key = blocks.tokens[index * BLOCK_KEY_BYTES : (index + 1) * BLOCK_KEY_BYTES]
        node = node.children.get(key) or tier.tree.add_child(node, key)
        tier.column.addresses[node.row] = tier.address(node) or address
        yield path_hash, node, num_blocks + index + 1


def _path_without_addresses(snapshot: KeptSnapshot) -> KeptBlocks:
    """Return the whole blocks that a snapshot has the tokens of, without addresses."""
    num_blocks = len(snapshot.key) // BLOCK_KEY_BYTES
    tokens = snapshot.key[: num_blocks * BLOCK_KEY_BYTES]
    return KeptBlocks(snapshot.tree, snapshot.before, tokens, (NO_ADDRESS,) * num_blocks, 0, 0.0, False)


Entry = tuple[Copy, str, TierBlock]


def _snapshots(tier: LowerTier, kept: Kept, nodes: Nodes, reuse: UseHistory) -> Iterator[Entry]:
    """Yield the snapshots that have all blocks that they need, with the tree and the last block of each."""
    for snapshot in kept.snapshots:
        before, inside = snapshot.before, len(snapshot.key) % BLOCK_KEY_BYTES
        found = nodes.get((snapshot.tree, [before, *block_hashes(before, snapshot.key)][-1]))
        if found is None or bool(snapshot.tail) != bool(inside):
            continue
        block, num_blocks = found
        position = num_blocks * BLOCK_TOKENS + inside // TOKEN_BYTES
        num_needed = num_blocks - tier.first_needed(position)
        if tier.has_windows and num_needed and not all(map(tier.address, nodes_from(block, num_needed))):
            continue
        key, use = snapshot.key[len(snapshot.key) - inside :], _use(snapshot, reuse)
        demoted = Copy(TierSnapshot(position, key), snapshot.kind, use, position, is_shared=snapshot.is_shared)
        demoted.address, demoted.tail_address = snapshot.slot, snapshot.tail
        yield demoted, snapshot.tree, block


def _ends(kept: Kept, nodes: Nodes, reuse: UseHistory) -> Iterator[Entry]:
    """Yield an end for each group of blocks that were stored together, for models that keep no states."""
    for blocks in kept.blocks:
        found = nodes.get((blocks.tree, [blocks.before, *block_hashes(blocks.before, blocks.tokens)][-1]))
        if found is not None:
            position, use = found[1] * BLOCK_TOKENS, _use(blocks, reuse)
            end, kind = TierSnapshot(position, b""), SnapshotKind.GENERATION_END
            yield Copy(end, kind, use, position, is_shared=blocks.is_shared), blocks.tree, found[0]


def _use(entry: KeptBlocks | KeptSnapshot, reuse: UseHistory) -> Use:
    return Use(reuse.now - int(entry.idle_s * TICKS_PER_S), entry.interarrival_bin)


def _path_of(block: TierBlock) -> bytes:
    return b"".join(node.key for node in list(block.ancestry())[::-1])
