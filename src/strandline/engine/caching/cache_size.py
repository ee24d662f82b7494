"""The size of an engine's cache."""

from strandline.cache.size import CacheSize
from strandline.device.executor import ExecutorFacts


def cache_size(facts: ExecutorFacts, num_logs: int) -> CacheSize:
    """Return what the cache allocates from in an executor's memory."""
    spec = facts.spec
    windows = (spec.max_window_tokens, spec.window_blocks_per_slab)
    return CacheSize(facts.num_slabs, spec.blocks_per_slab, None, num_logs, facts.log_tokens, *windows)
