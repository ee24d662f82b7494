"""Restarts of an engine whose process cannot be started."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from strandline.config import EngineConfig
from strandline.errors import EngineError
from strandline.server.engines import supervisor

TIMEOUT_S = 60.0
EXHAUSTED = (errno.EMFILE, os.strerror(errno.EMFILE))
CONFIG = EngineConfig(model="demo")


def test_restarts_go_on_after_errors_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [OSError(*EXHAUSTED), zmq.ZMQError(errno.EMFILE), EngineError("no"), OSError(*EXHAUSTED)]
    monkeypatch.setattr(supervisor, "FIRST_RESTART_DELAY_S", 0.0)

    async def run() -> None:
        has_failed = asyncio.Event()

        @asynccontextmanager
        async def failing(_: EngineConfig) -> AsyncIterator[Any]:
            if errors:
                raise errors.pop()
            has_failed.set()
            await asyncio.get_running_loop().create_future()
            yield

        monkeypatch.setattr(supervisor, "engine_process", failing)
        client: Any = SimpleNamespace()
        engine: Any = SimpleNamespace(name="the engine", failure="it was killed")
        restarting = asyncio.ensure_future(supervisor.keep_restarting(CONFIG, client, engine))
        await asyncio.wait_for(has_failed.wait(), TIMEOUT_S)
        restarting.cancel()

    asyncio.run(run())


def test_failed_start_leaves_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def fail(*_: Any, **__: Any) -> None:
        assert list(tmp_path.iterdir())
        raise OSError(*EXHAUSTED)

    monkeypatch.setattr(supervisor, "EngineProcess", fail)

    async def run() -> None:
        async with supervisor.engine_process(CONFIG):
            pass

    with pytest.raises(OSError, match="Too many open files"):
        asyncio.run(run())
    assert list(tmp_path.iterdir()) == []
