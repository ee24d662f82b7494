"""A lease: the blocks, slots and log of one running request."""

import sys
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from strandline.cache.tree import Run, Snapshot, path_blocks
from strandline.cache.use import NO_INTERARRIVAL
from strandline.cache.window_blocks import Windows
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NULL_LOG, NULL_SLOT, LogId, RequestId, SlotId, TransferId
from strandline.records.account import Account, SnapshotKind
from strandline.records.tokens import TokenBuffer


@dataclass(slots=True)
class Cut:
    """A snapshot that a prefill emits: the state after ``position`` tokens is written to ``slot``.

    The null slot: the model keeps no states, and the snapshot is its window blocks.
    """

    position: int
    slot: SlotId
    kind: SnapshotKind
    windows: Windows | None = None
    """Its window blocks; None: those of its lease, once the tokens are computed."""


class LogUse(Enum):
    """What a step of one certain token may use its lease's log for."""

    NONE = "none"
    DECODED = "decoded"
    """The token is appended, unless it is time to fold."""
    DRAFTS = "drafts"
    """Logged drafts are computed again with the token, and those that follow it are logged: they may turn out wrong."""


class StepGrant(NamedTuple):
    """What a step reads and writes of a lease, decided by ``PrefixCache.reserve_step``."""

    src: SlotId
    """The slot that the state is read from."""
    dst: SlotId
    """The slot that the state is written to, unless ``num_folded`` is 0."""
    cuts: tuple[tuple[int, SlotId], ...]
    """Position and slot of each snapshot that the step emits."""
    log: LogId
    """The log that the step reads and appends to; the null log: none."""
    num_logged: int
    """Tokens in the log before the step."""
    num_folded: int
    """Tokens that go into ``dst``, counted from the position of the state in ``src``.

    0: the step's token is only appended to the log. ``num_logged`` plus the step's tokens: log and tokens are folded.
    """


class Lease:
    """Blocks and slots of one running request, and its position in the prefix index.

    The next step reads the state from slot ``src`` and writes it to ``dst``. They differ when the request resumes from
    a shared snapshot or has just left one; after a committed step ``src`` is ``dst``.
    """

    __slots__ = (
        "account",
        "computed",
        "cuts",
        "dst",
        "fallback",
        "folded",
        "held",
        "holds_drafts",
        "interarrival_bin",
        "is_active",
        "kv_start",
        "log",
        "num_published",
        "planned_cuts",
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
        "transfer",
        "windows",
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
        self.table = path_blocks(run)
        """Its blocks in order: published ones, which are shared and immutable, then its own."""
        self.windows: Windows = ()
        """Its window blocks; of a load, a hold, or where there are no such blocks: none."""
        self.num_published = len(self.table)
        self.computed = 0
        """Tokens that have been computed and committed."""
        self.kv_start = 0
        """Keys and values before this position are in shared blocks, which are never written."""
        self.shared_end = sys.maxsize
        """Blocks beyond this position are not published, and steps that start at or beyond it emit no cuts."""
        self.planned_cuts: dict[int, SnapshotKind] = {}
        """Positions where snapshots are planned, by the placement and for waiting requests."""
        self.source: Snapshot | None = None
        """The shared snapshot in ``src``, pinned until the step that reads it is committed."""
        self.src: SlotId = NULL_SLOT
        self.dst: SlotId = NULL_SLOT
        self.cuts: list[Cut] = []
        self.fallback: Cut | None = None
        """Its state a few tokens ago, to be published if the request ends with these; None: not kept."""
        self.tail: Run | None = None
        """The tail that makes the block being filled visible in the index, once a snapshot is inside that block."""
        self.is_active = True
        self.held: tuple[Snapshot, ...] | None = None
        """The snapshots that it keeps as they are: no request runs (``Holds``). None: it is no hold."""
        self.log: LogId = NULL_LOG
        """Holds the tokens that are not folded into the state yet; the null log: none are kept."""
        self.folded = 0
        """Tokens that are folded into the state; those up to ``computed`` are in the log."""
        self.holds_drafts = False
        """Whether the tokens in the log are drafts that were accepted; else they are decoded tokens."""
        self.transfer: TransferId | None = None
        """The transfer that fills it: no request runs, its blocks and snapshots are being loaded. None: one runs."""

    @property
    def is_request(self) -> bool:
        """Whether a request runs; otherwise its path is being loaded, or held."""
        return self.transfer is None and self.held is None

    def has_room(self, end: int) -> bool:
        """Return whether it has blocks for the tokens up to ``end``."""
        windows = self.windows
        return end <= len(self.table) * BLOCK_TOKENS and (not windows or end <= len(windows[0].blocks) * BLOCK_TOKENS)

    def windows_before(self, position: int) -> Windows:
        """Return pinned windows of what computing from a position on reads, which share blocks with its own.

        Raises:
            CacheInvariantError: it has not got all of them any more.
        """
        for window in self.windows:
            if not (window.covers(position) and position <= len(window.blocks) * BLOCK_TOKENS):
                raise CacheInvariantError(f"the window before {position} was freed")
        return tuple([window.part_before(position) for window in self.windows])

    def num_missing_window_blocks(self, end: int) -> int:
        """Return how many window blocks of each size it lacks for the tokens up to ``end``."""
        return max(-(-end // BLOCK_TOKENS) - len(self.windows[0].blocks), 0) if self.windows else 0

    @property
    def is_return(self) -> bool:
        """Whether it continues a path that was served before."""
        return self.interarrival_bin != NO_INTERARRIVAL

    @property
    def num_logged(self) -> int:
        """Tokens in the log, the last ones before ``computed``."""
        return self.computed - self.folded

    @property
    def has_logged_drafts(self) -> bool:
        """Whether the log holds drafts, which the next step has to fold."""
        return self.holds_drafts and self.computed > self.folded

    def has_planned_cut(self, end: int) -> bool:
        """Whether a snapshot is planned within the tokens from ``computed`` to ``end``."""
        return any(self.computed < position <= end for position in self.planned_cuts)

    @property
    def has_own_state(self) -> bool:
        """Whether ``dst`` holds the state after ``folded`` tokens; before the first step it does not."""
        return self.src == self.dst


@dataclass(frozen=True, slots=True)
class Lead:
    """A running request that computes tokens ``[0, position)`` of a waiting request's prompt, or a load of them."""

    lease: Lease
    position: int

    @property
    def is_pending(self) -> bool:
        """Whether the request runs and has not computed them yet, or the load is under way."""
        return self.lease.is_active and self.lease.computed < self.position
