"""Data that passes between the core, which handles tokens, and the text part, which handles users' requests.

All of it is plain data, so that the two can run in two processes.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any, NamedTuple

from strandline.ids import RequestId
from strandline.records.account import Account
from strandline.records.adapters import LoadedAdapter
from strandline.records.pictures import Picture, PictureSpan
from strandline.records.plan import NewRequest, RoutedTokens, TokenLogprobs
from strandline.records.tier_stats import DirectoryUse, TierStats
from strandline.records.transfer_params import TransferParams
from strandline.specs import RoutingShape


class FinishReason(StrEnum):
    """Why a request ended, in the OpenAI API's terms."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """No token could be sampled, as the logits had no finite maximum; or an exception concerned this output alone."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One sequence to run. A user's request with ``n > 1`` is several."""

    new: NewRequest
    max_total: int
    """Most tokens of prompt and output together."""
    salt: str = ""
    marks: tuple[int, ...] = ()
    """Token positions up to which other prompts are likely to share this one's prefix."""
    transfer: TransferParams | None = None
    """What it hands over to another engine, or fetches from one; None: nothing."""
    num_remembered: int = 0
    """Tokens of the prompt that are encoded as earlier answers were generated."""
    comes_back: bool = False
    """Whether later prompts contain the text of its output, which leaves out a stop string: it answers a conversation.
    """
    pictures: tuple[PictureSpan, ...] = ()
    """Pictures in its prompt, in order."""
    pixels: dict[bytes, Picture] = field(default_factory=dict)
    """These pictures, by digest; without those that the engine asks for if no hit covers them."""
    tenant: str = ""
    """Whose it is: waiting requests of several tenants are admitted in turn."""
    weight: float = 1.0
    """Share of the tenant while others wait, in proportion to theirs."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Numbers of drafts, of one output or of all since the start; they add up."""

    num_drafts: int = 0
    """Steps of a sequence that had drafts."""
    num_draft_tokens: int = 0
    num_accepted_by_position: tuple[int, ...] = ()
    """How often the first draft of a step, the second, and so on, agreed with what was sampled; empty if there can be
    no drafts."""

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_by_position)

    @property
    def num_rejected_tokens(self) -> int:
        return self.num_draft_tokens - self.num_accepted_tokens

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        by_position = zip_longest(self.num_accepted_by_position, other.num_accepted_by_position, fillvalue=0)
        return SpeculationStats(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            tuple(map(sum, by_position)),
        )


class TokenEvent(NamedTuple):
    """A token of a sequence."""

    request_id: RequestId
    token_id: int
    """No token of the output if the finish reason is ``ERROR``."""
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """A stop token, a stop string, or the text of an exception."""
    account: Account | None
    """The cache lookup's account; with the first token only."""
    speculation: SpeculationStats | None = None
    """The sequence's drafts; with the last token only, if there were any."""
    hidden_state: bytes | None = None
    """The final hidden state before the token, float32 of the machine; with the first token only, if asked for."""
    routed: RoutedTokens | None = None
    """The experts of tokens before it; with the first token of a step, if asked for."""


class HandedOver(NamedTuple):
    """What another engine needs to continue a sequence that has ended here."""

    request_id: RequestId
    params: dict[str, Any]
    """Its ``kv_transfer_params``."""


class Admission(NamedTuple):
    """When a sequence left the queue: seconds of the machine's monotonic clock, which its processes share."""

    request_id: RequestId
    admitted_s: float
    """When its first step was planned."""
    load_begun_s: float | None
    """When the first of its loads from a store began; None: there were no loads."""
    load_ended_s: float | None


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a prompt's tokens from ``start + 1`` on."""

    request_id: RequestId
    start: int
    entries: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepEvents:
    """The output of one step."""

    tokens: list[TokenEvent] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    handed_over: list[HandedOver] = field(default_factory=list)
    """Results of sequences that end in this step."""
    admissions: list[Admission] = field(default_factory=list)
    """Those of sequences that got their first token."""

    def drop(self, request_id: RequestId) -> None:
        """Remove what happened to a sequence, except what it handed over."""
        self.tokens[:] = [event for event in self.tokens if event.request_id != request_id]
        self.prompts[:] = [event for event in self.prompts if event.request_id != request_id]
        self.admissions[:] = [event for event in self.admissions if event.request_id != request_id]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the core that the text part checks requests against."""

    vocab_size: int
    max_model_len: int
    max_picture_tokens: int = 0
    """Tokens of the largest picture; 0: the model reads none."""
    adapters: tuple[LoadedAdapter, ...] = ()
    """LoRA adapters that were loaded at the start."""
    asks_for_pictures: bool = False
    """Whether the engine asks for pictures that its messages leave out."""
    routing_shape: RoutingShape | None = None
    """What is recorded of the experts that tokens are routed to; None: nothing."""
    changes_weights: bool = True
    """Whether the engine can read other weights of its model."""
    hands_over: bool = False
    """Whether other engines may read the engine's memory at any time."""


@dataclass(frozen=True, slots=True)
class KernelFallback:
    """An operation that runs its reference implementation instead of a backend."""

    operation: str
    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class HandOverStats:
    """What this engine gave to others and fetched from them. Counters count from the start."""

    pulls: dict[str, int]
    """Its own pulls that have ended, by outcome: ``done``, ``not_needed``, ``nothing``, ``slower``, or why it
    failed."""
    gives: dict[str, int]
    """Other engines' pulls from it, in the same way."""
    fetched_bytes: int
    fetched_s: float
    """The time from the first to the last byte, summed over completed pulls."""
    given_bytes: int
    given_s: float
    num_leases: int
    """Prompts that it keeps for other engines now."""
    leases_ended: dict[str, int]
    """``fetched``, ``expired``, or ``given_up`` because their memory was needed."""


@dataclass(frozen=True, slots=True)
class CoreStats:
    """State of the core; counters count from its start."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    queried_tokens: int
    hit_tokens: int
    missed_tokens: dict[str, int]
    """By reason, as in the accounts that requests get: nothing more is revealed about other salts."""
    hits_by_kind: dict[str, int]
    snapshots_taken: dict[str, int]
    """By kind."""
    num_snapshots: int
    """Snapshots in the cache now."""
    num_snapshots_evicted: int
    num_blocks_evicted: int
    bytes_by_use: dict[str, int]
    """Memory of slots and blocks, and free memory; they add up to the arena."""
    num_audited: int = 0
    """Requests that were replayed without the cache."""
    num_audited_tokens: int = 0
    """Tokens of their outputs."""
    largest_audit_difference: float = 0.0
    """Largest difference of one of these tokens' log-probabilities."""
    num_events_published: int = 0
    num_events_dropped: int = 0
    """Cache events that found the publisher's queue full."""
    tiers: list[TierStats] = field(default_factory=list)
    """Those below the device, nearest first."""
    shared_directory: DirectoryUse | None = None
    """None: there is no object store, or it is a bucket."""
    num_snapshots_loaded: int = 0
    num_blocks_loaded: int = 0
    """None: there is none below the device."""
    hand_over: HandOverStats | None = None
    """None: this engine does not take part."""
    kernel_fallbacks: list[KernelFallback] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    speculation_by_method: dict[str, SpeculationStats] = field(default_factory=dict)
    """What ``speculation`` sums up, by the method that made the drafts."""
