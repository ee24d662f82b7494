"""Kernels for CPUs are compiled ahead in several processes, each module in one of them."""

import os
from pathlib import Path

import pytest

pytest.importorskip("numba")

from strandline.kernels import compilation, runtime_numba
from strandline.kernels.compilation import compile_modules, uncompiled

RECORD = """
import os
with open(os.environ["RECORD"], "a") as record:
    record.write(__name__ + "\\n")
"""


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
    assert compile_modules(["short_numba", "rows.long_numba"], 1)
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


def test_modules_without_kernels_in_the_cache_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime_numba, "cache_directory", lambda: tmp_path)
    (tmp_path / "norm_numba._gated-166.py312.nbi").touch()
    assert uncompiled(["rowwise.norm_numba", "step_numba"]) == ["step_numba"]
    monkeypatch.setattr(runtime_numba, "cache_directory", lambda: None)
    assert uncompiled(["rowwise.norm_numba", "step_numba"]) == []
