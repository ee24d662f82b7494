"""The life of the core's process: started, greeted, watched, and started again when it has ended, if that is wished."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import zmq.asyncio

from strandline.config import EngineConfig
from strandline.errors import ConfigError, EngineError, StrandlineError
from strandline.records.events import Limits
from strandline.records.messages import ENCODER, FROM_CORE, Ready, Refused, Start
from strandline.server.client import EngineClient

LOGGER: Final = logging.getLogger("strandline.server")
STOP_TIMEOUT_S: Final = 5.0
FIRST_WAIT_S: Final = 0.5
"""Before the core is started again; doubled each time, up to the longest."""
LONGEST_WAIT_S: Final = 60.0
LAST_WORDS_S: Final = 0.05
"""Time to read what the core said of its end."""
CALM_S: Final = 120.0
"""A life longer than this was a good one: the next wait is a short one again."""


class CoreLife:
    """One process of the core, from its start to its end."""

    def __init__(self, socket: zmq.asyncio.Socket, process: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        self.socket = socket
        self._process = process
        self._ended = loop.create_future()
        self._watch = os.pidfd_open(process.pid)
        loop.add_reader(self._watch, partial(_settle, self._ended))

    async def greet(self, engine: EngineConfig) -> Limits:
        """Wait until the core is ready.

        Raises:
            ConfigError: the configuration does not allow a start.
            EngineError: the process ended before it was ready.
        """
        self.socket.send(ENCODER.encode(Start(engine)))  # not awaited: a process that dies early never takes it
        first = asyncio.ensure_future(self.socket.recv())
        await asyncio.wait((first, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            first.cancel()
            raise EngineError("the engine's process ended while it started; its error is above")
        match FROM_CORE.decode(first.result()):
            case Ready(limits, lines):
                for line in lines:
                    LOGGER.info("%s", line)
                return limits
            case Refused(message):
                raise ConfigError(message)
            case other:
                raise EngineError(f"the engine began with {other!r}")

    async def last(self, client: EngineClient) -> str:
        """Let the client receive until the process, or the receiving, ends; return why it did."""
        receiving = asyncio.ensure_future(client.receive())
        try:
            await asyncio.wait((receiving, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                await asyncio.wait((receiving,), timeout=LAST_WORDS_S)
            if not receiving.done():
                return f"its process ended with code {self._process.wait()}"
            # An error in the front end's own part of the work must not leave requests waiting.
            error = receiving.exception()
            LOGGER.error("cannot take in what the engine says", exc_info=error)
            return f"{type(error).__name__}: {error}"
        finally:
            receiving.cancel()

    def close(self) -> None:
        """Let the core end by itself: its standard input closes. Kill it when it does not."""
        asyncio.get_running_loop().remove_reader(self._watch)
        os.close(self._watch)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def core_life(engine: EngineConfig) -> AsyncIterator[tuple[CoreLife, Limits]]:
    """Start the core's process and yield it when it is ready; end it on the way out. Raises as ``CoreLife.greet``."""
    folder = tempfile.mkdtemp(prefix="strandline-")  # readable by this user alone
    address = f"ipc://{folder}/core"
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(address)
        command = [sys.executable, "-m", "strandline.engine.core_process", address]
        life = CoreLife(socket, subprocess.Popen(command, stdin=subprocess.PIPE))
        try:
            limits = await life.greet(engine)
            shutil.rmtree(folder)
            yield life, limits
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            life.close()


async def live_on(engine: EngineConfig, client: EngineClient) -> None:
    """Start the core again and again, waiting longer each time, and give it to the client."""
    loop = asyncio.get_running_loop()
    wait_s = FIRST_WAIT_S
    while True:
        LOGGER.warning("the engine has stopped: %s; it starts in %g s", client.death, wait_s)
        await asyncio.sleep(wait_s)
        begun = loop.time()
        try:
            async with core_life(engine) as (life, limits):
                client.revive(life.socket, limits)
                LOGGER.info("the engine runs again")
                client.fail(await life.last(client))
        except StrandlineError as error:
            LOGGER.error("the engine does not start: %s", error)
        wait_s = FIRST_WAIT_S if loop.time() - begun > CALM_S else min(2 * wait_s, LONGEST_WAIT_S)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
