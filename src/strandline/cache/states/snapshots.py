"""The snapshots that a lease takes: which ones, where they belong in the index, and how a request resumes from them."""

from strandline.cache.hits import record_hit, record_use
from strandline.cache.lease import Cut, Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.placement import Placement
from strandline.cache.publish import Publisher
from strandline.cache.resume import Match
from strandline.cache.tree import Home, find_home
from strandline.cache.window_blocks import Window, Windows
from strandline.records.account import SnapshotKind
from strandline.records.tokens import resumable_end


class LeasedSnapshots:
    """What slots and windows have in common.

    Args:
        placement: says which states become snapshots; None: none do.
    """

    def __init__(self, memory: CacheMemory, publisher: Publisher, placement: Placement | None) -> None:
        self._memory = memory
        self._publisher = publisher
        self._placement = placement

    def resume(self, lease: Lease, match: Match) -> None:
        """Give a lease its windows, and record the hit and the use of its path."""
        lease.windows = self._windows_of(match)
        if match.snapshot is not None:
            record_hit(lease, match.snapshot, self._memory, self._publisher.reuse)
        record_use(lease, None, self._memory, self._publisher.reuse)

    def _windows_of(self, match: Match) -> Windows:
        """Return the window blocks of a request that resumes, or begins with its first token."""
        if match.snapshot is None:
            return tuple(map(Window, self._memory.windows))
        return self._memory.resume_windows(match.snapshot.windows, match.position)

    def take_due(self, lease: Lease, end: int) -> list[tuple[int, SnapshotKind]]:
        """Return the planned snapshots up to ``end`` and that of the step, by position; they are planned no longer."""
        placement = self._placement
        if placement is None:
            return []
        due = {position: kind for position, kind in lease.planned_cuts.items() if lease.computed < position <= end}
        boundary = placement.in_step(lease.computed, end)
        if boundary is not None and resumable_end(lease.tokens.data, boundary) == boundary:
            due.setdefault(boundary, SnapshotKind.BOUNDARY)
        lease.planned_cuts = {position: kind for position, kind in lease.planned_cuts.items() if position > end}
        self._publisher.probation.make_room(sum(kind is SnapshotKind.PROBE for kind in due.values()))
        return sorted(due.items())

    def publish_due(self, lease: Lease) -> None:
        """Publish the cuts whose tokens are computed."""
        if lease.cuts:
            self._publisher.publish_cuts(lease)

    def home_for(self, lease: Lease, kind: SnapshotKind, position: int) -> Home | None:
        """Return the home of a new snapshot on the lease's path; None if it is unwanted, impossible or exists."""
        if position == 0 or not self.keeps(kind):
            return None
        if resumable_end(lease.tokens.data, position) < position:
            return None  # it is inside a picture, where nothing resumes
        run, key = find_home(lease.run, lease.tokens.data, position)
        return None if key in run.snapshots else (run, key)

    def keeps(self, kind: SnapshotKind) -> bool:
        """Whether a lease's own state becomes a snapshot of this kind."""
        return self._placement is not None and self._placement.keeps(kind)

    def has_own_state(self, lease: Lease) -> bool:
        """Return whether the state at ``lease.computed`` can become a snapshot: it is the lease's, with its window.

        A lease that resumed one token before a snapshot has no whole window until it has computed that token.
        """
        return lease.has_own_state and self.has_window(lease, lease.computed)

    def has_window(self, lease: Lease, position: int) -> bool:
        """Return whether a lease still has the window before a position."""
        return not lease.windows or all(window.covers(position) for window in lease.windows)

    def drop_fallback(self, lease: Lease) -> bool:
        """Free a lease's fallback; return whether there was one."""
        fallback = lease.fallback
        if fallback is not None:
            self._memory.free_cut(fallback)
            lease.fallback = None
        return fallback is not None

    def fallback_before(self, lease: Lease, kind: SnapshotKind, end: int) -> Cut | None:
        """Return what a lease that ends leaves of a kind, if not its state at ``end``: its fallback, or the last state.

        The fallback if it is before ``end``, or there is nothing else.
        """
        fallback, has_own = lease.fallback, self.has_own_state(lease)
        if fallback is not None and (fallback.position <= end or not has_own):
            fallback.kind = kind
            return fallback
        return Cut(lease.computed, lease.dst, kind) if has_own else None
