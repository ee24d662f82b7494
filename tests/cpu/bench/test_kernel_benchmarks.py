"""The runner of kernel benchmarks on a CPU, and the smallest shape of every case in Triton's interpreter."""

import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline.kernels import binding
from tests.interpreter import (
    convert_e4m3,
    multiply_bfloat16,
    spare_repeated_work,
    subtract_bfloat16,
    take_loop_bounds_from_memory,
)

take_loop_bounds_from_memory()
multiply_bfloat16()
subtract_bfloat16()
convert_e4m3()
spare_repeated_work()

FOLDER = Path(__file__).parents[3] / "benchmarks" / "kernels"
TINY_SWIGLU = ("--tiny", "--device", "cpu", "--digest", "--case", "norm/swiglu")

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command as a function that returns its exit status."""
    monkeypatch.syspath_prepend(FOLDER)
    runner = import_module("runner")

    return lambda *arguments: runner.main(list(map(str, arguments)))


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_list_names_cases_and_axes(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list", "--case", "norm/swi*") == 0
    out = capsys.readouterr().out
    assert out.startswith("norm/swiglu (cuda)\n    size: 512, 9216; tokens: 1,")
    assert "linear" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--case", "nothing"), "no case matches nothing; there are linear/dense, "),
        (("--case", "norm/*", "--where", "nothing=1"), "no chosen case has the axis nothing"),
    ],
)
def test_unknown_names_are_refused(arguments: tuple[str, ...], said: str, run: Run) -> None:
    with pytest.raises(SystemExit, match=said):
        run(*arguments)


@pytest.mark.usefixtures("plain_cpu")
def test_json_holds_times_errors_and_checksums(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert run(*TINY_SWIGLU, "--json", path) == 0
    stored = json.loads(path.read_text())
    assert stored["torch"] == torch.__version__
    ours, peer = stored["rows"]
    assert (ours["shape"], ours["variant"], peer["variant"]) == ("norm/swiglu shape=tiny", "strandline", "torch")
    assert ours["us"] > 0
    assert ours["error"] <= ours["limit"]
    assert len(ours["digest"]) == 16
    assert peer["digest"] is None


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({}, 0, "2 rows compared, 0 new: 0 differ"),
        ({"digest": "0" * 16}, 1, "bits differ"),
        ({"us": 0.001}, 1, "of 0.00 us"),
        ({"kernels": [{"registers": 32, "spills": 0, "shared": 0}]}, 1, "kernels none, before 32/0/0"),
        ({"shape": "another"}, 0, "1 rows compared, 1 new: 0 differ"),
    ],
)
@pytest.mark.usefixtures("plain_cpu")
def test_compare_finds_what_differs(
    change: dict[str, Any], status: int, said: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "before.json"
    run(*TINY_SWIGLU, "--json", path)
    stored = json.loads(path.read_text())
    for row in stored["rows"]:
        row["us"] = 1e9
    stored["rows"][0].update(change)
    path.write_text(json.dumps(stored))
    assert run(*TINY_SWIGLU, "--compare", path) == status
    assert said in capsys.readouterr().out


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_every_case_runs_in_the_interpreter(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(binding, "why_unavailable", lambda *_: None)
    path = tmp_path / "rows.json"
    run("--tiny", "--device", "cpu", "--untimed", "--json", path)
    for row in json.loads(path.read_text())["rows"]:
        name = f"{row['shape']} {row['variant']}"
        assert row["problem"] is None or row["problem"].startswith("skipped: "), f"{name}: {row['problem']}"
        # The interpreter rounds to bfloat16 towards zero.
        assert row["limit"] is None or row["error"] <= 10 * row["limit"], f"{name}: {row['error']}"
