"""The documentation's Python examples run as printed, each file from top to bottom."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from strandline.model_config import ARCHITECTURES
from tests.cpu.server.process import ForkedServer, templates

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES_WITH_EXAMPLES = [page for page in PAGES if EXAMPLE.search(page.read_text())]


def test_there_are_examples() -> None:
    assert ROOT / "README.md" in PAGES_WITH_EXAMPLES


def test_models_page_names_every_architecture() -> None:
    named = re.findall(r"^\| `([A-Z]\w+)` \|", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(ARCHITECTURES)


@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES, ids=lambda page: page.name)
def test_examples_run_as_printed(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if "subprocess.Popen" in page.read_text():
        templates()
        monkeypatch.setattr(subprocess, "Popen", ForkedServer)
    names: dict[str, object] = {}
    for example in EXAMPLE.findall(page.read_text()):
        exec(compile(example, str(page), "exec"), names)
    printed = capsys.readouterr().out
    if page.name == "README.md":
        assert "Ada" in printed
    if page.name == "compaction.md":
        assert f"```\n{printed}```" in page.read_text()
