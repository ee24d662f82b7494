"""Strandline's version, and its commit if known. No installed metadata is needed."""

import json
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

VERSION: Final = "0.1.0"

CHECKOUT: Final = Path(__file__).parents[2]
"""The repository, if the package runs from a checkout."""

GIT_TIMEOUT_S: Final = 5.0


def find_commit() -> str | None:
    """Return the commit of the git checkout, with ``-dirty`` if files differ, or the commit that pip installed from."""
    return _checked_out_commit() if (CHECKOUT / ".git").exists() else _installed_commit()


def _checked_out_commit() -> str | None:
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _installed_commit() -> str | None:
    """Return what pip has recorded for ``pip install git+https://…`` (PEP 610)."""
    try:
        recorded = json.loads(distribution("strandline").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return None
    commit: str | None = recorded.get("vcs_info", {}).get("commit_id")
    return commit
