"""The flush at an orderly end: who stops it, and what the front end says."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable

import pytest

from strandline.errors import EngineError
from strandline.records.messages import FROM_CORE, Flush, Flushed, FlushReport
from strandline.server import launch
from strandline.server.engines.engine_client import EngineClient
from strandline.text.structured import Grammars
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.core_loop import TIMEOUT_S, LoopInThread, MakeLoop


def loop_of(make_loop: MakeLoop) -> LoopInThread:
    return make_loop(Grammars(lambda: (byte_tokenizer(), frozenset({0})), VOCAB_SIZE))


def test_a_flush_without_a_disk_cache_is_answered(make_loop: MakeLoop) -> None:
    loop = loop_of(make_loop)
    loop.say(Flush(7))
    assert FROM_CORE.decode(loop.socket.recv()) == Flushed(7, None)


def test_a_flush_ends_with_the_front_end(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, is_begun = loop_of(make_loop), threading.Event()

    def flush(is_stopped: Callable[[], bool]) -> None:
        assert not is_stopped()
        is_begun.set()
        while not is_stopped():
            pass

    monkeypatch.setattr(loop.core, "flush", flush)
    loop.say(Flush(7))
    assert is_begun.wait(TIMEOUT_S)
    loop.end()


class FakeClient(EngineClient):
    """Has an engine that answers as the test wants."""

    def __init__(self, answer: FlushReport | EngineError | None) -> None:
        self.answer = answer

    async def flush(self) -> FlushReport | None:
        if self.answer is None:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        if isinstance(self.answer, EngineError):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (FlushReport(3 * 2**20, 0, 1.25), "wrote 3.0 MiB to the disk cache in 1.2 s"),
        (FlushReport(0, 4, 20.0), "wrote 0.0 MiB to the disk cache in 20.0 s; there was no time for 4 snapshots"),
        (
            FlushReport(0, 0, 0.0, 1, "No space left on device"),
            "wrote 0.0 MiB to the disk cache in 0.0 s; 1 snapshot could not be written: No space left on device",
        ),
        (EngineError("it hangs"), "the disk cache may lack entries that were only in memory: it hangs"),
        (None, "interrupted; the remaining entries were not written"),
    ],
    ids=["done", "late", "failed", "error", "second signal"],
)
def test_the_log_says_what_became_of_a_flush(
    answer: FlushReport | EngineError | None, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(launch._flush(FakeClient(answer), "disk cache"))
    signal.signal(signal.SIGTERM, before)
    assert caplog.messages[-1] == line
