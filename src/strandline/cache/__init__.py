"""The prefix cache: pure decisions over ids and tokens. No tensors, no I/O, no wall clock."""

from strandline.cache.core import PrefixCache
from strandline.cache.counters import CacheCounters
from strandline.cache.lease import Cut, Lead, Lease, LogUse, StepGrant
from strandline.cache.placement import Placement
from strandline.cache.resume import ResumeRule

__all__ = ["CacheCounters", "Cut", "Lead", "Lease", "LogUse", "Placement", "PrefixCache", "ResumeRule", "StepGrant"]
