"""Which waiting requests may run, by the slots of their adapters.

A request whose adapter has no slot is blocked and lets later ones pass. Once these have been
``MAX_OVERTAKEN_FOR_SLOT``, no request of one adapter in a slot, that with the fewest running ones, is admitted any
more: the slot is free when those have ended. So a request waits for a bounded number of others, however many come.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from strandline.engine.requests.request import Request
from strandline.engine.scheduling.waiting import WaitingQueue

MAX_OVERTAKEN_FOR_SLOT: Final = 16
"""Requests with adapters that are admitted while one waits for a slot, before a slot is cleared for it."""


class AdapterAdmission:
    """Admits requests by their adapters.

    Args:
        max_loras: adapters that running requests may have together.
    """

    def __init__(self, waiting: WaitingQueue, max_loras: int) -> None:
        self._waiting, self._max_loras = waiting, max_loras
        self._running = Counter[str]()
        """Running requests, by adapter; preempted ones may be counted until the next step."""
        self._overtaken = dict[str, int]()
        """Adapters that requests wait for, in that order, and admissions of others since."""

    def begin_step(self, running: Sequence[Request]) -> None:
        """Requeue requests whose adapters may run now."""
        self._running = Counter(request.new.adapter for request in running if request.new.adapter)
        if not self._overtaken:
            return
        held = self._waiting.held
        wanted = {request.new.adapter for request in held}
        self._overtaken = {adapter: count for adapter, count in self._overtaken.items() if adapter in wanted}
        for request in held:
            request.wait.is_held = not self._may_run(request.new.adapter)
        self._waiting.requeue_unblocked()

    def try_hold(self, request: Request) -> bool:
        """Block a queued request if its adapter may not run now; return whether it is blocked."""
        if self._may_run(request.new.adapter):
            return False
        self._overtaken.setdefault(request.new.adapter, 0)
        request.wait.is_held = True
        self._waiting.block(request)
        return True

    def note_admitted(self, request: Request) -> None:
        """Count a request that is admitted."""
        adapter = request.new.adapter
        if not adapter:
            return
        self._running[adapter] += 1
        self._overtaken.pop(adapter, None)
        for waiting in self._overtaken:
            self._overtaken[waiting] += 1

    def _may_run(self, adapter: str) -> bool:
        if not adapter:
            return True
        first = next((x for x, count in self._overtaken.items() if count >= MAX_OVERTAKEN_FOR_SLOT), None)
        if adapter in self._running:
            is_full = len(self._running) >= self._max_loras
            return first is None or not is_full or adapter != min(self._running, key=self._running.__getitem__)
        return len(self._running) < self._max_loras and first in (None, adapter)
