"""Processes that a template forks are what they were asked to be, as if they had been started anew."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.server.forked import ForkedProcess, asked_for, templates
from tests.cpu.server.process import TIMEOUT_S, ending_with_parent

SAY_ALL = """
import os, sys, threading, torch
print(sorted(os.environ.items()))
print(os.getcwd(), sys.stdin.read(), threading.active_count(), __name__)
print(torch.ones(500, 500).sum().item(), flush=True)
os._exit(7)
"""


def forked(code: str, **options: object) -> ForkedProcess:
    """Fork a process that runs code; ``timeit`` is a module of Python's that runs its argument."""
    output = options.pop("output", 1)
    assert isinstance(output, int)
    arguments = ["-n1", "-r1", code]
    return ForkedProcess(templates().engines, "timeit", arguments, {1: output, 2: output}, **options)  # type: ignore[arg-type]


def test_process_has_its_environment_directory_and_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("said").open("wb") as file:
        process = forked(SAY_ALL, environment={"ONE": "1"}, output=file.fileno())
        assert process.wait(TIMEOUT_S) == 7
    assert Path("said").read_text() == f"[('ONE', '1')]\n{tmp_path}  1 __main__\n250000.0\n"


def test_executed_servers_end_with_a_killed_worker() -> None:
    child = ending_with_parent(["/bin/sleep", "600"])
    with subprocess.Popen([sys.executable, "-S", "-c", f"import subprocess; subprocess.run({child})"]) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (pids := children.read_text().split()) or Path(f"/proc/{pids[0]}/comm").read_text() != "sleep\n":
            assert parent.poll() is None
        ends = os.pidfd_open(int(pids[0]))
        parent.kill()
        assert select.select([ends], [], [], TIMEOUT_S)[0]
        os.close(ends)


def test_signals_end_it_and_nothing_stays() -> None:
    process = forked("import sys; sys.stdin.read()", has_pipe=True)
    assert asked_for(templates().engines, os.getpid()) == [process.pid]
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == -signal.SIGTERM
    process.stdin.close()
    assert not Path(f"/proc/{process.pid}").exists()
    assert asked_for(templates().engines, os.getpid()) == []


def test_it_ends_when_its_standard_input_closes() -> None:
    process = forked("import os, sys; os._exit(len(sys.stdin.read()))", has_pipe=True)
    process.stdin.write(b"four")
    process.stdin.close()
    assert process.wait(TIMEOUT_S) == 4
