"""One replica: an engine process that runs sequences for the ingress. It handles no text."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
from ray import serve
from ray.util import get_node_ip_address

from strandline.config import EngineConfig
from strandline.errors import EngineError
from strandline.ids import RequestId
from strandline.ray.calls import End, Run
from strandline.ray.replica_directory import replica_directory
from strandline.records.events import Limits, StepEvents
from strandline.records.messages import (
    ENCODER,
    FLUSH_S,
    FROM_CORE,
    TO_CORE,
    Died,
    Finish,
    Flush,
    Flushed,
    FlushReport,
    Stepped,
    Submit,
)
from strandline.server.engines.supervisor import EngineProcess, engine_process

LOGGER: Final = logging.getLogger("ray.serve.strandline")  # to the log files of Ray Serve
LATE_S: Final = 5.0
"""Extra time of a flush beyond its limit, for the write in progress."""


class EngineReplica:
    """Runs an engine process. When that ends, the replica's process ends too, so that Ray replaces it at once."""

    async def __init__(self, engine: EngineConfig) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """
        Args:
            engine: must not configure events, which are published on any port of the node's address. The directory of a
            disk
                cache is the same for all replicas: each one uses a separate subdirectory.

        Raises:
            ConfigError: the configuration does not allow a start.
        """
        any_port = f"tcp://{get_node_ip_address()}:*"
        events = {"enable_kv_cache_events": True, "endpoint": any_port, "replay_endpoint": any_port}
        self.name = serve.get_replica_context().replica_id.unique_id
        self._runs: dict[RequestId, asyncio.Queue[StepEvents]] = {}
        """By sequence: events for the call that runs it."""
        self._stack = AsyncExitStack()
        self._receiving: asyncio.Future[None] | None = None
        self._process: EngineProcess
        self._limits: Limits
        engine, inherited = replace(engine, kv_events_config=events), []
        self._flushed: asyncio.Future[FlushReport | None] | None = None
        if engine.disk_cache is not None:
            directory, lock = self._stack.enter_context(replica_directory(Path(engine.disk_cache)))
            engine, inherited = replace(engine, disk_cache=str(directory)), [lock]
        if engine.file_tier:
            self._flushed = asyncio.get_running_loop().create_future()
        started = engine_process(engine, inherited)
        self._process, self._limits = await self._stack.enter_async_context(started)
        self._receiving = asyncio.ensure_future(self._exit_with_engine())

    # Calls of the ingress

    async def limits(self) -> bytes:
        """Return the engine's limits, encoded."""
        return msgspec.msgpack.encode(self._limits)

    async def run(self, call: Run) -> AsyncIterator[str | bytes]:
        """Run sequences; yield this replica's name, then their events, as encoded ``StepEvents``.

        Sequences that have not ended when the call does are ended.
        """
        unfinished = {submission.new.request_id for submission in _decoded(call.submit).submissions}
        events: asyncio.Queue[StepEvents] = asyncio.Queue()
        self._runs.update(dict.fromkeys(unfinished, events))
        self._process.socket.send(call.submit)
        try:
            yield self.name
            while unfinished:
                step = await events.get()
                yield msgspec.msgpack.encode(step)
                for token in step.tokens:
                    if token.finish_reason is not None:
                        self._runs.pop(token.request_id, None)
                unfinished &= self._runs.keys()
        finally:
            self._end(tuple(unfinished))

    async def end(self, call: End) -> None:
        """End sequences. Unknown ones are ignored."""
        events = [self._runs[name] for name in call.request_ids if name in self._runs]
        self._end(call.request_ids)
        for each in events:
            each.put_nowait(StepEvents())

    # Hooks of Ray Serve

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the endpoints of the cache's events."""
        events = self._process.events
        return {} if events is None else {"events": (events.live, events.replay)}

    def check_health(self) -> None:
        """Raise an EngineError if the engine hangs: Ray Serve replaces the replica then."""
        hang = self._process.heartbeat.find_hang()
        if hang is not None:
            raise EngineError(f"the engine hangs: {hang}")

    async def __del__(self) -> None:
        """Write entries that are only in memory to the disk cache, if there is one, and end the engine process."""
        if self._receiving is not None:
            await self._flush()
            self._receiving.cancel()
        await self._stack.aclose()

    # The engine

    async def receive(self) -> None:
        """Receive the engine's messages, and forward events to their calls."""
        while True:
            match FROM_CORE.decode(await self._process.socket.recv()):
                case Stepped(events):
                    self._pass_on(events)
                case Flushed(_, report) if self._flushed is not None:
                    self._flushed.set_result(report)
                case Died(reason):
                    LOGGER.error("the engine has failed: %s", reason)

    async def _flush(self) -> None:
        if self._flushed is None:
            return
        self._process.socket.send(ENCODER.encode(Flush(0)))
        try:
            report = await asyncio.wait_for(self._flushed, FLUSH_S + LATE_S)
        except TimeoutError:
            LOGGER.warning("the disk cache may lack entries that were only in memory: the engine has not answered")
        else:
            LOGGER.info("%s", report)

    async def _exit_with_engine(self) -> None:
        reason = await self._process.receive_until_exit(self.receive())
        LOGGER.error("the engine has stopped, so its replica exits: %s", reason)
        os._exit(1)

    def _pass_on(self, events: StepEvents) -> None:
        parts: dict[asyncio.Queue[StepEvents], StepEvents] = {}
        for entry in events.prompts:
            if (queue := self._runs.get(entry.request_id)) is not None:
                parts.setdefault(queue, StepEvents()).prompts.append(entry)
        for token in events.tokens:
            if (queue := self._runs.get(token.request_id)) is not None:
                parts.setdefault(queue, StepEvents()).tokens.append(token)
        for queue, part in parts.items():
            queue.put_nowait(part)

    def _end(self, names: tuple[RequestId, ...]) -> None:
        """End sequences in the engine, and forget them."""
        known = [name for name in names if self._runs.pop(name, None) is not None]
        if known:
            self._process.socket.send(ENCODER.encode(Finish(known)))


def _decoded(submit: bytes) -> Submit:
    message = TO_CORE.decode(submit)
    if not isinstance(message, Submit):
        raise EngineError(f"a replica runs sequences, and got {type(message).__name__}")
    return message
