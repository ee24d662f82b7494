"""An engine that hangs: what ``/health`` and ``/metrics`` say, and what is not a hang."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from strandline.config import EngineConfig
from strandline.records import heartbeat as heartbeats
from strandline.records.events import StepEvents
from strandline.server.app import build_app
from strandline.server.config import ServerConfig
from strandline.server.engines import engine_link
from strandline.server.launch import start_core
from strandline.server.requests.service import Service
from strandline.text.structured import Grammars
from strandline.text.vocabulary import load_vocabulary
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.core_loop import MakeLoop, new_heartbeat
from tests.cpu.server.process import START_TIMEOUT_S, TIMEOUT_S


class Clock:
    """The clock of heartbeats, which a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeats, "monotonic", clock)
    return clock


def test_process_without_a_beat_hangs(clock: Clock) -> None:
    heartbeat = new_heartbeat()
    heartbeat.beat()
    clock.now_s += heartbeats.MAX_SILENCE_S
    assert heartbeat.find_hang() is None
    clock.now_s += 1
    assert heartbeat.find_hang() == f"its process has shown no sign of life for {heartbeats.MAX_SILENCE_S + 1:.0f} s"


def test_long_step_is_no_hang_until_its_limit(
    make_loop: MakeLoop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(Grammars(lambda: (byte_tokenizer(), frozenset({0})), VOCAB_SIZE))
    is_in_step, may_go, step = threading.Event(), threading.Event(), loop.core.step

    def long_step() -> StepEvents:
        is_in_step.set()
        assert may_go.wait(TIMEOUT_S)
        return step()

    monkeypatch.setattr(loop.core, "step", long_step)

    def pass_s(duration_s: float) -> None:
        clock.now_s += duration_s
        loop.heartbeat.beat()

    assert loop.num_waiting() == 0
    pass_s(heartbeats.MAX_TURN_S + 1)
    while loop.heartbeat.find_hang() is not None:  # until the loop waits for messages again
        pass
    loop.submit("one")
    assert is_in_step.wait(TIMEOUT_S)
    pass_s(heartbeats.MAX_TURN_S)
    assert loop.heartbeat.find_hang() is None
    pass_s(1)
    assert loop.heartbeat.find_hang() == f"its current step has taken {heartbeats.MAX_TURN_S + 1:.0f} s so far"
    may_go.set()
    assert loop.finished() == "one"


@asynccontextmanager
async def client_of_server(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server in this process, whose engine has its own."""
    engine = EngineConfig(model=str(model), memory="16MiB", device="cpu")
    server = ServerConfig(served_model_name=["tiny"])
    async with asyncio.timeout(START_TIMEOUT_S), start_core(engine, server, load_vocabulary(engine)) as core:
        transport = httpx.ASGITransport(build_app(Service(core, ["tiny"])))
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=TIMEOUT_S) as http:
            yield http


async def health(http: httpx.AsyncClient, status: int) -> httpx.Response:
    """Return a response of ``/health`` once it has a status."""
    while (response := await http.get("/health")).status_code != status:
        await asyncio.sleep(0.05)
    return response


def children() -> set[int]:
    pid = os.getpid()
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_stopped_engine_is_reported_and_recovers(bytes_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()

    async def run() -> None:
        async with client_of_server(bytes_dir) as http, asyncio.timeout(TIMEOUT_S):
            await health(http, 200)
            while 'engine_up{engine="0",model_name="tiny"} 1.0' not in (await http.get("/metrics")).text:
                pass  # a busy machine may take longer than the limit
            [engine] = children() - before
            os.kill(engine, signal.SIGSTOP)
            # Shorter from here on, where the engine answers nothing.
            monkeypatch.setattr(heartbeats, "MAX_SILENCE_S", 2 * heartbeats.BEAT_INTERVAL_S)
            monkeypatch.setattr(engine_link, "STATS_TIMEOUT_S", 0.1)
            metrics = (await http.get("/metrics")).text
            assert 'engine_up{engine="0",model_name="tiny"} 0.0' in metrics
            assert "num_requests_running" not in metrics
            error = (await health(http, 503)).json()["error"]
            assert error["code"] == "engine_hung"
            assert "no sign of life" in error["message"]
            os.kill(engine, signal.SIGCONT)
            await health(http, 200)

    asyncio.run(run())
