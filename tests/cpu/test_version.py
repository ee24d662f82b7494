"""The version needs no installed metadata; the commit is that of the checkout, or what pip has recorded."""

import asyncio
import importlib.metadata
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import strandline
from strandline import version
from strandline.records.events import Limits
from strandline.server.app import build_app
from strandline.server.requests.service import Service
from strandline.text.frontend import Frontend

NEEDS_GIT = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def pretend_installed(monkeypatch: pytest.MonkeyPatch, directory: Path, direct_url: dict[str, Any] | None) -> None:
    """Let the package run from a directory without git; None: it is not installed."""

    def from_name(name: str) -> Any:
        if direct_url is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(read_text=lambda file: json.dumps(direct_url))

    monkeypatch.setattr(version, "CHECKOUT", directory)
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", from_name)


def git(directory: Path, *arguments: str) -> str:
    options = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(directory), *options, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_server_runs_without_installed_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_installed(monkeypatch, tmp_path, None)
    client: Any = SimpleNamespace(frontend=Frontend(Limits(256, 4096)))
    app = build_app(Service(client, ["tiny"]))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get("/version")

    assert asyncio.run(ask()).json() == {"version": strandline.__version__, "commit": None}


@NEEDS_GIT
def test_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(version, "CHECKOUT", tmp_path)
    git(tmp_path, "init", "-q")
    assert version.find_commit() is None
    file = tmp_path / "file"
    file.write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "First")
    git(tmp_path, "tag", "-am", "A tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert version.find_commit() == commit
    file.write_text("2")
    assert version.find_commit() == f"{commit}-dirty"


def test_commit_of_an_installation_is_what_pip_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_installed(monkeypatch, tmp_path, {"url": "https://example.com", "vcs_info": {"commit_id": "abc"}})
    assert version.find_commit() == "abc"
    pretend_installed(monkeypatch, tmp_path, {"url": "file:///somewhere", "dir_info": {}})
    assert version.find_commit() is None
