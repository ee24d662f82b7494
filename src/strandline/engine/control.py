"""Pauses, resets of the cache, and sleep: what happens between the steps of an engine that serves on.

An engine that is paused or asleep runs no step; requests are queued. Where memory is given back or the cache is
dropped, running requests are preempted, and computed anew when they run again.
"""

from collections.abc import Callable, Collection
from typing import Final

from strandline.cache import PrefixCache
from strandline.cache.evict_all import evict_all
from strandline.cache.tiers import Loads
from strandline.cache.tiers.reset import reset
from strandline.device.executor import Executor
from strandline.engine.caching.auditor import Auditor
from strandline.engine.caching.event_feed import EventFeed
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.errors import ConfigError, OutOfMemoryError, RequestError
from strandline.records.control import (
    Action,
    DropWeights,
    Memory,
    Pause,
    PrepareWeights,
    ResetCache,
    Resume,
    Sleep,
    UseWeights,
    WakeUp,
    refusal_of,
)

WAIT_S: Final = 0.1
"""How long to wait at a time for transfers that use the memory to be given back."""


class CoreControl:
    """Whether an engine runs steps, and what it has given back.

    Args:
        settle: waits for the step under way.
        auditor: compares nothing across a change of weights.
        feed: flushed after each action, as no step may follow for a long time; None: the engine publishes no events.
        hands_over: whether other engines may read the memory at any time.
    """

    def __init__(
        self,
        executor: Executor,
        cache: PrefixCache,
        loads: Loads,
        scheduler: Scheduler,
        settle: Callable[[], None],
        feed: EventFeed | None,
        auditor: Auditor,
        *,
        hands_over: bool,
    ) -> None:
        self._executor, self._cache, self._loads, self._scheduler = executor, cache, loads, scheduler
        self._settle, self._feed, self._hands_over = settle, feed, hands_over
        self._auditor = auditor
        self._is_paused = False
        self._given_back = set[Memory]()
        self._level = 0
        """How it was given back last."""
        self._has_prepared = False
        """Whether there are weights for ``UseWeights``."""
        self._weights = ""
        """Names the weights in use in epochs, which other engines begin with weights of their own; "": the model's."""

    @property
    def is_stopped(self) -> bool:
        """Whether no step runs."""
        return self._is_paused or bool(self._given_back)

    def require_running(self) -> None:
        """Raise a RequestError if no step runs, and none will without ``Resume`` or ``WakeUp``."""
        if self._given_back:
            raise RequestError("the engine is asleep: call wake_up()")
        if self._is_paused:
            raise RequestError("the engine is paused")

    def apply(self, action: Action) -> bool:
        """Do what is asked, between steps; return whether it was done.

        Raises:
            ConfigError: it cannot be done in this engine, or weights cannot be read.
            OutOfMemoryError: there is too little memory. None was taken.
        """
        changes_weights = self._executor.facts.changes_weights
        refusal = refusal_of(action, hands_over=self._hands_over, changes_weights=changes_weights)
        if refusal is not None:
            raise ConfigError(refusal)
        self._settle()
        try:
            return self._apply(action)
        finally:
            if self._feed is not None:
                self._feed.flush()

    def _apply(self, action: Action) -> bool:
        match action:
            case Pause(epoch):
                self._is_paused = True
                if epoch is not None:
                    self._reset(epoch)
            case Resume():
                self._is_paused = False
            case ResetCache(epoch, forced):
                if self._scheduler.running and not forced:
                    return False
                self._reset(epoch)
            case Sleep(level, memories):
                self._sleep(level, memories)
            case WakeUp(memories):
                return self._wake_up([memory for memory in memories if memory in self._given_back])
            case UseWeights():
                self._use_weights(action)
            case _:
                self._has_prepared &= not isinstance(action, PrepareWeights | DropWeights)
                self._executor.change_weights(action)
                self._has_prepared |= isinstance(action, PrepareWeights)
        return True

    def _reset(self, epoch: str) -> None:
        """Preempt all requests, and begin another epoch of the cache, which engines with the same weights share."""
        self._scheduler.preempt_all()
        self._finish_transfers()
        reset(self._cache, epoch + self._weights)
        self._finish_transfers()

    def _use_weights(self, action: UseWeights) -> None:
        if not self._has_prepared:
            raise ConfigError("no weights were prepared, or the engine was restarted since: send them again")
        self._has_prepared = False
        self._auditor.forget_all()
        # First: entries of weights that are gone are never hit.
        before, self._weights = self._weights, action.epoch
        self._reset(action.epoch)
        try:
            self._executor.change_weights(action)
        except OutOfMemoryError:
            self._weights = before
            self._reset(action.epoch)
            raise
        self._given_back.discard("weights")

    def _sleep(self, level: int, memories: Collection[Memory]) -> None:
        """Give memory back, as far as the engine has it; at level 2 also the copies of weights that level 1 has kept.

        What the device caches moves to the tiers below it.
        """
        self._scheduler.preempt_all()
        self._finish_transfers()
        evict_all(self._cache)
        self._finish_transfers()
        self._executor.sleep(level, memories)
        self._given_back.update(memories)
        self._level = level

    def _wake_up(self, memories: list[Memory]) -> bool:
        """Take memory again, all of it or none; return whether all of it is there."""
        taken = list[Memory]()
        try:
            for memory in memories:
                if self._executor.wake_up(memory):
                    taken.append(memory)
        except OutOfMemoryError:
            if taken:
                self._executor.sleep(self._level, taken)
            raise
        self._given_back.difference_update(taken)
        return self._given_back.isdisjoint(memories)

    def _finish_transfers(self) -> None:
        """Carry out the cache's actions, and wait for transfers that use the device's memory."""
        while True:
            self._executor.carry_out(self._cache.take_actions())
            if not (len(self._loads) or self._cache.holds_for_others):
                return
            self._scheduler.loading.complete(self._executor.wait_for_transfers(WAIT_S))
