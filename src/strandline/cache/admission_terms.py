"""How the admission of one request differs from that of another with the same tokens."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionTerms:
    """What a request may read of the cache, what it leaves there, and how its admission counts."""

    may_read: bool = True
    """When False, the request computes everything; it may still leave snapshots."""
    marks: tuple[int, ...] = ()
    """Positions up to which other prompts are likely to share this one."""
    shared_end: int | None = None
    """Blocks are published up to this position only, and no cuts are emitted from there on; None: everywhere."""
    past_bin: int | None = None
    """``Lease.interarrival_bin`` before the request was preempted; None: it was not."""
    is_counted: bool = True
    """When False, the admission changes neither the counters nor the reuse history."""
    load_failed_end: int = 0
    """Misses before this position have the reason ``LOAD_FAILED``: a load should have brought these tokens."""


FIRST_ADMISSION: Final = AdmissionTerms()
"""Those of a request that reads the cache, has not run yet and has no marks."""
