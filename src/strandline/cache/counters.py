"""Running totals of lookups, snapshots and loads."""

from dataclasses import dataclass, field

from strandline.records.account import Account, Reason, SnapshotKind


@dataclass(slots=True)
class LoadCounters:
    """Running totals of what was loaded from stores."""

    num_done: int = 0
    num_failed: int = 0
    """Loads that failed or were cancelled."""
    num_snapshots: int = 0
    """Snapshots that loads brought."""
    num_blocks: int = 0
    """Blocks that loads brought."""


@dataclass(slots=True)
class CacheCounters:
    """Running totals since the start."""

    queries: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    missed_tokens: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    told_tokens: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    """As ``missed_tokens``, by the reasons of ``Account.for_callers``."""
    hits_by_kind: dict[SnapshotKind, int] = field(default_factory=lambda: dict.fromkeys(SnapshotKind, 0))
    snapshots_taken: dict[SnapshotKind, int] = field(default_factory=lambda: dict.fromkeys(SnapshotKind, 0))
    loads: LoadCounters = field(default_factory=LoadCounters)

    def count(self, account: Account) -> None:
        self.queries += 1
        self.queried_tokens += account.queried
        self.hit_tokens += account.hit
        if account.snapshot_kind is not None:
            self.hits_by_kind[account.snapshot_kind] += 1
        for miss in account.misses:
            self.missed_tokens[miss.reason] += miss.num_tokens
        for miss in account.for_callers().misses:
            self.told_tokens[miss.reason] += miss.num_tokens
