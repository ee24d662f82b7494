"""The prefix index: a tree of runs of whole blocks, with snapshots at any token position.

A *run* is a sequence of 64-token blocks without a branch. Its children begin where it ends, each with a different first
block.

A *tail* is what follows the last whole block: fewer than 64 tokens. In the tree, it is a childless run of one block,
which is removed when a longer run with the same beginning is added: no tail's key is a proper prefix of that of a
sibling.

A snapshot belongs to the run with the last whole block before its position, or to the root, and is keyed by the number
of whole blocks before it and the tail after these. If there is one, the next block of the path begins with it: the next
one of the run or, after its last, those of one child or of several. Thus a lookup finds it whichever of them matches.

Source: radix trees as in SGLang's RadixAttention; the runs-of-blocks form and the snapshots' keys are our own.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from strandline.cache.use import NO_INTERARRIVAL, Use
from strandline.cache.window_blocks import Windows
from strandline.ids import BLOCK_TOKENS, NULL_SLOT, SlotId
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, common_tokens

SnapshotKey = tuple[int, bytes]
"""The number of whole blocks before a snapshot, and its tail: the tokens from there to its position, encoded."""


class Snapshot:
    """A published slot: the state of all recurrent layers after exactly ``position`` tokens; and its window blocks.

    Without states, the slot is the null slot. The slot is never written. Only the snapshot's position in the tree and
    its recorded use change.
    """

    __slots__ = (
        "home",
        "is_attached",
        "is_shared",
        "is_superseded",
        "key",
        "kind",
        "last_push",
        "last_tick",
        "num_readers",
        "num_waiters",
        "position",
        "replacement",
        "slot",
        "use",
        "windows",
    )

    def __init__(
        self,
        slot: SlotId,
        position: int,
        kind: SnapshotKind,
        use: Use,
        num_readers: int,
        is_shared: bool,
        windows: Windows = (),
    ) -> None:
        self.slot = slot
        self.windows = windows
        self.position = position
        self.kind = kind
        self.home: Run
        self.key: SnapshotKey
        self.num_readers = num_readers
        """Leases that read its slot in their next step: it is not evicted."""
        self.num_waiters = 0
        """Queued requests that would resume here."""
        self.replacement: Snapshot | None = None
        """Once evicted: where those requests would resume now."""
        self.last_push = 0
        """The number of its last push onto the eviction queue; 0: it is not there."""
        self.last_tick = 0
        """The number of its last use (``CacheMemory.tick``), which orders it among all others."""
        self.use = use
        """Its last use, or that of the path that it ends."""
        self.is_attached = False
        self.is_superseded = False
        """Whether its path has returned and continued, from here or from the next snapshot below."""
        self.is_shared = is_shared
        """Whether several paths share it: a prompt that is no return resumed here or below, or diverged here."""

    def record_hit(self, tick: int, now: int, *, is_source: bool, is_return: bool) -> None:
        """Record that a prompt resumed from this snapshot (``is_source``) or from below it."""
        self.is_shared |= not is_return
        if self.last_tick != tick and (is_source or self.is_shared):
            self.use = self.use.next(now)
        self.last_tick = tick

    def record_prompt_end(self) -> None:
        """Record that a prompt ends here, whatever the snapshot was taken for: its path will continue from here."""
        if self.kind is not SnapshotKind.PREEMPTION:
            self.kind, self.is_superseded = SnapshotKind.PROMPT_END, False

    @property
    def is_in_child(self) -> bool:
        """Whether it is inside the first block of children of its run."""
        return self.key > (self.home.end_block, b"")

    @property
    def num_slots(self) -> int:
        """The slots that it has: one, or none without states."""
        return int(self.slot != NULL_SLOT)

    @property
    def saved_tokens(self) -> int:
        """Tokens since the nearest snapshot above."""
        above = snapshot_above(self)
        return self.position - (above.position if above is not None else 0)

    @property
    def num_continuations(self) -> int:
        """The cached continuations, up to two.

        The tokens after it in its block do not count when they serve no request and no other snapshot, as after the
        eviction of an answer's snapshot: that block is cached for this snapshot alone.
        """
        run, (num_blocks, tail) = self.home, self.key
        if not tail or num_blocks < run.end_block:
            return 1 if run.key_after(self.key) is not None else min(len(run.child_keys), 2)
        longer = [child for child in children_with_prefix(run, tail) if len(child.tokens) > len(tail)]
        return 0 if len(longer) == 1 and _is_kept_for(longer[0], self) else len(longer)

    def replace(self, evicted: "Snapshot") -> None:
        """Replace an evicted snapshot below: its queued requests resume here now."""
        if self.use.at < evicted.use.at:
            self.use = evicted.use
        if evicted.num_waiters:
            self.num_waiters += evicted.num_waiters
            evicted.replacement = self


class Stored(Protocol):
    """What tiers below the device have of a run and after it (``tiers/stored.py``)."""

    @property
    def snapshots(self) -> Mapping[SnapshotKey, object]:
        """The snapshots of the run that tiers have."""

    @property
    def keys(self) -> Sequence[SnapshotKey]:
        """The keys of ``snapshots``, sorted."""

    @property
    def demoted(self) -> "Mapping[bytes, Run]":
        """Continuations of the run that tiers have and the device does not, by their first blocks."""

    def split(self, upper: "Run", count: int) -> "Stored":
        """Remove and return what belongs to the first ``count`` blocks of the run, which ``upper`` has now."""

    def take_out(self, key: bytes) -> "Run | None":
        """Remove and return the continuation that begins as ``key`` does, as far as it does, for the device to have."""

    def join(self, run: "Run", lower: "Run") -> None:
        """Take in what there is of a continuation whose blocks are about to be appended to the run."""


def position_of(key: SnapshotKey) -> int:
    """Return the position of a snapshot."""
    num_blocks, tail = key
    return num_blocks * BLOCK_TOKENS + len(tail) // TOKEN_BYTES


class Run:
    """Consecutive blocks without a branch. ``tokens`` is their key; only a tail's block is not full."""

    __slots__ = (
        "blocks",
        "child_keys",
        "children",
        "evicted_children",
        "evicted_snapshots",
        "hashes",
        "is_live",
        "is_shared",
        "keys",
        "last_push",
        "last_tick",
        "num_announced",
        "num_users",
        "num_waiters",
        "parent",
        "replacement",
        "salt",
        "snapshots",
        "start_block",
        "stored",
        "tokens",
        "use",
    )

    def __init__(self, parent: "Run | None", start_block: int, tokens: bytes, blocks: "array[int]") -> None:
        self.parent = parent
        self.salt = ""
        """The salt of the tree, if this is its root."""
        self.start_block = start_block
        self.tokens = bytearray(tokens)
        self.blocks = blocks
        self.children: dict[bytes, Run] = {}
        self.child_keys: list[bytes] = []
        """The children's keys, sorted."""
        self.stored: Stored | None = None
        """What tiers below the device have of it and after it; None: nothing."""
        self.snapshots: dict[SnapshotKey, Snapshot] = {}
        self.keys: list[SnapshotKey] = []
        """The keys of ``snapshots``, sorted."""
        self.num_users = 0
        """Leases whose path includes this run."""
        self.last_tick = 0
        """The number of its last use, not counting uses of its children while they are cached."""
        self.is_live = False
        """A tail whose block a running request is still filling."""
        self.last_push = 0
        """The number of its last push onto the eviction queue; 0: it is not there."""
        self.evicted_children: dict[int, int] = {}
        """By hash of an evicted child's first block: how many tokens were cached there."""
        self.evicted_snapshots: dict[SnapshotKey, None] = {}
        """The keys of snapshots evicted here; an ordered set."""
        self.hashes: list[bytes] = []
        """Hashes of the paths to its blocks, computed as far as events need them."""
        self.num_announced = 0
        """How many of its blocks, from the first, events have announced."""
        self.use = Use(0, NO_INTERARRIVAL)
        """Its last use, or that of the path that it ends; without snapshots, it decides on eviction."""
        self.is_shared = False
        """Whether a prompt that is no return has resumed here or below."""
        self.num_waiters = 0
        """Queued requests that would resume here, without a snapshot."""
        self.replacement: Run | None = None
        """Once removed: where those requests would resume now."""

    @property
    def end_block(self) -> int:
        return self.start_block + len(self.blocks)

    @property
    def end_tokens(self) -> int:
        """Position after the run's last token; for whole blocks, where children begin."""
        return self.start_block * BLOCK_TOKENS + len(self.tokens) // TOKEN_BYTES

    @property
    def is_tail(self) -> bool:
        return len(self.blocks) == 1 and len(self.tokens) < BLOCK_KEY_BYTES

    @property
    def first_key(self) -> bytes:
        return bytes(self.tokens[:BLOCK_KEY_BYTES])

    @property
    def num_own_snapshots(self) -> int:
        """How many of its snapshots, in the order of their keys, are no further than the end of its last block."""
        return bisect_right(self.keys, (self.end_block, b""))

    def key_after(self, key: SnapshotKey) -> SnapshotKey | None:
        """Return the key of its next snapshot if that is no further than the end of its last block, else None."""
        index = bisect_right(self.keys, key)
        after = self.keys[index] if index < len(self.keys) else None
        return after if after is not None and after <= (self.end_block, b"") else None

    def deepest_key_on(self, num_blocks: int, tokens: bytes) -> SnapshotKey | None:
        """Return the key of its deepest snapshot on a path through it, or None.

        Args:
            num_blocks: whole blocks of the path, no more than up to the end of the run.
            tokens: those after these, encoded.
        """
        keys = self.keys
        end = bisect_right(keys, (num_blocks, tokens))
        while end:
            key = keys[end - 1]
            if key[0] < num_blocks or tokens.startswith(key[1]):
                return key
            num_same = common_tokens(key[1], tokens) * TOKEN_BYTES
            end = bisect_right(keys, (num_blocks, tokens[:num_same]), hi=end - 1)
        return None

    def snapshots_in(self, num_blocks: int, tokens: bytes) -> "Iterator[Snapshot]":
        """Yield its snapshots inside the block after ``num_blocks``, which begins with ``tokens``, deepest first."""
        while (key := self.deepest_key_on(num_blocks, tokens)) is not None and key[1] and key[0] == num_blocks:
            yield self.snapshots[key]
            tokens = key[1][:-TOKEN_BYTES]

    def append(self, tokens: bytes, blocks: "array[int]") -> None:
        """Append whole blocks to a run without children but perhaps a tail that these continue."""
        self.tokens += tokens
        self.blocks += blocks
        self.evicted_children.clear()

    def ancestry(self) -> "list[Run]":
        """Return this run, its parent, and so on up to the root."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path


Home = tuple[Run, SnapshotKey]
"""Where a snapshot belongs in the tree: its run, and its key there."""


def snapshot_above(snapshot: Snapshot) -> Snapshot | None:
    """Return the deepest snapshot above ``snapshot`` on its path, or None."""
    run, key = snapshot.home, snapshot.key
    index = bisect_left(run.keys, key)
    if not index:
        return None if run.parent is None else deepest_snapshot_on(run.parent, run.start_block, run.first_key)
    before = run.keys[index - 1]
    if before[0] < key[0] or key[1].startswith(before[1]):
        return run.snapshots[before]
    return deepest_snapshot_on(run, key[0], key[1][:-TOKEN_BYTES])


def deepest_snapshot_on(run: Run, num_blocks: int, tokens: bytes) -> Snapshot | None:
    """Return the deepest snapshot on a path, or None.

    Args:
        run: the one with its last whole block, or the root.
        num_blocks: whole blocks of the path.
        tokens: those after these, encoded.
    """
    while True:
        if run.keys and (key := run.deepest_key_on(num_blocks, tokens)) is not None:
            return run.snapshots[key]
        if run.parent is None:
            return None
        num_blocks, tokens, run = run.start_block, run.first_key, run.parent


def _is_kept_for(run: Run, snapshot: Snapshot) -> bool:
    """Return whether a run is one unused block that no snapshot needs but one inside it and those above that."""
    is_needed = run.num_users or run.child_keys or run.keys
    return len(run.blocks) == 1 and not is_needed and deepest_snapshot_in_first_block(run) is snapshot


def first_unneeded_block(run: Run) -> int:
    """Return the first block of a childless run that neither a snapshot needs nor any block after it."""
    if run.keys:
        num_blocks, tail = run.keys[-1]
        return num_blocks + bool(tail)
    return run.start_block + (deepest_snapshot_in_first_block(run) is not None)


def deepest_snapshot_in_first_block(run: Run) -> Snapshot | None:
    """Return the deepest snapshot of the parent that is inside the run's first block, or None."""
    parent = run.parent
    if parent is None or not parent.keys:
        return None
    key = parent.deepest_key_on(run.start_block, run.first_key)
    return parent.snapshots[key] if key is not None and key > (parent.end_block, b"") else None


def find_home(run: Run, data: bytearray, position: int) -> Home:
    """Return where a snapshot at a position of the path that ends with ``run`` belongs."""
    num_blocks = position // BLOCK_TOKENS
    while run.start_block >= num_blocks and run.parent is not None:
        run = run.parent
    return run, (num_blocks, bytes(data[num_blocks * BLOCK_KEY_BYTES : position * TOKEN_BYTES]))


def children_with_prefix(run: Run, prefix: bytes) -> list[Run]:
    """Return the children whose first block begins with ``prefix``, up to two."""
    index = bisect_left(run.child_keys, prefix)
    return [run.children[key] for key in run.child_keys[index : index + 2] if key.startswith(prefix)]


def child_with_prefix(run: Run, prefix: bytes) -> Run | None:
    """Return a child whose first block begins with ``prefix``, or None."""
    return next(iter(children_with_prefix(run, prefix)), None)


def snapshots_that_need(run: Run) -> list[Snapshot]:
    """Return the snapshots of the parent whose tokens only the one block of a childless run holds."""
    parent = run.parent
    if parent is None or run.start_block < parent.end_block:
        return []
    found = parent.snapshots_in(run.start_block, run.first_key)
    return [snapshot for snapshot in found if children_with_prefix(parent, snapshot.key[1]) == [run]]


def run_of_last_block(snapshot: Snapshot) -> Run | None:
    """Return a run that holds the last block that a snapshot needs."""
    return child_with_prefix(snapshot.home, snapshot.key[1]) if snapshot.is_in_child else snapshot.home


def path_blocks(run: Run) -> "array[int]":
    """Return the blocks of the path to the end of a run."""
    blocks = array("i")
    for node in run.ancestry()[::-1]:
        blocks += node.blocks
    return blocks


def tail_that_begins(run: Run, key: bytes) -> Run | None:
    """Return the tail under ``run`` that is a proper prefix of ``key``, or None: there is at most one."""
    end = bisect_left(run.child_keys, key)
    while end:
        before = run.child_keys[end - 1]
        if len(before) < len(key) and key.startswith(before):
            return run.children[before]
        num_same = common_tokens(before, key) * TOKEN_BYTES
        end = bisect_right(run.child_keys, key[:num_same], hi=end - 1) if num_same else 0
    return None
