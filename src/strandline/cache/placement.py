"""Placement: at which token positions to take snapshots, as a pure function of the request and the spare memory.

A placement is consulted when a request is admitted (``on_admission``), at every step (``in_step``), and when a
request's own slot could be kept as a snapshot (``keeps``). Its positions are requests, not guarantees: a cut is omitted
when no slot can be allocated.
"""

from typing import Final, NamedTuple, Protocol

from strandline.records.account import SnapshotKind

SnapshotPositions = dict[int, SnapshotKind]
"""The kind of snapshot to take, by position."""

RESERVE_SHARE: Final = 0.25
"""Share of the memory that ladders leave free."""


class Admission(NamedTuple):
    """The facts about a request that a placement can use when it is admitted."""

    start: int
    """The position at which it resumes."""
    end: int
    """The number of its tokens."""
    kv_tokens: int
    """Tokens whose keys and values are cached. Beyond ``start``, the prompt diverges from a cached one here."""
    marks: tuple[int, ...]
    """Ends of shared prefixes, by the sender or the chat template."""
    num_spare_snapshots: int
    """Snapshots that can be taken without eviction before memory is scarce."""
    snapshot_tokens: int = 0
    """Tokens whose keys and values are as large as a snapshot; 0: unknown."""
    may_probe: bool = False
    """Whether a probe may be taken: the prompt continues no path, and the memory is large enough for probes."""
    data: bytes | bytearray = b""
    """Its tokens, encoded. Positions strictly inside a picture become its start."""


class Placement(Protocol):
    """Chooses positions of snapshots. Stateless."""

    @property
    def is_stepwise(self) -> bool:
        """Whether ``in_step`` ever returns a position."""

    def on_admission(self, admission: Admission) -> SnapshotPositions:
        """Return positions in ``(start, end)``."""

    def in_step(self, start: int, end: int) -> int | None:
        """Return a position in ``(start, end]`` for a step that computes the tokens between, or None."""

    def keeps(self, kind: SnapshotKind) -> bool:
        """Return whether a request's own slot is kept as a snapshot of this kind."""

    def takes_branches(self) -> bool:
        """Return whether a snapshot may be taken where a waiting request diverges from a running one."""
