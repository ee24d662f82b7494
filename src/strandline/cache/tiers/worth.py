"""What a snapshot in a tier below the device is worth."""

from strandline.cache.policy.outcomes import next_bin_edge
from strandline.cache.policy.worth import reuse_rate
from strandline.cache.tiers.tier_tree import TierSnapshot
from strandline.cache.use import UseHistory
from strandline.ids import BLOCK_TOKENS


class TierWorth:
    """Ranks the entries of a tier as ``WorthPerByte`` ranks what the device holds.

    Args:
        slot_blocks: the size of a snapshot, in blocks; 0: without states, a snapshot is the end of its blocks.
    """

    def __init__(self, slot_blocks: int, reuse: UseHistory) -> None:
        self._slot_tokens = slot_blocks * BLOCK_TOKENS
        self._reuse = reuse

    @property
    def now(self) -> int:
        """The time of the reuse history."""
        return self._reuse.now

    def worth(self, entry: TierSnapshot) -> float:
        worth, _ = self.appraise(entry)
        return worth

    def appraise(self, entry: TierSnapshot) -> tuple[float, int | None]:
        used_at, past_bin = entry.use
        age = self._reuse.now - used_at
        continuations = entry.num_continuations
        rate = reuse_rate(self._reuse, entry, continuations, past_bin, age)
        size = self._slot_tokens + (0 if continuations and self._slot_tokens else entry.saved_tokens)
        return rate * entry.saved_tokens / size, used_at + next_bin_edge(age)
