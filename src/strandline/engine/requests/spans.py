"""What a sequence does in a step, from the scheduler's choice to the record in the plan."""

from dataclasses import dataclass

from strandline.cache import Lease, LogUse, StepGrant
from strandline.engine.requests.request import Request
from strandline.ids import BLOCK_TOKENS, NO_TOKEN, NULL_LOG, PendingToken
from strandline.records.plan import SequencePlan

NO_DRAFTS: tuple[int, ...] = ()


@dataclass(slots=True)
class Span:
    """What a sequence does in a step: it computes the tokens ``[start, end)`` of a request."""

    request: Request
    lease: Lease
    start: int
    end: int
    drafts: tuple[int, ...] = NO_DRAFTS
    """The last of these tokens that are drafts."""
    next_drafts: int = 0
    """Drafts that the draft layer makes for the next step."""
    log_use: LogUse = LogUse.NONE

    @property
    def is_verification(self) -> bool:
        """Whether it computes one token and drafts after it."""
        return self.end - self.start == 1 + len(self.drafts)

    def drop_drafts(self) -> None:
        """Verify none."""
        self.end -= len(self.drafts)
        self.drafts = NO_DRAFTS


def exact_end(request: Request, start: int, end: int) -> int:
    """Return where a deterministic step ends that may compute up to ``end``; ``start`` when it can compute nothing.

    A prompt's step ends on the 64-token grid or with the prompt; generated tokens are computed one by one.
    """
    num_prompt = request.num_prompt_tokens
    if start >= num_prompt:
        return min(start + 1, end)
    return num_prompt if end >= num_prompt else max(start, end // BLOCK_TOKENS * BLOCK_TOKENS)


def _tokens_between(request: Request, start: int, end: int) -> tuple[int, ...]:
    prompt_ids, num_prompt = request.prompt_ids, request.num_prompt_tokens
    if end <= num_prompt:
        return prompt_ids[start:end]
    return (*prompt_ids[start:num_prompt], *request.output_ids[max(start - num_prompt, 0) : end - num_prompt])


def sequence_plan(span: Span, grant: StepGrant) -> SequencePlan:
    """Describe a sequence's part of the step. Nothing may be reserved for the step afterwards: blocks could move."""
    request, lease, start, end, drafts = span.request, span.lease, span.start, span.end, span.drafts
    logs_drafts = span.log_use is LogUse.DRAFTS
    src, dst, cuts, log, num_logged, num_folded = grant
    pending = PendingToken.NONE
    if drafts:
        token_ids: tuple[int, ...] = (request.output_ids[-1] if request.output_ids else 0, *drafts)
        if start - request.num_prompt_tokens == len(request.output_ids):
            # Where it starts is not known either.
            pending = PendingToken.MAY_STOP
    elif end - start == 1 and start >= request.num_prompt_tokens:
        index = start - request.num_prompt_tokens
        output_ids = request.output_ids
        if index < len(output_ids):
            token_ids = (output_ids[index],)
        else:
            token_ids = (0,)
            pending = PendingToken.MAY_STOP if index >= request.params.min_tokens else PendingToken.GOES_ON
    else:
        token_ids = _tokens_between(request, start, end)
    # By position: keywords cost another 0.7 us per sequence and step.
    return SequencePlan(
        request.request_id,
        start,
        end,
        token_ids,
        lease.table.tobytes(),
        lease.kv_start,
        src,
        dst,
        cuts,
        end - len(drafts) == request.num_tokens,
        pending,
        logs_drafts and log != NULL_LOG,
        log,
        num_logged,
        num_folded,
        len(drafts),
        tuple([window.packed for window in lease.windows]),
    )


def with_next(sequence: SequencePlan, span: Span) -> SequencePlan:
    """Add what a draft layer needs: the token after the step's, if it is known, and how many to draft."""
    next_id = NO_TOKEN if sequence.is_sampled else _tokens_between(span.request, span.end, span.end + 1)[0]
    return sequence._replace(next_id=next_id, next_drafts=span.next_drafts)


def as_exact(sequence: SequencePlan, request: Request) -> SequencePlan:
    """Return a sequence of a deterministic step: prefill kernels compute all tokens of its prompt."""
    return sequence._replace(is_prefill=sequence.start < request.num_prompt_tokens)
