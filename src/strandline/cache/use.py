"""Uses of a cached prefix, and the inter-arrival times between them, in bins of powers of two."""

from typing import Final, NamedTuple, Protocol

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


class UseHistory(Protocol):
    """Records uses of paths, and estimates how often each will be used again (``policy/reuse.py``)."""

    @property
    def now(self) -> int:
        """Its time, which ``count_admission`` advances."""

    def count_admission(self) -> None: ...

    def record_departure(self, salt: str, data: bytearray, num_prompt: int, num_tokens: int, past_bin: int) -> None: ...

    def record_return(self, salt: str, data: bytearray) -> int: ...

    def count_hit(self, num_continuations: int) -> None: ...

    def rate(self, past_bin: int, age: int) -> float: ...

    def answer_rate(self, past_bin: int, age: int) -> float: ...

    def prompt_rate(self, past_bin: int, age: int) -> float: ...

    def interior_rate(self, past_bin: int, age: int) -> float: ...

    def shared_rate(self, past_bin: int, age: int) -> float: ...
