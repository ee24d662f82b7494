"""What passes between the core, which knows tokens, and the text part, which knows users.

All of it is plain data, so that the two may live in two processes.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from strandline.cache import Account
from strandline.ids import RequestId
from strandline.records.plan import NewRequest, TokenLogprobs


class FinishReason(StrEnum):
    """Why a request ended, in the OpenAI API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Submission:
    """One sequence to run. With ``n > 1`` a user's request is several."""

    new: NewRequest
    max_total: int
    """Prompt and output together end here."""
    salt: str = ""
    marks: tuple[int, ...] = ()
    """Positions where others are likely to share the prompt's beginning."""


class TokenEvent(NamedTuple):
    """A sequence got a token."""

    request_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    account: Account | None
    """What the lookup found; with the first token only."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a prompt's tokens from ``start + 1`` on."""

    request_id: RequestId
    start: int
    entries: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step produced."""

    tokens: list[TokenEvent] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the text part must know of the core to refuse what cannot be served."""

    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class KernelFallback:
    """An operation that runs its reference implementation in place of a backend."""

    operation: str
    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class CoreStats:
    """Where the core stands; counters count from its start."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    queried_tokens: int
    hit_tokens: int
    missed_tokens: dict[str, int]
    """By reason, as the requests were told: the counters tell no more of other salts than accounts do."""
    hits_by_kind: dict[str, int]
    snapshots_taken: dict[str, int]
    """By kind."""
    num_snapshots: int
    """That the cache holds now."""
    num_snapshots_evicted: int
    num_blocks_evicted: int
    tenant_bytes: dict[str, int]
    """Memory by who holds it, and what is free; the sum is the arena."""
    num_audited: int = 0
    """Requests that were replayed cold."""
    num_audited_tokens: int = 0
    """Of their outputs."""
    largest_audit_difference: float = 0.0
    """Of the log-probabilities of one of these tokens."""
    kernel_fallbacks: list[KernelFallback] = field(default_factory=list)
