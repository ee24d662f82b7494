"""The environment variables that Strandline reads, all of them."""

import os
from typing import Final

DEBUG_CACHE: Final = "STRANDLINE_DEBUG_CACHE"


def is_cache_debugged() -> bool:
    """Whether to check the cache's invariants and poison freed memory with NaN at every step (slow)."""
    return os.environ.get(DEBUG_CACHE, "0") not in ("", "0")
