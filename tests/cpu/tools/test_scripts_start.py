"""Every script of ``tools/`` and ``benchmarks/`` can be imported where there is no GPU, and prints its help."""

import os
import runpy
import sys
from pathlib import Path

import pytest

import strandline

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(path for folder in ("benchmarks", "tools") for path in (ROOT / folder).rglob("*.py"))
OPTIONAL = {"ray", "triton", "vllm"}
"""What a script may need that is not installed everywhere."""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_script_starts(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", [str(path.parent), str(Path(strandline.__file__).parents[1]), *sys.path])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    try:
        names = runpy.run_path(str(path))
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    if "argparse" in names:
        with pytest.raises(SystemExit) as end:
            names["main"]()
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith("usage:")
