"""The states of a model that keeps neither states nor windows: prompts resume at any token, from blocks alone."""

from strandline.cache.hits import record_departure, record_use
from strandline.cache.lease import Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.placement import Placement
from strandline.cache.publish import Publisher
from strandline.cache.resume import Match
from strandline.cache.tree import child_with_prefix
from strandline.cache.use import Use
from strandline.ids import BLOCK_TOKENS, SlotId
from strandline.records.account import SnapshotKind


class NoStates:
    """Publishes the block that a lease is filling, as far as it is computed. Arguments are those of ``NewStates``."""

    num_slots = 0

    def __init__(self, memory: CacheMemory, publisher: Publisher, placement: Placement | None) -> None:
        self._memory = memory
        self._publisher = publisher
        self._is_enabled = placement is not None

    def begin(self, lease: Lease, match: Match) -> None:
        record_use(lease, match.copied_run, self._memory, self._publisher.reuse)

    def reserve(self, lease: Lease, end: int) -> tuple[tuple[int, SlotId], ...]:
        return ()

    def commit(self, lease: Lease) -> None:
        """Publish the tokens that waiting requests share, once they are computed."""
        if min(lease.planned_cuts) <= lease.computed:
            self._publish_partial_block(lease)
            lease.planned_cuts = {p: kind for p, kind in lease.planned_cuts.items() if p > lease.computed}

    def leave(self, lease: Lease, kind: SnapshotKind) -> bool:
        """Publish the block that the lease is filling; there is no snapshot."""
        self._publish_partial_block(lease)
        return False

    def _publish_partial_block(self, lease: Lease) -> None:
        """Publish the computed tokens of the block that the lease is filling, or count a use of those in the index."""
        if not self._is_enabled:
            return
        reuse = self._publisher.reuse
        key = lease.tokens.slice(lease.num_published * BLOCK_TOKENS, lease.computed)
        if key and lease.computed < lease.shared_end:
            existing = child_with_prefix(lease.run, key)
            if existing is None:
                self._publisher.publish_tail(lease, key)
            else:
                self._memory.touch(existing)
                existing.use = Use(reuse.now, lease.interarrival_bin)
        record_departure(lease, reuse)

    def fold(self, lease: Lease) -> None:
        lease.folded = lease.computed

    def keep_fallback(self, lease: Lease) -> None:
        """Do nothing: a prompt resumes before any token."""

    def drop_fallback(self, lease: Lease) -> bool:
        return False

    def end(self, lease: Lease, kind: SnapshotKind, end: int) -> None:
        self._publish_partial_block(lease)
