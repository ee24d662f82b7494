"""Start and shutdown: drains, crashes, restarts, refusals to start."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cpu.server.forked import templates
from tests.cpu.server.process import (
    TIMEOUT_S,
    ServerProcess,
    Start,
    execute_server,
    fork_server,
    http_post,
    running_server,
)

ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def doomed(bytes_dir: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that the test ends."""
    with running_server(bytes_dir, tmp_path / "log") as server:
        yield server


@pytest.fixture
def executed(bytes_dir: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """The same, started by the command that users run."""
    with running_server(bytes_dir, tmp_path / "log", start=execute_server) as server:
        yield server


def listens(server: ServerProcess) -> bool:
    try:
        server.connect().close()
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    return True


def lives(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_sigterm_finishes_what_runs_and_takes_nothing_new(executed: ServerProcess) -> None:
    core = executed.core_pid()
    with executed.stream(prompt="x", max_tokens=400, ignore_eos=True, stream_options={"include_usage": True}) as events:
        next(events)
        executed.signal(signal.SIGTERM)
        executed.wait_until(lambda: not listens(executed))
        *_, usage, done = events
    assert done == "[DONE]"
    assert json.loads(usage)["usage"]["completion_tokens"] == 400
    assert executed.exit_code() == 0
    assert "every request was answered" in executed.log()
    assert not lives(core)
    assert "Traceback" not in executed.log()


def caught_at_start(start: Callable[[], ServerProcess], directory: Path) -> ServerProcess:
    """Return a server whose engine has begun to start; one that serves before a look at it is ended, and another tried.

    Args:
        directory: where the server has its temporary files.
    """
    for _ in range(10):
        server = start()
        server.wait_until(lambda log=server.log: list(directory.glob("strandline-*/core")) or "serving" in log())
        if list(directory.glob("strandline-*/core")):
            return server
        server.close()
    raise AssertionError("no server was caught at its start")


@pytest.mark.parametrize(
    ("number", "code", "start"),
    [(signal.SIGTERM, 0, execute_server), (signal.SIGKILL, -signal.SIGKILL, fork_server)],
    ids=["terminated", "killed"],
)
def test_signal_at_start_leaves_no_files_and_no_process(
    bytes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, start: Start
) -> None:
    templates()  # whose folder is none of the server's files
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = caught_at_start(lambda: ServerProcess(bytes_dir, tmp_path / "log", start=start), tmp_path)
    try:
        core = server.core_pid()
        if number == signal.SIGTERM:
            os.kill(core, signal.SIGINT)  # as Ctrl-C in a terminal; it imports its modules
        server.signal(number)
        assert server.exit_code() == code
        if number == signal.SIGKILL:
            server.wait_until(lambda: not lives(core))
    finally:
        server.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "log"]
    assert not lives(core)
    assert server.log() == ("stopped before it served\n" if code == 0 else "")


def test_a_second_ctrl_c_stops_at_once(bytes_dir: Path, tmp_path: Path) -> None:
    with (
        running_server(bytes_dir, tmp_path / "log", "--client-timeout-s", "0") as doomed,
        ThreadPoolExecutor() as pool,
        doomed.stream(**ENDLESS, n=4) as events,
        doomed.connect() as unfinished,
    ):
        core = doomed.core_pid()
        unfinished.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        whole = pool.submit(http_post, f"{doomed.url}/v1/completions", json=ENDLESS)
        next(events)
        doomed.wait_until(lambda: doomed.metric("num_requests_running") == 5)
        doomed.signal(signal.SIGINT)
        doomed.wait_until(lambda: not listens(doomed))
        assert doomed.process.poll() is None
        doomed.signal(signal.SIGINT)
        *_, error, done = events
        assert "the server was stopped" in json.loads(error)["error"]["message"]
        assert done == "[DONE]"
        assert whole.result().status_code == 503
        assert "the server was stopped" in whole.result().json()["error"]["message"]
        assert doomed.exit_code() == 130
        assert not lives(core)
        assert "Traceback" not in doomed.log()


def test_a_restarted_server_hits_what_the_last_one_left(bytes_dir: Path, tmp_path: Path) -> None:
    ask = {"prompt": "hello there, who are you?", "max_tokens": 8, "temperature": 0}
    answers = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with running_server(bytes_dir, tmp_path / number.name, "--disk-cache", str(tmp_path / "cache")) as server:
            answers.append(server.post("/v1/completions", **ask).json())
            loaded_bytes = server.metric("cache_loaded_bytes_total")
            server.signal(number)
            assert server.exit_code() == 0
            assert "writing entries that are only in memory to the disk cache, for at most 20 s" in server.log()
            assert " MiB to the disk cache in " in server.log()
            assert "Traceback" not in server.log()
    assert answers[0]["choices"] == answers[1]["choices"]
    assert [x["usage"]["prompt_tokens_details"]["cached_tokens"] for x in answers] == [0, len(ask["prompt"])]
    assert loaded_bytes > 0


def test_dead_engine_fails_unfinished_requests_and_health(doomed: ServerProcess) -> None:
    with doomed.stream(**ENDLESS) as events:
        next(events)
        os.kill(doomed.core_pid(), signal.SIGKILL)
        *_, error, done = events
    assert json.loads(error)["error"]["code"] == "engine_dead"
    assert done == "[DONE]"
    health = doomed.get("/health")
    assert health.status_code == 503
    assert "ended with code -9" in health.json()["error"]["message"]
    answer = doomed.post("/v1/completions", prompt="x")
    assert answer.status_code == 503
    assert "restart the server" in answer.json()["error"]["message"]
    assert "time_to_first_token" in doomed.get("/metrics").text
    doomed.signal(signal.SIGTERM)
    assert doomed.exit_code() == 0
    assert "requests that ended when an engine stopped: 1; all others were answered" in doomed.log()


def test_restarted_engine_has_an_empty_cache(bytes_dir: Path, tmp_path: Path) -> None:
    with running_server(bytes_dir, tmp_path / "log", "--restart") as server:
        ask = {"prompt": "hello there, who are you?", "max_tokens": 8, "temperature": 0}
        before = server.post("/v1/completions", **ask).json()
        first = server.core_pid()
        with server.stream(**ENDLESS) as events:
            next(events)
            os.kill(first, signal.SIGKILL)
            *_, error, done = events
        assert "it is being restarted" in json.loads(error)["error"]["message"]
        assert done == "[DONE]"
        server.wait_until(lambda: server.get("/health").status_code == 200)
        assert server.core_pid() != first
        after = server.post("/v1/completions", **ask).json()
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.metric("num_requests_running") == 0
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_the_engine_does_not_outlive_its_front_end(doomed: ServerProcess) -> None:
    core = doomed.core_pid()
    watch = os.pidfd_open(core)
    doomed.process.kill()
    ended, _, _ = select.select([watch], [], [], TIMEOUT_S)
    os.close(watch)
    assert ended


def test_engine_without_handshake_exits_with_its_server(tmp_path: Path) -> None:
    folder = tmp_path / "strandline-folder"
    folder.mkdir()
    heartbeat = os.memfd_create("heartbeat")
    command = [
        sys.executable,
        "-m",
        "strandline.engine.processes.core_process",
        f"ipc://{folder}/core",
        str(heartbeat),
        "0",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[heartbeat]) as core:
        os.close(heartbeat)
        assert core.stdin is not None
        core.stdin.close()
        assert core.wait(TIMEOUT_S) == 0
    assert not folder.exists()


def test_an_engine_that_cannot_import_is_said_in_one_line(
    bytes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has ended before the HTTP process, which imports more, listens for it."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    server = ServerProcess(bytes_dir, tmp_path / "log", start=execute_server)
    try:
        assert server.exit_code() == 2
    finally:
        server.close()
    *_, error, said = server.log().splitlines()
    assert error == "ImportError: torch is broken"
    assert said == "strandline: error: the engine's process ended while it started; its error is above"


def refuse(model: Path, log: Path, *flags: str) -> str:
    """Start a server that cannot start; return what it says."""
    server = ServerProcess(model, log, *flags)
    try:
        assert server.exit_code() == 2
    finally:
        server.close()
    return server.log()


def test_an_address_in_use_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refuse(tmp_path, tmp_path / "log", "--port", str(taken.getsockname()[1]))
    assert "cannot listen on 127.0.0.1:" in said
    assert "choose another --port" in said


def test_what_the_engine_refuses_is_said_in_one_line(bytes_dir: Path, tmp_path: Path) -> None:
    said = refuse(bytes_dir, tmp_path / "log", "--memory", "1KiB")
    [line] = said.splitlines()
    assert line.startswith("strandline: error: --memory of ")
