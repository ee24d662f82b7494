"""The explanation of a lookup: where a prompt diverges from the cached ones, and what would have helped."""

from dataclasses import dataclass
from enum import StrEnum

from strandline.records.account import Account, SnapshotKind


class Help(StrEnum):
    """What would make similar prompts hit more."""

    MARK = "mark"
    """Mark the position where the prompt diverges, for a snapshot there."""
    MEMORY = "memory"
    """Raise the memory budget."""
    ORDER = "order"
    """Move the changing part of the prompt after the constant part."""
    PATIENCE = "patience"
    """Send it a little later: another request is computing its prefix."""
    LOAD = "load"
    """Nothing: what a tier below the device has is loaded, or computed where that is faster."""
    STORE = "store"
    """Find out why loading failed."""
    ASK = "ask"
    """Allow the request to read the cache."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice."""

    help: Help
    position: int
    """The position in the prompt that it concerns."""
    num_tokens: int
    """Tokens that would have been hit."""
    text: str


@dataclass(frozen=True, slots=True)
class PathSnapshot:
    """A snapshot on the prompt's path."""

    position: int
    kind: SnapshotKind


@dataclass(frozen=True, slots=True)
class Parting:
    """The position where a prompt diverges from the cached ones."""

    position: int
    """The first token that differs from every cached prompt."""
    before: tuple[int, ...]
    """The last shared tokens."""
    prompt: tuple[int, ...]
    """The prompt's next tokens."""
    cached: tuple[tuple[int, ...], ...]
    """The next tokens of cached prompts, most recently used first."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one lookup, past or hypothetical."""

    account: Account
    kv_now: int
    """Tokens of the prompt whose keys and values are cached now."""
    snapshots: tuple[PathSnapshot, ...]
    """Snapshots on the prompt's path now, up to where it diverged; deepest first."""
    num_snapshots_left_out: int
    next_snapshot: int | None
    """The position of the first snapshot after that, on the cached continuations."""
    parting: Parting | None
    """None when the prompt does not diverge, or when nothing is cached there any more."""
    advice: tuple[Advice, ...]
