"""Command lines of docs/clients.md, run as printed by the tools themselves where these are installed.

Elsewhere these tests are skipped; what the tools send is held by ``test_clients.py`` all the same.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.server.process import TIMEOUT_S, ServerProcess

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "clients.md").read_text()
SEARCHED = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
"""Where a tool may lie: beside this Python, or in an environment of its own that is on the path."""

WARNED_ALWAYS = "Batch size > 1 detected."
"""The harness says so of every server, before it has asked anything."""


def commands(tool: str) -> list[str]:
    """Return the page's command lines of a tool."""
    return re.findall(rf"^```sh\n({tool} .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def needs(tool: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test where the tool is not installed, and tells how to install it."""
    [install] = [line for line in PAGE.splitlines() if re.match(rf'pip install "?{tool}\b', line)]
    return pytest.mark.skipif(shutil.which(tool, path=SEARCHED) is None, reason=f"no {tool} on the path: {install}")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder where the page's paths lead to the repository's files, and where tools may leave theirs."""
    for name in ("docs", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(command: str, server: ServerProcess, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line of the page in a folder, offline."""
    own = {"PATH": SEARCHED, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        ["bash", "-ec", command.replace("http://127.0.0.1:8000", server.url)],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_page_has_two_command_lines_of_each_tool() -> None:
    assert [len(commands(tool)) for tool in ("lm_eval", "guidellm")] == [2, 2]


@needs("lm_eval")
@pytest.mark.parametrize("command", commands("lm_eval"), ids=["completions", "chat"])
def test_the_harness_finds_every_sum_right(command: str, demo_server: ServerProcess, checkout: Path) -> None:
    done = run(command, demo_server, checkout)
    [tasks] = re.findall(r"--tasks (\S+)", command)
    rows = re.findall(r"^\|(\w+) *\|.*?\|(?:acc|exact_match) *\|[^|]*\| *([\d.]+)\|", done.stdout, re.MULTILINE)
    assert {task: float(value) for task, value in rows} == dict.fromkeys(tasks.split(","), 1.0)
    warnings = re.findall(r" (?:WARNING|ERROR|CRITICAL) +\[\S+\] (.*)", done.stderr)
    assert [warning for warning in warnings if not warning.startswith(WARNED_ALWAYS)] == []


@needs("guidellm")
@pytest.mark.parametrize("command", commands("guidellm"), ids=["chat", "completions"])
def test_guidellm_gets_every_answer_whole(command: str, demo_server: ServerProcess, checkout: Path) -> None:
    run(command, demo_server, checkout)
    asked = {name: int(value) for name, value in re.findall(r"(count|prompt_tokens|output_tokens)=(\d+)", command)}
    [benchmark] = json.loads((checkout / "benchmarks.json").read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    ended = {name: number for name, number in metrics["request_totals"].items() if name != "total"}
    assert ended == {"successful": asked["count"], "errored": 0, "incomplete": 0}
    outputs, prompts = (metrics[f"{name}_token_count"]["successful"] for name in ("output", "prompt"))
    assert outputs["min"] == outputs["max"] == asked["output_tokens"]
    # The server counts what the chat template adds.
    assert prompts["min"] == prompts["max"] >= asked["prompt_tokens"]
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0
