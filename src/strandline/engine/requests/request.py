"""A request in the engine: one sequence of tokens and its progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from strandline.cache import Lead, Lease
from strandline.engine.requests.draft_counters import DraftCounters
from strandline.engine.requests.suffix_index import SuffixIndex
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


class Proposals(NamedTuple):
    """What may follow the first tokens of a request."""

    num_tokens: int
    drafted: tuple[int, ...]
    looked_up: tuple[int, ...]


@dataclass(slots=True)
class RequestLoads:
    """The loads of a request's prompt from stores."""

    num_begun: int = 0
    begun_s: float | None = None
    """When the first began."""
    ended_s: float | None = None
    """When the last ended."""
    failed_end: int = 0
    """Tokens that a load failed to bring."""


class Request:
    """One sequence, changed by the scheduler alone. With ``n > 1`` each output is a request of its own."""

    __slots__ = (
        "account",
        "comes_back",
        "counted_drafts",
        "draft_rates",
        "drafts",
        "finish_reason",
        "grammar",
        "interarrival_bin",
        "is_audit",
        "is_bound",
        "is_held",
        "is_independent",
        "is_introduced",
        "is_looked_up",
        "lead",
        "lease",
        "loads",
        "marks",
        "max_total",
        "new",
        "num_admissions_seen",
        "num_new",
        "num_prompt_tokens",
        "num_remembered",
        "num_tokens",
        "offer",
        "output_ids",
        "pictures",
        "pixels",
        "prompt_ids",
        "proposals",
        "queue_number",
        "request_id",
        "salt",
        "shared_end",
        "status",
        "stop_ids",
        "stop_reason",
        "suffixes",
        "tenant",
        "tokens",
        "transfer",
        "weight",
    )

    def __init__(self, submission: Submission, *, is_audit: bool = False) -> None:
        self.new = new = submission.new
        self.request_id: RequestId = new.request_id
        self.prompt_ids = new.prompt_ids
        self.num_prompt_tokens = len(new.prompt_ids)
        self.pictures = submission.pictures
        """Pictures in its prompt, in order."""
        self.pixels = submission.pixels
        """These pictures, by digest."""
        self.tokens = TokenBuffer(with_virtual_ids(new.prompt_ids, self.pictures) if self.pictures else new.prompt_ids)
        """Its tokens as the cache names them: those of pictures have virtual ids."""
        self.num_tokens = self.num_prompt_tokens
        self.output_ids: list[int] = []
        self.num_new = 0
        """Tokens of the output that the last step brought."""
        self.drafts: tuple[int, ...] = ()
        """Drafts of the model's draft layer, or of a drafter, for the tokens after the last one."""
        self.is_looked_up = False
        """Whether the drafts that it verifies were looked up in earlier text."""
        self.proposals: Proposals | None = None
        """What was last drafted and looked up, to be compared with what follows (``ChoosingDrafter``)."""
        self.draft_rates: list[float] | None = None
        """How often what was drafted agreed, and what was looked up; None before the first."""
        self.counted_drafts: DraftCounters | None = None
        """Counters of its verified drafts; None before the first."""
        self.suffixes: SuffixIndex | None = None
        """Index of its tokens for suffix decoding; None before the first search."""
        self.max_total = submission.max_total
        """Most tokens of prompt and output together, by ``max_tokens`` or ``max_model_len``."""
        self.salt = submission.salt
        self.tenant, self.weight = submission.tenant, submission.weight
        """Whose it is, and the tenant's share of the engine while others wait, in proportion to theirs."""
        self.grammar: object = None
        """Keeps the compiled grammar of structured outputs while the request exists (``Executor.compile_grammar``)."""
        self.marks = submission.marks
        """Ends of prefixes that other prompts are likely to share: of tools, system prompt and turns."""
        self.transfer = submission.transfer
        """What it hands over to another engine, or fetches from one; None: nothing."""
        self.num_remembered = submission.num_remembered
        """Tokens of its prompt that are encoded as earlier answers were generated."""
        self.comes_back = submission.comes_back
        """Whether later prompts contain the text of its output, which leaves out a stop string."""
        self.lead: Lead | None = None
        """The running request or the load that it last waited for, or None."""
        self.is_held = False
        """Whether it waits for a slot of its adapter (``AdapterAdmission``)."""
        self.offer: Offer | None = None
        """What a store holds of its prompt, to be loaded before it is admitted; None: nothing, or it has been tried."""
        self.loads = RequestLoads()
        self.stop_ids = new.stop_ids
        self.lease: Lease | None = None
        self.account: Account | None = None
        """The account of its first admission."""
        self.num_admissions_seen = -1
        """The scheduler's count of admissions when a leader was last searched for."""
        self.interarrival_bin: int | None = None
        """That of its lease when it was first admitted; kept while it is preempted."""
        self.queue_number = (0, 0)
        """Its position among the waiting requests (``WaitingQueue``)."""
        self.shared_end: int | None = None
        """Where the tokens end that the next turn can share, before a stop string; None: not before its last token."""
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.is_audit = is_audit
        """Whether it repeats another request for the ``Auditor`` and has no sender."""
        self.is_independent = new.is_independent and not is_audit
        """Whether the runner can choose its tokens together (``NewRequest``), as far as it is known by now."""
        self.is_bound = False
        """Whether the budget of its reasoning may end within the next tokens, so that the host has to choose them."""
        self.is_introduced = False
        """Whether a plan has announced it to the runner."""

    @property
    def held_lease(self) -> Lease:
        """The lease of a running request. Raises an ``EngineError`` if it has no lease."""
        if self.lease is None:
            raise EngineError(f"request {self.request_id} runs without a lease")
        return self.lease

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
    def is_following(self) -> bool:
        """Whether its leader runs and has not computed their shared prefix yet."""
        return self.lead is not None and self.lead.is_pending

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
