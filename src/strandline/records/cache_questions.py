"""Questions about the cache and their answers: what the cache page and ``explain`` show."""

from dataclasses import dataclass
from typing import NamedTuple

from strandline.cache import Account
from strandline.cache.explanation import Explanation
from strandline.cache.view import TreeView
from strandline.records.events import CoreStats


class MemorySample(NamedTuple):
    """Who held the memory at one time. The rest of the arena was free."""

    age_s: float
    slots_in_use: int
    """Bytes, as all that follow."""
    slots_evictable: int
    blocks_in_use: int
    blocks_evictable: int


@dataclass(frozen=True, slots=True)
class LookupRow:
    """One of the last lookups."""

    request_id: str
    salt_label: str
    """Empty: without a salt."""
    age_s: float
    account: Account


@dataclass(frozen=True, slots=True)
class CacheState:
    """What the page shows."""

    is_enabled: bool
    mode: str
    total_bytes: int
    block_bytes: int
    slot_bytes: int
    stats: CoreStats
    tree: TreeView
    lookups: list[LookupRow]
    """Newest first."""
    memory: list[MemorySample]
    """Oldest first, the last one of now. From one to the next nothing changes but in the second before."""


@dataclass(frozen=True, slots=True)
class CacheQuestion:
    """Why did a request miss, or what would a prompt hit?"""

    salt: str = ""
    request_id: str | None = None
    tokens: list[int] | None = None


@dataclass(frozen=True, slots=True)
class CacheAnswer:
    """The answer to a question."""

    request_id: str | None = None
    age_s: float | None = None
    """Of a past request."""
    explanation: Explanation | None = None
    now: Account | None = None
    """Of a past request: what it would find now."""
    problem: str | None = None
    """Why there is no explanation."""
