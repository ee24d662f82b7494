"""How deep the next step drafts, from where, and how many drafts were accepted.

N-grams and suffixes are looked up before a step, which then waits for the tokens of the one before. So where the depth
is chosen, and a step finds drafts for none of its requests, lookups are *suspended*: the depth is 0, so that steps are
planned ahead, and drafts are looked up after a step's result instead, in a growing interval of steps, until some are
found.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from strandline.cache import PrefixCache
from strandline.engine.drafting.draft_depth import DraftDepth
from strandline.engine.drafting.drafters import (
    ChoosingDrafter,
    Drafter,
    DraftLayerDrafter,
)
from strandline.engine.drafting.step_drafts import NO_LIMITS, DraftLimits, StepDrafts, is_independent
from strandline.engine.drafting.suffix_drafter import SuffixDrafter
from strandline.engine.requests.draft_counters import DraftCounters
from strandline.engine.requests.request import Request
from strandline.engine.requests.spans import NO_DRAFTS
from strandline.records.events import SpeculationStats
from strandline.records.plan import SequencePlan, StepPlan

MOST_STEPS_BETWEEN_LOOKUPS: Final = 8
"""While lookups are suspended. No request gets more tokens in between."""


class Drafts:
    """The part of the scheduler that handles drafts.

    Args:
        drafter: proposes tokens that decoding requests may generate next; None: no drafts.
        chooser: chooses how many; None: always as many as the limits allow.
        methods: names of what the drafter chooses from, a drafter's before that of lookups.
    """

    def __init__(
        self,
        cache: PrefixCache,
        drafter: Drafter | None = None,
        limits: DraftLimits = NO_LIMITS,
        chooser: DraftDepth | None = None,
        methods: Sequence[str] = (),
    ) -> None:
        self._cache, self.drafter, self.chooser = cache, drafter, chooser
        self.has_layer = isinstance(drafter, (DraftLayerDrafter, ChoosingDrafter))
        self._choosing = drafter if isinstance(drafter, ChoosingDrafter) else None
        # N-grams and suffixes are looked up in tokens that have reached the host.
        self.limits = limits._replace(corrects_lengths=limits.corrects_lengths and self.has_layer)
        self.depth = limits.draft_tokens
        """Drafts that the next step makes or, without a draft layer, verifies."""
        self._may_suspend = chooser is not None and not isinstance(drafter, DraftLayerDrafter)
        self.is_suspended = False
        """Whether no drafts are looked up before steps, because none were found."""
        self._lookup_steps = 0
        """While lookups are suspended: steps from one to the next."""
        self._steps_to_lookup = 0
        self._num_lookups = self._num_found = 0
        """Lookups while a step is planned, and those that found drafts."""
        self._counters = {method: DraftCounters(limits.draft_tokens) for method in methods}
        self._methods = methods
        self._last = self.begin_step(None)
        """The last planned step."""
        self.choose_depth(1, is_timed=False)

    def choose_depth(self, num_running: int, *, is_timed: bool) -> None:
        """Choose the depth of the next step; as of ``DraftDepth.choose``, unless lookups are suspended."""
        if self.is_suspended and not self.has_layer:
            self.depth = 0
        elif self.chooser is not None:
            self.depth = self.chooser.choose(max(num_running, 1), is_timed=is_timed)

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """Return at most ``most`` drafts after a request's last token; note whether they were looked up."""
        drafter = self.drafter
        if drafter is None:
            return NO_DRAFTS
        if self._choosing is not None and self.is_suspended:
            request.drafts.is_looked_up = False
            return request.drafts.drafted[:most]
        drafts = drafter.propose(request, most)
        self._num_lookups += 1
        self._num_found += len(drafts) > 0 if self._choosing is None else request.drafts.is_looked_up
        return drafts

    def begin_step(self, under_way: StepPlan | None) -> StepDrafts:
        """Begin to plan a step.

        Args:
            under_way: the step before, if it is not settled.
        """
        self._num_lookups = self._num_found = 0
        return StepDrafts(
            self._cache,
            self.limits,
            None if self.drafter is None else self.propose,
            self.depth,
            has_layer=self.has_layer,
            under_way=() if under_way is None or self._last.is_plain else under_way.sequences,
        )

    def end_step(self, step: StepDrafts, sequences: Sequence[SequencePlan], num_running: int) -> None:
        """Note what was planned, and choose the depth of the next step."""
        if self.drafter is None:
            return
        step.end(sequences)
        self._last = step
        if self._may_suspend and self._num_lookups and not self._num_found:
            # The next one is after this step's result: in time for the next step, if that is then planned at all.
            self.is_suspended, self._lookup_steps, self._steps_to_lookup = True, 1, 1
        self.choose_depth(num_running, is_timed=any(x.is_verification for x in sequences))

    def look_up(self, advanced: Sequence[Request], num_running: int) -> None:
        """Keep the answers of requests that have ended; while lookups are suspended, look for drafts if it is time to.

        Drafts are looked for after tokens that have come in. Requests that got their first token are always looked up.
        Where there are drafts, the depth of the next step is chosen again; it looks them up itself.
        """
        drafter = self.drafter
        lookup = drafter if self._choosing is None else self._choosing.lookup
        if isinstance(lookup, SuffixDrafter):
            for request in advanced:
                if request.finish_reason is not None:
                    lookup.add_answer(request)
        if not self.is_suspended or drafter is None:
            return
        self._steps_to_lookup -= 1
        is_due = self._steps_to_lookup <= 0
        running = [x for x in advanced if x.finish_reason is None and (is_due or len(x.output_ids) == x.num_new)]
        if any(self._is_worth_looking_up(request, drafter) for request in running):
            self.is_suspended = False
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
        if self._choosing is not None and self.depth and not self.is_suspended:
            return False
        last, limits = self._last, self.limits
        if last.is_plain:
            return not self.depth or self.drafter is None or (limits.corrects_lengths and _are_independent(running))
        can_correct = limits.corrects_lengths and last.makes_drafts and not last.must_settle
        may_admit = may_admit and not limits.verified_prompts.num_rows
        return can_correct and not may_admit and _are_independent(running)

    @property
    def can_launch_ahead(self) -> bool:
        """Whether the step that was just planned can be launched before the previous one is settled."""
        return self._last.is_plain or self.limits.corrects_lengths

    def count(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Count the verified and the accepted drafts of a request in a step."""
        drafts = request.drafts
        if drafts.counters is None:
            drafts.counters = DraftCounters(self.limits.draft_tokens)
        drafts.counters.count(num_drafted, num_accepted)
        self._counters[self._methods[-1 if drafts.is_looked_up else 0]].count(num_drafted, num_accepted)
        if self.chooser is not None:
            self.chooser.count(num_drafted, num_accepted)

    def stats_by_method(self) -> dict[str, SpeculationStats]:
        """Return the counts of all drafts so far."""
        return {method: each.stats() for method, each in self._counters.items()}

    def stats(self) -> SpeculationStats:
        """Return the sum of these."""
        return sum(self.stats_by_method().values(), SpeculationStats())

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take the time of a step, from the result of the one before or, if that is later, from its planning on."""
        if self.chooser is not None:
            self.chooser.observe(plan, seconds)


def _are_independent(requests: Iterable[Request]) -> bool:
    return all(map(is_independent, requests))
