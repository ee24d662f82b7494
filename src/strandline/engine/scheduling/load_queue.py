"""Which waiting requests are loaded from stores before they are admitted, and the ends of these loads.

A request's offer is loaded when it is the request's turn to be admitted. The request is blocked until the load has
ended; then it returns to its position in the queue and is admitted like any other, with what is cached by then.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from strandline.cache import PrefixCache
from strandline.cache.tiers import Loads
from strandline.clock import SYSTEM_CLOCK
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.waiting import WaitingQueue
from strandline.records.actions import Completion
from strandline.records.offer import Offer

MAX_LOADS: Final = 4
"""Loads per request. What was loaded may be evicted before the request is admitted, when memory is very short."""


class LoadState(Enum):
    """Outcome of an attempt to load what a store has of a prompt."""

    NOTHING = "nothing"
    """No store has what the device lacks, or computing it is faster."""
    BEGUN = "begun"
    """By this request, or by another one whose load brings a part of it."""
    NO_ROOM = "no room"
    """There is not enough memory beside what the request itself needs."""


class LoadQueue:
    """Begins the loads of waiting requests, and ends them."""

    def __init__(self, cache: PrefixCache, loads: Loads, waiting: WaitingQueue) -> None:
        self._cache = cache
        self.loads = loads
        self._waiting = waiting

    def try_load(self, request: Request, step_tokens: int) -> LoadState:
        """Begin to load what a store has of a queued request's prompt, and block it until that has ended.

        Where another load brings a part of it, the request is blocked until that one has ended, and loads the rest.

        Args:
            step_tokens: tokens of the request's first step.
        """
        offer = self._offer(request)
        if offer is None:
            return LoadState.NOTHING
        wait = request.wait
        beyond = wait.lead.position if wait.lead else 0
        shared = self.loads.find_shared(request.tokens, offer, request.salt, beyond=beyond)
        if shared is not None:
            wait.lead = shared
            self._block(request)
            return LoadState.BEGUN
        lead = self.loads.begin(request.tokens, offer, request.salt, step_tokens=step_tokens)
        if lead is None:
            return LoadState.NO_ROOM
        request.loads.offer, wait.lead = None, lead
        request.loads.num_begun += 1
        self._block(request)
        return LoadState.BEGUN

    def _block(self, request: Request) -> None:
        """Block a request until its load has ended."""
        if request.loads.begun_s is None:
            request.loads.begun_s = SYSTEM_CLOCK()
        self._waiting.block(request)

    def _offer(self, request: Request) -> Offer | None:
        """Return what a store has of a prompt and the device lacks: the request's own offer, or what a tier stores."""
        cache = self._cache
        if not cache.is_enabled or request.params.prompt_logprobs is not None or request.loads.num_begun >= MAX_LOADS:
            return None
        own, demoted = request.loads.offer, self.loads.tier_offer(request.tokens, request.salt)
        if own is not None and not self.loads.is_lacking(request.tokens, own, request.salt):
            own = request.loads.offer = None
        if own is None or (demoted is not None and demoted.position >= own.position):
            return demoted
        return own

    def is_worth_waiting(self, state: LoadState, running: Sequence[Request]) -> bool:
        """Return whether a load waits for memory that running requests or other loads will free."""
        return state is LoadState.NO_ROOM and (bool(running) or len(self.loads) > 0)

    def forget(self, request: Request) -> None:
        """Cancel the load of a request that has been removed from the queue, unless others wait for it."""
        lead = request.wait.lead
        if lead is not None and lead.is_pending and not self._waiting.followers(lead.lease):
            self.loads.cancel(lead)

    def complete(self, completions: Iterable[Completion]) -> None:
        """Take in transfers that have ended. Between steps only; a step may be in flight."""
        for completion in completions:
            ended = self.loads.complete(completion)
            if ended is None:
                continue
            for request in self._waiting.followers(ended.lease):
                request.loads.ended_s = SYSTEM_CLOCK()
                if not ended.is_done and request.wait.lead is not None:
                    request.loads.failed_end = request.wait.lead.position
                # What was loaded is protected from eviction until the request is admitted.
                self._cache.forget(request.request_id)
                self._cache.expect(request.request_id, request.tokens, request.salt)
