"""The examples of the pages on the server run as printed, and docs/server.md names every flag and metric."""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from strandline.cli import build_parser
from tests.cpu.server.process import ServerProcess, running_server

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "server.md").read_text()


def examples(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def run_in_shell(example: str, server: ServerProcess) -> object:
    """Return what an example prints, as JSON."""
    command = example.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_python_examples_run_and_the_second_turn_hits(demo_server: ServerProcess) -> None:
    names: dict[str, object] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for example in examples("py"):
            exec(compile(example.replace("http://127.0.0.1:8000", demo_server.url), "docs/server.md", "exec"), names)
    names["client"].close()  # type: ignore[attr-defined]
    assert "Your name is Ada." in said.getvalue()
    [(cached, total)] = re.findall(r"(\d+) of (\d+) tokens were cached", said.getvalue())
    assert 0 < int(cached) < int(total)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_shell_examples_run(demo_server: ServerProcess) -> None:
    for example in examples("sh"):
        answer: Any = run_in_shell(example, demo_server)
        assert "Ada" in answer["choices"][0]["message"]["content"]
        assert answer["usage"]["cache"]["queried"] == answer["usage"]["prompt_tokens"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("page", ["rollouts.md", "label-reads.md"])
def test_shell_examples_of_other_pages_run(demo_server: ServerProcess, page: str) -> None:
    found = examples("sh", (DOCS / page).read_text())
    for example in (each for each in found if "/update_weights" not in each):
        answer: Any = run_in_shell(example, demo_server)
        assert "error" not in answer


def test_servers_of_one_host_tier_hit_what_another_evicted(tmp_path: Path) -> None:
    """The page's commands, but for a device that few prompts fill."""
    section = (DOCS / "cache-configuration.md").read_text().partition("### One host tier for a machine")[2]
    shared = f"file://{tmp_path / 'shared'}"
    commands = [
        [shared if each == "file:///dev/shm/strandline" else each for each in shlex.split(line)[3:]]
        for line in section.split("```")[1].splitlines()
        if line
    ]
    assert [command.count(shared) for command in commands] == [1, 1]
    own = ("--port", "0", "--memory", "16MiB", "--max-model-len", "512")
    with (
        running_server(Path("demo"), tmp_path / "first log", *commands[0], *own) as first,
        running_server(Path("demo"), tmp_path / "second log", *commands[1], *own) as second,
    ):
        prompts = [f"{index} " + "a shared host tier " * 8 for index in range(30)]
        for prompt in prompts:
            assert first.post("/v1/completions", prompt=prompt, max_tokens=1).status_code == 200
        unused = 'object_store_bytes{engine="0",model_name="tiny",state="used"} 0.0'
        second.wait_until(lambda: unused not in second.metrics(), timeout_s=30)  # also while it is idle
        second.wait_until(lambda: second.metric("object_store_directory_files") > 0, timeout_s=30)
        answers = [second.post("/v1/completions", prompt=prompt, max_tokens=1).json() for prompt in prompts[:4]]
        assert any(each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers)
        assert second.metric("cache_loads_total") > 0


def test_every_flag_and_metric_is_on_the_page(demo_server: ServerProcess) -> None:
    flags = set(build_parser().parse_args(["serve"]).parser._option_string_actions)
    assert flags - set(re.findall(r"(?<![\w-])--?[a-z-]+", PAGE)) == {"-h"}
    metrics = re.findall(r"^# TYPE strandline:(\w+)", demo_server.metrics(), re.MULTILINE)
    assert {name for name in metrics if not name.endswith("_created")} == set(
        re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in metrics_table()))
    )


def metrics_table() -> list[str]:
    rows = PAGE.partition("## Metrics")[2].splitlines()
    return [row for row in rows if row.startswith("| `")]
