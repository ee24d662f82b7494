"""A running request: one sequence of tokens, and where it stands."""

from enum import Enum, StrEnum

from strandline.cache import Account, Lease, TokenBuffer
from strandline.engine.plan import NewRequest
from strandline.engine.sampling_params import SamplingParams
from strandline.ids import RequestId


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended, in the OpenAI API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Request:
    """One sequence. The scheduler owns it and alone changes it.

    With ``n > 1`` each output is a request of its own; all but the first have the first as ``leader`` and wait
    until its prompt is computed, so that they resume from its snapshot.
    """

    __slots__ = (
        "account",
        "finish_reason",
        "is_introduced",
        "leader",
        "lease",
        "max_total",
        "new",
        "num_prompt_tokens",
        "num_tokens",
        "output_ids",
        "prompt_ids",
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
        leader: "Request | None" = None,
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
        self.leader = leader
        self.stop_ids = new.stop_ids
        self.lease: Lease | None = None
        self.account: Account | None = None
        """What its first admission found in the cache."""
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.is_introduced = False
        """Whether the runner has been told of it."""

    @property
    def params(self) -> SamplingParams:
        return self.new.params

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def is_leader_busy(self) -> bool:
        """Whether it should wait for its leader's prompt."""
        leader = self.leader
        return leader is not None and not leader.output_ids and not leader.is_finished
