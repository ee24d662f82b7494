"""Uses of a cached prefix, and the inter-arrival times between them, in bins of powers of two."""

from typing import Final, NamedTuple

NO_INTERARRIVAL: Final = 0
"""The bin of what has been used once: there is no inter-arrival time yet."""


def interarrival_bin(time: int) -> int:
    """Return the bin of an inter-arrival time, 2 or more."""
    return 1 + max(time, 1).bit_length()


class Use(NamedTuple):
    """The last use of a snapshot."""

    at: int
    """When, by the clock of the reuse history."""
    interarrival_bin: int
    """The bin of the time between this use and the one before."""

    def next(self, now: int) -> "Use":
        """Return the use that follows this one, at ``now``."""
        return Use(now, interarrival_bin(now - self.at))
