"""A lease: what one running request holds of the cache."""

import sys
from array import array
from dataclasses import dataclass
from typing import NamedTuple

from strandline.cache.account import Account, SnapshotKind
from strandline.cache.tokens import TokenBuffer
from strandline.cache.tree import Run, Snapshot
from strandline.cache.use import NO_INTERARRIVAL
from strandline.ids import NULL_LOG, NULL_SLOT, LogId, RequestId, SlotId


@dataclass(slots=True)
class Cut:
    """A snapshot that a prefill is to emit in passing: the state after ``position`` tokens goes to ``slot``."""

    position: int
    slot: SlotId
    kind: SnapshotKind


class StepGrant(NamedTuple):
    """What one step of a lease reads and writes."""

    src: SlotId
    """The slot that the state is read from."""
    dst: SlotId
    """The slot that the state is written to, when anything is folded."""
    cuts: tuple[tuple[int, SlotId], ...]
    """Position and slot of each snapshot to emit in passing."""
    log: LogId
    """The log that the step reads and appends to; the null log: none."""
    num_logged: int
    """Tokens in the log before the step."""
    num_folded: int
    """Tokens that go into ``dst``, counted from the position of the state in ``src``.

    0: the step's token is only appended to the log. ``num_logged`` plus the step's tokens: all of them.
    """


class Lease:
    """Blocks and slots of one running request, and its place in the prefix index.

    ``src`` is the slot that its next step reads, ``dst`` the one that the step writes. They differ when the
    request resumes from a shared snapshot or has just left one behind; after a committed step ``src`` is ``dst``.
    """

    __slots__ = (
        "account",
        "computed",
        "cuts",
        "dst",
        "folded",
        "interarrival_bin",
        "is_active",
        "kv_start",
        "log",
        "num_published",
        "request_id",
        "root",
        "run",
        "salt",
        "shared_end",
        "source",
        "src",
        "table",
        "tail",
        "tokens",
        "wanted",
    )

    def __init__(
        self, request_id: RequestId, tokens: TokenBuffer, salt: str, root: Run, run: Run, account: Account
    ) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.salt = salt
        self.root = root
        self.run = run
        """The deepest published run of its path. Its end is block ``num_published``."""
        self.account = account
        self.interarrival_bin = NO_INTERARRIVAL
        """The bin of the time since its path was last used."""
        self.table: array[int] = array("i")
        """Its blocks, in order: published (shared, immutable) ones first, then its own."""
        self.num_published = 0
        self.computed = 0
        """Tokens of which the state has been computed and committed."""
        self.kv_start = 0
        """Keys and values of tokens before this position are in shared blocks: they are read, never written."""
        self.shared_end = sys.maxsize
        """Blocks beyond this position are not published, and steps that start at or beyond it emit no cuts."""
        self.wanted: dict[int, SnapshotKind] = {}
        """Positions worth a cut, and why: what the placement wished for, and where others wait to part from it."""
        self.source: Snapshot | None = None
        """The shared snapshot behind ``src``, held until the step that reads it is committed."""
        self.src: SlotId = NULL_SLOT
        self.dst: SlotId = NULL_SLOT
        self.cuts: list[Cut] = []
        self.tail: Run | None = None
        """The tail in the index that shows the block being filled, after a snapshot inside that block."""
        self.is_active = True
        self.log: LogId = NULL_LOG
        """Where tokens wait that are not folded into the state; the null log: every token is folded at once."""
        self.folded = 0
        """Tokens that are folded into the state; those up to ``computed`` are in the log."""

    @property
    def num_logged(self) -> int:
        """Tokens in the log, the last ones before ``computed``."""
        return self.computed - self.folded

    @property
    def has_own_state(self) -> bool:
        """Whether ``dst`` holds the state at ``computed``, as far as the log does not (no step has run if not)."""
        return self.src == self.dst


@dataclass(frozen=True, slots=True)
class Lead:
    """A running request that will compute ``[0, position)`` of somebody else's prompt, and leave a snapshot there."""

    lease: Lease
    position: int

    @property
    def is_pending(self) -> bool:
        """Whether it is still on its way there."""
        return self.lease.is_active and self.lease.computed < self.position
