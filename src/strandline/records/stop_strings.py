"""What the device needs of stop strings: something per output that finds them."""

from typing import Protocol


class StopFinder(Protocol):
    """The text of one output so far."""

    @property
    def num_stop_tokens(self) -> int:
        """The last tokens that belong to a stop string which the text leaves out, or may turn out to."""

    def append(self, token: int) -> str | None:
        """Append a token; return the stop string that it completes, if any."""
