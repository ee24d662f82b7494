"""How many drafts each sequence verifies in a step, and makes for the next one; and how many were accepted.

N-grams and suffixes are looked up before a step, which then waits for the tokens of the one before. So where the depth
is chosen, and a step finds drafts for none of its requests, lookups *rest*: the depth is 0, so that steps are planned
ahead, and drafts are looked up after a step's result instead, in a growing interval of steps, until some are found.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from strandline.cache import Lease, LogUse, PrefixCache
from strandline.device.batches.prompt_room import NO_PROMPTS, PromptRoom
from strandline.engine.drafting.draft_depth import DraftDepth
from strandline.engine.drafting.drafting import ChoosingDrafter, Drafter, DraftLayerDrafter
from strandline.engine.drafting.suffix_drafter import SuffixDrafter
from strandline.engine.requests.draft_counters import DraftCounters
from strandline.engine.requests.request import Request
from strandline.engine.requests.spans import NO_DRAFTS, DraftPlan, Span
from strandline.ids import RequestId
from strandline.records.events import SpeculationStats
from strandline.records.plan import SequencePlan, StepPlan

MOST_STEPS_BETWEEN_LOOKUPS: Final = 8
"""While lookups rest. No request gets more tokens in between."""


class Drafts:
    """The part of the scheduler that handles drafts.

    Args:
        drafter: proposes tokens that decoding requests may generate next; None: no drafts.
        draft_tokens: most drafts of a request in a step.
        chooser: chooses how many; None: always as many.
        methods: names of what the drafter chooses from, a drafter's before that of lookups.
        tokens_kept_ahead: as of ``SpeculativeConfig``.
        corrects_lengths: whether the executor completes sequences that are planned before it is known how many of
            their drafts are accepted.
        verified_prompts: what the executor computes of prompts in a step that it completes.
    """

    def __init__(
        self,
        cache: PrefixCache,
        drafter: Drafter | None = None,
        draft_tokens: int = 0,
        chooser: DraftDepth | None = None,
        methods: Sequence[str] = (),
        *,
        tokens_kept_ahead: int = -1,
        corrects_lengths: bool = False,
        verified_prompts: PromptRoom = NO_PROMPTS,
    ) -> None:
        self._cache, self.drafter, self.chooser = cache, drafter, chooser
        self._tokens_kept_ahead = tokens_kept_ahead
        self.has_layer = isinstance(drafter, (DraftLayerDrafter, ChoosingDrafter))
        self._choosing = drafter if isinstance(drafter, ChoosingDrafter) else None
        # N-grams and suffixes are looked up in tokens that have reached the host.
        self.corrects_lengths = corrects_lengths and self.has_layer
        self.verified_prompts = verified_prompts
        self._is_plain = drafter is None
        """Whether the last planned step is computed as in an engine without drafts: it does not follow any, either."""
        self._makes_drafts = False
        """Whether drafts are made after the last planned step."""
        self.draft_tokens = draft_tokens
        self.depth = draft_tokens
        """Drafts that the next step makes or, without a draft layer, verifies."""
        self._may_rest = chooser is not None and not isinstance(drafter, DraftLayerDrafter)
        self.is_resting = False
        """Whether no drafts are looked up before steps, because none were found."""
        self._lookup_steps = 0
        """While lookups rest: steps from one to the next."""
        self._steps_to_lookup = 0
        self._num_lookups = self._num_found = 0
        """Lookups while a step is planned, and those that found drafts."""
        self._counters = {method: DraftCounters(draft_tokens) for method in methods}
        self._methods = methods
        self._unsettled: Mapping[RequestId, SequencePlan] = {}
        """While a step is planned: the sequences of the step under way, if that verifies or makes drafts."""
        self._must_settle = False
        """Whether a sequence was left out of the last planned step until all is settled."""
        self._ahead: list[tuple[int, int]] = []
        """While a step is planned that follows an unsettled one: the tokens of prompts that it computes."""
        self._num_cuts_ahead = 0
        """The snapshots that may be due among these."""
        self.choose_depth(1, is_timed=False)

    def choose_depth(self, num_running: int, *, is_timed: bool) -> None:
        """Choose the depth of the next step; as of ``DraftDepth.choose``, unless lookups rest."""
        if self.is_resting and not self.has_layer:
            self.depth = 0
        elif self.chooser is not None:
            self.depth = self.chooser.choose(max(num_running, 1), is_timed=is_timed)

    def join(self, request: Request, lease: Lease, end: int, budget: int) -> Span | None:
        """Return what a running sequence does in the step that is planned; None: it is left out until all is settled.

        Args:
            end: of the tokens that it computes for certain, for which there is room unless a step is under way.
        """
        start = lease.computed
        if self._unsettled and start >= request.num_prompt_tokens:
            return self._verify_ahead(request, lease, budget)
        if not self.computes_ahead(request, lease, end):
            return None
        drafts = NO_DRAFTS
        # A preempted request may compute a single token that is not its last one.
        if end - start == 1 and end == request.num_tokens and request.output_ids:
            drafts = self._propose(request, lease, budget)
        return request, lease, start, end + len(drafts), drafts

    def _propose(self, request: Request, lease: Lease, budget: int) -> tuple[int, ...]:
        """Return drafts for a decoding request: as many as it may still generate, and as memory holds.

        None while a snapshot is due: it would be of tokens that may turn out wrong.
        """
        drafter, num_tokens = self.drafter, request.num_tokens
        if drafter is None:
            return NO_DRAFTS
        most = min(max(self.depth, len(request.drafts)), request.max_total - num_tokens - 1, budget - 1)
        if most < 1 or self._cache.is_cut_due(lease, num_tokens + most):
            return NO_DRAFTS
        if self._choosing is not None and self.is_resting:
            request.is_looked_up, drafts = False, request.drafts[:most]
        else:
            drafts = drafter.propose(request, most)
            self._num_lookups += 1
            self._num_found += len(drafts) > 0 if self._choosing is None else request.is_looked_up
        return drafts if self._cache.extend(lease, num_tokens + len(drafts)) else NO_DRAFTS

    def begin_step(self, under_way: StepPlan | None) -> None:
        """Begin to plan a step.

        Args:
            under_way: the step before, if it is not settled.
        """
        sequences = () if under_way is None or self._is_plain else under_way.sequences
        self._unsettled = {sequence.request_id: sequence for sequence in sequences}
        self._must_settle = False
        self._ahead, self._num_cuts_ahead = [], 0
        self._num_lookups = self._num_found = 0

    @property
    def follows_unsettled(self) -> bool:
        """Whether the step that is planned follows one whose accepted drafts are not known."""
        return len(self._unsettled) > 0

    def plan_step(self, spans: list[Span], logged_from: int) -> tuple[list[Span], list[DraftPlan]]:
        """Decide what each sequence of a step does about drafts, and what for it uses its log.

        Decoded tokens are logged at depth 0 alone, and not after drafts that are logged or not settled: what follows
        the latter is replayed by the graphs that verify drafts, even if it has none itself.

        Args:
            logged_from: the least number of decodes for which a step logs decoded tokens.

        Returns:
            The spans, perhaps without their drafts; and a plan for each.
        """
        num_single = [end - start for _, _, start, end, _ in spans].count(1)
        decodes = LogUse.DECODED if num_single >= logged_from else LogUse.NONE
        if self.drafter is None:
            return spans, [DraftPlan(0, decodes)] * len(spans)
        is_kept_plain = self.corrects_lengths and not self._unsettled and not self._are_verified(spans)
        if is_kept_plain:
            spans = [(*span[:3], span[3] - len(span[4]), NO_DRAFTS) for span in spans]
        # Graphs of prompts alone make no drafts.
        is_alone = bool(self._unsettled) and all(start < r.num_prompt_tokens for r, _, start, _, _ in spans)
        may_draft = self.has_layer and not is_kept_plain and not is_alone
        next_drafts = [self._next_drafts(span) if may_draft else 0 for span in spans]
        holds_drafts = [bool(drafts) or lease.has_logged_drafts for _, lease, _, _, drafts in spans]
        has_drafts = self.follows_unsettled or any(next_drafts) or any(holds_drafts)
        if self.depth or has_drafts:
            decodes = LogUse.NONE
        plans = list[DraftPlan]()
        for span, num_next, holds in zip(spans, next_drafts, holds_drafts, strict=True):
            is_replayed = (holds and not is_kept_plain) or self._has_unsettled_drafts(span)
            use = LogUse.DRAFTS if is_replayed and span[3] - span[2] == 1 + len(span[4]) else decodes
            plans.append(DraftPlan(num_next, use))
        return spans, plans

    def end_step(self, sequences: Sequence[SequencePlan], num_running: int) -> None:
        """Note what was planned, and choose the depth of the next step."""
        if self.drafter is None:
            return
        self._is_plain = not self._unsettled and all(x.is_plain for x in sequences)
        self._makes_drafts = any(x.next_drafts > 0 for x in sequences)
        if self._may_rest and self._num_lookups and not self._num_found:
            # The next one is behind this step's result: in time for the next step, if that is then planned at all.
            self.is_resting, self._lookup_steps, self._steps_to_lookup = True, 1, 1
        self.choose_depth(num_running, is_timed=any(x.is_verification for x in sequences))

    def look_up(self, advanced: Sequence[Request], num_running: int) -> None:
        """Keep the answers of requests that have ended; while lookups rest, look for drafts if it is time to.

        Drafts are looked for behind tokens that have come in. Requests that got their first token are always looked up.
        Where there are drafts, the depth of the next step is chosen again; it looks them up itself.
        """
        drafter = self.drafter
        lookup = drafter if self._choosing is None else self._choosing.lookup
        if isinstance(lookup, SuffixDrafter):
            for request in advanced:
                if request.finish_reason is not None:
                    lookup.add_answer(request)
        if not self.is_resting or drafter is None:
            return
        self._steps_to_lookup -= 1
        is_due = self._steps_to_lookup <= 0
        running = [x for x in advanced if x.finish_reason is None and (is_due or len(x.output_ids) == x.num_new)]
        if any(self._is_worth_looking_up(request, drafter) for request in running):
            self.is_resting = False
            self.choose_depth(num_running, is_timed=True)
        elif is_due:
            self._steps_to_lookup = self._lookup_steps
            self._lookup_steps = min(2 * self._lookup_steps, MOST_STEPS_BETWEEN_LOOKUPS)

    def _is_worth_looking_up(self, request: Request, drafter: Drafter) -> bool:
        if self._choosing is None:
            return len(drafter.propose(request, 1)) > 0
        return self.depth > 0 and self._choosing.prefers_looked_up(request, self.depth)

    def can_plan_ahead(self, running: Iterable[Request], *, may_admit: bool) -> bool:
        """Whether the next step can be planned before the last planned one is settled.

        It can after a plain step, if it is plain, too, or a CUDA graph drafts or does without. Or if both verify what a
        draft layer drafts, and a graph computes prompts as well. Lookups need the tokens of the last planned one.
        """
        if self._choosing is not None and self.depth and not self.is_resting:
            return False
        if self._is_plain:
            return not self.depth or self.drafter is None or (self.corrects_lengths and _are_independent(running))
        can_correct = self.corrects_lengths and self._makes_drafts and not self._must_settle
        may_admit = may_admit and not self.verified_prompts.num_rows
        return can_correct and not may_admit and _are_independent(running)

    @property
    def can_launch_ahead(self) -> bool:
        """Whether the step that was just planned can be launched before the previous one is settled."""
        return self._is_plain or self.corrects_lengths

    def _verify_ahead(self, request: Request, lease: Lease, budget: int) -> Span | None:
        """Return what a sequence does in a step that is planned before the step under way is settled; None: nothing.

        It verifies what the step under way drafts, if anything. How far it has got by then may be unknown: it is
        planned as if none of the drafts in that step were accepted, and the device corrects that. It is left out where
        it may have ended, or where a step of another kind may be due: one that takes a snapshot, or computes tokens
        anew. If such a step is due for sure, or memory is short, the next step is planned when all is settled.
        """
        before, start = self._unsettled.get(request.request_id), lease.computed
        request.is_looked_up = False
        drafts = request.drafts if before is None else (0,) * before.next_drafts
        most_tokens = request.num_tokens + (0 if before is None else before.num_drafts)
        if most_tokens >= request.max_total:
            return None
        num_drafts = min(len(drafts), request.max_total - most_tokens - 1, budget - 1)
        end = most_tokens + num_drafts
        is_other = request.num_tokens - start != 1 or not lease.log
        if is_other or self._cache.is_cut_due(lease, end) or not self._cache.extend(lease, end):
            self._must_settle = True
            return None
        return request, lease, start, start + 1 + num_drafts, drafts[:num_drafts]

    def can_join_ahead(self, request: Request) -> bool:
        """Whether a request can be admitted to the step that is planned; if not, the next one is planned when all is
        settled.
        """
        can_join = not self._unsettled or (self.verified_prompts.num_rows > 0 and _is_independent(request))
        self._must_settle |= not can_join
        return can_join

    def computes_ahead(self, request: Request, lease: Lease, end: int) -> bool:
        """Whether the step that is planned can compute a prompt's tokens up to ``end``, which are known.

        If it follows an unsettled step, a graph has to complete it: if that has no room, or memory is short, the next
        step is planned when all is settled.
        """
        if not self._unsettled:
            return True
        prompts = [*self._ahead, (lease.computed, end)]
        self._num_cuts_ahead += sum(lease.computed < position <= end for position in lease.planned_cuts)
        has_room = self.verified_prompts.has_room_for(prompts, self._num_cuts_ahead)
        if not (has_room and self.can_join_ahead(request) and self._cache.extend(lease, end)):
            self._must_settle = True
            return False
        self._ahead = prompts
        return True

    def _has_unsettled_drafts(self, span: Span) -> bool:
        before = self._unsettled.get(span[0].request_id)
        return before is not None and before.num_drafts > 0

    def _next_drafts(self, span: Span) -> int:
        """Return how many tokens the draft layer drafts after the step, for the next one."""
        request, lease, _, end, drafts = span
        before = self._unsettled.get(request.request_id)
        num_unsettled = 0 if before is None else before.num_drafts
        remaining = request.max_total - num_unsettled
        # The drafter's keys and values are within the longest request's blocks.
        end_without_drafts = end + self._tokens_kept_ahead
        most = min(self.depth, remaining - request.num_tokens - 2, remaining - end_without_drafts)
        if end - len(drafts) < request.num_tokens or most < 1:
            return 0
        return most if self._cache.extend(lease, end_without_drafts + num_unsettled + most) else 0

    def _are_verified(self, spans: Sequence[Span]) -> bool:
        """Whether graphs can verify and make drafts in a step, and the device complete what the host does not know.

        They do where sequences compute a token of their output, and there is room for what others compute: prompts, and
        tokens after which a snapshot is due. To launch the kernels one by one, and to wait for each draft, takes
        longer than drafts save: elsewhere a step is kept plain, and is replayed as that of a model without a draft
        layer. What was accepted before is folded first. The step after it drafts.
        """
        is_complete = _are_known(spans) or _are_independent(span[0] for span in spans)
        if not is_complete:
            return False
        others = [(span[2], span[3]) for span in spans if not self._is_verified(span)]
        return len(others) < len(spans) and self.verified_prompts.has_room_for(others)

    def _is_verified(self, span: Span) -> bool:
        """Whether a graph can verify a sequence's drafts, none included, and draft behind it."""
        request, lease, start, end, drafts = span
        is_certain_token = end - len(drafts) == request.num_tokens == start + 1 > request.num_prompt_tokens
        return is_certain_token and not self._cache.is_cut_due(lease, end)

    def count(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Count what became of the drafts of a request in a step."""
        if request.counted_drafts is None:
            request.counted_drafts = DraftCounters(self.draft_tokens)
        request.counted_drafts.count(num_drafted, num_accepted)
        self._counters[self._methods[-1 if request.is_looked_up else 0]].count(num_drafted, num_accepted)
        if self.chooser is not None:
            self.chooser.count(num_drafted, num_accepted)

    def stats_by_method(self) -> dict[str, SpeculationStats]:
        """Return the counts of all drafts so far."""
        return {method: each.stats() for method, each in self._counters.items()}

    def stats(self) -> SpeculationStats:
        """Return the sum of these."""
        return sum(self.stats_by_method().values(), SpeculationStats())

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take the time of a step."""
        if self.chooser is not None:
            self.chooser.observe(plan, seconds)


def _are_independent(requests: Iterable[Request]) -> bool:
    """Whether tokens of requests are chosen and compared with stop tokens on the device alone."""
    return all(map(_is_independent, requests))


def _is_independent(request: Request) -> bool:
    is_independent = request.is_independent
    if not request.is_introduced:
        is_independent = request.new.is_independent and not request.is_audit
    return is_independent and not (request.is_bound or request.params.stop_strings)


def _are_known(spans: Iterable[Span]) -> bool:
    """Whether the host knows the first tokens of spans behind the prompt."""
    return all(start - r.num_prompt_tokens < len(r.output_ids) for r, _, start, _, _ in spans)
