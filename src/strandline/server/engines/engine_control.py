"""Pauses, sleep and new weights of all engines of a server, and how requests are handled meanwhile."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Final, get_args

from strandline.errors import EngineError, OutOfMemoryError, RequestError
from strandline.records.control import (
    MEMORIES,
    Action,
    BeginWeights,
    DropWeights,
    JoinTrainer,
    LeaveTrainer,
    Memory,
    Pause,
    PauseMode,
    PrepareWeights,
    ReceiveWeights,
    ResetCache,
    Resume,
    Sleep,
    UseWeights,
    WakeUp,
    new_epoch,
    refusal_of,
)
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.engine_link import EngineDeadError, EngineLink
from strandline.server.engines.engine_weights import Weights

DRAIN_S: Final = 0.02
"""How often to look whether the last request has ended."""
PAUSED: Final = "the server is paused; POST /resume lets it go on"
ASLEEP: Final = "the server is asleep; POST /wake_up wakes it"


class Activity(Enum):
    """What the engines of a server do."""

    RUNNING = auto()
    PAUSED = auto()
    """They run no step until ``EngineControl.resume``."""
    ASLEEP = auto()
    """They have given memory back, and run no step until it is taken again."""


class EngineControl:
    """Controls the engines of a client, one action after the other."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self._state = client, client.state
        self._turn = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """Whether no step runs until ``resume``."""
        return self._state.is_paused

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is given back."""
        return bool(self._state.given_back)

    @property
    def _activity(self) -> Activity:
        if self.is_sleeping:
            return Activity.ASLEEP
        return Activity.PAUSED if self.is_paused else Activity.RUNNING

    @property
    def weight_version(self) -> str:
        """What the weights in use are called."""
        return self._client.weights.version

    async def pause(self, mode: PauseMode, *, clears: bool | None) -> None:
        """Run no step until ``resume``.

        Args:
            mode: how unfinished requests are handled. While they are kept, further ones are queued; else refused.
            clears: drop what is cached. Kept requests are computed anew then. None: drop it unless engines keep it for
                others.

        Raises:
            RequestError: the engines cannot drop it, or unfinished requests are waited for in vain.
        """
        async with self._turn:
            await self._pause(mode, clears=self._refusal_of(Pause("")) is None if clears is None else clears)

    async def resume(self) -> None:
        """Run steps again."""
        async with self._turn:
            await self._resume()

    async def reset_cache(self, *, forced: bool) -> bool:
        """Drop all that is cached; return whether that was possible: only if nothing runs, or if ``forced``."""
        async with self._turn:
            self._require(ResetCache("", forced))
            if forced or len(self._client.engines) == 1:
                return await self._reset(forced=forced)
            # All engines or none: while they are paused, none begins a request.
            try:
                await self._apply(Pause(None))
                stats = await self._client.ask_stats()
                if any(each is not None and each.num_running for each in stats):
                    return False
                return await self._reset(forced=True)
            finally:
                if not self.is_paused:
                    await self._apply(Resume())

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Give memory back, and run no step until it is taken again.

        Args:
            level: 0: pause only; 1: weights stay in the host's memory; 2: they are read again.
            mode: see ``pause``.

        Raises:
            RequestError: the engines cannot; then they go on as before.
        """
        async with self._turn:
            if level > 0:
                self._require(Sleep(level))
            await self._pause(mode, clears=False)
            if level > 0:
                state = self._state
                state.sleep_level = max(level, state.sleep_level) if "weights" in state.given_back else level
                state.given_back.update(MEMORIES)
                self._refuse()
                await self._apply(Sleep(level))

    async def wake_up(self, memories: Collection[Memory]) -> None:
        """Take memory again; when all of it is there, run steps again.

        Raises:
            RequestError: the weights cannot be read again.
            OutOfMemoryError: an engine has too little memory; none has taken any.
        """
        async with self._turn:
            lent = [memory for memory in MEMORIES if memory in memories and memory in self._state.given_back]
            try:
                for memory in lent:
                    await self._take(memory)
            except OutOfMemoryError:
                self._state.given_back.update(lent)
                with suppress(RequestError, EngineError):
                    await self._apply(Sleep(self._state.sleep_level, tuple(lent)))
                raise
            if self.is_sleeping:
                self._refuse()
            else:
                await self._resume()

    async def exchange_weights(self, action: JoinTrainer | LeaveTrainer | BeginWeights | ReceiveWeights) -> None:
        """Have all engines take part in what a trainer does; the weights in use stay.

        Raises:
            RequestError: the trainer does not do what it says, or no trainer is expected.
        """
        async with self._turn:
            await self._apply(action)

    async def update_weights(
        self, path: str | None, version: str, *, aborts: bool = False, stays_paused: bool = False
    ) -> int:
        """Have all engines compute with other weights; return how many requests go on with them.

        Engines that sleep only until they have weights are woken by it.

        Args:
            path: a directory that holds them; None: those that were received.
            aborts: end unfinished requests; else they are computed anew, with what they have generated so far.
            stays_paused: run no step until ``resume``.

        Raises:
            RequestError: they cannot be read, or are not the model's. The engines go on as before.
            OutOfMemoryError: an engine has too little memory for them. It stays asleep if it was, or goes on as before.
        """
        async with self._turn:
            self._require(PrepareWeights(path))
            asked = {engine: engine.num_restarts for engine in self._running}
            try:
                await self._apply(PrepareWeights(path))
            except (RequestError, EngineError):
                with suppress(EngineError):
                    await self._apply(DropWeights())  # where they could be read
                raise
            before, refusal = self._activity, self._client.refusal
            after = before  # unless the weights are used
            try:
                await self._pause("abort" if aborts else "keep", clears=False)
                self._state.was_reset = True
                await self._use_weights(asked, version)
                is_woken = before is Activity.ASLEEP and not self.is_sleeping
                if is_woken or before is Activity.RUNNING:
                    after = Activity.PAUSED if stays_paused else Activity.RUNNING
            finally:
                if after is Activity.RUNNING:
                    await self._resume()
                elif before is Activity.PAUSED:
                    self._client.refusal = refusal
                else:
                    self._refuse(PAUSED if aborts else None)
            return len(self._client.frontend.requests)

    async def _pause(self, mode: PauseMode, *, clears: bool) -> None:
        if clears:
            self._require(Pause(""))
        if mode == "wait":
            await self._drain()
        self._refuse(None if mode == "keep" else PAUSED)
        if mode == "abort":
            self._client.abort()
        self._state.was_reset |= clears
        self._state.is_paused = True
        await self._apply(Pause(new_epoch() if clears else None))

    async def _drain(self) -> None:
        """Wait until unfinished requests have ended, and accept no others. Engines that are paused go on."""
        if not len(self._client.frontend):
            return
        if self.is_sleeping:
            raise RequestError(
                "unfinished requests cannot finish while the server is asleep: POST /wake_up, or use another mode",
                param="mode",
            )
        self._refuse(PAUSED)
        self._state.is_paused = False
        await self._apply(Resume())
        while len(self._client.frontend):
            await asyncio.sleep(DRAIN_S)

    async def _take(self, memory: Memory) -> None:
        """Have all engines take memory again. One that is restarted meanwhile has it, and is not to give it back."""
        self._state.being_taken = memory
        try:
            if all(await self._apply(WakeUp((memory,)))):
                self._state.given_back.discard(memory)
        finally:
            self._state.being_taken = None

    async def _use_weights(self, asked: Mapping[EngineLink, int], version: str) -> None:
        """Have engines use the weights that they have prepared, and record which do.

        Args:
            asked: engines that were to prepare them, and how often they had been restarted then. Those that have been
                restarted since have the model's own weights.
        """
        prepared = self._not_restarted(asked)
        others = [engine for engine in self._running if engine not in prepared]
        weights = Weights(new_epoch(), version)
        self._state.being_taken = "weights"
        try:
            answers = await self._ask(UseWeights(weights.epoch), prepared)
            answered = {engine for engine, answer in zip(prepared, answers, strict=True) if answer is True}
            used = [engine for engine in self._not_restarted(asked) if engine in answered]
            if used:
                self._client.change_weights(used, weights)
            _raise_first(answers)
            if not used:
                raise EngineError("every engine has ended before it could use the weights: send them again")
            if self.is_sleeping:
                await self._ask(WakeUp(("weights",)), others)
            self._state.given_back.discard("weights")
        finally:
            self._state.being_taken = None

    async def _resume(self) -> None:
        self._state.is_paused = False
        await self._apply(Resume())
        self._refuse()

    async def _reset(self, *, forced: bool) -> bool:
        before, self._state.was_reset = self._state.was_reset, True
        is_done = all(await self._apply(ResetCache(new_epoch(), forced)))
        if not is_done:
            self._state.was_reset = before
        return is_done

    def _refuse(self, reason: str | None = None) -> None:
        """Refuse new requests while memory is given back, and else if there is another reason."""
        self._client.refusal = ASLEEP if self.is_sleeping else reason

    def _refusal_of(self, action: Action) -> str | None:
        limits = self._client.engines[0].limits
        return refusal_of(action, hands_over=limits.hands_over, changes_weights=limits.changes_weights)

    def _require(self, action: Action) -> None:
        """Raise a RequestError if the engines cannot do what is asked, before anything is done for it."""
        if (refusal := self._refusal_of(action)) is not None:
            raise RequestError(refusal)

    async def _apply(self, action: Action) -> list[bool]:
        """Have all engines do what is asked; one that dies meanwhile is asked again when it is restarted.

        Raises:
            RequestError: an engine cannot.
            EngineError: an engine does not answer, or all have exited.
        """
        self._client.require_running()
        answers = await self._ask(action, self._running)
        _raise_first(answers)
        self._client.require_running()
        return [answer for answer in answers if isinstance(answer, bool)]

    @property
    def _running(self) -> list[EngineLink]:
        return [engine for engine in self._client.engines if engine.failure is None]

    def _not_restarted(self, asked: Mapping[EngineLink, int]) -> list[EngineLink]:
        """Return the engines that still run, of those that had been restarted so often."""
        return [engine for engine in self._running if asked.get(engine) == engine.num_restarts]

    async def _ask(self, action: Action, engines: Sequence[EngineLink]) -> list[bool | BaseException]:
        """Have engines do what is asked; return what each returns or raises."""
        return await asyncio.gather(*(engine.control(action) for engine in engines), return_exceptions=True)


def _raise_first(answers: Sequence[bool | BaseException]) -> None:
    """Raise the first error among answers, but for those of engines that have died: they are restarted."""
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, EngineDeadError):
            raise answer


def pause_mode(given: str) -> PauseMode:
    """Return a mode by its name; raises a RequestError for an unknown one."""
    for mode in get_args(PauseMode):
        if mode == given:
            return mode  # type: ignore[no-any-return]
    raise RequestError(f"mode must be one of {', '.join(get_args(PauseMode))}; got {given[:100]!r}", param="mode")


def memories_of(tags: Sequence[str]) -> Sequence[Memory]:
    """Return what tags name, or everything without any; raises a RequestError for an unknown one."""
    for tag in tags:
        if tag not in MEMORIES:
            raise RequestError(f"tags must be among {', '.join(MEMORIES)}; got {tag[:100]!r}", param="tags")
    return [memory for memory in MEMORIES if not tags or memory in tags]
