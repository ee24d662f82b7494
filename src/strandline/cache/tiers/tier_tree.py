"""The tree of a tier's entries: blocks and snapshots in a store, by their tokens.

A *demoted* snapshot is one that the device has evicted, with those blocks on its path that the device has evicted too.
The tree has a node for every whole block on the path of a demoted snapshot, and no others; a node without an address is
on the device. The block that contains a snapshot's position is stored with the snapshot.

Paths are long, and most of them are known: every ``STRIDE_BLOCKS`` blocks, a node remembers where the last path that
passed it went on, with the tokens in between, which takes one ``memcmp`` to follow again.

Where attention has windows, a block is stored only if it is in the window of a demoted snapshot. The nodes of other
blocks have only tokens.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from strandline.cache.use import Use
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES

NO_ADDRESS = 0
STRIDE_BLOCKS: Final = 32
"""Blocks between nodes that remember how paths go on."""


class Stride(NamedTuple):
    """Consecutive blocks that a path has passed."""

    tokens: bytes
    """Encoded."""
    end: "TierBlock"
    """The last one. It may have been removed since, and then has no parent; else all before it are there, too."""


class TierBlock:
    """A whole block on the path of a demoted snapshot."""

    __slots__ = ("address", "children", "key", "num_needers", "parent", "path_hash", "snapshots", "stride")

    def __init__(self, parent: "TierBlock | None", key: bytes) -> None:
        self.parent = parent
        """None for a root, which stands for no tokens, and for what has been removed."""
        self.key = key
        """The block's tokens, encoded."""
        self.children: dict[bytes, TierBlock] = {}
        self.snapshots: dict[bytes, TierSnapshot] = {}
        """Those between its end and that of the next block, by the tokens in between."""
        self.address = NO_ADDRESS
        """``NO_ADDRESS``: the device has it, it is being written to the store, or nothing needs it."""
        self.num_needers = 0
        """With windows: number of snapshots whose window contains it."""
        self.path_hash = b""
        """Its hash in events; empty: it is not announced."""
        self.stride: Stride | None = None
        """How the last path went on from here; None: not known, or this is no node that remembers it."""

    def unlink(self) -> None:
        """Remove it, as nothing needs it any more. A stride may still lead to it, so it drops its references."""
        if self.parent is not None:
            del self.parent.children[self.key]
        self.parent = self.stride = None

    def ancestry(self) -> "Iterator[TierBlock]":
        """Yield this block and those before it, last block first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> "Iterator[TierSnapshot]":
        """Yield the snapshots at its end and below."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield from node.snapshots.values()
            waiting.extend(node.children.values())


class TierSnapshot:
    """A snapshot that the device has evicted, in a store."""

    __slots__ = (
        "address",
        "block",
        "is_interior",
        "is_shared",
        "is_superseded",
        "key",
        "kind",
        "last_push",
        "num_loads",
        "path_hash",
        "position",
        "salt",
        "saved_tokens",
        "tail_address",
        "use",
    )

    def __init__(
        self,
        position: int,
        key: bytes,
        kind: SnapshotKind,
        use: Use,
        saved_tokens: int,
        *,
        is_shared: bool = False,
        is_superseded: bool = False,
        is_interior: bool = False,
    ) -> None:
        self.block: TierBlock | None = None
        """The last whole block before it; None: it is not in the tier (any more)."""
        self.salt = ""
        """The name of its tree (``LowerTier.tree_name``)."""
        self.position = position
        self.key = key
        """The tokens from there to its position, encoded."""
        self.kind = kind
        self.use = use
        self.saved_tokens = saved_tokens
        """Tokens since the nearest snapshot above, on the device or in the tier."""
        self.is_shared = is_shared
        self.is_superseded = is_superseded
        self.is_interior = is_interior
        """Whether its path continued when it was evicted."""
        self.address = NO_ADDRESS
        """Address of its slot; ``NO_ADDRESS`` for models that keep no states."""
        self.tail_address = NO_ADDRESS
        """Address of the block that contains its position; ``NO_ADDRESS``: it is at a block's end."""
        self.num_loads = 0
        """Transfers under way that read or write it, or blocks before it: it is not evicted."""
        self.path_hash = b""
        """Its hash in events; empty: it is not announced."""
        self.last_push = 0
        """The number of its last push onto the eviction queue; 0: it is not there."""

    def copy(self, salt: str, saved_tokens: int) -> "TierSnapshot":
        """Return it as an entry of another tree."""
        is_shared, is_superseded, is_interior = self.is_shared, self.is_superseded, self.is_interior
        other = TierSnapshot(
            self.position,
            self.key,
            self.kind,
            self.use,
            saved_tokens,
            is_shared=is_shared,
            is_superseded=is_superseded,
            is_interior=is_interior,
        )
        other.salt = salt
        return other

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

    @property
    def num_continuations(self) -> int:
        """Continuations of its path, up to two: those in the tier, or one if it was evicted before its continuation."""
        block = self.block
        return max(int(self.is_interior), min(len(block.children), 2) if block is not None else 0)


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


def add_block(root: TierBlock, data: bytes | bytearray, num_blocks: int) -> TierBlock:
    """Return the node of the last of ``num_blocks`` whole blocks of encoded tokens; create what is missing."""
    node, depth = descend(root, data, num_blocks)
    for start in range(depth * BLOCK_KEY_BYTES, num_blocks * BLOCK_KEY_BYTES, BLOCK_KEY_BYTES):
        key = bytes(data[start : start + BLOCK_KEY_BYTES])
        child = node.children[key] = TierBlock(node, key)
        node = child
    return node


def next_below(block: TierBlock, removed: TierSnapshot) -> Iterator[TierSnapshot]:
    """Yield the nearest snapshots below one that came right after ``block``."""
    longer = [s for key, s in block.snapshots.items() if len(key) > len(removed.key) and key.startswith(removed.key)]
    if longer:
        yield min(longer, key=lambda snapshot: snapshot.position)
        return
    waiting = [child for key, child in block.children.items() if key.startswith(removed.key)]
    while waiting:
        node = waiting.pop()
        if node.snapshots:
            yield min(node.snapshots.values(), key=lambda snapshot: snapshot.position)
        else:
            waiting.extend(node.children.values())


def nearest_above(node: TierBlock, block: TierBlock, removed: TierSnapshot) -> TierSnapshot | None:
    """Return the nearest snapshot above one that was removed after ``block``, if it has no continuation at rest now.

    Args:
        node: the last block that is left before the one that was removed.
    """
    above: TierBlock | None = node
    while above is not None:
        before = [s for key, s in above.snapshots.items() if above is not block or removed.key.startswith(key)]
        if before:
            return None if above.children else max(before, key=lambda snapshot: snapshot.position)
        if len(above.children) > (above is not node):
            return None
        above = above.parent
    return None
