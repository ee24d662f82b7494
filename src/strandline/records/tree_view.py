"""An excerpt of the prefix tree for display: runs, their snapshots and their users."""

from dataclasses import dataclass

from strandline.ids import RequestId
from strandline.records.account import SnapshotKind
from strandline.records.excerpts import Excerpt


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """A snapshot, for display."""

    position: int
    kind: SnapshotKind
    age: int
    """Uses of any entry since its last use."""
    readers: tuple[RequestId, ...]
    """Running requests whose next step reads it, so that it cannot be evicted."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run, for display: consecutive tokens without a branch."""

    parent: int | None
    """Index of the parent in the list, before this run; None for the root, which has no tokens."""
    start: int
    end: int
    """Its tokens are ``[start, end)`` of the prompts that contain it."""
    num_blocks: int
    digest: str
    """A digest of the path to the run."""
    parts_at: int
    """The position from which on it differs from its siblings."""
    head: Excerpt
    """The first tokens from ``parts_at`` on."""
    age: int
    num_users: int
    """Running requests whose path includes it."""
    snapshots: tuple[SnapshotView, ...]
    """By position; only the deepest ones. Those beyond ``end`` are inside the first block of its children."""
    num_snapshots_left_out: int
    num_children: int
    num_children_left_out: int


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A running request, for display."""

    request_id: RequestId
    run: int | None
    """Index of the deepest run on its path; None when that is omitted."""
    num_tokens: int
    computed: int
    hit: int


@dataclass(frozen=True, slots=True)
class TreeView:
    """An excerpt of one salt's tree, and totals of all salts."""

    runs: tuple[RunView, ...]
    leases: tuple[LeaseView, ...]
    num_runs_left_out: int
    """Omitted children of the runs shown. Their descendants are not counted."""
    num_blocks: int
    """Allocated blocks of all salts."""
    num_snapshots: int
    """Snapshots of all salts."""
    num_other_salts: int
    """Other salts with cached prompts."""
