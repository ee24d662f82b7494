"""Policies: which snapshots to take, and what is worth keeping. ``new_cache`` returns a cache with the default ones."""

from strandline.cache.policy.default import new_cache
from strandline.cache.policy.placements import AUTO, OnGrid, placement

__all__ = ["AUTO", "OnGrid", "new_cache", "placement"]
