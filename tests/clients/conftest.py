"""Servers of a tiny random model with a long context, under a lenient and a strict chat template."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.model import TEMPLATES, save_long_model, template_flags
from tests.clients.page import MODEL
from tests.cpu.server.process import ServerProcess, execute_server, running_server

collect_ignore = ["test_sessions.py"]
"""Run by name only: it takes minutes, and clients that are installed."""


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="session", params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def long_server(template: str, long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of that model under a template."""
    flags = ["--memory", "2GiB", "--served-model-name", "tiny", MODEL, *template_flags(template)]
    with running_server(long_model, tmp_path_factory.mktemp("server") / "log", *flags, start=execute_server) as server:
        yield server


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a row for each session."""
    rows = [("client", "version", "template", "requests", "hits of each request of the conversation", "verdict")]
    for verdict in ("passed", "failed"):
        for report in terminalreporter.stats.get(verdict, ()):
            rows += [(*found, verdict) for name, found in report.user_properties if name == "row"]
    if len(rows) > 1:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        terminalreporter.write_sep("=", "sessions of clients")
        for row in rows:
            terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
