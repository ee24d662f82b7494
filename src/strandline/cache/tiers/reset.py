"""Resets: nothing that is cached is hit any more, on the device, in tiers, in files or when it arrives there later.

A reset begins another *epoch* of the cache. Every tree is of the epoch in which it began, which is part of its name in
tiers (``TierTree.name``), and requests reach the trees of the present epoch alone:

| what begins before a reset | and after it |
| --- | --- |
| a spill | arrives in its old tree, in which nothing needs it: its memory is freed, or its files are removed |
| the discovery of what other engines have stored | enters a tree with another name |
| files, when the process has ended | are found in trees with other names: a process begins with the epoch "" |

Neither salts nor the hashes of prefixes, which events announce, contain the epoch.
"""

from strandline.cache.announcing.announcer import Announcer
from strandline.cache.core import PrefixCache
from strandline.cache.evict_all import evict_all
from strandline.cache.tiers.loads import Loads
from strandline.cache.tiers.tier_tree import TierTree
from strandline.cache.tree import Snapshot
from strandline.errors import CacheInvariantError


def reset(cache: PrefixCache, epoch: str) -> None:
    """Drop all that is cached, in every tier, and begin another epoch. Spills may be under way.

    Args:
        epoch: a name that no other one has had.

    Raises:
        CacheInvariantError: requests, loads or holds have memory of the device.
    """
    parts = cache.internals()
    below, memory = parts.below, parts.memory
    if parts.leases:
        raise CacheInvariantError(f"the cache was to be reset while {', '.join(parts.leases)} had memory")
    for request_id in list(parts.expected):
        cache.forget(request_id)
    if isinstance(below, Loads) and below.tiers:
        tree = below.tiers[0].tree
        tree.begin_epoch(epoch)
        for tier in below.tiers:
            for copy in list(tier.snapshots()):
                tier.remove(copy)
        memory.lower = _NothingDemoted(tree)
    evict_all(cache)
    memory.lower = None if below is None else below.first_tier
    parts.index.roots.clear()
    if isinstance(memory.announcer, Announcer):
        memory.announcer.clear()


class _NothingDemoted:
    """The first tier while the device offers it nothing. What spills pin stays in the tree."""

    def __init__(self, tree: TierTree) -> None:
        self.demote_blocks = tree.leave_below

    def demote_snapshot(self, snapshot: Snapshot) -> None:
        """Leave it to be dropped."""
