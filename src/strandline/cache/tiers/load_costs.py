"""What loading costs and what computing costs, learned from measurements: whether a load pays.

A store that was slow once, such as a disk that was busy with other work, is measured again: loads may lose a small
share of the time that prompts have taken since the last one. What loads have taken that failed counts against that
share, so a store that does not answer is left alone for a while.
"""

from typing import Final

SHARE_OF_NEW: Final = 0.1
"""Weight of a new measurement in the running averages."""

MIN_MEASURED_TOKENS: Final = 64
"""Steps that compute fewer tokens of prompts are not measured: most of their time is not spent on those."""

PREFILLS_PER_LOSS: Final = 64
"""A load may take longer than computing by one in this many seconds of prefills since the last load."""

LEAST_LIMIT_S: Final = 1.0
"""Loads are not given up sooner: they may take longer once without being slow."""
FIRST_LIMIT_S: Final = 10.0
"""Loads are given up after this before it is known how long computing takes."""


class LoadCosts:
    """Rates of one store and of the device. Before the first measurement of either, every load pays.

    Args:
        latency_s: fixed cost of a load.
        bytes_per_s: at which a store is read; None: not measured yet.
        token_s: time to compute a token of a prompt; None: not measured yet.
    """

    def __init__(self, latency_s: float = 0.0, bytes_per_s: float | None = None, token_s: float | None = None) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.token_s = token_s
        self._prefill_s = 0.0
        """How long prefills took since the last load."""
        self._failed_s = 0.0
        """How long loads took that failed since then."""

    def pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Return whether to load: it takes less time than computing these tokens, or a new measurement is due."""
        if self._failed_s > 0 and self._loss_s <= 0:
            return False
        return self.gain_s(num_bytes, num_tokens) + self._loss_s > 0

    @property
    def _loss_s(self) -> float:
        """How much longer than computing a load may take."""
        return self._prefill_s / PREFILLS_PER_LOSS - self._failed_s

    def limit_s(self, num_tokens: int) -> float:
        """Return after how long a load is given up: computing these tokens would have ended."""
        if self.token_s is None:
            return FIRST_LIMIT_S
        return max(num_tokens * self.token_s + self._loss_s, LEAST_LIMIT_S)

    def gain_s(self, num_bytes: int, num_tokens: int) -> float:
        """Return how much sooner loading ends than computing these tokens; infinity before the first measurement."""
        if self.bytes_per_s is None or self.token_s is None:
            return float("inf")
        return num_tokens * self.token_s - self.latency_s - num_bytes / self.bytes_per_s

    def observe_load(self, num_bytes: int, seconds: float) -> None:
        """Record how long a load took; 0 s: unknown."""
        self._prefill_s = self._failed_s = 0.0
        if seconds > 0 and num_bytes:
            self.bytes_per_s = _averaged(self.bytes_per_s, num_bytes / seconds)

    def observe_failure(self, seconds: float) -> None:
        """Record how long a load took that brought nothing."""
        self._failed_s += seconds

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step took that computed this many tokens of prompts."""
        self._prefill_s += seconds
        if seconds > 0 and num_tokens >= MIN_MEASURED_TOKENS:
            self.token_s = _averaged(self.token_s, seconds / num_tokens)


def _averaged(average: float | None, new: float) -> float:
    return new if average is None else average + SHARE_OF_NEW * (new - average)
