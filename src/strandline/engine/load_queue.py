"""Which waiting requests are loaded from stores before they are admitted, and what becomes of those loads.

A request's offer is loaded when it is the request's turn to be admitted. The request is blocked until the load has
ended; then it returns to its position in the queue and is admitted like any other, with what is cached by then.
"""

from collections.abc import Iterable, Sequence

from strandline.cache import Completion, PrefixCache
from strandline.engine.request import Request
from strandline.engine.waiting import WaitingQueue


class LoadQueue:
    """Begins the loads of waiting requests, and ends them."""

    def __init__(self, cache: PrefixCache, waiting: WaitingQueue) -> None:
        self._cache = cache
        self._waiting = waiting

    def try_load(self, request: Request, step_tokens: int) -> bool:
        """Begin to load what a store offers of a queued request's prompt, and block it until that has ended.

        Args:
            step_tokens: tokens of the request's first step.

        Returns:
            False when nothing is offered that the request needs, or for lack of memory; in that case the offer is kept.
        """
        offer = request.offer
        if offer is None:
            return False
        loads, is_asked = self._cache.loads, self._cache.is_enabled and request.params.prompt_logprobs is None
        if not is_asked or not loads.is_lacking(request.tokens, offer, request.salt):
            request.offer = None
            return False
        lead = loads.begin(request.tokens, offer, request.salt, step_tokens=step_tokens)
        if lead is not None:
            request.offer, request.lead = None, lead
            self._waiting.block(request)
        return lead is not None

    def waits_for_room(self, request: Request, running: Sequence[Request]) -> bool:
        """Return whether a request's load waits for memory that running requests or other loads will free."""
        return request.offer is not None and (bool(running) or len(self._cache.loads) > 0)

    def forget(self, request: Request) -> None:
        """Cancel the load of a request that has been removed from the queue, unless others wait for it."""
        if request.lead is not None and request.lead.is_pending and not self._waiting.followers(request.lead.lease):
            self._cache.loads.cancel(request.lead)

    def complete(self, completions: Iterable[Completion]) -> None:
        """Take in transfers that have ended. Between steps only; a step may be in flight."""
        for completion in completions:
            lease = self._cache.loads.complete(completion)
            if lease is None:
                continue
            for request in self._waiting.followers(lease):
                if not completion.is_done:
                    request.load_failed_end = len(lease.tokens)
                # What was loaded is protected from eviction until the request is admitted.
                self._cache.forget(request.request_id)
                self._cache.expect(request.request_id, request.tokens, request.salt)
