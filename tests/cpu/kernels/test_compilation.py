"""Kernels for CPUs are compiled ahead in several processes, each module in one of them."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from strandline.kernels import compilation, runtime_numba
from strandline.kernels.binding import LoggedProgress
from strandline.kernels.compilation import PROGRAM, compile_modules, uncompiled

RECORD = """
import os
with open(os.environ["RECORD"], "a") as record:
    record.write(__name__ + "\\n")
"""


ENDLESS = (
    RECORD.replace("__name__", "str(os.getpid())")
    + """
import time
time.sleep(600)
"""
)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package named ``strandline.kernels`` whose modules record that they are imported, and load nothing."""
    package = tmp_path / "strandline" / "kernels"
    for folder in (package.parent, package, package / "rows"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    monkeypatch.setattr(compilation, "PACKAGE", package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return package


def recorded(tmp_path: Path) -> list[str]:
    return (tmp_path / "record").read_text().split()


def test_each_module_is_imported_once_the_longest_first(package: Path, tmp_path: Path) -> None:
    (package / "short_numba.py").write_text(RECORD)
    (package / "rows" / "long_numba.py").write_text(RECORD + "# more")
    reports: list[int] = []
    assert compile_modules(["short_numba", "rows.long_numba"], 1, reports.append)
    assert reports == [1, 2]
    assert recorded(tmp_path) == ["strandline.kernels.rows.long_numba", "strandline.kernels.short_numba"]


def test_two_processes_share_modules_and_report_one_that_fails(
    package: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["a_numba", "b_numba", "c_numba"]
    for name in names:
        (package / f"{name}.py").write_text(RECORD)
    (package / "broken_numba.py").write_text("raise ValueError('taken first, as it is the longest')" + "\n" * 99)
    assert not compile_modules([*names, "broken_numba"], 2)
    assert sorted(recorded(tmp_path)) == [f"strandline.kernels.{name}" for name in names]
    assert "ValueError: taken first" in capfd.readouterr().err


def test_processes_end_with_the_call(package: Path, tmp_path: Path) -> None:
    (package / "long_numba.py").write_text(ENDLESS)
    (package / "short_numba.py").write_text("import os, time\nwhile not os.path.exists(os.environ['RECORD']): pass")

    def interrupt(num_done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_modules(["long_numba", "short_numba"], 2, interrupt)
    [pid] = recorded(tmp_path)
    assert not Path("/proc", pid).exists()


def test_a_process_ends_with_the_one_that_started_it(package: Path, tmp_path: Path) -> None:
    (package / "long_numba.py").write_text("print('started', flush=True)\n" + ENDLESS)
    numbers, lifeline = os.pipe(), os.pipe()
    os.write(numbers[1], bytes([0]))
    fds = numbers[0], numbers[1], lifeline[0]
    command = [sys.executable, "-c", PROGRAM, *map(str, fds), "long_numba"]
    with subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.close(lifeline[1])
        assert process.wait(timeout=60) == 1
    for fd in fds:
        os.close(fd)


def test_progress_is_logged_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([10.0, 11.0, 15.0, 16.0, 17.0])
    monkeypatch.setattr("strandline.kernels.binding.SYSTEM_CLOCK", lambda: next(times))
    progress = LoggedProgress(4)
    with caplog.at_level(logging.WARNING):
        for num_done in range(1, 5):
            progress(num_done)
    assert caplog.messages == ["kernels: 2 of 4 compiled, 5 s", "kernels: 4 of 4 compiled, 7 s"]


def test_modules_without_kernels_in_the_cache_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime_numba, "cache_directory", lambda: tmp_path)
    (tmp_path / "norm_numba._gated-166.py312.nbi").touch()
    assert uncompiled(["rowwise.norm_numba", "step_numba"]) == ["step_numba"]
    monkeypatch.setattr(runtime_numba, "cache_directory", lambda: None)
    assert uncompiled(["rowwise.norm_numba", "step_numba"]) == []
