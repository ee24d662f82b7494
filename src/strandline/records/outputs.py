"""What a user gets back: vLLM's ``RequestOutput`` and its parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from strandline.cache import Account


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at its place."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` outputs, complete or so far."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None while running."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the end-of-sequence token."""


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the engine's clock."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """A request's prompt and outputs, complete or so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens that were not computed, thanks to the prefix cache."""
    cache_account: Account | None
    """What the lookup found, and why it found no more."""
    times: RequestTimes = field(repr=False)
