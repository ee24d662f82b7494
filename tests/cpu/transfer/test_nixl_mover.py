"""Pulls by NIXL between two processes: what is wanted arrives; whatever goes wrong is an error, and not for ever."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from secrets import token_hex
from threading import Thread
from typing import Any

import numpy as np
import pytest

from strandline.errors import ConfigError
from strandline.transfer.client import Peer, Pull
from strandline.transfer.connection import Cause, TransferError
from strandline.transfer.layout import Items
from strandline.transfer.messages import Hello, Want
from strandline.transfer.nixl_mover import NixlMover, Region
from tests.cpu.transfer.test_pull import (
    ASK,
    LAYOUT,
    LONG_S,
    OFFER,
    SHORT_S,
    SPEC,
    WANTED,
    Memory,
    sink_of,
    wanted_content,
)

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs strandline[nixl]")
NOWHERE = Region(0, 0, None)
WANT = Want(0, [100, 4992, 5000])
"""Three pieces."""


@dataclass
class Producer:
    """An engine that gives, in its own process."""

    process: subprocess.Popen[str]
    port: int
    is_stopped: bool = False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop it, unless it has stopped, and wait until it has."""
        if not self.is_stopped:
            self.process.send_signal(signal.SIGSTOP)
            os.waitpid(self.process.pid, os.WUNTRACED)
            self.is_stopped = True

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.is_stopped = False


MakeProducer = Callable[..., Producer]


@pytest.fixture(scope="module")
def make_producer() -> Iterator[MakeProducer]:
    made: list[Producer] = []

    def make(shift: int = 0) -> Producer:
        command = [sys.executable, "-m", "tests.cpu.transfer.nixl_producer", str(shift)]
        environment = {**os.environ, "NIXL_LOG_LEVEL": "ERROR"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("port "))
        made.append(Producer(process, int(line.split()[1])))
        return made[-1]

    yield make
    for producer in made:
        producer.process.kill()
        producer.process.communicate()


@pytest.fixture(scope="module")
def producer(make_producer: MakeProducer) -> Producer:
    return make_producer()


def new_mover() -> NixlMover:
    """Return a mover that gives nothing."""
    own = np.zeros(4096, np.uint8)
    return NixlMover(token_hex(8), Region(own.ctypes.data, own.nbytes, None), ["UCX"])


@pytest.fixture(scope="module")
def mover() -> Iterator[NixlMover]:
    made = new_mover()
    yield made
    made.close()


def pull_from(producer: Producer, mover: NixlMover, timeout_s: float = LONG_S) -> Pull:
    """Return a pull that has an offer."""
    pull = Pull(Peer("127.0.0.1", producer.port, "producer"), Hello("d", LAYOUT), SPEC, mover, timeout_s=timeout_s)
    assert pull.ask(ASK) == OFFER
    return pull


def check_whole(producer: Producer, mover: NixlMover, want: Want = WANT) -> None:
    """Fetch, and check every byte."""
    memory = Memory()
    num_bytes = pull_from(producer, mover).fetch(want, memory.sink)
    expected = wanted_content(want)
    assert memory.all_written == expected
    assert num_bytes == len(expected)


@needs_nixl
@pytest.mark.parametrize("want", WANTED)
def test_what_is_wanted_arrives_and_nothing_else(producer: Producer, mover: NixlMover, want: Want) -> None:
    check_whole(producer, mover, want)


@needs_nixl
def test_pulls_that_run_together_do_not_mix(producer: Producer, mover: NixlMover) -> None:
    failures: list[BaseException] = []

    def run(want: Want) -> None:
        try:
            for _ in range(3):
                check_whole(producer, mover, want)
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [Thread(target=run, args=[Want(first, [100, 5000])]) for first in range(0, 60, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@needs_nixl
def test_a_peer_killed_between_two_pieces_is_an_error(
    make_producer: MakeProducer, producer: Producer, mover: NixlMover
) -> None:
    killed = make_producer()
    with pytest.raises(TransferError) as failure:
        pull_from(killed, mover).fetch(WANT, sink_of(lambda items, data: killed.kill()))
    assert failure.value.cause is Cause.DISCONNECTED
    check_whole(producer, mover)


@needs_nixl
@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_what_was_read_of_a_stopped_peer_does_not_count(
    producer: Producer, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    mover = new_mover()
    check_whole(producer, mover)  # connecting takes longer than this test's limit
    with pytest.raises(TransferError) as failure:
        pull_from(producer, mover, timeout_s=SHORT_S).fetch(WANT, sink_of(lambda items, data: producer.stop()))
    producer.go_on()
    assert failure.value.cause is Cause.STALLED
    check_whole(producer, mover)
    mover.close()


@needs_nixl
def test_a_pull_that_is_closed_does_not_wait(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    mover = new_mover()
    check_whole(producer, mover)
    pull = pull_from(producer, mover)

    def stop(items: Items, data: memoryview) -> None:
        producer.stop()
        pull.close()

    with pytest.raises(TransferError) as failure:
        pull.fetch(WANT, sink_of(stop))
    producer.go_on()
    assert failure.value.cause is Cause.DISCONNECTED
    mover.close()


@needs_nixl
def test_memory_that_is_not_given_is_not_read(make_producer: MakeProducer, mover: NixlMover) -> None:
    memory = Memory()
    with pytest.raises(TransferError) as failure:
        pull_from(make_producer(shift=2**40), mover).fetch(WANT, memory.sink)
    assert failure.value.cause is Cause.GARBLED
    assert memory.written == {}


@needs_nixl
def test_own_memory_that_cannot_be_registered_is_no_room(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = new_mover()

    class Full:
        def __getattr__(self, name: str) -> Any:
            if name != "register_memory":
                return getattr(mover_agent, name)
            raise bindings.nixlBackendError("no memory can be pinned")

    bindings, mover_agent = import_module("nixl._bindings"), mover._agent
    monkeypatch.setattr(mover, "_agent", Full())
    with pytest.raises(TransferError, match="no memory can be pinned") as failure:
        pull_from(producer, mover).fetch(WANT, Memory().sink)
    assert failure.value.cause is Cause.NO_ROOM
    monkeypatch.undo()
    check_whole(producer, mover)
    mover.close()


@needs_nixl
def test_a_backend_that_nixl_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NIXL has no backend Pigeon; known are .*UCX"):
        NixlMover("any", NOWHERE, ["Pigeon"])


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("strandline.transfer.nixl_mover"), "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'strandline\[nixl\]'"):
        NixlMover("any", NOWHERE, ["UCX"])
