"""What the stores of all ranks hold from an earlier process.

Each rank has its own files and numbers its addresses itself. A process that was killed may have written some files on
one rank only, and only what all ranks hold is of use. Files are matched by the paths of their tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, takewhile

from strandline.ids import NO_ADDRESS
from strandline.records.path_hashes import block_hashes
from strandline.records.persisted import PersistedBlocks, PersistedEntries, PersistedSnapshot
from strandline.records.tokens import BLOCK_KEY_BYTES

Content = tuple[str, bytes]
"""Identifies a block: a tree, and the hash of the path that ends with the block."""


def join_entries(parts: Sequence[PersistedEntries]) -> tuple[PersistedEntries, list[dict[int, int]]]:
    """Return what all ranks hold, under new addresses; other contents of files are those of the first rank.

    Args:
        parts: what each rank holds.

    Returns:
        What all hold, and for each rank a map from its addresses to the new ones, which omits what is of no use.
    """
    numbers, renames = count(NO_ADDRESS + 1), [dict[int, int]() for _ in parts]

    def rename(addresses: Iterable[int]) -> int:
        new = next(numbers)
        for rank, address in enumerate(addresses):
            renames[rank][address] = new
        return new

    blocks_of = [{content: address for blocks in part.blocks for content, address in _blocks(blocks)} for part in parts]
    snapshots_of = [{(x.tree, x.before, x.key): x for x in part.snapshots} for part in parts]
    new_addresses = dict[Content, int]()
    joined_blocks, joined_snapshots = list[PersistedBlocks](), list[PersistedSnapshot]()
    for blocks in parts[0].blocks:
        # What comes after a block that one rank lacks cannot be reached.
        common = list(takewhile(lambda content: all(content in own for own in blocks_of), dict(_blocks(blocks))))
        for content in common:
            if content not in new_addresses:
                new_addresses[content] = rename(own[content] for own in blocks_of)
        if common:
            tokens = blocks.tokens[: len(common) * BLOCK_KEY_BYTES]
            addresses = tuple(new_addresses[content] for content in common)
            joined_blocks.append(blocks._replace(tokens=tokens, addresses=addresses))
    for key, snapshot in snapshots_of[0].items():
        if all(key in own for own in snapshots_of):
            address, tail_address = rename(own[key].address for own in snapshots_of), NO_ADDRESS
            if snapshot.tail_address != NO_ADDRESS:
                tail_address = rename(own[key].tail_address for own in snapshots_of)
            joined_snapshots.append(snapshot._replace(address=address, tail_address=tail_address))
    return PersistedEntries(tuple(joined_blocks), tuple(joined_snapshots)), renames


def _blocks(blocks: PersistedBlocks) -> Iterator[tuple[Content, int]]:
    """Yield the identity and the address of each block."""
    for path_hash, address in zip(block_hashes(blocks.before, blocks.tokens), blocks.addresses, strict=True):
        yield (blocks.tree, path_hash), address
