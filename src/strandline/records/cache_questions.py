"""Questions about the cache and their answers, for the cache page and ``explain``."""

from dataclasses import dataclass
from typing import NamedTuple

from strandline.records.account import Account
from strandline.records.events import CoreStats
from strandline.records.excerpts import Excerpt
from strandline.records.explanation import Explanation
from strandline.records.tree_view import TreeView


@dataclass(frozen=True, slots=True)
class RecentHits:
    """Hits of the requests of the last minutes."""

    window_s: float
    queried_tokens: int
    hit_tokens: int


class MemorySample(NamedTuple):
    """Memory by use at one time. The remaining arena was free."""

    age_s: float
    slots_in_use: int
    """In bytes, as all that follow."""
    slots_evictable: int
    blocks_in_use: int
    blocks_evictable: int


@dataclass(frozen=True, slots=True)
class LookupRow:
    """One recent lookup."""

    request_id: str
    salt_label: str
    """Empty for a request without a salt."""
    age_s: float
    account: Account
    head: Excerpt | None
    """The beginning of the prompt's uncached part, or if that is short, the prompt's end. None if the prompt is not
    kept any more, or not for this caller."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """The data of the cache page."""

    is_enabled: bool
    mode: str
    total_bytes: int
    block_bytes: int
    snapshot_bytes: int
    """Size of a snapshot with its window, which others may share."""
    stats: CoreStats
    recent: RecentHits
    tree: TreeView
    lookups: list[LookupRow]
    """Newest first."""
    memory: list[MemorySample]
    """Oldest first, the last one current. Between two samples nothing changed but shortly before the later."""


@dataclass(frozen=True, slots=True)
class CacheQuestion:
    """Asks why a request missed, or what a prompt would hit."""

    salt: str = ""
    request_id: str | None = None
    tokens: list[int] | None = None
    num_remembered: int = 0
    """How many of these are encoded as earlier answers were generated."""


@dataclass(frozen=True, slots=True)
class CacheAnswer:
    """The answer to a question."""

    request_id: str | None = None
    age_s: float | None = None
    """Age of a past request."""
    explanation: Explanation | None = None
    now: Account | None = None
    """What a past request would find now."""
    problem: str | None = None
    """Why there is no explanation."""
