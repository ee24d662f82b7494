"""The error of ranks that have failed names the one that all others follow from."""

import errno
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from select import select
from types import SimpleNamespace
from typing import Any

import pytest

from strandline import LLM
from strandline.config import EngineConfig
from strandline.device.ranks.rendezvous import Rendezvous
from strandline.engine.processes import worker
from strandline.engine.workers import workers
from strandline.engine.workers.worker_link import WorkerEndedError, WorkerLink
from strandline.engine.workers.workers import Workers
from strandline.errors import ConfigError, EngineError
from tests.cpu.engine.test_executors import is_running

LOST, NO_MEMORY, SILENT = EngineError("a peer is lost"), EngineError("no memory"), WorkerEndedError("has ended")
KILLED, FIRST_CODE, SECOND_CODE = "ended by SIGKILL", "ended with exit code 1", "ended with exit code 2"

CASES: dict[str, tuple[list[tuple[Exception | None, str | None]], list[int], str]] = {
    "killed": ([(LOST, None), (SILENT, KILLED)], [0], f"rank 1 of 2 (process 1) has {KILLED}"),
    "killed, and the other one ends": ([(LOST, SECOND_CODE), (SILENT, KILLED)], [0], f"has {KILLED}"),
    "without a word": ([(LOST, SECOND_CODE), (SILENT, FIRST_CODE)], [0], f"rank 1 of 2 (process 1) has {FIRST_CODE}"),
    "memory, in a step": ([(None, None), (NO_MEMORY, None)], [1], "rank 1 of 2 (process 1) has failed: no memory"),
    "memory, at the start": ([(None, None), (NO_MEMORY, SECOND_CODE)], [1], "(process 1) has failed: no memory"),
    "memory, and the other one ends": ([(LOST, SECOND_CODE), (NO_MEMORY, SECOND_CODE)], [1], "has failed: no memory"),
}
"""Errors and ends of both ranks; the ranks whose errors came first; a part of what is said."""


def link(index: int, end: str | None) -> Any:
    return SimpleNamespace(
        process=SimpleNamespace(pid=index, kill=lambda: None),
        last_words=f"words of {index}".encode(),
        describe_end=lambda: end,
    )


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_failed_first_is_named(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(workers, "GRACE_S", 0.0)
    ranks, first, expected = CASES[case]
    made = object.__new__(Workers)
    made._links = [link(index, end) for index, (_, end) in enumerate(ranks)]
    futures = [Future[Any]() for _ in ranks]
    for future, (error, _) in zip(futures, ranks, strict=True):
        if error is not None:
            future.set_exception(error)
    errors: dict[int, BaseException] = {rank: error for rank in first if (error := ranks[rank][0]) is not None}
    text = made._find_failure(futures, errors, "a step")
    assert expected in text
    assert text.endswith("its last words:\nwords of 1")


DONE: Future[Any] = Future()
DONE.set_result(None)
WAITED: Future[Any] = Future()
WAITED.set_exception(EngineError("RuntimeError: Timed out waiting 600000ms for recv operation to complete"))
STACK, WAITING = b"File worker.py, line 1 in readinto", b"File distributed_c10d.py, line 1 in all_reduce"

HANGS: dict[str, tuple[list[Future[Any]], list[bytes], str]] = {
    "between steps": ([DONE, Future()], [STACK, b""], "rank 1 of 2 (process 1) has not finished a step"),
    "in a step": ([Future(), Future()], [WAITING, STACK], "rank 1 of 2 (process 1) has not finished a step"),
    "at the start": ([WAITED, Future()], [STACK, b""], "rank 1 of 2 (process 1) has not finished a step"),
    "others have failed, too": ([WAITED, Future()], [STACK, WAITING], "rank 0 of 2 (process 0) has failed: Runtime"),
}
"""What ranks have replied, what they say when they are asked, and a part of what is said of them."""


@pytest.mark.parametrize("case", HANGS)
def test_the_rank_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    """And nothing is left for the ranks, which are killed, to meet at."""
    monkeypatch.setattr(workers, "GRACE_S", 0.0)
    monkeypatch.setattr(workers, "STACK_S", 0.0)
    futures, stacks, expected = HANGS[case]
    made = object.__new__(Workers)
    made.directory = str(tmp_path / "ranks")
    Path(made.directory).mkdir()
    made._links = [link(index, None) for index in range(2)]
    for each, stack in zip(made._links, stacks, strict=True):
        each.process.send_signal = lambda _, each=each, stack=stack: setattr(each, "last_words", stack)
    with pytest.raises(EngineError) as raised:
        made.results(futures, 0.01, "a step")
    assert expected in str(raised.value)
    assert not Path(made.directory).exists()


def test_a_rank_that_has_ended_is_found_without_a_call() -> None:
    made = Workers(2)
    made.check()
    made._links[1].process.kill()
    select(made.fds, (), ())
    with pytest.raises(EngineError, match=r"rank 1 of 2 .* has ended by SIGKILL"):
        made.check()
    made.close()


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_workers_begin_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """And end when loading fails."""
    begun = list[WorkerLink]()

    class NotedLink(WorkerLink):
        def __init__(self) -> None:
            super().__init__()
            begun.append(self)

    monkeypatch.setattr(workers, "WorkerLink", NotedLink)
    with pytest.raises(ConfigError, match="tokenizer"):
        LLM("demo", tokenizer=str(tmp_path), device="cpu", distributed_executor_backend=backend)
    assert len(begun) == (backend == "mp")
    assert not any(is_running(link.process.pid) for link in begun)


def test_workers_end_when_another_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[WorkerLink]()

    def begin() -> WorkerLink:
        if begun:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        begun.append(WorkerLink())
        return begun[0]

    monkeypatch.setattr(workers, "WorkerLink", begin)
    with pytest.raises(OSError, match="open files"):
        Workers(2)
    assert not is_running(begun[0].process.pid)


def test_a_worker_ends_when_its_connection_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[int]()

    def fail(pid: int) -> int:
        begun.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="open files") as raised:
        WorkerLink()
    assert raised.value.errno == errno.EMFILE
    assert not is_running(begun[0])
    assert len(os.listdir("/proc/self/fd")) == before


BEGINS = """
import os
import sys
from strandline.engine.workers import workers

def begin():
    print("begun", "torch" in sys.modules, flush=True)
    os._exit(0)

workers.WorkerLink = begin
"""

ENTRIES = {
    "engine's process": """
import zmq
from strandline.config import EngineConfig
from strandline.engine.processes import core_process
from strandline.records.heartbeat import Heartbeat
from strandline.records.messages import ENCODER, Start

with zmq.Context() as context, context.socket(zmq.PAIR) as front, context.socket(zmq.PAIR) as back:
    front.bind("inproc://core")
    back.connect("inproc://core")
    front.send(ENCODER.encode(Start(EngineConfig(model="demo", device="cpu", tensor_parallel_size=2))))
    core_process.serve_core(back, os.pipe()[0], Heartbeat(os.memfd_create("heartbeat")), 2)
""",
    "LLM": """
from strandline import LLM
LLM("demo", device="cpu", tensor_parallel_size=2)
""",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_workers_begin_before_torch_is_loaded(entry: str) -> None:
    command = [sys.executable, "-c", BEGINS + ENTRIES[entry]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["begun", "False"], done.stderr


def test_ranks_of_deterministic_engines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "ProcessRanks", lambda *_, is_deterministic: is_deterministic)
    configs = [EngineConfig(model="demo", device="cpu", deterministic=value) for value in (False, True)]
    assert [worker.new_ranks(Rendezvous(0, 4, "meeting"), config) for config in configs] == [False, True]
