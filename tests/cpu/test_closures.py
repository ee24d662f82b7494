"""Import closures: the modules of the package that importing one of them loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
files = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "strandline"}
print(json.dumps(files))
"""

MAX_LINES = {
    "strandline.cache": 4000,
    "strandline.cache.core": 4000,
    "strandline.routing.snapshot_router": 3000,
    "strandline.routing.names": 3000,
    "strandline.records.plan": 3000,
}
"""Most lines of source, comments and docstrings included, that importing a module loads."""

ENGINE_ROOMS = {"cache", "device", "engine", "kernels", "models", "transfer"}
"""Rooms of the core's process, which the HTTP process does not load."""


def closure(module: str) -> dict[str, Path]:
    """Import a module in a new process; return the files of the package's modules that were loaded, by name."""
    command = [sys.executable, "-c", PROGRAM, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: Path(file) for name, file in json.loads(done.stdout).items()}


@pytest.mark.parametrize(("module", "max_lines"), MAX_LINES.items())
def test_importing_a_module_loads_a_bounded_number_of_lines(module: str, max_lines: int) -> None:
    lines = {name: len(file.read_text().splitlines()) for name, file in closure(module).items()}
    assert module in lines
    assert sum(lines.values()) <= max_lines, sorted(lines.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("module", ["strandline.engine.processes.core_process", "strandline.engine.workers.workers"])
def test_what_begins_workers_loads_no_model(module: str) -> None:
    """Workers import a tensor library while the engine's process does."""
    rooms = {name.split(".")[1] for name in closure(module) if "." in name}
    assert rooms & {"kernels", "models", "text", "transfer"} == set()


@pytest.mark.parametrize("module", ["strandline.server.app", "strandline.server.launch"])
def test_the_http_process_loads_no_room_of_the_core(module: str) -> None:
    rooms = {name.split(".")[1] for name in closure(module) if "." in name}
    assert {"server", "text", "records", "routing"} <= rooms
    assert rooms & ENGINE_ROOMS == set()
