"""Tests that ask the same servers run in the same worker, so that each server is started once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SHARE_SERVERS


def shared_servers(item: pytest.Function) -> Iterator[str]:
    """Yield the fixtures of a test that are servers of the session."""
    for name, fixtures in item._fixtureinfo.name2fixturedefs.items():
        if name.endswith("server") and fixtures[-1].scope == "session":
            yield name


def test_conftest_names_all_files_that_share_servers(request: pytest.FixtureRequest) -> None:
    # A run that picks some tests compares their files alone.
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    root = Path(request.config.rootpath)
    asking = {item.path.relative_to(root).as_posix() for item in items if any(shared_servers(item))}
    missing = sorted(path for path in asking if not SHARE_SERVERS.match(path))
    assert not missing, "the pattern SHARE_SERVERS in tests/conftest.py lacks files"
