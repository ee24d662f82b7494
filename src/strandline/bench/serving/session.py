"""What is sent and what comes back, as plain data: asks, answers, and sessions of asks that follow each other."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or messages."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: Prompt
    max_tokens: int
    tokens: bytes | None = None
    """The prompt's tokens, encoded, where they are known."""
    at_s: float = 0.0
    """Earliest time to send it, relative to its session's start."""
    think_s: float = 0.0
    """Minimum delay after the previous answer."""
    body: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request."""


@dataclass(slots=True)
class Answer:
    """Outcome of one request. Times are seconds; ``start_s`` counts from the run's start."""

    start_s: float = 0.0
    ttft_s: float = 0.0
    """Time from sending to the first text."""
    latency_s: float = 0.0
    """Time from sending to the end of the answer."""
    gaps_s: list[float] = field(default_factory=list)
    """Between pieces of text."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Generated token ids, if the server reports them."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """None: the server does not say."""
    ideal_tokens: int | None = None
    """The prompt's longest prefix that was sent or generated before; None: the tokens are not known."""
    error: str = ""
    """Why there is no answer; empty: there is one."""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


Asks = Generator[Ask, Answer, None]
"""Yields requests and receives the answer to each, so that the next turn can contain it."""


@dataclass(frozen=True, slots=True)
class Session:
    """A sequence of requests, each after the answer to the previous one. ``asks`` starts a new iteration each time."""

    asks: Callable[[], Asks]
    start_s: float | None = None
    """Start time; None: chosen by the pace."""
    holds_its_place: bool = False
    """Count against the concurrency from the first ask to the last, not from ask to ask."""


def single(ask: Ask) -> Session:
    """Return a session of one request."""

    def asks() -> Asks:
        yield ask

    return Session(asks, holds_its_place=True)
