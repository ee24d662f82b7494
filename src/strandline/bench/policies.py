"""Policies to compare: what a cache keeps, and what it lets go, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strandline.cache import Placement, PrefixCache
from strandline.cache.core import AUTO
from strandline.cache.placement import Align, EveryBoundary, Nothing
from strandline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Policy:
    """How a cache behaves."""

    placement: Placement = AUTO
    is_enabled: bool = True


POLICIES: Final[Mapping[str, Policy]] = {
    "auto": Policy(),
    "align-1056": Policy(Align(1056)),
    "all-1024": Policy(EveryBoundary(1024)),
    "none": Policy(Nothing()),
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


def make_cache(chosen: Policy, num_slabs: int, blocks_per_slab: int) -> PrefixCache:
    """Return an empty cache that behaves so."""
    return PrefixCache(num_slabs, blocks_per_slab, placement=chosen.placement, enabled=chosen.is_enabled)
