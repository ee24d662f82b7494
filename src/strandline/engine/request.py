"""A running request: one sequence of tokens, and where it stands."""

from collections.abc import Sequence
from enum import Enum

from strandline.cache import Account, Lead, Lease, TokenBuffer
from strandline.ids import RequestId
from strandline.records.events import FinishReason
from strandline.records.plan import NewRequest
from strandline.records.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence. The scheduler owns it and alone changes it. With ``n > 1`` each output is one of its own."""

    __slots__ = (
        "account",
        "finish_reason",
        "grammar",
        "interarrival_bin",
        "is_audit",
        "is_introduced",
        "lead",
        "lease",
        "marks",
        "max_total",
        "new",
        "num_admissions_seen",
        "num_prompt_tokens",
        "num_tokens",
        "output_ids",
        "prompt_ids",
        "queue_number",
        "request_id",
        "salt",
        "status",
        "stop_ids",
        "stop_reason",
        "tokens",
    )

    def __init__(
        self,
        new: NewRequest,
        *,
        max_total: int,
        salt: str = "",
        marks: tuple[int, ...] = (),
        is_audit: bool = False,
    ) -> None:
        self.new = new
        self.request_id: RequestId = new.request_id
        self.prompt_ids = new.prompt_ids
        self.num_prompt_tokens = len(new.prompt_ids)
        self.tokens = TokenBuffer(new.prompt_ids)
        self.num_tokens = self.num_prompt_tokens
        self.output_ids: list[int] = []
        self.max_total = max_total
        """Prompt and output together end here, by ``max_tokens`` or ``max_model_len``."""
        self.salt = salt
        self.grammar: object = None
        """Keeps the compiled grammar of structured outputs while the request exists (``Executor.compile_grammar``)."""
        self.marks = marks
        """Positions where others are likely to share its beginning: ends of tools, system prompt and turns."""
        self.lead: Lead | None = None
        """Who computes the beginning of its prompt, while it waits for that."""
        self.stop_ids = new.stop_ids
        self.lease: Lease | None = None
        self.account: Account | None = None
        """What its first admission found in the cache."""
        self.num_admissions_seen = -1
        """The scheduler's count of admissions when it last looked for somebody to follow."""
        self.interarrival_bin: int | None = None
        """That of its lease when it was first admitted; kept while it is preempted."""
        self.queue_number = 0
        """Its place in the order of those that wait."""
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.is_audit = is_audit
        """Whether it replays another one, and has no sender (``Auditor``)."""
        self.is_introduced = False
        """Whether the runner has been told of it."""

    @property
    def params(self) -> SamplingParams:
        return self.new.params

    def append(self, token_ids: Sequence[int]) -> None:
        """Append generated tokens."""
        self.output_ids += token_ids
        self.tokens.extend(token_ids)

    @property
    def is_following(self) -> bool:
        """Whether somebody is still on the way to computing the beginning of its prompt."""
        return self.lead is not None and self.lead.is_pending

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED
