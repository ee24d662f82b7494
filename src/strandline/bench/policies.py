"""Named cache policies to compare: placement, eviction and the division of memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strandline.cache import Placement, PrefixCache, ResumeRule
from strandline.cache.announcing.announcer import Announcer
from strandline.cache.policy import AUTO, new_cache
from strandline.cache.policy.placements import Align, EveryBoundary, NoSnapshots
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS
from strandline.cache.policy.worth import LeastRecentlyUsed
from strandline.cache.size import CacheSize, WindowClass
from strandline.clock import Clock
from strandline.errors import ConfigError
from strandline.records.account import SnapshotKind


@dataclass(frozen=True, slots=True)
class Policy:
    """Placement, eviction and division of memory of a cache."""

    placement: Placement = AUTO
    evicts_oldest: bool = False
    """Evict the least recently used entry rather than the least valuable one."""
    slot_share: float | None = None
    """Fixed share of the memory for slots; None: divided on demand."""
    is_enabled: bool = True


ENDS: Final = frozenset({SnapshotKind.PROMPT_END, SnapshotKind.GENERATION_END})

POLICIES: Final[Mapping[str, Policy]] = {
    "auto": Policy(),
    "auto-lru": Policy(evicts_oldest=True),
    "align-lru": Policy(Align(1056), evicts_oldest=True),
    "8192-lru": Policy(EveryBoundary(8192), evicts_oldest=True, slot_share=0.47),
    "8192-ends-lru": Policy(EveryBoundary(8192, ENDS), evicts_oldest=True, slot_share=0.47),
    "align": Policy(Align(1024)),
    "all": Policy(EveryBoundary(1024)),
    "none": Policy(NoSnapshots()),
    "off": Policy(is_enabled=False),
}


def policy(name: str) -> Policy:
    """Return a policy by name.

    Raises:
        ConfigError: none is called so.
    """
    if name not in POLICIES:
        raise ConfigError(f"no policy named {name!r}; known are {', '.join(POLICIES)}")
    return POLICIES[name]


def make_cache(
    chosen: Policy,
    num_slabs: int,
    blocks_per_slab: int,
    clock: Clock,
    rule: ResumeRule = AT_SNAPSHOTS,
    *,
    announcer: Announcer | None = None,
    windows: tuple[WindowClass, ...] = (),
) -> PrefixCache:
    """Return an empty cache with a policy.

    Args:
        windows: the sizes of windows.

    Raises:
        ConfigError: the policy has a fixed share for slots, and window blocks belong to neither share.
    """
    if chosen.slot_share is not None and windows:
        raise ConfigError(
            f"the policy divides the memory between slots ({chosen.slot_share:.0%}) and blocks, and this model has "
            "window blocks as well; replay it with another policy, such as auto-lru"
        )
    max_slots = None if chosen.slot_share is None else int(chosen.slot_share * num_slabs)
    return new_cache(
        CacheSize(num_slabs, blocks_per_slab, max_slots, windows=windows),
        rule=rule,
        order=LeastRecentlyUsed() if chosen.evicts_oldest else None,
        placement=chosen.placement,
        enabled=chosen.is_enabled,
        clock=clock,
        announcer=announcer,
    )
