"""The tree of what tiers below the device hold: blocks and snapshots, by their tokens.

A *demoted* snapshot is one that the device has evicted, with those blocks on its path that the device has evicted too.
A block and a snapshot are in the tree once, whichever tiers store them. As on the device, a *run* is a sequence of
blocks without a branch (``paths.py``). A tier *has* each whole block on the path of a snapshot that it stores, and no
others: of a run, the first ones. For each tier, the run has the addresses of these in the tier's store. One without an
address is on the device, if the tier is the first, or is being written. A block that no tier has is removed, unless a
move under way pins it. The block that contains a snapshot's position is stored with the snapshot.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from strandline.cache.last_lookup import LastLookup
from strandline.cache.paths import SnapshotKey, descend, insert_above, position_of
from strandline.cache.traversal import runs_below
from strandline.cache.use import Use
from strandline.ids import BLOCK_TOKENS, NO_ADDRESS
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES


class TierRun:
    """Consecutive whole blocks on the paths of demoted snapshots, without a branch."""

    __slots__ = ("addresses", "children", "hashes", "keys", "parent", "snapshots", "start_block", "tokens")

    def __init__(self, parent: "TierRun | None", start_block: int, tokens: bytes, num_tiers: int) -> None:
        self.parent = parent
        """None for a root, which has no blocks, and for what has been removed."""
        self.start_block = start_block
        self.tokens = bytearray(tokens)
        """Those of the blocks, encoded."""
        self.addresses = [array("q") for _ in range(num_tiers)]
        """By tier: those of the blocks that it has, which are the first ones."""
        self.children: dict[bytes, TierRun] = {}
        """By their first blocks."""
        self.snapshots: dict[SnapshotKey, TierSnapshot] = {}
        self.keys: list[SnapshotKey] = []
        """The keys of ``snapshots``, sorted."""
        self.hashes: list[bytes] = []
        """The hashes of the blocks that events have announced, which are the first ones."""

    @property
    def end_block(self) -> int:
        return self.start_block + len(self.tokens) // BLOCK_KEY_BYTES

    @property
    def first_key(self) -> bytes:
        return bytes(self.tokens[:BLOCK_KEY_BYTES])

    def find_key(self, num_blocks: int, key: bytes = b"") -> int:
        """Return where a key is among the sorted ones, or would be."""
        return bisect_left(self.keys, (num_blocks, key))

    def ancestry(self) -> "Iterator[TierRun]":
        """Yield this run and those before it, the root last."""
        run: TierRun | None = self
        while run is not None:
            yield run
            run = run.parent


class PathEnd(NamedTuple):
    """The end of a path of whole blocks."""

    run: TierRun
    """The one with the last block, or the root."""
    depth: int
    """The number of blocks."""


class Blocks(NamedTuple):
    """Consecutive blocks of a run."""

    run: TierRun
    start: int
    """The index of the first one in the run."""
    end: int


Block = tuple[TierRun, int]
"""A run, and the index in it of one of its blocks."""


class Column:
    """What one tier has of a tree."""

    def __init__(self, tree: "TierTree", index: int) -> None:
        self.tree = tree
        self.index = index
        """Number of the tier, nearest first."""

    def addresses_in(self, run: TierRun) -> "array[int]":
        """Return the addresses of the blocks of a run that the tier has, which are the first ones."""
        return run.addresses[self.index]

    def num_blocks_in(self, run: TierRun) -> int:
        """Return how many of a run's blocks the tier has."""
        return len(run.addresses[self.index])

    def last_on_path(self, end: PathEnd) -> PathEnd:
        """Return how much of a path the tier has."""
        run, depth = end
        while run.parent is not None:
            if num_blocks := self.num_blocks_in(run):
                return PathEnd(run, min(depth, run.start_block + num_blocks))
            run, depth = run.parent, run.start_block
        return PathEnd(run, 0)

    def num_children(self, end: PathEnd) -> int:
        """Count the continuations of a path that the tier has."""
        run, depth = end
        if depth < run.end_block:
            return int(run.start_block + self.num_blocks_in(run) > depth)
        return sum(self.num_blocks_in(child) > 0 for child in run.children.values())

    def addresses(self, end: PathEnd, first: int = 0) -> "array[int]":
        """Return the addresses of the blocks of a path that the tier has, from ``first`` on."""
        found = array("q")
        for blocks in pieces(end, first):
            found += self.addresses_in(blocks.run)[blocks.start : blocks.end]
        return found

    def copy(self, run: TierRun, key: SnapshotKey) -> "Copy | None":
        """Return the tier's copy of a snapshot of a run, if it has one."""
        return run.snapshots[key].copies[self.index]

    def copies(self, run: TierRun) -> "Iterator[Copy]":
        """Yield the tier's snapshots of a run, in the order in which they have entered the tree."""
        return filter(None, (self.copy(run, key) for key in run.snapshots))

    def copies_after(self, run: TierRun, depth: int) -> "Iterator[Copy]":
        """Yield the tier's snapshots of a run between the end of the block at a depth and that of the next one."""
        keys = run.keys[run.find_key(depth) : run.find_key(depth + 1)]
        return filter(None, (self.copy(run, key) for key in keys))

    def first_after(self, run: TierRun, depth: int) -> "Copy | None":
        """Return the tier's first snapshot of a run after the block at a depth and the next one."""
        for num_blocks, _ in run.keys[run.find_key(depth + 1) :]:
            first = min(self.copies_after(run, num_blocks), key=lambda copy: copy.position, default=None)
            if first is not None:
                return first
        return None

    def copies_on(self, end: PathEnd, data: bytes | bytearray, *, beyond: int = -1) -> "Iterator[Copy]":
        """Yield the tier's snapshots on a path beyond a position, deepest first.

        Args:
            data: the tokens of the path and what follows, encoded.
        """
        for node in end.run.ancestry():
            if (node.end_block + 1) * BLOCK_TOKENS <= beyond:
                return
            # Of the keys that the path begins with, after the same number of blocks, the longest is the last.
            for index in range(node.find_key(end.depth + 1) - 1, -1, -1):
                copy = self.copy(node, node.keys[index])
                if copy is not None and data.startswith(copy.snapshot.rest, copy.snapshot.num_blocks * BLOCK_KEY_BYTES):
                    if copy.position <= beyond:
                        return
                    yield copy

    def below(self, run: TierRun, depth: int = 0) -> "Iterator[Copy]":
        """Yield the tier's snapshots after the block at a depth that a run contains, and below."""
        for node in runs_below(run):
            found = [copy for copy in self.copies(node) if copy.snapshot.num_blocks >= depth]
            yield from sorted(found, key=lambda copy: copy.snapshot.num_blocks)

    def enter(self, copy: "Copy") -> None:
        """Take in a copy of a snapshot of the tree, and the blocks before it."""
        copy.column, copy.snapshot.copies[self.index] = self, copy
        depth = copy.snapshot.num_blocks
        for run in copy.snapshot.ancestry():
            addresses = self.addresses_in(run)
            num_lacking = depth - run.start_block - len(addresses)
            if run.parent is None or num_lacking <= 0:
                return
            addresses.extend([NO_ADDRESS] * num_lacking)
            depth = run.start_block

    def blocks_for(self, copy: "Copy") -> list[Blocks]:
        """Return the blocks that the tier has for a copy alone, the deepest run first."""
        alone, below = list[Blocks](), None
        for run in copy.snapshot.ancestry():
            num_blocks = self.num_blocks_in(run)
            is_shared = any(child is not below and self.num_blocks_in(child) for child in run.children.values())
            if is_shared or run.parent is None:
                break
            others = (key for key in reversed(run.keys) if self.copy(run, key) not in (None, copy))
            num_shared = next(others, (run.start_block, b""))[0] - run.start_block
            if num_shared < num_blocks:
                alone.append(Blocks(run, num_shared, num_blocks))
            if num_shared:
                break
            below = run
        return alone

    def leave(self, copy: "Copy", alone: Iterable[Blocks]) -> PathEnd | None:
        """Drop a copy of a snapshot, and the blocks that the tier has for it alone; return what is left before it.

        Args:
            alone: the result of ``blocks_for``.
        """
        copy.column = copy.snapshot.copies[self.index] = None
        copy.last_push = 0
        run, depth = copy.snapshot.home, copy.snapshot.num_blocks
        for blocks in alone:
            del self.addresses_in(blocks.run)[blocks.start :]
            run, depth = blocks.run if blocks.start else blocks.run.parent, blocks.run.start_block + blocks.start
        return None if run is None else PathEnd(run, depth)


class TierTree:
    """The trees of all salts.

    Args:
        num_tiers: tiers below the device.
        key: secret for hashing salts, where files outlive the process.
    """

    def __init__(self, num_tiers: int, key: bytes | None) -> None:
        self.roots: dict[str, TierRun] = {}
        """By name (``name``)."""
        self.salts: dict[str, str] = {}
        """By the name of a tree: those under which the device has evicted something."""
        self.columns = tuple(Column(self, index) for index in range(num_tiers))
        self.on_entered: Callable[[TierSnapshot], object] = _ignore
        """Called with each snapshot that has entered the tree."""
        self.on_left: Callable[[TierSnapshot, list[bytes]], object] = _ignore
        """Called with each snapshot that has left the tree, and the hashes of the announced blocks that have left with
        it, deepest first."""
        self._key = key
        self.revision = 0
        """Number of changes to the runs."""
        self.last = LastLookup[TierRun, PathEnd](_end_of)

    def name(self, salt: str) -> str:
        """Return the name of a salt's tree: the salt or, where files outlive the process, a keyed hash of it."""
        if self._key is None:
            return salt
        return blake2b(salt.encode(errors="surrogatepass"), key=self._key, digest_size=16).hexdigest()

    def open(self, salt: str) -> str:
        """Return the name of the tree of a salt under which the device evicts something."""
        tree = self.name(salt)
        self.salts[tree] = salt
        return tree

    def root(self, tree: str) -> TierRun:
        """Return the root of a tree; create it if needed."""
        root = self.roots.get(tree)
        if root is None:
            root = self.roots[tree] = self._new_run(None, 0, b"")
        return root

    def _new_run(self, parent: TierRun | None, start_block: int, tokens: bytes) -> TierRun:
        return TierRun(parent, start_block, tokens, len(self.columns))

    def walk(self, tree: str, data: bytes | bytearray, num_blocks: int) -> PathEnd | None:
        """Follow a path of encoded tokens for up to ``num_blocks`` blocks as far as it is there; None: no such tree."""
        root = self.roots.get(tree)
        return None if root is None else PathEnd(*descend(root, data, num_blocks))

    def end_of(self, salt: str, data: bytearray) -> PathEnd | None:
        """Return how much is there of a prompt, in whole blocks; None: there is nothing of its salt."""
        root = self.roots.get(self.name(salt))
        return None if root is None else self.last.find(root, data, self.revision)

    def find(self, tree: str, data: bytes | bytearray, num_blocks: int) -> PathEnd | None:
        """Return the end of a path of ``num_blocks`` blocks of encoded tokens, or None if not all of it is there."""
        end = self.walk(tree, data, num_blocks)
        return end if end is not None and end.depth == num_blocks else None

    def attach(self, snapshot: "TierSnapshot", tree: str, data: bytes | bytearray) -> "TierSnapshot":
        """Put a snapshot into a tree, unless it is there, with the blocks before it; return the one that is there now.

        Args:
            data: the tokens before it, encoded.
        """
        num_blocks = snapshot.num_blocks
        run, depth = descend(self.root(tree), data, num_blocks)
        if depth < num_blocks:
            run = self._grow(run, depth, bytes(data[depth * BLOCK_KEY_BYTES : num_blocks * BLOCK_KEY_BYTES]))
        found = run.snapshots.setdefault(snapshot.key, snapshot)
        if found.home is None:
            insort(run.keys, snapshot.key)
            found.home, found.tree, found.copies = run, tree, [None] * len(self.columns)
            self.on_entered(found)
        return found

    def _grow(self, run: TierRun, depth: int, tokens: bytes) -> TierRun:
        """Add blocks after the one of a run at a depth: to the run itself if nothing else continues it."""
        self.revision += 1
        if run.start_block < depth < run.end_block:
            run = self._split(run, depth - run.start_block)
        if run.parent is None or run.children:
            child = self._new_run(run, depth, tokens)
            run.children[child.first_key] = child
            return child
        run.tokens += tokens
        return run

    def _split(self, run: TierRun, count: int) -> TierRun:
        """Split a run after its first ``count`` blocks; return the upper part."""
        upper = self._new_run(run.parent, run.start_block, b"")
        insert_above(upper, run, count)
        upper.addresses = [addresses[:count] for addresses in run.addresses]
        run.addresses = [addresses[count:] for addresses in run.addresses]
        return upper

    def pin(self, snapshot: "TierSnapshot") -> None:
        """Keep a snapshot in the tree, with the blocks before it, until ``unpin``."""
        snapshot.num_pins += 1

    def unpin(self, snapshot: "TierSnapshot") -> None:
        """Remove a snapshot if neither a tier has it nor another pin keeps it."""
        snapshot.num_pins -= 1
        self.detach(snapshot)

    def detach(self, snapshot: "TierSnapshot") -> None:
        """Remove a snapshot from the tree, with the blocks that nothing else needs, unless it is used."""
        run = snapshot.home
        if run is not None and not snapshot.is_used:
            del run.snapshots[snapshot.key], run.keys[run.find_key(*snapshot.key)]
            snapshot.home = None
            self.on_left(snapshot, self._trim(run))

    def _trim(self, run: TierRun) -> list[bytes]:
        """Remove the blocks of a path after which nothing comes; return the hashes of those that were announced."""
        self.revision += 1
        gone = list[bytes]()
        while (parent := run.parent) is not None and not run.children:
            count = run.keys[-1][0] - run.start_block if run.keys else 0
            if not count:
                del parent.children[run.first_key]
                run.parent = None
            gone += run.hashes[count:][::-1]
            del run.hashes[count:], run.tokens[count * BLOCK_KEY_BYTES :]
            if count:
                break
            run = parent
        return gone


@dataclass(slots=True, eq=False)
class TierSnapshot:
    """A snapshot that the device has evicted, in the stores of one or several tiers, or on its way back."""

    key: SnapshotKey
    home: TierRun | None = None
    """The run with the last whole block before it; None: it is not in the tree (any more)."""
    tree: str = ""
    """The name of its tree."""
    copies: "list[Copy | None]" = field(default_factory=list)
    """By tier."""
    num_pins: int = 0
    """What keeps it in the tree, whether a tier has it or not: moves under way."""
    path_hash: bytes = b""
    """Its hash in events; empty: it is not announced."""

    @property
    def position(self) -> int:
        return position_of(self.key)

    @property
    def num_blocks(self) -> int:
        """The number of whole blocks before it."""
        return self.key[0]

    @property
    def rest(self) -> bytes:
        """The tokens from the end of the last whole block to its position, encoded."""
        return self.key[1]

    @property
    def end(self) -> PathEnd | None:
        """The end of the whole blocks before it; None: it is not in the tree."""
        return None if self.home is None else PathEnd(self.home, self.num_blocks)

    @property
    def is_used(self) -> bool:
        """Whether a tier has it or something pins it."""
        return self.num_pins > 0 or any(self.copies)

    @property
    def has_tail(self) -> bool:
        """Whether its position is inside a block."""
        return bool(self.rest)

    def ancestry(self) -> Iterator[TierRun]:
        """Yield the runs before it, the root last."""
        return iter(()) if self.home is None else self.home.ancestry()

    @property
    def whole_blocks(self) -> list[Blocks]:
        """The whole blocks before it, which it needs, in order."""
        return [] if self.end is None else pieces(self.end)

    def locate(self, indices: Collection[int]) -> dict[int, Block]:
        """Return those whole blocks before it that have these indices in its path, by index and in order."""
        if self.end is None or not indices:
            return {}
        return {
            run.start_block + own: (run, own)
            for run, start, stop in pieces(self.end, min(indices))
            for own in range(start, stop)
            if run.start_block + own in indices
        }

    def path(self) -> bytes:
        """Return the tokens before it, encoded."""
        runs = [run.tokens for run in self.ancestry()][::-1]
        return b"".join(runs)[: self.num_blocks * BLOCK_KEY_BYTES] + self.rest


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
    """Where it is stored; ``NO_ADDRESS``: it is the end of its blocks alone."""
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
        column, end = self.column, self.snapshot.end
        num_children = 0 if column is None or end is None else column.num_children(end)
        return max(int(self.is_interior), min(num_children, 2))


def _end_of(root: TierRun, data: bytearray) -> PathEnd:
    return PathEnd(*descend(root, data, len(data) // BLOCK_KEY_BYTES))


def pieces(end: PathEnd, first: int = 0) -> list[Blocks]:
    """Return the blocks of a path from ``first`` on, in order."""
    found = list[Blocks]()
    for node in end.run.ancestry():
        start, stop = max(first, node.start_block), min(end.depth, node.end_block)
        if start < stop:
            found.append(Blocks(node, start - node.start_block, stop - node.start_block))
        if node.start_block <= first:
            break
    return found[::-1]


def _ignore(*_: object) -> None:
    """Callback where nothing is announced."""
