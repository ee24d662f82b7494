"""vLLM's ``RequestOutput`` and its parts, and the deltas that they are made of.

Deltas are structs, since there is one per token: a frozen dataclass takes ten times as long to create.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from strandline.records.account import Account
from strandline.records.events import SpeculationStats


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at its position."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    decoded_token: str | None = None
    token_bytes: bytes | None = None
    """What the token stands for, which may be a part of a character; None: not known."""


class OutputDelta(msgspec.Struct, frozen=True):
    """What one of a request's outputs gained since its last delta. The deltas of an output add up to the output."""

    index: int
    text: str
    token_ids: list[int]
    """A token may come before its text, which may need more of them."""
    logprobs: list[dict[int, Logprob]] | None
    num_tokens: int
    """Tokens of the output so far."""
    cumulative_logprob: float | None
    """Log-probability of the output so far."""
    finish_reason: str | None
    """``stop``, ``length``, ``abort`` or ``error`` in the delta that ends the output, None in all others."""
    stop_reason: int | str | None
    speculation: SpeculationStats
    """The output's drafts; known when it has ended."""
    call_marks: tuple[int, ...] = ()
    """The characters of the text at which a special token opens a tool call."""
    token_spans: Sequence[tuple[int, int] | None] = ()
    """The characters ``[start, end)`` of the output's text that each token with log-probabilities adds.

    An empty range: a later token completes the character. None: the text leaves the token out.
    """

    @property
    def is_visible(self) -> bool:
        """Whether it has anything to show other than token ids."""
        return bool(self.text or self.logprobs) or self.finish_reason is not None


class RequestDelta(msgspec.Struct, frozen=True):
    """What a request's outputs gained since its last delta."""

    outputs: list[OutputDelta]
    """One per output, in their order, also of those that gained nothing."""
    finished: bool
    cache_account: Account | None

    @property
    def num_cached_tokens(self) -> int:
        return self.cache_account.hit if self.cache_account is not None else 0


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` outputs, complete or so far."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``error``; None while running."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the end-of-sequence token.

    Of an ``error``, the text of the exception; None: no token could be sampled.
    """
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    """Counts of its accepted and rejected drafts (speculative decoding); known when it has ended."""

    def extend(self, delta: OutputDelta) -> None:
        """Append what the output gained."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.cumulative_logprob, self.speculation = delta.cumulative_logprob, delta.speculation
        if self.logprobs is not None:
            self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def copy(self) -> "CompletionOutput":
        """Return a copy that grows no more."""
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return replace(self, token_ids=list(self.token_ids), logprobs=logprobs)


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the engine's clock."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    admitted_s: float | None = None
    """When the first step of an output was planned."""
    load_begun_s: float | None = None
    """When what a store had of the prompt began to be loaded; None: nothing was."""
    load_ended_s: float | None = None

    @property
    def queue_s(self) -> float | None:
        """Time in the queue, loads included; None: not known, or not admitted yet."""
        return None if self.admitted_s is None else self.admitted_s - self.arrival_s

    @property
    def load_s(self) -> float | None:
        """Time of loads; None: there were none, or they have not ended."""
        if self.load_begun_s is None or self.load_ended_s is None:
            return None
        return self.load_ended_s - self.load_begun_s

    @property
    def prefill_s(self) -> float | None:
        """Time from the first step to the first token."""
        if self.admitted_s is None or self.first_token_s is None:
            return None
        return self.first_token_s - self.admitted_s

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
    """Prompt tokens that came from the prefix cache."""
    cache_account: Account | None
    """What the cache lookup hit, and the reasons of its misses."""
    times: RequestTimes = field(repr=False)

    @property
    def speculation(self) -> SpeculationStats:
        """Counts of accepted and rejected drafts, of all outputs that have ended."""
        return sum((output.speculation for output in self.outputs), SpeculationStats())

    def extend(self, delta: RequestDelta) -> None:
        """Append what the outputs gained."""
        for output, gained in zip(self.outputs, delta.outputs, strict=True):
            output.extend(gained)
        self.finished = delta.finished
        self.num_cached_tokens, self.cache_account = delta.num_cached_tokens, delta.cache_account

    def copy(self) -> "RequestOutput":
        """Return a copy that grows no more."""
        return replace(self, outputs=[output.copy() for output in self.outputs])
