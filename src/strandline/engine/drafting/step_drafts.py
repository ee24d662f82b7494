"""What the sequences of one step verify and draft: decided for each as it joins, and for all when the step is closed.

A step may follow one whose accepted drafts are not known yet. It is planned as if none were accepted, and the device
corrects that.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from strandline.cache import Lease, LogUse, PrefixCache
from strandline.device.batches.prompt_room import NO_PROMPTS, PromptRoom
from strandline.engine.requests.request import Request
from strandline.engine.requests.spans import NO_DRAFTS, Span
from strandline.records.plan import SequencePlan


class DraftLimits(NamedTuple):
    """What an executor and its drafter allow."""

    draft_tokens: int = 0
    """Most drafts of a request in a step."""
    tokens_kept_ahead: int = -1
    """See ``SpeculativeConfig``."""
    corrects_lengths: bool = False
    """Whether the executor completes sequences that are planned before it is known how many of their drafts are
    accepted."""
    verified_prompts: PromptRoom = NO_PROMPTS
    """What the executor computes of prompts in a step that it completes."""


NO_LIMITS: Final = DraftLimits()


class StepDrafts:
    """The drafts of one step.

    Args:
        propose: returns drafts after a request's last token, at most a number; None: the engine has no drafts.
        depth: drafts that the step makes or, without a draft layer, verifies.
        has_layer: whether layers draft after the step.
        under_way: the sequences of the step before, if that is not settled and verifies or makes drafts.
    """

    def __init__(
        self,
        cache: PrefixCache,
        limits: DraftLimits,
        propose: Callable[[Request, int], tuple[int, ...]] | None,
        depth: int,
        *,
        has_layer: bool = False,
        under_way: Iterable[SequencePlan] = (),
    ) -> None:
        self._cache, self._limits, self._propose, self._depth = cache, limits, propose, depth
        self._has_layer = has_layer
        self._unsettled = {sequence.request_id: sequence for sequence in under_way}
        self.must_settle = False
        """Whether a sequence was left out until all is settled."""
        self._prompts_ahead: list[tuple[int, int]] = []
        """If it follows an unsettled step: the tokens of prompts that it computes."""
        self._num_cuts_ahead = 0
        """The snapshots that may be due among these."""
        self.is_plain = propose is None
        """Whether it is computed as in an engine without drafts: it does not follow any, either."""
        self.makes_drafts = False
        """Whether drafts are made after it."""

    @property
    def follows_unsettled(self) -> bool:
        """Whether it follows a step whose accepted drafts are not known."""
        return len(self._unsettled) > 0

    def admits(self, request: Request) -> bool:
        """Whether a waiting request can be admitted; if not, the next step is planned when all is settled."""
        is_admitted = not self._unsettled or (self._limits.verified_prompts.num_rows > 0 and is_independent(request))
        self.must_settle |= not is_admitted
        return is_admitted

    def join(self, request: Request, lease: Lease, end: int, budget: int) -> Span | None:
        """Return what a sequence does in the step; None: it is left out until all is settled.

        Args:
            end: end of the tokens that are computed for certain, for which there is room unless a step is under way.
        """
        start, num_tokens = lease.computed, request.num_tokens
        is_last_token = end - start == 1 and end == num_tokens > request.num_prompt_tokens
        if self._unsettled:
            if is_last_token:
                return self._verify_ahead(request, lease, budget)
            return Span(request, lease, start, end) if self._computes_ahead(request, lease, end) else None
        drafts = self._drafts_of(request, lease, budget) if is_last_token and request.output_ids else NO_DRAFTS
        return Span(request, lease, start, end + len(drafts), drafts)

    def _drafts_of(self, request: Request, lease: Lease, budget: int) -> tuple[int, ...]:
        """Return drafts for a decoding request: as many as it may still generate, and as memory holds.

        None while a snapshot is due: it would be of tokens that may turn out wrong.
        """
        if self._propose is None:
            return NO_DRAFTS
        num_tokens = request.num_tokens
        most = min(max(self._depth, len(request.drafts.drafted)), request.max_total - num_tokens - 1, budget - 1)
        if most < 1 or self._cache.is_cut_due(lease, num_tokens + most):
            return NO_DRAFTS
        drafts = self._propose(request, most)
        return drafts if self._cache.extend(lease, num_tokens + len(drafts)) else NO_DRAFTS

    def _verify_ahead(self, request: Request, lease: Lease, budget: int) -> Span | None:
        """Return what a decoding sequence does while the step before is not settled; None: nothing.

        It verifies what the step under way drafts, if anything. How far it has got by then may be unknown. It is left
        out where it may have ended, or where a snapshot may be due. If one is due for sure, or memory is short, the
        next step is planned when all is settled.
        """
        before, start = self._unsettled.get(request.request_id), lease.computed
        request.drafts.is_looked_up = False
        drafts = request.drafts.drafted if before is None else (0,) * before.next_drafts
        most_tokens = request.num_tokens + (0 if before is None else before.num_drafts)
        if most_tokens >= request.max_total:
            return None
        num_drafts = min(len(drafts), request.max_total - most_tokens - 1, budget - 1)
        end = most_tokens + num_drafts
        if not lease.log or self._cache.is_cut_due(lease, end) or not self._cache.extend(lease, end):
            self.must_settle = True
            return None
        return Span(request, lease, start, start + 1 + num_drafts, drafts[:num_drafts])

    def _computes_ahead(self, request: Request, lease: Lease, end: int) -> bool:
        """Whether known tokens up to ``end`` can be computed while the step before is not settled.

        A graph has to complete the step: if that has no room, or memory is short, the next one is planned when all is
        settled.
        """
        prompts = [*self._prompts_ahead, (lease.computed, end)]
        self._num_cuts_ahead += sum(lease.computed < position <= end for position in lease.planned_cuts)
        has_room = self._limits.verified_prompts.has_room_for(prompts, self._num_cuts_ahead)
        if not (has_room and self.admits(request) and self._cache.extend(lease, end)):
            self.must_settle = True
            return False
        self._prompts_ahead = prompts
        return True

    def close(self, spans: Sequence[Span], logged_from: int) -> None:
        """Decide what each sequence drafts and uses its log for, and whether the step has drafts at all.

        Decoded tokens are logged at depth 0 alone, and not after drafts that are logged or not settled: what follows
        the latter is replayed by the graphs that verify drafts, even if it has none itself.

        Args:
            logged_from: the least number of decodes for which a step logs decoded tokens.
        """
        num_single = [span.end - span.start for span in spans].count(1)
        decodes = LogUse.DECODED if num_single >= logged_from else LogUse.NONE
        if self._propose is None:
            for span in spans:
                span.log_use = decodes
            return
        is_kept_plain = self._limits.corrects_lengths and not self._unsettled and not self._are_verified(spans)
        if is_kept_plain:
            for span in spans:
                span.drop_drafts()
        # Graphs of prompts alone make no drafts.
        is_alone = bool(self._unsettled) and all(span.start < span.request.num_prompt_tokens for span in spans)
        if self._has_layer and not is_kept_plain and not is_alone:
            for span in spans:
                span.next_drafts = self._next_drafts(span)
        are_holding = [bool(span.drafts) or span.lease.has_logged_drafts for span in spans]
        if self._depth or self._unsettled or any(are_holding) or any(span.next_drafts for span in spans):
            decodes = LogUse.NONE
        for span, is_holding in zip(spans, are_holding, strict=True):
            logs_drafts = (is_holding and not is_kept_plain) or self._num_unsettled_drafts(span) > 0
            span.log_use = LogUse.DRAFTS if logs_drafts and span.is_verification else decodes

    def _num_unsettled_drafts(self, span: Span) -> int:
        before = self._unsettled.get(span.request.request_id)
        return 0 if before is None else before.num_drafts

    def _next_drafts(self, span: Span) -> int:
        """Return how many tokens the draft layer drafts after the step, for the next one."""
        request, num_unsettled = span.request, self._num_unsettled_drafts(span)
        remaining = request.max_total - num_unsettled
        # The drafter's keys and values are within the longest request's blocks.
        end_without_drafts = span.end + self._limits.tokens_kept_ahead
        most = min(self._depth, remaining - request.num_tokens - 2, remaining - end_without_drafts)
        if span.end - len(span.drafts) < request.num_tokens or most < 1:
            return 0
        return most if self._cache.extend(span.lease, end_without_drafts + num_unsettled + most) else 0

    def _are_verified(self, spans: Sequence[Span]) -> bool:
        """Whether graphs can verify and make drafts in the step, and the device complete what the host does not know.

        They do where sequences compute a token of their output, and there is room for what others compute: prompts, and
        tokens after which a snapshot is due. To launch the kernels one by one, and to wait for tokens to compare
        drafts with, takes longer than drafts save: elsewhere a step is kept plain, and is replayed as that of a model
        without a draft layer. What was accepted before is folded first. The step after it drafts.
        """
        if not (all(map(_is_known, spans)) or all(is_independent(span.request) for span in spans)):
            return False
        others = [(span.start, span.end) for span in spans if not self._is_verified(span)]
        return len(others) < len(spans) and self._limits.verified_prompts.has_room_for(others)

    def _is_verified(self, span: Span) -> bool:
        """Whether a graph can verify a sequence's drafts, none included, and draft after them."""
        request, start = span.request, span.start
        is_certain_token = span.end - len(span.drafts) == request.num_tokens == start + 1 > request.num_prompt_tokens
        return is_certain_token and not self._cache.is_cut_due(span.lease, span.end)

    def end(self, sequences: Sequence[SequencePlan]) -> None:
        """Note what the step does in the end, given its sequences."""
        self.is_plain = not self._unsettled and all(x.is_plain for x in sequences)
        self.makes_drafts = any(x.next_drafts > 0 for x in sequences)


def is_independent(request: Request) -> bool:
    """Whether tokens of a request are chosen and compared with stop tokens on the device alone."""
    return request.is_independent and not (request.is_bound or request.params.stop_strings)


def _is_known(span: Span) -> bool:
    """Whether the host knows the first token of a sequence after the prompt."""
    return span.start - span.request.num_prompt_tokens < len(span.request.output_ids)
