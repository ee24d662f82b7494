"""Engines' processes, which are spawned before the HTTP process imports what it needs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strandline.server.engines import spawned_engine
from strandline.server.engines.spawned_engine import SpawnedEngine
from tests.cpu.test_closures import closure

BEGINS = """
import sys
from strandline import cli
from strandline.server.engines import spawned_engine

class Spawned:
    def __init__(self, num_workers):
        print("spawned with", num_workers, "fastapi" in sys.modules)
    def __enter__(self):
        return self
    def __exit__(self, *_):
        print("ended")

spawned_engine.SpawnedEngine = Spawned
sys.exit(cli.main(["serve", "demo", "--host", "::1::", *sys.argv[1:]]))
"""

BEGINS_WITH_LOG = """
import sys
from strandline import cli
from strandline.env import read_log_format, read_log_level
from strandline.server.engines import spawned_engine

def begin(num_workers):
    print(read_log_format(), read_log_level())
    sys.exit()

spawned_engine.SpawnedEngine = begin
cli.main(["serve", "demo", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [0]),
        (["--tensor-parallel-size", "2"], [2]),
        (["--data-parallel-size", "2"], [0, 0]),
        (["--distributed-executor-backend", "mp"], [1]),
    ],
)
def test_engines_are_spawned_before_the_web_framework_is_imported(flags: list[str], expected: list[int]) -> None:
    command = [sys.executable, "-c", BEGINS, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"spawned with {each} False" for each in expected] + ["ended"] * len(expected)
    assert (done.returncode, "cannot listen" in done.stderr) == (2, True), done.stderr


def test_engines_inherit_format_and_level_of_the_log() -> None:
    command = [sys.executable, "-c", BEGINS_WITH_LOG, "--log-format", "json", "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["json error"], done.stderr


def test_what_spawns_engines_loads_little() -> None:
    rooms = {name.split(".")[1] for name in closure("strandline.server.engines.spawned_engine") if "." in name}
    assert rooms <= {"clock", "records", "server", "signals", "version", "env", "ids", "errors"}


def test_an_engine_that_is_left_alone_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with SpawnedEngine(0) as spawned:
        assert spawned.process.poll() is None
        assert list(tmp_path.iterdir()) == [Path(spawned.folder.name)]
    assert spawned.process.returncode is not None
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_an_engine_is_spawned_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spawned = list[subprocess.Popen[bytes]]()

    class NotedProcess(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            spawned.append(self)

    @contextmanager
    def interrupted() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(spawned_engine.subprocess, "Popen", NotedProcess)
    monkeypatch.setattr(spawned_engine, "signals_held", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SpawnedEngine(0)
    assert spawned[0].returncode is not None
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(spawned_engine, "COMMAND", [str(tmp_path / "missing")])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        SpawnedEngine(0)
    assert (list(tmp_path.iterdir()), len(os.listdir("/proc/self/fd"))) == ([], before)
