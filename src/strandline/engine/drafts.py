"""How many drafts each sequence verifies in a step, and makes for the next one; and what became of them."""

from strandline.cache import Lease, PrefixCache
from strandline.engine.draft_counters import DraftCounters
from strandline.engine.draft_depth import DraftDepth
from strandline.engine.drafting import Drafter, DraftLayerDrafter
from strandline.engine.request import Request
from strandline.engine.spans import NO_DRAFTS, Reservation, Span
from strandline.ids import NULL_LOG
from strandline.records.plan import StepPlan


class Drafts:
    """The scheduler's part that knows of drafts.

    Args:
        drafter: proposes tokens that decoding requests may generate next; None: no drafts.
        draft_tokens: most drafts of a request in a step.
        chooser: chooses how many; None: always as many.
    """

    def __init__(
        self, cache: PrefixCache, drafter: Drafter | None, draft_tokens: int, chooser: DraftDepth | None
    ) -> None:
        self._cache, self.drafter, self.chooser = cache, drafter, chooser
        self._draft_tokens = draft_tokens
        self.depth = draft_tokens
        """Drafts that the next step makes or, without a draft layer, verifies."""
        self.has_layer = isinstance(drafter, DraftLayerDrafter)
        self.counters = DraftCounters(draft_tokens)
        self.choose_depth(1)

    def choose_depth(self, num_running: int) -> None:
        """Choose the depth of the next step."""
        if self.chooser is not None:
            self.depth = self.chooser.choose(max(num_running, 1))

    def propose(self, request: Request, lease: Lease, budget: int) -> tuple[int, ...]:
        """Return drafts for a decoding request: as many as it may still generate, and as memory holds.

        None while a snapshot is due: it would be of tokens that may turn out wrong. None for a request with stop
        strings, which are found in the text: the request's state would be past its end.
        """
        drafter, num_tokens = self.drafter, request.num_tokens
        if drafter is None:
            return NO_DRAFTS
        depth = self._draft_tokens if self.has_layer else self.depth
        most = min(depth, request.max_total - num_tokens - 1, budget - 1)
        if most < 1 or request.params.stop or self._cache.is_cut_due(lease, num_tokens + most):
            return NO_DRAFTS
        drafts = drafter.propose(request, most)
        return drafts if self._cache.extend(lease, num_tokens + len(drafts)) else NO_DRAFTS

    def next_drafts(self, span: Span) -> int:
        """Return how many tokens the draft layer drafts behind the step, for the next one."""
        request, lease, _, end, drafts = span
        most = min(self.depth, request.max_total - request.num_tokens - 2)
        if end - len(drafts) < request.num_tokens or most < 1 or request.params.stop:
            return 0
        # The layer's keys and values lie up to one position before the last draft.
        return most if self._cache.extend(lease, end + most) else 0

    def reserve(self, lease: Lease, end: int, num_drafts: int, keeps_logs: bool) -> Reservation:
        """Reserve a step: a sequence with drafts, or with a log of them, is prefilled."""
        is_replayed = num_drafts > 0 or lease.has_logged_drafts
        grant = self._cache.reserve_step(lease, end, wants_log=is_replayed or keeps_logs, num_drafts=num_drafts)
        return is_replayed and grant.log != NULL_LOG, grant

    def count(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Count what became of the drafts of a request in a step."""
        if request.counted_drafts is None:
            request.counted_drafts = DraftCounters(self._draft_tokens)
        request.counted_drafts.count(num_drafted, num_accepted)
        self.counters.count(num_drafted, num_accepted)
        if self.chooser is not None:
            self.chooser.count(num_drafted, num_accepted)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take the time of a step."""
        if self.chooser is not None:
            self.chooser.observe(plan, seconds)
