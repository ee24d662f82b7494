"""The tree of what tiers below the device hold: blocks and snapshots, by their tokens.

A *demoted* snapshot is one that the device has evicted, with those blocks on its path that the device has evicted too.
A block and a snapshot are in the tree once, whichever tiers store them. Each tier has a ``Column``, which holds the
addresses of blocks in its store. A tier *has* each whole block on the path of a snapshot that it stores, and no others;
in the first tier, one without an address is on the device. A node that no tier has is removed, unless a load under way
brings it to the device, as requests wait for that. The block that contains a snapshot's position is stored with the
snapshot.

Paths are long, and most of them are known: every ``STRIDE_BLOCKS`` blocks, a node remembers where the last path that
passed it went on, with the tokens in between, which takes one ``memcmp`` to follow again.

Where attention has windows, a block is stored only if it is in the window of a demoted snapshot. The nodes of other
blocks have only tokens.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

from strandline.cache.tree import Snapshot
from strandline.cache.use import Use
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES

NO_ADDRESS = 0
NO_ROW: Final = 0
"""The row of nodes that are not in the tree: no tier has them."""
STRIDE_BLOCKS: Final = 32
"""Blocks between nodes that remember how paths go on."""
NO_SNAPSHOTS: Final[dict[bytes, "TierSnapshot"]] = {}
"""The snapshots of blocks that have none."""


class Stride(NamedTuple):
    """Consecutive blocks that a path has passed."""

    tokens: bytes
    """Encoded."""
    end: "TierBlock"
    """The last one. It may have been removed since, and then has no parent; else all before it are there, too."""


@dataclass(slots=True, eq=False)
class TierBlock:
    """A whole block on the path of a demoted snapshot."""

    parent: "TierBlock | None"
    """None for a root, which stands for no tokens, and for what has been removed."""
    key: bytes
    """The block's tokens, encoded."""
    row: int
    """Its row in the tiers' columns."""
    children: dict[bytes, "TierBlock"] = field(default_factory=dict)
    snapshots: "dict[bytes, TierSnapshot]" = field(default_factory=lambda: NO_SNAPSHOTS)
    """Those between its end and that of the next block, by the tokens in between."""
    path_hash: bytes = b""
    """Its hash in events; empty: it is not announced."""
    stride: Stride | None = None
    """How the last path went on from here; None: not known, or this is no node that remembers it."""

    def ancestry(self) -> "Iterator[TierBlock]":
        """Yield this block and those before it, last block first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Column:
    """What one tier has of the blocks of a tree, by their rows."""

    def __init__(self, tree: "TierTree", index: int) -> None:
        self.tree = tree
        self.index = index
        """Number of the tier, nearest first."""
        self.addresses = array("q", [NO_ADDRESS])
        """``NO_ADDRESS``: the device has it, it is being written to the store, or nothing needs it."""
        self.num_needers = array("i", [0])
        """With windows: number of the tier's snapshots whose window contains a block."""
        self.num_holders = array("i", [0])
        """Number of the tier's blocks and snapshots that come right after a block."""

    def __contains__(self, node: TierBlock) -> bool:
        """Whether the tier has a block, or a root with anything below."""
        return self.num_holders[node.row] > 0

    def last_on_path(self, node: TierBlock, depth: int) -> tuple[TierBlock, int]:
        """Return the last block that the tier has on the path to one at a depth, and its depth; else the root."""
        while node.parent is not None and node not in self:
            node, depth = node.parent, depth - 1
        return node, depth

    def num_children(self, node: TierBlock) -> int:
        """Count the continuations of a block that the tier has."""
        num_holders = self.num_holders[node.row]
        return num_holders - sum(1 for _ in self.copies_at(node)) if node.snapshots else num_holders

    def copies_at(self, node: TierBlock) -> "Iterator[Copy]":
        """Yield the tier's snapshots between a block's end and that of the next one."""
        for snapshot in node.snapshots.values():
            copy = snapshot.copies[self.index]
            if copy is not None:
                yield copy

    def below(self, node: TierBlock) -> "Iterator[Copy]":
        """Yield the tier's snapshots at the end of a block and below."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node in self:
                yield from self.copies_at(node)
                waiting.extend(node.children.values())

    def enter(self, copy: "Copy") -> None:
        """Take in a copy of a snapshot of the tree, and the blocks before it."""
        copy.column, copy.snapshot.copies[self.index] = self, copy
        num_holders, node = self.num_holders, copy.snapshot.block
        while node is not None:
            num_holders[node.row] += 1
            node = node.parent if num_holders[node.row] == 1 else None

    def leave(self, copy: "Copy", block: TierBlock) -> tuple[TierBlock, list[TierBlock]]:
        """Drop a copy of a snapshot after a block, and the blocks that the tier has for it alone.

        Returns:
            The last block before it that the tier still has, and those that it has dropped, the deepest first.
        """
        copy.column = copy.snapshot.copies[self.index] = None
        copy.last_push = 0
        node, dropped = block, list[TierBlock]()
        self.num_holders[node.row] -= 1
        while not self.num_holders[node.row] and node.parent is not None:
            dropped.append(node)
            node = node.parent
            self.num_holders[node.row] -= 1
        return node, dropped


class TierTree:
    """The trees of all salts.

    Args:
        num_tiers: tiers below the device.
        key: secret for hashing salts, where files outlive the process.
    """

    def __init__(self, num_tiers: int, key: bytes | None) -> None:
        self.roots: dict[str, TierBlock] = {}
        """By name (``name``)."""
        self.salts: dict[str, str] = {}
        """By the name of a tree: those under which the device has evicted something."""
        self.columns = tuple(Column(self, index) for index in range(num_tiers))
        self.on_entered: Callable[[TierSnapshot], object] = _ignore
        """Called with each snapshot that has entered the tree."""
        self.on_left: Callable[[TierSnapshot, list[TierBlock]], object] = _ignore
        """Called with each snapshot that has left the tree, and the blocks that have left with it, deepest first."""
        self._key = key
        self._free_rows: list[int] = []

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

    def root(self, tree: str) -> TierBlock:
        """Return the root of a tree; create it if needed."""
        root = self.roots.get(tree)
        if root is None:
            root = self.roots[tree] = TierBlock(None, b"", self._new_row())
        return root

    def add_child(self, node: TierBlock, key: bytes) -> TierBlock:
        """Return a new child, which no tier has."""
        child = node.children[key] = TierBlock(node, key, self._new_row())
        return child

    def _new_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        for column in self.columns:
            column.addresses.append(NO_ADDRESS)
            column.num_needers.append(0)
            column.num_holders.append(0)
        return len(self.columns[0].addresses) - 1

    def attach(self, snapshot: "TierSnapshot", tree: str, block: TierBlock) -> "TierSnapshot":
        """Put a snapshot into the tree after a block, unless it is there; return the one that is there now."""
        if block.snapshots is NO_SNAPSHOTS:
            block.snapshots = {}
        found = block.snapshots.setdefault(snapshot.key, snapshot)
        if found.block is None:
            found.block, found.tree, found.copies = block, tree, [None] * len(self.columns)
            self.on_entered(found)
        return found

    def detach(self, snapshot: "TierSnapshot") -> None:
        """Remove a snapshot from the tree, with the blocks that nothing else needs, unless it is used."""
        if snapshot.block is not None and not snapshot.is_used:
            del snapshot.block.snapshots[snapshot.key]
            unlinked, snapshot.block = self.prune(snapshot.block), None
            self.on_left(snapshot, unlinked)

    def prune(self, node: TierBlock) -> list[TierBlock]:
        """Remove a block, and those before it, unless another block or a snapshot comes after them; return the removed.

        A stride may still lead to one, so it drops its references.
        """
        unlinked = list[TierBlock]()
        while (parent := node.parent) is not None and not node.children and not node.snapshots:
            del parent.children[node.key]
            self._free_rows.append(node.row)
            node.parent, node.stride, node.row = None, None, NO_ROW
            unlinked.append(node)
            node = parent
        return unlinked

    def add_block(self, tree: str, data: bytes | bytearray, num_blocks: int) -> TierBlock:
        """Return the node of the last of ``num_blocks`` whole blocks of encoded tokens; create what is missing."""
        node, depth = descend(self.root(tree), data, num_blocks)
        for start in range(depth * BLOCK_KEY_BYTES, num_blocks * BLOCK_KEY_BYTES, BLOCK_KEY_BYTES):
            node = self.add_child(node, bytes(data[start : start + BLOCK_KEY_BYTES]))
        return node


@dataclass(slots=True, eq=False)
class TierSnapshot:
    """A snapshot that the device has evicted, in the stores of one or several tiers, or on its way back."""

    position: int
    key: bytes
    """The tokens from the end of the last whole block to its position, encoded."""
    block: TierBlock | None = None
    """The last whole block before it; None: it is not in the tree (any more)."""
    tree: str = ""
    """The name of its tree."""
    copies: "list[Copy | None]" = field(default_factory=list)
    """By tier."""
    num_pins: int = 0
    """What keeps it in the tree, whether a tier has it or not: loads under way that bring it to the device."""
    path_hash: bytes = b""
    """Its hash in events; empty: it is not announced."""

    @property
    def is_used(self) -> bool:
        """Whether a tier has it or something pins it."""
        return self.num_pins > 0 or any(self.copies)

    @property
    def has_tail(self) -> bool:
        """Whether its position is inside a block."""
        return bool(self.key)

    def last_blocks(self, num_blocks: int) -> list[TierBlock]:
        """Return the last ones of the whole blocks before it, in order."""
        return [] if self.block is None or not num_blocks else nodes_from(self.block, num_blocks)

    def path(self) -> bytes:
        """Return the tokens before it, encoded."""
        blocks = self.last_blocks(self.position // BLOCK_TOKENS)
        return b"".join([block.key for block in blocks]) + self.key


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
    """Address of its slot; ``NO_ADDRESS`` for models that keep no states."""
    tail_address: int = NO_ADDRESS
    """Address of the block that contains its position; ``NO_ADDRESS``: it is at a block's end."""
    num_loads: int = 0
    """Transfers under way that read or write it, or blocks before it: it is not evicted."""
    last_push: int = 0
    """The number of its last push onto the eviction queue; 0: it is not there."""

    @property
    def position(self) -> int:
        return self.snapshot.position

    @property
    def num_continuations(self) -> int:
        """Continuations of its path, up to two: those in the tier, or one if it was evicted before its continuation."""
        column, block = self.column, self.snapshot.block
        num_children = 0 if column is None or block is None else column.num_children(block)
        return max(int(self.is_interior), min(num_children, 2))


def copy_of_device(snapshot: Snapshot, key: bytes, saved_tokens: int) -> Copy:
    """Return a snapshot of the device as a tier would store it.

    Args:
        key: the tokens from the end of the last whole block to its position, encoded.
    """
    flags = snapshot.is_shared, snapshot.is_superseded, snapshot.num_continuations > 0
    return Copy(TierSnapshot(snapshot.position, key), snapshot.kind, snapshot.use, saved_tokens, *flags)


def descend(root: TierBlock, data: bytes | bytearray, num_blocks: int) -> tuple[TierBlock, int]:
    """Follow a path of encoded tokens; return its deepest node among the first ``num_blocks`` blocks, and its depth."""
    node, depth = root, 0
    while True:
        end = depth + STRIDE_BLOCKS
        stride = node.stride if end <= num_blocks else None
        if stride is not None and stride.end.parent and data.startswith(stride.tokens, depth * BLOCK_KEY_BYTES):
            node, depth = stride.end, end
            continue
        first, start = node, depth
        node, depth = _step(node, data, depth, min(end, num_blocks))
        if depth < end:
            return node, depth
        first.stride = Stride(bytes(data[start * BLOCK_KEY_BYTES : end * BLOCK_KEY_BYTES]), node)


def _step(node: TierBlock, data: bytes | bytearray, depth: int, end: int) -> tuple[TierBlock, int]:
    """Follow a path block by block, to depth ``end`` at most; return the last node and its depth."""
    for start in range(depth * BLOCK_KEY_BYTES, end * BLOCK_KEY_BYTES, BLOCK_KEY_BYTES):
        child = node.children.get(bytes(data[start : start + BLOCK_KEY_BYTES]))
        if child is None:
            return node, start // BLOCK_KEY_BYTES
        node = child
    return node, end


def nodes_from(node: TierBlock, num_nodes: int) -> "list[TierBlock]":
    """Return the last nodes of the path to a node, in order; the root may be the first."""
    nodes = [node]
    append, parent = nodes.append, node.parent
    for _ in range(num_nodes - 1):
        if parent is None:
            break
        append(parent)
        parent = parent.parent
    nodes.reverse()
    return nodes


def find_block(root: TierBlock | None, data: bytes | bytearray, num_blocks: int) -> TierBlock | None:
    """Return the node of the last of ``num_blocks`` whole blocks of encoded tokens, or None."""
    if root is None:
        return None
    node, depth = descend(root, data, num_blocks)
    return node if depth == num_blocks else None


def next_below(column: Column, block: TierBlock, removed: TierSnapshot) -> Iterator[Copy]:
    """Yield a tier's nearest snapshots below one that came right after ``block``."""
    longer = [
        copy
        for copy in column.copies_at(block)
        if len(copy.snapshot.key) > len(removed.key) and copy.snapshot.key.startswith(removed.key)
    ]
    if longer:
        yield min(longer, key=lambda copy: copy.position)
        return
    waiting = [child for key, child in block.children.items() if key.startswith(removed.key)]
    while waiting:
        node = waiting.pop()
        if node not in column:
            continue
        if node.snapshots and (copies := list(column.copies_at(node))):
            yield min(copies, key=lambda copy: copy.position)
        else:
            waiting.extend(node.children.values())


def nearest_above(column: Column, node: TierBlock, block: TierBlock, removed: TierSnapshot) -> Copy | None:
    """Return a tier's nearest snapshot above one that was removed after ``block``, if the tier has no continuation.

    Args:
        node: the last block that is left before the one that was removed.
    """
    above: TierBlock | None = node
    while above is not None:
        copies = column.copies_at(above) if above.snapshots else ()
        before = [copy for copy in copies if above is not block or removed.key.startswith(copy.snapshot.key)]
        if before:
            return None if column.num_children(above) else max(before, key=lambda copy: copy.position)
        if column.num_children(above) > (above is not node):
            return None
        above = above.parent
    return None


def position_above(column: Column, root: TierBlock | None, data: bytes, position: int, *, down_to: int = 0) -> int:
    """Return the position of the nearest snapshot above one that is about to enter, or ``down_to`` if that is nearer.

    Args:
        column: that of the tier.
        data: the tokens before it, encoded.
    """
    if root is None:
        return down_to
    node, depth = column.last_on_path(*descend(root, data, position // BLOCK_TOKENS))
    while (depth + 1) * BLOCK_TOKENS > down_to:
        offset, copies = depth * BLOCK_KEY_BYTES, column.copies_at(node) if node.snapshots else ()
        before = [x.position for x in copies if x.position < position and data.startswith(x.snapshot.key, offset)]
        if before or node.parent is None:
            return max(down_to, *before) if before else down_to
        node, depth = node.parent, depth - 1
    return down_to


def _ignore(*_: object) -> None:
    """Callback where nothing is announced."""
