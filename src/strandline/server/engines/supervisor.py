"""Supervision of the engine process: handshake, exit, and restart if configured."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import zmq.asyncio

from strandline.config import EngineConfig
from strandline.errors import ConfigError, EngineError, StrandlineError
from strandline.records.events import Limits
from strandline.records.messages import ENCODER, FROM_CORE, EventEndpoints, Ready, Refused, Start
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.engine_link import EngineLink
from strandline.server.engines.spawned_engine import SpawnedEngine

LOGGER: Final = logging.getLogger("strandline.server")
STOP_TIMEOUT_S: Final = 5.0
FIRST_RESTART_DELAY_S: Final = 0.5
"""Doubled after each restart, up to the maximum."""
LONGEST_RESTART_DELAY_S: Final = 60.0
STABLE_AFTER_S: Final = 120.0
"""A process that ran longer than this resets the delay."""
DRAIN_S: Final = 0.05
"""Time to receive the last messages of a process that has exited."""


class EngineProcess:
    """A running engine process, the socket to it, and its heartbeat.

    Args:
        name: name of the engine, in messages to users.
    """

    def __init__(self, spawned: SpawnedEngine, socket: zmq.asyncio.Socket, *, name: str = "the engine") -> None:
        loop = asyncio.get_running_loop()
        self.socket = socket
        self.name = name
        self.events: EventEndpoints | None = None
        """Endpoints of published cache events; None: none."""
        self.heartbeat, self._process = spawned.heartbeat, spawned.process
        self._exited = loop.create_future()
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, partial(_set_done, self._exited))

    async def handshake(self, engine: EngineConfig) -> Limits:
        """Send the configuration and wait until the engine is ready.

        Raises:
            ConfigError: the configuration does not allow a start.
            EngineError: the process exited before it was ready.
        """
        self.socket.send(ENCODER.encode(Start(engine)))  # not awaited: a process that dies early never takes it
        first = asyncio.ensure_future(self.socket.recv())
        await asyncio.wait((first, self._exited), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            first.cancel()
            raise EngineError(f"{self.name}'s process ended while it started; its error is above")
        prefix = f"{self.name}: " if engine.data_parallel_size > 1 else ""
        match FROM_CORE.decode(first.result()):
            case Ready(limits, lines, events):
                self.events = events
                for line in lines:
                    LOGGER.info("%s%s", prefix, line)
                return limits
            case Refused(message):
                raise ConfigError(prefix + message)
            case other:
                raise EngineError(f"{self.name} began with {other!r}")

    async def receive_until_exit(self, receive: Coroutine[Any, Any, None]) -> str:
        """Run what receives the engine's messages until the process exits or receiving fails; return the reason."""
        receiving = asyncio.ensure_future(receive)
        try:
            await asyncio.wait((receiving, self._exited), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                await asyncio.wait((receiving,), timeout=DRAIN_S)
            if not receiving.done():
                return f"its process ended with code {self._process.wait()}"
            # An error in the front end's own part of the work must not leave requests waiting.
            error = receiving.exception()
            LOGGER.error("cannot process a message of the engine", exc_info=error)
            return f"{type(error).__name__}: {error}"
        finally:
            receiving.cancel()

    async def close(self) -> None:
        """Close the process's standard input, at which it exits; kill it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait((self._exited,), timeout=STOP_TIMEOUT_S)
        finally:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            if not self._exited.done():
                self._process.kill()
            self._process.wait()


@asynccontextmanager
async def engine_process(
    engine: EngineConfig, inherited: Sequence[int] = (), spawned: SpawnedEngine | None = None
) -> AsyncIterator[tuple[EngineProcess, Limits]]:
    """Start an engine process, yield it once it is ready, and end it on exit.

    Args:
        inherited: file descriptors that the process keeps open.
        spawned: the process, if it has been spawned.

    Raises:
        ConfigError, EngineError: as ``EngineProcess.handshake``.
        OSError, zmq.ZMQError: the system lacks a resource, such as file descriptors.
    """
    with (
        spawned or SpawnedEngine(engine.num_workers, inherited) as started,
        zmq.asyncio.Context() as context,
        context.socket(zmq.PAIR) as socket,
    ):
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(started.address)
        process = EngineProcess(started, socket, name=engine_name(engine))
        try:
            limits = await process.handshake(engine)
            started.folder.cleanup()
            yield process, limits
        finally:
            await process.close()


def engine_name(engine: EngineConfig) -> str:
    """Return an engine's name in messages to users: with a number if there are several."""
    return "the engine" if engine.data_parallel_size == 1 else f"engine {engine.data_parallel_rank}"


async def keep_restarting(config: EngineConfig, client: EngineClient, engine: EngineLink) -> None:
    """Restart an engine whenever it has exited, with growing delays, and connect the client to it."""
    loop = asyncio.get_running_loop()
    delay_s = FIRST_RESTART_DELAY_S
    while True:
        LOGGER.warning("%s has stopped: %s; restarting in %g s", engine.name, engine.failure, delay_s)
        await asyncio.sleep(delay_s)
        started_s = loop.time()
        try:
            async with engine_process(config) as (process, limits):
                client.reconnect(engine, process.socket, limits, process.heartbeat)
                LOGGER.info("%s has restarted", engine.name)
                client.fail(engine, await process.receive_until_exit(client.receive(engine)))
        except (StrandlineError, OSError, zmq.ZMQError) as error:
            LOGGER.error("%s failed to start: %s", engine.name, error)
        is_stable = loop.time() - started_s > STABLE_AFTER_S
        delay_s = FIRST_RESTART_DELAY_S if is_stable else min(2 * delay_s, LONGEST_RESTART_DELAY_S)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
