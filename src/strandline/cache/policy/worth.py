"""Eviction orders: what a snapshot or a run on the device is worth."""

from collections.abc import Callable
from typing import Final, Protocol

from strandline.cache.eviction import Entry
from strandline.cache.policy.outcomes import next_bin_edge
from strandline.cache.tree import Run, Snapshot, deepest_snapshot_in_first_block
from strandline.cache.use import Use, UseHistory
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import SnapshotKind

WORTHLESS: Final = float("-inf")
CERTAIN_RATE: Final = 1.0
"""Reuse rate of what a queued request will resume from, and of what is newer than the last admission."""
TICK_SHARE: Final = 2.0**-50
"""By how much a use raises a rate: it decides between equal rates alone."""


class LeastRecentlyUsed:
    """Evicts the least recently used entry. The baseline."""

    def worth(self, entry: Entry) -> float:
        return entry.last_tick


class Reusable(Protocol):
    """A snapshot, on the device or below it."""

    kind: SnapshotKind
    use: Use
    is_shared: bool
    is_superseded: bool

    @property
    def position(self) -> int:
        """Tokens before it."""

    @property
    def saved_tokens(self) -> int:
        """Tokens since the nearest snapshot above in its memory."""

    @property
    def num_continuations(self) -> int:
        """Continuations of its path in its memory, up to two."""


class WorthPerByte:
    """Evicts the entry with the lowest value density: tokens saved × reuse rate ÷ size. The default.

    - Tokens saved: those since the nearest snapshot above, so a snapshot becomes more valuable when that one is
      evicted.
    - Size: slot and window and, for the last snapshot of a path, the keys and values since the snapshot above, which
      cannot be used without it and are evicted with it. Keys and values that no snapshot needs are worth nothing.
    - Reuse rate: how often the entry is expected to be used per unit of time (``ReuseHistory``). It depends on
      where the snapshot is: at the end of a path; at the end of a prompt whose next turn has not come, which may
      leave out the answer; inside one path, where only a rewind uses it; or on a prefix that several paths share. A
      path that is continued several times, each time leaving out its last answer, does not count as several.
    - On the device, an entry that a queued request will resume from, or the last snapshot of a path that was used after
      the last admission, has at least ``CERTAIN_RATE``.

    Args:
        blocks_at: returns the size of a snapshot at a position of a path in this memory, in blocks; 0: it is the end of
            its blocks alone.
    """

    def __init__(self, blocks_at: Callable[[int], int], reuse: UseHistory) -> None:
        self._blocks_at = blocks_at
        self._reuse = reuse

    @property
    def now(self) -> int:
        """The time of the reuse history."""
        return self._reuse.now

    def worth(self, entry: Run | Reusable) -> float:
        worth, _ = self.appraise(entry)
        return worth

    def appraise(self, entry: Run | Reusable) -> tuple[float, int | None]:
        snapshot = _needed_snapshot(entry) if isinstance(entry, Run) else entry
        if snapshot is None:
            return WORTHLESS, None
        used_at, past_bin = snapshot.use
        age = self._reuse.now - used_at
        saved_tokens, continuations = snapshot.saved_tokens, snapshot.num_continuations
        own_tokens = self._blocks_at(snapshot.position) * BLOCK_TOKENS
        size = own_tokens + (0 if continuations and own_tokens else saved_tokens)
        rate = reuse_rate(self._reuse, snapshot, continuations, past_bin, age)
        if isinstance(snapshot, Snapshot) and (snapshot.num_waiters or (continuations == 0 and age == 0)):
            rate = max(rate, CERTAIN_RATE)
        return rate * saved_tokens / size, used_at + next_bin_edge(age)


def reuse_rate(reuse: UseHistory, snapshot: Reusable, continuations: int, past_bin: int, age: int) -> float:
    """Return how often a snapshot is expected to be used per unit of time.

    Args:
        continuations: cached continuations of its path, up to two.
    """
    if continuations > 1 and snapshot.is_shared:
        return reuse.shared_rate(past_bin, age)
    if continuations == 0:
        is_answer = snapshot.kind is SnapshotKind.GENERATION_END
        return (reuse.answer_rate if is_answer else reuse.rate)(past_bin, age)
    if snapshot.kind is SnapshotKind.PROMPT_END and not snapshot.is_superseded:
        return reuse.prompt_rate(past_bin, age)
    return reuse.interior_rate(past_bin, age)


class ReuseRate:
    """Evicts the blocks with the lowest reuse rate. The default where prompts resume without snapshots.

    A block saves its own tokens and takes its own memory, so its value density is its reuse rate: that of the path that
    ends there, or of a prefix that several paths share. What a queued request would hit, or was used after the last
    admission, has at least ``CERTAIN_RATE``. Of blocks with equal rates, the least recently used are evicted first.
    """

    def __init__(self, reuse: UseHistory) -> None:
        self._reuse = reuse

    @property
    def now(self) -> int:
        """The time of the reuse history."""
        return self._reuse.now

    def worth(self, entry: Entry) -> float:
        worth, _ = self.appraise(entry)
        return worth

    def appraise(self, entry: Entry) -> tuple[float, int | None]:
        used_at, past_bin = entry.use
        age = self._reuse.now - used_at
        rate = (self._reuse.shared_rate if entry.is_shared else self._reuse.rate)(past_bin, age)
        if entry.num_waiters or age == 0:
            rate = max(rate, CERTAIN_RATE)
        return rate * (1 + TICK_SHARE * entry.last_tick), used_at + next_bin_edge(age)


def _needed_snapshot(run: Run) -> Snapshot | None:
    """Return the deepest snapshot that needs the last block of a childless run, or None."""
    if run.keys:
        last = run.keys[-1]
        return run.snapshots[last] if last > (run.end_block - 1, b"") else None
    return deepest_snapshot_in_first_block(run) if len(run.blocks) == 1 else None
