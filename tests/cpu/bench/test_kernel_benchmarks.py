"""The runner of kernel benchmarks on a CPU, and the smallest shape of every case in Triton's interpreter."""

import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline.kernels import binding, sizes
from tests.interpreter import prepare_interpreter

prepare_interpreter()

FOLDER = Path(__file__).parents[3] / "benchmarks" / "kernels"
TINY_SWIGLU = ("--tiny", "--device", "cpu", "--digest", "--case", "norm/swiglu")

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command as a function that returns its exit status; its modules are imported."""
    monkeypatch.syspath_prepend(FOLDER)
    runner = import_module("runner")
    runner.chosen_cases(None)
    return lambda *arguments: runner.main(list(map(str, arguments)))


@pytest.fixture
def plain_cpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations are those of CPUs, not Triton's in its interpreter, for which modules have been imported."""
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


PTX = """
	// .globl	{name}
.visible .entry {name}(
	.param .u32 {name}_param_0
)
{{
	.loc	1 {line} 22                          // {name}.py:{line}:22
	{instruction}
$L__tmp{line}:
	ret;
}}
	.file	1 "{name}.py"
	.section	.debug_abbrev
"""


@pytest.mark.parametrize(
    ("name", "line", "instruction", "is_same"),
    [("first", 7, "add.s32", True), ("other", 9, "add.s32", True), ("first", 7, "mul.s32", False)],
)
@pytest.mark.usefixtures("run")
def test_checksum_of_code_ignores_names_and_source_lines(name: str, line: int, instruction: str, is_same: bool) -> None:
    checksum = import_module("timing").code_checksum
    first = checksum(PTX.format(name="first", line=7, instruction="add.s32"), "first")
    assert (checksum(PTX.format(name=name, line=line, instruction=instruction), name) == first) is is_same


@pytest.mark.usefixtures("run")
def test_launch_replaces_constants_and_functions_for_a_while() -> None:
    launch = import_module("case").Launch("other", {"sizes.NUM_SMS": 7, "sizes.cdiv": 9})
    before = sizes.NUM_SMS, sizes.cdiv(8, 4)
    with launch.in_force():
        assert (sizes.NUM_SMS, sizes.cdiv(8, 4)) == (7, 9)
    assert (sizes.NUM_SMS, sizes.cdiv(8, 4)) == before


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
