"""Each replica has a directory of its own for its disk cache, and takes over one that is free."""

import os
import subprocess
from pathlib import Path

import pytest

from strandline.errors import ConfigError
from strandline.ray.replica_directory import replica_directory


def test_replicas_use_different_directories(tmp_path: Path) -> None:
    parent = tmp_path / "cache"
    with replica_directory(parent) as (first, _):
        with replica_directory(parent) as (second, _):
            assert (first, second) == (parent / "0", parent / "1")
        with replica_directory(parent) as (third, _):
            assert third == second
    with replica_directory(parent) as (path, _):
        assert path == first
    assert parent.stat().st_mode & 0o077 == 0


def test_directory_is_not_free_before_the_engine_has_ended(tmp_path: Path) -> None:
    with replica_directory(tmp_path) as (first, lock):
        engine = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock])
    with replica_directory(tmp_path) as (path, _):
        assert path != first
    engine.communicate()
    with replica_directory(tmp_path) as (path, _):
        assert path == first


@pytest.mark.parametrize("name", ["file", "file/cache"])
def test_directory_that_cannot_be_used_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    descriptors = os.listdir("/proc/self/fd")
    with (
        pytest.raises(ConfigError, match=f"--disk-cache {tmp_path / name} cannot be used"),
        replica_directory(tmp_path / name),
    ):
        pass
    assert os.listdir("/proc/self/fd") == descriptors
