"""The parts of a cache, for the checks, views and tests of this package."""

from dataclasses import dataclass

from strandline.cache.below import Below
from strandline.cache.counters import CacheCounters
from strandline.cache.eviction import Entry
from strandline.cache.index import PrefixIndex
from strandline.cache.lease import Lease
from strandline.cache.logs import LogPool
from strandline.cache.memory import CacheMemory
from strandline.cache.placement import Placement
from strandline.cache.publish import Publisher
from strandline.cache.request_states import RequestStates
from strandline.cache.resume import ResumeRule
from strandline.cache.slab_allocator import SlabAllocator
from strandline.cache.use import UseHistory
from strandline.ids import RequestId


@dataclass(frozen=True, slots=True)
class Internals:
    """The parts of a cache, which no module outside this package uses."""

    memory: CacheMemory
    leases: dict[RequestId, Lease]
    placement: Placement
    index: PrefixIndex
    expected: dict[RequestId, Entry]
    """By waiting request: the snapshot, or without snapshots the run, that it would have resumed from when queued."""
    reuse: UseHistory
    logs: LogPool
    rule: ResumeRule
    states: RequestStates
    publisher: Publisher
    counters: CacheCounters
    below: Below | None
    """What is attached to the cache."""

    @property
    def allocator(self) -> SlabAllocator:
        return self.memory.allocator
