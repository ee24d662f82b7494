"""What tiers below the device have of the index: columns of its runs, and *demoted* runs, which the device lacks.

The core imports none of this; it moves it with the runs (``Stored`` in ``tree.py``).
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from strandline.cache.tiers.paths import Block, Blocks, path_to, pieces
from strandline.cache.traversal import continuations, stored_keys
from strandline.cache.tree import Run, SnapshotKey, position_of
from strandline.cache.use import Use
from strandline.cache.walk import PathEnd, common_blocks
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NO_ADDRESS, NULL_BLOCK
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, common_tokens


class StoredRun:
    """What tiers have of a run and after it. Implements ``Stored``."""

    __slots__ = ("addresses", "demoted", "keys", "snapshots")

    def __init__(self, addresses: "list[array[int]]") -> None:
        self.addresses = addresses
        """By tier: those of the blocks that it has, which are the first ones."""
        self.snapshots: dict[SnapshotKey, TierSnapshot] = {}
        self.keys: list[SnapshotKey] = []
        """The keys of ``snapshots``, sorted."""
        self.demoted: dict[bytes, Run] = {}
        """Continuations of the run that the device does not have, by their first blocks."""

    def split(self, upper: Run, count: int) -> "StoredRun":
        first = StoredRun([addresses[:count] for addresses in self.addresses])
        self.addresses = [addresses[count:] for addresses in self.addresses]
        num_upper = bisect_left(self.keys, (upper.start_block + count + 1, b""))
        first.keys, self.keys = self.keys[:num_upper], self.keys[num_upper:]
        first.snapshots = {key: self.snapshots.pop(key) for key in first.keys}
        first.belong_to(upper)
        return first

    def take_out(self, key: bytes) -> Run | None:
        run = self.demoted.pop(key[:BLOCK_KEY_BYTES], None)
        if run is not None:
            num_blocks = min(len(key), len(run.tokens)) // BLOCK_KEY_BYTES
            cut_demoted(run, common_blocks(run.tokens, key, 0, num_blocks + 1))
        return run

    def join(self, run: Run, lower: Run) -> None:
        if len(run.hashes) == run.end_block - run.start_block:
            run.hashes += lower.hashes
        run.num_announced += lower.num_announced
        stored = stored_for(lower, len(self.addresses))
        for addresses, more in zip(self.addresses, stored.addresses, strict=True):
            addresses.extend(more)
        self.keys += stored.keys
        self.snapshots |= stored.snapshots
        self.demoted = stored.demoted
        self.belong_to(run)

    def belong_to(self, run: Run) -> None:
        """Link the snapshots and the demoted continuations to a run."""
        for snapshot in self.snapshots.values():
            snapshot.home = run
        for child in self.demoted.values():
            child.parent = run


def stored_of(run: Run) -> StoredRun | None:
    """Return what tiers have of a run and after it, or None."""
    stored = run.stored
    return stored if isinstance(stored, StoredRun) else None


def stored_for(run: Run, num_tiers: int) -> StoredRun:
    """Return what tiers have of a run and after it; a new, empty entry if they have nothing."""
    stored = stored_of(run)
    if stored is None:
        stored = run.stored = StoredRun([array("q") for _ in range(num_tiers)])
    return stored


def demoted_run(parent: Run, start_block: int, tokens: bytes) -> Run:
    """Return a run that the device does not have."""
    return Run(parent, start_block, tokens, array("i", [NULL_BLOCK]) * (len(tokens) // BLOCK_KEY_BYTES))


def cut_demoted(run: Run, count: int) -> None:
    """Give what a demoted run has after its first ``count`` blocks to a demoted run after it, if there is anything."""
    if count < len(run.blocks):
        cut_off(run, count)
        del run.blocks[count:], run.tokens[count * BLOCK_KEY_BYTES :]


def cut_off(run: Run, count: int) -> Run:
    """Give what tiers have of a run after its first ``count`` blocks to a new demoted run; leave its tokens and blocks.

    Args:
        run: one without children on the device.
    """
    stored = stored_of(run)
    if stored is None or run.parent is None:
        raise CacheInvariantError(f"tiers have nothing of blocks [{run.start_block}, {run.end_block})")
    parent, at_block = run if count else run.parent, run.start_block + count
    lower = demoted_run(parent, at_block, bytes(run.tokens[count * BLOCK_KEY_BYTES :]))
    lower.hashes, run.hashes = run.hashes[count:], run.hashes[:count]
    lower.num_announced = max(run.num_announced - count, 0)
    run.num_announced -= lower.num_announced
    lower.stored, run.stored = stored, stored.split(run, count)
    stored.belong_to(lower)
    stored_for(parent, len(stored.addresses)).demoted[lower.first_key] = lower
    return lower


class Column:
    """What one tier has of a tree."""

    def __init__(self, index: int) -> None:
        self.index = index
        """Number of the tier, nearest first."""

    def addresses_in(self, run: Run) -> "array[int]":
        """Return the addresses of the blocks of a run that the tier has, which are the first ones."""
        stored = stored_of(run)
        return _NONE if stored is None else stored.addresses[self.index]

    def num_blocks_in(self, run: Run) -> int:
        """Return how many of a run's blocks the tier has."""
        stored = stored_of(run)
        return 0 if stored is None else len(stored.addresses[self.index])

    def last_on_path(self, end: PathEnd) -> PathEnd:
        """Return how much of a path the tier has."""
        run, depth = end
        while run.parent is not None:
            if num_blocks := self.num_blocks_in(run):
                return PathEnd(run, min(depth, run.start_block + num_blocks))
            run, depth = run.parent, run.start_block
        return PathEnd(run, 0)

    def num_children(self, end: PathEnd) -> int:
        """Count the continuations of a path that the tier has, up to two: more of them make no difference."""
        run, depth = end
        if depth < run.end_block:
            return int(run.start_block + self.num_blocks_in(run) > depth)
        return len(list(islice(filter(self.num_blocks_in, continuations(run)), 2)))

    def addresses(self, end: PathEnd, first: int = 0) -> "array[int]":
        """Return the addresses of the blocks of a path that the tier has, from ``first`` on."""
        found = array("q")
        for blocks in pieces(end, first):
            found += self.addresses_in(blocks.run)[blocks.start : blocks.end]
        return found

    def copy(self, run: Run, key: SnapshotKey) -> "Copy | None":
        """Return the tier's copy of a snapshot of a run, if it has one."""
        stored = stored_of(run)
        snapshot = None if stored is None else stored.snapshots.get(key)
        return None if snapshot is None else snapshot.copies[self.index]

    def copies(self, run: Run) -> "Iterator[Copy]":
        """Yield the tier's snapshots of a run, in the order of their keys."""
        return filter(None, (self.copy(run, key) for key in stored_keys(run)))

    def copies_after(self, run: Run, depth: int, tail: bytes = b"") -> "Iterator[Copy]":
        """Yield the tier's snapshots of a run that follow exactly ``depth`` whole blocks and tokens."""
        keys = stored_keys(run)
        for index in range(find_key(run, depth, tail), len(keys)):
            num_blocks, longer = key = keys[index]
            if num_blocks > depth or not longer.startswith(tail):
                return
            if (copy := self.copy(run, key)) is not None:
                yield copy

    def first_after(self, run: Run, depth: int) -> "Copy | None":
        """Return the tier's first snapshot of a run that follows more than ``depth`` whole blocks, or None."""
        keys = stored_keys(run)
        for index in range(find_key(run, depth + 1), len(keys)):
            if self.copy(run, keys[index]) is not None:
                return min(self.copies_after(run, keys[index][0]), key=lambda copy: copy.position)
        return None

    def above(self, snapshot: "TierSnapshot") -> "Copy | None":
        """Return the tier's deepest snapshot above one, or None."""
        depth, tail = snapshot.key
        for run in snapshot.home.ancestry():
            copy = next(self.copies_before(run, find_key(run, depth, tail), depth, tail), None)
            if copy is not None:
                return copy
            depth, tail = run.start_block, run.first_key
        return None

    def copies_on(self, end: PathEnd, data: bytes | bytearray, *, beyond: int = -1) -> "Iterator[Copy]":
        """Yield the tier's snapshots on a path beyond a position, deepest first.

        Args:
            data: the tokens of the path and what follows, encoded.
        """
        depth = end.depth
        for run in end.run.ancestry():
            if (run.end_block + 1) * BLOCK_TOKENS <= beyond:
                return
            tail = bytes(data[depth * BLOCK_KEY_BYTES : (depth + 1) * BLOCK_KEY_BYTES])
            for copy in self.copies_before(run, find_key(run, depth + 1), depth, tail):
                if copy.position <= beyond:
                    return
                yield copy
            depth = run.start_block

    def copies_before(self, run: Run, end: int, depth: int, tail: bytes) -> "Iterator[Copy]":
        """Yield the tier's snapshots on a path through a run, of the first ``end`` that tiers have, deepest first.

        Args:
            depth: whole blocks of the path, no more than up to the end of the run.
            tail: tokens of the path after these, encoded.
        """
        keys = stored_keys(run)
        while end:
            num_blocks, own_tail = key = keys[end - 1]
            tokens = _block_after(run, num_blocks) if num_blocks < depth else tail
            if tokens.startswith(own_tail):
                end -= 1
                if (copy := self.copy(run, key)) is not None:
                    yield copy
            else:
                # Of the snapshots after the same number of blocks, a path has only those whose tails it begins with.
                last = tokens if own_tail > tokens else tokens[: common_tokens(own_tail, tokens) * TOKEN_BYTES]
                end = bisect_right(keys, (num_blocks, last), hi=end - 1)

    def below(self, run: Run, depth: int = 0) -> "Iterator[Copy]":
        """Yield the tier's snapshots of a run, and below it, that follow at least ``depth`` whole blocks."""
        waiting = [run]
        while waiting:
            node = waiting.pop()
            found = [copy for copy in self.copies(node) if copy.snapshot.num_blocks >= depth]
            yield from sorted(found, key=lambda copy: copy.snapshot.num_blocks)
            waiting += filter(self.num_blocks_in, continuations(node))

    def enter(self, copy: "Copy") -> None:
        """Take in a copy of a snapshot of the tree, and the blocks before it."""
        copy.column, copy.snapshot.copies[self.index] = self, copy
        depth = copy.snapshot.num_blocks
        for run in copy.snapshot.home.ancestry():
            if run.parent is None:
                return
            addresses = stored_for(run, len(copy.snapshot.copies)).addresses[self.index]
            num_lacking = depth - run.start_block - len(addresses)
            if num_lacking <= 0:
                return
            addresses.extend([NO_ADDRESS] * num_lacking)
            depth = run.start_block

    def blocks_for(self, copy: "Copy") -> list[Blocks]:
        """Return the blocks that the tier has for a copy alone, the deepest run first."""
        alone, below = list[Blocks](), None
        for run in copy.snapshot.home.ancestry():
            num_blocks = self.num_blocks_in(run)
            is_shared = any(child is not below and self.num_blocks_in(child) for child in continuations(run))
            if is_shared or run.parent is None:
                break
            others = (key for key in reversed(stored_keys(run)) if self.copy(run, key) not in (None, copy))
            num_shared = next(others, (run.start_block, b""))[0] - run.start_block
            if num_shared < num_blocks:
                alone.append(Blocks(run, num_shared, num_blocks))
            if num_shared:
                break
            below = run
        return alone

    def leave(self, copy: "Copy", alone: Iterable[Blocks]) -> PathEnd:
        """Drop a copy of a snapshot, and the blocks that the tier has for it alone; return what is left before it.

        Args:
            alone: the result of ``blocks_for``.
        """
        copy.column = copy.snapshot.copies[self.index] = None
        copy.last_push = 0
        run, depth = copy.snapshot.home, copy.snapshot.num_blocks
        for blocks in alone:
            del self.addresses_in(blocks.run)[blocks.start :]
            run, depth = blocks.run, blocks.run.start_block + blocks.start
        if depth == run.start_block and run.parent is not None:
            run = run.parent
        return PathEnd(run, depth)


@dataclass(slots=True, eq=False)
class TierSnapshot:
    """A snapshot that the device has evicted, in the stores of one or several tiers, or on its way back."""

    home: Run
    """The run with the last whole block before it, or the root."""
    key: SnapshotKey
    copies: "list[Copy | None]" = field(default_factory=list)
    """By tier."""
    num_pins: int = 0
    """What keeps it in the tree, whether a tier has it or not: moves under way."""

    @property
    def position(self) -> int:
        return position_of(self.key)

    @property
    def num_blocks(self) -> int:
        """The number of whole blocks before it."""
        return self.key[0]

    @property
    def tail(self) -> bytes:
        """The tokens from the end of the last whole block to its position, encoded."""
        return self.key[1]

    @property
    def end(self) -> PathEnd:
        """The end of the whole blocks before it."""
        return PathEnd(self.home, self.num_blocks)

    @property
    def is_used(self) -> bool:
        """Whether a tier has it or something pins it."""
        return self.num_pins > 0 or any(self.copies)

    @property
    def has_tail(self) -> bool:
        """Whether its position is inside a block."""
        return bool(self.tail)

    def locate(self, indices: Collection[int]) -> dict[int, Block]:
        """Return those whole blocks before it that have these indices in its path, by index and in order."""
        if not indices:
            return {}
        return {
            run.start_block + own: (run, own)
            for run, start, stop in pieces(self.end, min(indices))
            for own in range(start, stop)
            if run.start_block + own in indices
        }

    def path(self) -> bytes:
        """Return the tokens before it, encoded."""
        return path_to(self.home)[1][: self.num_blocks * BLOCK_KEY_BYTES] + self.tail


@dataclass(slots=True, eq=False)
class Copy:
    """A snapshot as one tier stores it, or as one would."""

    snapshot: TierSnapshot
    kind: SnapshotKind
    use: Use
    saved_tokens: int
    """Tokens since the nearest snapshot above, on the device or in the tier."""
    is_shared: bool = False
    is_superseded: bool = False
    is_interior: bool = False
    """Whether its path continued when it was evicted."""
    column: Column | None = None
    """That of the tier; None: it is not in a tier (any more)."""
    address: int = NO_ADDRESS
    """Where its states and windows are stored; ``NO_ADDRESS``: it has none, and is only the end of its blocks."""
    tail_address: int = NO_ADDRESS
    """Address of the block that contains its position; ``NO_ADDRESS``: it is at a block's end."""
    num_moves: int = 0
    """Moves under way that read or write it, or blocks before it: it is not evicted."""
    last_push: int = 0
    """The number of its last push onto the eviction queue; 0: it is not there."""

    @property
    def position(self) -> int:
        return self.snapshot.position

    @property
    def num_continuations(self) -> int:
        """Continuations of its path, up to two: those in the tier, or one if it was evicted before its continuation."""
        num_children = 0 if self.column is None else self.column.num_children(self.snapshot.end)
        return max(int(self.is_interior), num_children)


_NONE = array("q")


def _block_after(run: Run, num_blocks: int) -> bytes:
    """Return the tokens of the block of a run that follows a number of whole blocks, encoded."""
    start = (num_blocks - run.start_block) * BLOCK_KEY_BYTES
    return bytes(run.tokens[start : start + BLOCK_KEY_BYTES])


def find_key(run: Run, num_blocks: int, tail: bytes = b"") -> int:
    """Return the index of a key among the sorted keys of a run's snapshots in tiers, or where it would be inserted."""
    return bisect_left(stored_keys(run), (num_blocks, tail))
