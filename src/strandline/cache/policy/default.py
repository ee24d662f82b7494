"""A cache with its policies."""

from strandline.cache.announcements import Announces
from strandline.cache.core import PrefixCache
from strandline.cache.eviction import EvictionOrder
from strandline.cache.placement import Placement
from strandline.cache.policy.placements import AUTO, NoSnapshots, OutsidePictures
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS
from strandline.cache.policy.reuse import ReuseHistory
from strandline.cache.policy.worth import ReuseRate, WorthPerByte
from strandline.cache.resume import ResumeRule
from strandline.cache.size import CacheSize
from strandline.cache.states.blocks import NoStates
from strandline.cache.states.slots import SlotStates
from strandline.cache.states.windows import WindowStates
from strandline.clock import Clock


def new_cache(
    size: CacheSize,
    *,
    rule: ResumeRule = AT_SNAPSHOTS,
    placement: Placement = AUTO,
    order: EvictionOrder | None = None,
    clock: Clock | None = None,
    enabled: bool = True,
    announcer: Announces | None = None,
) -> PrefixCache:
    """Return an empty cache. Arguments that are not listed here are those of ``PrefixCache``.

    Args:
        placement: chooses which snapshots to take, if prompts resume at snapshots.
        order: ranks what to evict; None: by worth per byte, without snapshots by reuse rate.
        clock: returns seconds, to learn inter-arrival times; None: time is counted in admissions alone.
    """
    reuse = ReuseHistory(clock)
    if order is None:
        snapshot_blocks = size.snapshot_blocks(int(rule.needs_slots))
        order = WorthPerByte(lambda _: snapshot_blocks, reuse) if rule.needs_snapshots else ReuseRate(reuse)
    return PrefixCache(
        size,
        placement=OutsidePictures(placement) if rule.needs_snapshots else NoSnapshots(),
        order=order,
        reuse=reuse,
        rule=rule,
        states=SlotStates if rule.needs_slots else WindowStates if rule.needs_snapshots else NoStates,
        enabled=enabled,
        announcer=announcer,
    )
