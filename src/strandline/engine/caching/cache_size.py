"""The size of an engine's cache."""

from strandline.cache.policy.window_classes import window_classes
from strandline.cache.size import CacheSize
from strandline.device.executor import ExecutorFacts


def cache_size(facts: ExecutorFacts, num_logs: int) -> CacheSize:
    """Return what the cache allocates from in an executor's memory."""
    spec = facts.spec
    windows = window_classes(spec)
    return CacheSize(facts.num_slabs, spec.blocks_per_slab, None, num_logs, facts.log_tokens, windows)
