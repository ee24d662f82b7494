"""What the core of the cache asks of the tiers below the device and of loads into it.

``cache/tiers/`` implements these protocols and attaches to a cache (``PrefixCache.attach``). The core imports none of
it, and works without.
"""

from typing import Protocol

from strandline.cache.lease import Lead
from strandline.cache.resume import Match
from strandline.cache.tree import Run, Snapshot
from strandline.records.tokens import TokenBuffer


class FirstTier(Protocol):
    """The tier that what the device evicts is offered to."""

    def demote_snapshot(self, snapshot: Snapshot) -> None:
        """Take in a snapshot that the device evicts, while it is still in the index, if it is worth it."""

    def demote_blocks(self, run: Run, kept: int) -> None:
        """Take in what the tier needs of a childless run's blocks after the first ``kept``, before they are evicted."""


class Below(Protocol):
    """All tiers of a cache, and the loads under way."""

    @property
    def first_tier(self) -> FirstTier | None:
        """None: there are no tiers."""

    def resumable_tokens(self, data: bytearray, match: Match) -> int:
        """Return the deepest position at which a prompt could resume after a load from a tier, or 0."""

    def find(self, root: Run | None, tokens: TokenBuffer, beyond: int) -> Lead | None:
        """Return the load that brings the longest prefix of a prompt, if longer than ``beyond``. Changes nothing."""

    def known_roots(self) -> tuple[Run, ...]:
        """Return the roots of the trees of tiers whose salts are known."""

    def begin_spills(self) -> None:
        """Issue the actions that free memory in the tiers before it is needed."""
