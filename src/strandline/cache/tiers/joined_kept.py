"""What the stores of all ranks hold from an earlier process.

Each rank has files of its own and numbers its places itself. A process that was killed may have written some of them on
one rank alone: only what all ranks hold is of use. Files are matched by the paths of tokens that they are for.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, takewhile

from strandline.cache.tiers.resting import NO_PLACE
from strandline.records.kept import Kept, KeptBlocks, KeptSnapshot
from strandline.records.path_hashes import block_hashes
from strandline.records.tokens import BLOCK_KEY_BYTES

Content = tuple[str, bytes]
"""What a block is for: a tree and the hash of the path that the block ends."""


def join_kept(parts: Sequence[Kept]) -> tuple[Kept, list[dict[int, int]]]:
    """Return what all ranks hold, under new places; other contents of files are those of the first rank.

    Args:
        parts: what each rank holds.

    Returns:
        Beside it, for each rank, the new places by its own. What has none is of no use.
    """
    numbers, renames = count(NO_PLACE + 1), [dict[int, int]() for _ in parts]

    def rename(places: Iterable[int]) -> int:
        new = next(numbers)
        for rank, place in enumerate(places):
            renames[rank][place] = new
        return new

    blocks_of = [{content: place for blocks in part.blocks for content, place in _blocks(blocks)} for part in parts]
    snapshots_of = [{(x.tree, x.before, x.key): x for x in part.snapshots} for part in parts]
    new_places = dict[Content, int]()
    joined_blocks, joined_snapshots = list[KeptBlocks](), list[KeptSnapshot]()
    for blocks in parts[0].blocks:
        # What comes after a block that one rank lacks cannot be reached.
        common = list(takewhile(lambda content: all(content in own for own in blocks_of), dict(_blocks(blocks))))
        for content in common:
            if content not in new_places:
                new_places[content] = rename(own[content] for own in blocks_of)
        if common:
            tokens = blocks.tokens[: len(common) * BLOCK_KEY_BYTES]
            places = tuple(new_places[content] for content in common)
            joined_blocks.append(blocks._replace(tokens=tokens, places=places))
    for key, snapshot in snapshots_of[0].items():
        if all(key in own for own in snapshots_of):
            slot = rename(own[key].slot for own in snapshots_of)
            tail = rename(own[key].tail for own in snapshots_of) if snapshot.tail != NO_PLACE else NO_PLACE
            joined_snapshots.append(snapshot._replace(slot=slot, tail=tail))
    return Kept(tuple(joined_blocks), tuple(joined_snapshots)), renames


def _blocks(blocks: KeptBlocks) -> Iterator[tuple[Content, int]]:
    """Yield what each block is for, and its place."""
    for path_hash, place in zip(block_hashes(blocks.before, blocks.tokens), blocks.places, strict=True):
        yield (blocks.tree, path_hash), place
