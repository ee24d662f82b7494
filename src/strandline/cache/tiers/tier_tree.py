"""What tiers below the device have of the prefix index: blocks and snapshots, by their tokens.

A *demoted* snapshot is one that the device has evicted, with those blocks on its path that the device has evicted too.
A block is in the tree (``cache/tree.py``) once, whichever memories have it. A tier *has* each whole block on the path
of a snapshot that it stores, and no others: of a run, the first ones. For each tier, ``Run.stored`` has the addresses
of these in the tier's store. One without an address is on the device, if the tier is the first, or is being written. A
block that neither the device nor a tier has is removed, unless a move under way pins it. The block that contains a
snapshot's position is stored with the snapshot.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from strandline.cache.announcing.announcer import Announcer
from strandline.cache.index import MAX_EMPTY_ROOTS, PrefixIndex
from strandline.cache.last_lookup import LastLookup
from strandline.cache.memory import CacheMemory
from strandline.cache.stored import (
    StoredRun,
    continuations,
    cut_demoted,
    cut_off,
    demoted_after,
    demoted_run,
    descend_below,
    is_on_device,
    stored_for,
    stored_keys,
    stored_of,
)
from strandline.cache.tiers.paths import Block, Blocks, PathEnd, pieces
from strandline.cache.tree import Run, SnapshotKey, path_to, position_of
from strandline.cache.use import Use
from strandline.cache.walk import Walk
from strandline.ids import BLOCK_TOKENS, NO_ADDRESS, NULL_BLOCK
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES


class Column:
    """What one tier has of a tree."""

    def __init__(self, tree: "TierTree", index: int) -> None:
        self.tree = tree
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
        """Count the continuations of a path that the tier has."""
        run, depth = end
        if depth < run.end_block:
            return int(run.start_block + self.num_blocks_in(run) > depth)
        return sum(self.num_blocks_in(child) > 0 for child in continuations(run))

    def addresses(self, end: PathEnd, first: int = 0) -> "array[int]":
        """Return the addresses of the blocks of a path that the tier has, from ``first`` on."""
        found = array("q")
        for blocks in pieces(end, first):
            found += self.addresses_in(blocks.run)[blocks.start : blocks.end]
        return found

    def copy(self, run: Run, key: SnapshotKey) -> "Copy | None":
        """Return the tier's copy of a snapshot of a run, if it has one."""
        stored = stored_of(run)
        snapshot: TierSnapshot | None = None if stored is None else stored.snapshots.get(key)
        return None if snapshot is None else snapshot.copies[self.index]

    def copies(self, run: Run) -> "Iterator[Copy]":
        """Yield the tier's snapshots of a run, in the order in which they have entered the tree."""
        return filter(None, (self.copy(run, key) for key in stored_keys(run)))

    def copies_after(self, run: Run, depth: int) -> "Iterator[Copy]":
        """Yield the tier's snapshots of a run between the end of the block at a depth and that of the next one."""
        keys = stored_keys(run)[find_key(run, depth) : find_key(run, depth + 1)]
        return filter(None, (self.copy(run, key) for key in keys))

    def first_after(self, run: Run, depth: int) -> "Copy | None":
        """Return the tier's first snapshot of a run after the block at a depth and the next one."""
        for num_blocks, _ in stored_keys(run)[find_key(run, depth + 1) :]:
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
            stored = stored_of(node)
            if stored is None:
                continue
            # Of the keys that the path begins with, after the same number of blocks, the longest is the last.
            for index in range(find_key(node, end.depth + 1) - 1, -1, -1):
                snapshot: TierSnapshot = stored.snapshots[stored.keys[index]]
                copy = snapshot.copies[self.index]
                if copy is not None and data.startswith(copy.snapshot.rest, copy.snapshot.num_blocks * BLOCK_KEY_BYTES):
                    if copy.position <= beyond:
                        return
                    yield copy

    def below(self, run: Run, depth: int = 0) -> "Iterator[Copy]":
        """Yield the tier's snapshots after the block at a depth that a run contains, and below."""
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
        for run in copy.snapshot.ancestry():
            if run.parent is None:
                return
            addresses = self.tree.stored(run).addresses[self.index]
            num_lacking = depth - run.start_block - len(addresses)
            if num_lacking <= 0:
                return
            addresses.extend([NO_ADDRESS] * num_lacking)
            depth = run.start_block

    def blocks_for(self, copy: "Copy") -> list[Blocks]:
        """Return the blocks that the tier has for a copy alone, the deepest run first."""
        alone, below = list[Blocks](), None
        for run in copy.snapshot.ancestry():
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
    """What tiers have of the trees of all salts.

    Args:
        num_tiers: tiers below the device.
        key: secret for hashing salts, where files outlive the process.
        index: that of the device.
        memory: that of the device.
        announcer: collects events; None: they are off.
    """

    def __init__(
        self,
        num_tiers: int,
        key: bytes | None,
        index: PrefixIndex,
        memory: CacheMemory,
        announcer: Announcer | None = None,
    ) -> None:
        self.roots: dict[str, Run] = {}
        """By name (``name``)."""
        self.columns = tuple(Column(self, number) for number in range(num_tiers))
        self._key = key
        self._index = index
        self._memory = memory
        self._announcer = announcer
        self._unknown = set[str]()
        """Names of the trees whose salts no request has had yet."""
        self.last = LastLookup[Run, PathEnd](_end_of)
        index.new_root = self._root_of

    @property
    def revision(self) -> int:
        """Number of changes to the runs."""
        return self._memory.revision

    def name(self, salt: str) -> str:
        """Return the name of a salt's tree: the salt or, where files outlive the process, a keyed hash of it."""
        if self._key is None:
            return salt
        return blake2b(salt.encode(errors="surrogatepass"), key=self._key, digest_size=16).hexdigest()

    def root(self, tree: str) -> Run:
        """Return the root of a tree; create it if needed."""
        root = self.roots.get(tree)
        if root is None:
            root = self.roots[tree] = Run(None, 0, b"", array("i"))
            if tree != self.name(""):
                self._unknown.add(tree)
        return root

    def _root_of(self, salt: str) -> Run:
        """Return the root of a salt's tree, which is known from now on."""
        if len(self.roots) >= 2 * MAX_EMPTY_ROOTS:
            in_use = {id(root) for root in self._index.roots.values()}
            self.roots = {n: r for n, r in self.roots.items() if id(r) in in_use or demoted_after(r) or stored_keys(r)}
            self._unknown &= self.roots.keys()
        tree = self.name(salt)
        root = self.root(tree)
        if tree in self._unknown:
            self._unknown.remove(tree)
            root.salt = salt
            if self._announcer is not None:
                self._announcer.add_root(root)
        return root

    def known_roots(self) -> tuple[Run, ...]:
        """Return the roots of the trees whose salts are known."""
        return tuple(root for tree, root in self.roots.items() if tree not in self._unknown)

    def stored(self, run: Run) -> StoredRun:
        """Return what the tiers have of a run; enter that they will have something, if they have not."""
        return stored_for(run, len(self.columns))

    def walk(self, tree: str, data: bytes | bytearray, num_blocks: int) -> PathEnd | None:
        """Follow a path of encoded tokens for up to ``num_blocks`` blocks as far as it is there; None: no such tree."""
        root = self.roots.get(tree)
        return None if root is None else PathEnd(*descend_below(root, data, num_blocks))

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
        root = self.root(tree)
        run, depth = descend_below(root, data, num_blocks)
        if depth < num_blocks:
            run = self._grow(run, depth, bytes(data[depth * BLOCK_KEY_BYTES : num_blocks * BLOCK_KEY_BYTES]))
        stored = self.stored(run)
        found: TierSnapshot = stored.snapshots.setdefault(snapshot.key, snapshot)
        if found.home is None:
            insort(stored.keys, snapshot.key)
            found.home, found.tree, found.copies = run, tree, [None] * len(self.columns)
            if self._announcer is not None and tree not in self._unknown:
                self._announcer.store(run, snapshot.key, root.salt)
        return found

    def _grow(self, run: Run, depth: int, tokens: bytes) -> Run:
        """Add blocks after the one of a run at a depth: to the run itself if nothing else continues it."""
        self._memory.revision += 1
        if run.start_block < depth < run.end_block:
            if is_on_device(run):
                run = self._index.split_at(Walk(run, depth, None, 0))
            else:
                cut_demoted(run, depth - run.start_block)
        if is_on_device(run) or demoted_after(run):
            child = demoted_run(run, depth, tokens)
            self.stored(run).demoted[child.first_key] = child
            return child
        run.append(tokens, array("i", [NULL_BLOCK]) * (len(tokens) // BLOCK_KEY_BYTES))
        return run

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
            stored = self.stored(run)
            index = find_key(run, *snapshot.key)
            del stored.snapshots[snapshot.key], stored.keys[index]
            snapshot.home = None
            if self._announcer is not None and snapshot.tree not in self._unknown:
                self._announcer.remove(run, snapshot.key)
            self.trim(run)

    def leave_below(self, run: Run, kept: int) -> None:
        """Keep in the tree what tiers need of a run after its first ``kept`` blocks, which the device is to lose."""
        last = max((num_blocks for num_blocks, _ in stored_keys(run)[-1:]), default=0)
        last = run.end_block if demoted_after(run) else last
        if last <= run.start_block + kept:
            return
        lower = cut_off(run, kept)
        if self._announcer is not None:
            self._announcer.remove_blocks(lower, last - lower.start_block)
        self.trim(lower)
        if len(demoted := demoted_after(lower)) == 1:
            (child,) = demoted.values()
            self.stored(lower).join(lower, child)
            lower.append(bytes(child.tokens), child.blocks)

    def trim(self, run: Run) -> None:
        """Remove the blocks of a path after which nothing comes, if the device does not have them."""
        self._memory.revision += 1
        while (parent := run.parent) is not None and not is_on_device(run) and not demoted_after(run):
            keys = stored_keys(run)
            count = keys[-1][0] - run.start_block if keys else 0
            if not count:
                del demoted_after(parent)[run.first_key]
                run.parent = None
            del run.blocks[count:], run.hashes[count:], run.tokens[count * BLOCK_KEY_BYTES :]
            if count:
                break
            run = parent


@dataclass(slots=True, eq=False)
class TierSnapshot:
    """A snapshot that the device has evicted, in the stores of one or several tiers, or on its way back."""

    key: SnapshotKey
    home: Run | None = None
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

    def ancestry(self) -> Iterator[Run]:
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
        before = b"" if self.home is None else path_to(self.home)[1]
        return before[: self.num_blocks * BLOCK_KEY_BYTES] + self.rest


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


def _end_of(root: Run, data: bytearray) -> PathEnd:
    return PathEnd(*descend_below(root, data, len(data) // BLOCK_KEY_BYTES))


_NONE = array("q")


def find_key(run: Run, num_blocks: int, key: bytes = b"") -> int:
    """Return where a key is among the sorted ones of the snapshots that tiers have, or would be."""
    return bisect_left(stored_keys(run), (num_blocks, key))
