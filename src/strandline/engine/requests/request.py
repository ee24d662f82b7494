"""A request in the engine: one sequence of tokens and its progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from strandline.cache import Lead, Lease
from strandline.engine.requests.request_drafts import RequestDrafts
from strandline.errors import EngineError
from strandline.ids import NO_TOKEN, RequestId
from strandline.records.account import Account
from strandline.records.events import FinishReason, Submission
from strandline.records.offer import Offer
from strandline.records.pictures import with_virtual_ids
from strandline.records.plan import NewRequest
from strandline.records.sampling_params import SamplingParams
from strandline.records.tokens import TokenBuffer


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Wait:
    """Where a request waits before it is admitted, and for what."""

    queue_number: tuple[int, int] = (0, 0)
    """Its position among the waiting requests (``WaitingQueue``)."""
    lead: Lead | None = None
    """The running request or the load that it last waited for, or None."""
    num_admissions_seen: int = -1
    """The scheduler's count of admissions when a leader was last searched for."""
    is_held: bool = False
    """Whether it waits for a slot of its adapter (``AdapterAdmission``)."""

    @property
    def is_following(self) -> bool:
        """Whether its leader runs and has not computed their shared prefix yet."""
        return self.lead is not None and self.lead.is_pending

    @property
    def is_blocked(self) -> bool:
        """Whether it cannot be admitted yet, whatever its position."""
        return self.is_held or self.is_following


@dataclass(slots=True, eq=False)
class RequestLoads:
    """The loads of a request's prompt from stores."""

    offer: Offer | None = None
    """What a store holds of its prompt, to be loaded before it is admitted; None: nothing, or it has been tried."""
    num_begun: int = 0
    begun_s: float | None = None
    """When the first began."""
    ended_s: float | None = None
    """When the last ended."""
    failed_end: int = 0
    """Position up to which a load that failed would have brought tokens."""

    @property
    def lacking_end(self) -> int:
        """Position up to which tokens were to be loaded, although not all of them have come."""
        return max(self.failed_end, self.offer.position if self.offer else 0)


class Request:
    """One sequence, changed by the scheduler alone. With ``n > 1`` each output is a request of its own.

    What was asked is in ``submission``; what may change of it, such as the salt, is copied. Records hold what only some
    parts of the engine need: the queue (``wait``), stores (``loads``) and drafting (``drafts``).
    """

    __slots__ = (
        "account",
        "drafts",
        "finish_reason",
        "grammar",
        "interarrival_bin",
        "is_audit",
        "is_bound",
        "is_independent",
        "is_introduced",
        "lease",
        "loads",
        "max_total",
        "new",
        "num_new",
        "num_prompt_tokens",
        "num_tokens",
        "output_ids",
        "pixels",
        "request_id",
        "salt",
        "shared_end",
        "status",
        "stop_reason",
        "submission",
        "tokens",
        "wait",
    )

    def __init__(self, submission: Submission, *, is_audit: bool = False) -> None:
        # What was asked
        self.submission = submission
        self.new = new = submission.new
        self.request_id: RequestId = new.request_id
        self.num_prompt_tokens = len(new.prompt_ids)
        self.is_audit = is_audit
        """Whether it repeats another request for the ``Auditor`` and has no sender."""

        # Progress
        self.status = Status.WAITING
        pictures = submission.pictures
        self.tokens = TokenBuffer(with_virtual_ids(new.prompt_ids, pictures) if pictures else new.prompt_ids)
        """Its tokens as the cache names them: those of pictures have virtual ids."""
        self.num_tokens = self.num_prompt_tokens
        """Tokens of prompt and output, with a last one that is not known yet."""
        self.max_total = submission.max_total
        """Most tokens of prompt and output together; warm-up requests are cut short."""
        self.output_ids: list[int] = []
        self.num_new = 0
        """Tokens of the output that the last step brought."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.pixels = submission.pixels
        """Its pictures, by digest; those that the engine asked for are added as they come."""

        # In the cache
        self.salt = submission.salt
        """The salt of the weights that compute it: it changes if they do while the request waits."""
        self.lease: Lease | None = None
        """None unless it runs."""
        self.account: Account | None = None
        """The account of its first admission."""
        self.interarrival_bin: int | None = None
        """That of its lease when it was first admitted; kept while it is preempted."""
        self.shared_end: int | None = None
        """Where the tokens end that the next turn can share, before a stop string; None: not before its last token."""

        # In the executor
        self.grammar: object = None
        """Keeps the compiled grammar of structured outputs while the request exists (``Executor.compile_grammar``)."""
        self.is_introduced = False
        """Whether a plan has announced it to the runner."""
        self.is_independent = new.is_independent and not is_audit
        """Whether the runner can choose its tokens together (``NewRequest``), as far as it is known by now."""
        self.is_bound = False
        """Whether the budget of its reasoning may end within the next tokens, so that the host has to choose them."""

        self.wait = Wait()
        self.loads = RequestLoads()
        self.drafts = RequestDrafts()

    @property
    def held_lease(self) -> Lease:
        """The lease of a running request. Raises an ``EngineError`` if it has no lease."""
        if self.lease is None:
            raise EngineError(f"request {self.request_id} runs without a lease")
        return self.lease

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.new.prompt_ids

    @property
    def params(self) -> SamplingParams:
        return self.new.params

    @property
    def needs_host_tokens(self) -> bool:
        """Whether every token must reach the host before the next one can be computed."""
        return self.is_bound or self.new.needs_host_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """Append generated tokens."""
        self.output_ids += token_ids
        self.tokens.extend(token_ids)

    def append_sampled(self, sampled: int) -> None:
        """Append the next token of the output; note whether it is the last one, and why."""
        token = max(sampled, 0)  # as the device has it, whose step under way may have computed it
        self.output_ids.append(token)
        self.tokens.append(token)
        num_output = len(self.output_ids)
        if sampled == NO_TOKEN:
            self.finish_reason = FinishReason.ERROR
        elif self.new.stops_at(token, num_output):
            self.finish_reason = FinishReason.STOP
            self.stop_reason = token if token in (self.params.stop_token_ids or ()) else None
        elif num_output + self.num_prompt_tokens >= self.max_total:
            self.finish_reason = FinishReason.LENGTH

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED


def adapters_of(requests: Sequence[Request]) -> set[str]:
    """Return the digests of the adapters that requests use."""
    return {request.new.adapter for request in requests} - {""}


def introduce_all(requests: Sequence[Request], introduce: Callable[[Request], NewRequest]) -> list[NewRequest]:
    """Return what the executor gets of those requests that no plan has announced; they count as announced from now."""
    new = []
    for request in requests:
        if not request.is_introduced:
            request.is_introduced = True
            introduced = introduce(request)
            request.is_independent = introduced.is_independent
            new.append(introduced)
    return new
