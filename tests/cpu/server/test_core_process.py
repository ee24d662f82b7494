"""The engine's process ends with the process that started it, and with its workers."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from threading import Event

import pytest

from strandline.device.uni_executor import UniExecutor
from strandline.engine.processes import core_process
from strandline.engine.processes.core_process import interrupted_by
from strandline.errors import EngineError
from strandline.text.structured import Grammars
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.core_loop import TIMEOUT_S, MakeLoop


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Yield both ends of a pipe; the test closes the second."""
    before = signal.getsignal(signal.SIGUSR1)
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    signal.signal(signal.SIGUSR1, before)


def test_loading_ends_when_the_lifeline_closes(pipe: tuple[int, int]) -> None:
    lifeline, writer = pipe
    with interrupted_by(lifeline):
        pass
    with interrupted_by(lifeline), pytest.raises(SystemExit):
        close_and_wait(writer)


def test_exit_arrives_after_callbacks_that_drop_it(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "EXIT_INTERVAL_S", 0.02)
    lifeline, writer = pipe
    callback = ctypes.CFUNCTYPE(None)(lambda: close_and_wait(writer))

    def load() -> None:
        callback()
        Event().wait(TIMEOUT_S)

    with interrupted_by(lifeline), pytest.raises(SystemExit):
        load()


def test_error_after_a_dropped_exit_is_an_exit(pipe: tuple[int, int]) -> None:
    lifeline, writer = pipe
    callback = ctypes.CFUNCTYPE(None)(lambda: close_and_wait(writer))

    def load() -> None:
        with interrupted_by(lifeline):
            callback()
            raise RuntimeError("half done")

    with pytest.raises(SystemExit):
        load()


def test_exit_interrupts_no_cleanup(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "EXIT_INTERVAL_S", 0.02)
    lifeline, writer = pipe
    steps = []

    def load() -> None:
        try:
            close_and_wait(writer)
        finally:
            with suppress(OSError):
                steps.append(Event().wait(0.1))
                raise OSError
            steps.append(Event().wait(0.1))

    with interrupted_by(lifeline), pytest.raises(SystemExit):
        load()
    assert len(steps) == 2


def close_and_wait(fd: int) -> None:
    os.close(fd)
    Event().wait(TIMEOUT_S)


def test_an_idle_engine_ends_with_its_workers(
    pipe: tuple[int, int], make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, writer = pipe

    def fail(_: UniExecutor) -> None:
        raise EngineError("rank 1 of 2 has ended")

    monkeypatch.setattr(UniExecutor, "worker_fds", [fd])
    monkeypatch.setattr(UniExecutor, "check_workers", fail)
    loop = make_loop(Grammars(lambda: (byte_tokenizer(), frozenset({0})), VOCAB_SIZE))
    assert loop.num_waiting() == 0
    os.close(writer)
    assert str(loop.failure()) == "rank 1 of 2 has ended"
