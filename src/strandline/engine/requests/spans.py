"""What a sequence does in a step, from the scheduler's choice to the record in the plan."""

from typing import NamedTuple

from strandline.cache import Lease, LogUse, StepGrant
from strandline.engine.requests.request import Request
from strandline.ids import BLOCK_TOKENS, NO_TOKEN, NULL_LOG, PendingToken
from strandline.records.plan import SequencePlan

Span = tuple[Request, Lease, int, int, tuple[int, ...]]
"""A request, its lease, the tokens ``[start, end)`` that it computes in the step, and the drafts at their end."""

NO_DRAFTS: tuple[int, ...] = ()


class DraftPlan(NamedTuple):
    """What a sequence does about drafts in a step, beyond those that it verifies."""

    num_next: int
    """Drafts that the draft layer makes for the next step."""
    log: LogUse
    """What the step may use the sequence's log for."""


def exact_end(request: Request, start: int, end: int) -> int:
    """Return where a deterministic step ends that may compute up to ``end``; ``start`` when it can compute nothing.

    A prompt's step ends on the 64-token grid or with the prompt; generated tokens are computed one by one.
    """
    num_prompt = request.num_prompt_tokens
    if start >= num_prompt:
        return min(start + 1, end)
    return num_prompt if end >= num_prompt else max(start, end // BLOCK_TOKENS * BLOCK_TOKENS)


def _tokens_between(request: Request, start: int, end: int) -> tuple[int, ...]:
    num_prompt = request.num_prompt_tokens
    if end <= num_prompt:
        return request.prompt_ids[start:end]
    return (*request.prompt_ids[start:num_prompt], *request.output_ids[max(start - num_prompt, 0) : end - num_prompt])


def sequence_plan(span: Span, plan: DraftPlan, grant: StepGrant) -> SequencePlan:
    """Describe a sequence's part of the step. Nothing may be reserved for the step afterwards: blocks could move."""
    request, lease, start, end, drafts = span
    is_replayed = plan.log is LogUse.DRAFTS
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
        is_replayed and log != NULL_LOG,
        log,
        num_logged,
        num_folded,
        len(drafts),
        lease.window.packed,
    )


def with_next(sequence: SequencePlan, span: Span, plan: DraftPlan) -> SequencePlan:
    """Add what a draft layer needs: the token after the step's, if it is known, and how many to draft."""
    request, _, _, end, _ = span
    next_id = NO_TOKEN if sequence.is_sampled else _tokens_between(request, end, end + 1)[0]
    return sequence._replace(next_id=next_id, next_drafts=plan.num_next)


def as_exact(sequence: SequencePlan, request: Request) -> SequencePlan:
    """Return a sequence of a deterministic step: prefill kernels compute all tokens of its prompt."""
    return sequence._replace(is_prefill=sequence.start < request.num_prompt_tokens)
