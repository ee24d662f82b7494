"""Pauses, sleep and new weights of all engines of a server, and how requests are handled meanwhile."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Final, get_args

from strandline.errors import RequestError
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
)
from strandline.server.engines.engine_client import EngineClient

DRAIN_S: Final = 0.02
"""How often to look whether the last request has ended."""
PAUSED: Final = "the server is paused; POST /resume lets it go on"
ASLEEP: Final = "the server is asleep; POST /wake_up wakes it"


class EngineControl:
    """Controls the engines of a client, one action after the other."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._turn = asyncio.Lock()
        self._given_back = set[Memory]()
        self.is_paused = False

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is given back."""
        return bool(self._given_back)

    @property
    def weight_version(self) -> str:
        """What the weights in use are called."""
        return self._client.weight_version

    async def pause(self, mode: PauseMode, *, clears: bool) -> None:
        """Run no step until ``resume``.

        Args:
            mode: how unfinished requests are handled. While they are kept, further ones are queued; else refused.
            clears: drop what is cached. Kept requests are computed anew then.
        """
        async with self._turn:
            await self._pause(mode, clears=clears)

    async def resume(self) -> None:
        """Run steps again."""
        async with self._turn:
            await self._resume()

    async def reset_cache(self, *, forced: bool) -> bool:
        """Drop all that is cached; return whether that was possible: only if nothing runs, or if ``forced``."""
        async with self._turn:
            before, self._client.was_reset = self._client.was_reset, True
            are_done = await self._apply(ResetCache(new_epoch(), forced))
            if not any(are_done):
                self._client.was_reset = before
            return all(are_done)

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Give memory back, and run no step until it is taken again.

        Args:
            level: 0: pause only; 1: weights stay in the host's memory; 2: they are read again.
            mode: see ``pause``.
        """
        async with self._turn:
            was_stopped = self.is_paused or self.is_sleeping
            await self._pause(mode, clears=False)
            if level > 0:
                try:
                    await self._apply(Sleep(level))
                except RequestError:
                    if not was_stopped:
                        await self._resume()
                    raise
                self._given_back.update(MEMORIES)
                self._refuse()

    async def wake_up(self, memories: Collection[Memory]) -> None:
        """Take memory again; when all of it is there, run steps again."""
        async with self._turn:
            wanted = tuple(memory for memory in MEMORIES if memory in memories)
            if all(await self._apply(WakeUp(wanted))):
                self._given_back.difference_update(wanted)
            if self._given_back:
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

        Args:
            path: a directory that holds them; None: those that were received.
            aborts: end unfinished requests; else they are computed anew, with what they have generated so far.
            stays_paused: run no step until ``resume``.

        Raises:
            RequestError: they cannot be read, or are not the model's. The engines go on as before.
        """
        async with self._turn:
            was_stopped, refusal = self.is_paused or self.is_sleeping, self._client.refusal
            await self._pause("abort" if aborts else "keep", clears=False)
            try:
                try:
                    await self._apply(PrepareWeights(path))
                except RequestError:
                    await self._apply(DropWeights())  # where they could be read
                    raise
                self._client.was_reset = True
                await self._apply(UseWeights(new_epoch()))
                self._given_back.discard("weights")
                self._client.name_weights(version)
            finally:
                if was_stopped:
                    self._client.refusal = refusal
                elif not stays_paused:
                    await self._resume()
            return len(self._client.frontend.requests)

    async def _pause(self, mode: PauseMode, *, clears: bool) -> None:
        self._client.refusal = None if mode == "keep" else PAUSED
        if mode == "abort":
            self._client.abort()
        elif mode == "wait":
            while len(self._client.frontend):
                await asyncio.sleep(DRAIN_S)
        self._client.was_reset |= clears
        await self._apply(Pause(new_epoch() if clears else None))
        self.is_paused = True

    async def _resume(self) -> None:
        await self._apply(Resume())
        self.is_paused = False
        self._refuse()

    def _refuse(self) -> None:
        """Refuse new requests while memory is given back, and no longer."""
        self._client.refusal = ASLEEP if self._given_back else None

    async def _apply(self, action: Action) -> list[bool]:
        self._client.require_running()
        running = [engine for engine in self._client.engines if engine.failure is None]
        return list(await asyncio.gather(*(engine.control(action) for engine in running)))


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
