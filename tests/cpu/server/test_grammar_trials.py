"""Grammars that take too much are refused, and hold up neither other requests nor the server's end."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from strandline.server.engines.grammar_trials import MAX_CPU_S
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, running_server

SLOW: dict[str, Any] = {
    "type": "object",
    "patternProperties": {f"^k{index:04}_[a-z]+$": {"type": "integer"} for index in range(1000)},
}
"""Takes minutes, as each pattern is compared with each other."""
DEEP: dict[str, Any] = {
    "$defs": {**{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)}, "5000": {"type": "integer"}},
    "$ref": "#/$defs/0",
}
"""Overflows the stack."""


def ask(server: ServerProcess, structure: dict[str, Any]) -> httpx.Response:
    return server.post("/v1/completions", prompt="a", max_tokens=20, stop_token_ids=[0], structured_outputs=structure)


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def trials(server: ServerProcess) -> list[int]:
    """Return the processes that compile a grammar."""
    [template] = [pid for pid in children(server.process.pid) if pid != server.core_pid()]
    return children(template)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def hurried(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that gives requests half a second."""
    log = tmp_path_factory.mktemp("hurried") / "log"
    with running_server(bytes_dir, log, "--request-timeout-s", "0.5") as server:
        yield server


@pytest.mark.parametrize("schema", [SLOW, DEEP], ids=["slow", "deep"])
def test_grammar_that_takes_too_much_is_refused(server: ServerProcess, schema: dict[str, Any]) -> None:
    answer = ask(server, {"json": schema})
    assert answer.status_code == 400
    assert f"it takes more than {MAX_CPU_S} s of processor time" in answer.json()["error"]["message"]
    assert ask(server, {"regex": "[ab]{3}"}).status_code == 200


def test_invalid_grammar_is_refused_with_its_reason(server: ServerProcess) -> None:
    answer = ask(server, {"json": {"type": "strin"}})
    assert answer.status_code == 400
    message = "structured_outputs.json cannot be used: Invalid type: strin"
    assert answer.json()["error"]["message"].startswith(message)


def test_trial_ends_when_its_sender_has_gone(server: ServerProcess) -> None:
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        body = json.dumps({"prompt": "a", "structured_outputs": {"json": SLOW}})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        [trial] = server.wait_until(lambda: trials(server))
    taken_s = [0.0]
    server.wait_until(lambda: taken_s.append(cpu_s(trial)) or not trials(server))
    assert max(taken_s) < MAX_CPU_S / 2


def test_request_ends_in_time_though_its_grammar_compiles(hurried: ServerProcess) -> None:
    answer = ask(hurried, {"json": SLOW})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    hurried.wait_until(lambda: not trials(hurried))


def test_server_does_not_wait_for_trials_at_its_end(hurried: ServerProcess) -> None:
    [template] = [pid for pid in children(hurried.process.pid) if pid != hurried.core_pid()]
    ask(hurried, {"json": SLOW})
    hurried.signal(signal.SIGTERM)
    assert hurried.exit_code() == 0
    assert not Path(f"/proc/{template}").exists()
