"""The catalog of an object store: files that cannot be read neither hide others nor are forgotten."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any

import pytest

from strandline.engine.caching import object_catalog
from strandline.engine.caching.object_catalog import MAX_PATHS, Discovery, ObjectCatalog
from strandline.records.account import SnapshotKind
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.tokens import encode
from strandline.transfer.bucket import Bucket, ObjectInfo
from strandline.transfer.object_files import MAX_READS, ObjectFiles
from strandline.transfer.shared_directory import SharedDirectory
from strandline.transfer.stored_files import StoredFile
from tests.cpu.transfer import test_shared_directory as shared
from tests.cpu.transfer.test_object_files import files, opened, write

__all__ = ["files"]


@dataclass
class Refusals:
    """Which objects the server refuses to read."""

    names: set[str] = field(default_factory=set)
    num_refused: int = 0


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    refused, read = Refusals(), Bucket.read

    async def read_or_refuse(bucket: Bucket, name: str, start: int, end: int) -> Any:
        if name.rsplit("/", 1)[1] in refused.names:
            refused.num_refused += 1
            raise OSError("403 Forbidden: InvalidObjectState")
        return await read(bucket, name, start, end)

    monkeypatch.setattr(Bucket, "read", read_or_refuse)
    return refused


@pytest.fixture
def stored(files: ObjectFiles) -> list[StoredFile]:
    return write(files)


@pytest.fixture
def catalog(stored: list[StoredFile], refusals: Refusals, store_url: str) -> Iterator[ObjectCatalog]:
    """A catalog of a store whose snapshot cannot be read at first."""
    refusals.names = {stored[1].name}
    catalog = ObjectCatalog(opened(store_url), has_snapshots=True)
    yield catalog
    catalog.close()


def found(catalog: ObjectCatalog) -> list[str]:
    return [file.name for discovery in iter(catalog.take, None) for file in discovery.files]


def test_files_that_cannot_be_read_are_found_later(
    catalog: ObjectCatalog, stored: list[StoredFile], refusals: Refusals, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(catalog) == [stored[0].name]
    [record] = caplog.get_records("setup")
    assert "could not be read; they are found later: 403 Forbidden: InvalidObjectState" in record.getMessage()
    refusals.names = set()
    catalog.refresh()
    assert found(catalog) == [stored[1].name]
    catalog.refresh()
    assert found(catalog) == []


def test_many_files_that_cannot_be_read_do_not_hide_others(
    catalog: ObjectCatalog, stored: list[StoredFile], refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(catalog)
    listed = catalog._files.list()
    others = [listed[0]._replace(name=f"{number:032x}.blocks") for number in range(4 * MAX_READS)]
    monkeypatch.setattr(ObjectFiles, "list", lambda _: [*others, *listed])
    refusals.names, refusals.num_refused = {each.name for each in others}, 0
    catalog.refresh()
    assert (refusals.num_refused, found(catalog)) == (MAX_READS, []), "the server does not answer, it seems"
    names = list[str]()
    for _ in range(4):
        catalog.refresh()
        names += found(catalog)
    assert names == [stored[1].name]


def test_useless_files_are_found_when_they_are_written_again(
    files: ObjectFiles, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, _ = write(files)
    bucket = Bucket(store_url)
    data, _ = bucket.run(bucket.read(f"{files.folder}/{blocks.name}", 0, 10**6))
    bucket.write(f"{files.folder}/{blocks.name}", b"damaged")
    catalog = ObjectCatalog(opened(store_url), has_snapshots=True)
    assert blocks.name not in found(catalog)
    bucket.write(f"{files.folder}/{blocks.name}", bytearray(data))
    later = [each._replace(modified_s=each.modified_s + 1) for each in files.list()]
    monkeypatch.setattr(ObjectFiles, "list", lambda _: later)
    catalog.refresh()
    discoveries: list[Discovery] = list(iter(catalog.take, None))
    assert [file.name for each in discoveries for file in each.files] == [blocks.name]
    assert [len(each.paths) for each in discoveries] == [0], "the block before it has not been found"
    bucket.close()
    catalog.close()


def write_path(files: SharedDirectory, seed: int) -> list[Path]:
    """Write a block, and the snapshot after it."""
    path = StoredPath("tree", encode([seed] * 64), StoredBlocks(0, (1,)), 2, 0, SnapshotKind.MARK, 0, is_shared=False)
    block = files.new_file(path, path.blocks, (shared.BLOCK_BYTES,))
    files.write(block, [[bytes(shared.BLOCK_BYTES)]])
    snapshot = shared.write(files, seed)
    return [files.folder / each.name for each in (block, snapshot)]


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_is_known_of_a_churning_directory_is_bounded(tmp_path: Path, *, is_taken: bool) -> None:
    files = shared.opened(tmp_path, 6 * shared.FILE_BYTES)
    catalog = ObjectCatalog(shared.opened(tmp_path), has_snapshots=True)
    entered, sizes = set[str](), list[int]()
    for seed in range(120):
        write_path(files, seed)
        catalog.refresh()
        for each in iter(catalog.take, None) if is_taken or seed == 60 else ():
            entered -= {file.name for file in each.gone}
            entered |= {file.name for file in each.files}
        sizes.append(len(catalog))
    num_files = len(files.list())
    assert num_files < 20
    assert max(sizes) < 8 * num_files
    for each in iter(catalog.take, None):
        entered -= {file.name for file in each.gone}
        entered |= {file.name for file in each.files}
    assert entered == shared.names(files)
    for name in entered:
        (files.folder / name).unlink()
    catalog.refresh()
    assert sum(len(each.gone) for each in iter(catalog.take, None)) == num_files
    assert len(catalog) == 0
    catalog.close()


def test_files_that_are_found_or_gone_can_be_waited_for(tmp_path: Path) -> None:
    files = shared.opened(tmp_path)
    catalog = ObjectCatalog(shared.opened(tmp_path), has_snapshots=True)

    def has_news(timeout_s: float = 0.0) -> bool:
        return bool(select([catalog], (), (), timeout_s)[0])

    assert not has_news()
    paths = write_path(files, 1)
    assert has_news(60.0), "the thread looks for it"
    catalog.refresh()
    [discovery] = iter(catalog.take, None)
    assert (len(discovery.files), len(discovery.paths), has_news()) == (2, 1, False)
    paths[0].unlink()
    assert has_news(60.0)
    [discovery] = iter(catalog.take, None)
    assert (len(discovery.lost), [each.name for each in discovery.gone]) == (1, [paths[0].name])
    catalog.close()


def test_what_is_lost_is_taken_before_its_files_are_gone(tmp_path: Path) -> None:
    files = shared.opened(tmp_path)
    paths = [path for seed in range(2 * MAX_PATHS) for path in write_path(files, seed)]
    catalog = ObjectCatalog(files, has_snapshots=True)
    assert sum(len(each.paths) for each in iter(catalog.take, None)) == 2 * MAX_PATHS
    for path in paths[2:]:
        path.unlink()
    catalog.refresh()
    first, second = iter(catalog.take, None)
    assert (len(first.lost), first.gone, first.files) == (MAX_PATHS, (), ())
    assert (len(second.lost), len(second.gone), len(second.files)) == (MAX_PATHS - 1, 4 * MAX_PATHS - 2, 0), (
        "one for a block and what follows it"
    )
    catalog.close()


def test_listings_take_a_small_share_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, now_s, waits = shared.opened(tmp_path), [0.0], list[float]()
    catalog = ObjectCatalog(files, has_snapshots=True)
    catalog.close()
    list_files = files.list

    def list_slowly() -> list[ObjectInfo]:
        now_s[0] += 3.0
        return list_files()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now_s[0] += seconds
        return len(waits) > 40

    monkeypatch.setattr(object_catalog, "SYSTEM_CLOCK", lambda: now_s[0])
    monkeypatch.setattr(SharedDirectory, "list", lambda _: list_slowly())
    monkeypatch.setattr(catalog._is_closed, "wait", wait)
    catalog._run()
    num_listings = (now_s[0] - sum(waits)) / 3.0
    assert num_listings > 5
    assert 3.0 * num_listings <= files.max_share * now_s[0]


def test_paths_follow_all_files_that_they_may_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_catalog, "MAX_FILES", 3)
    files = shared.opened(tmp_path)
    paths = [path for seed in range(4) for path in write_path(files, seed)]
    catalog = ObjectCatalog(files, has_snapshots=True)
    found = list(iter(catalog.take, None))
    assert [(len(each.files), len(each.paths)) for each in found] == [(3, 0), (3, 0), (2, 4)]
    assert {file.name for each in found for file in each.files} == {path.name for path in paths}
    for path in paths:
        path.unlink()
    catalog.refresh()
    assert [(len(each.lost), len(each.gone)) for each in iter(catalog.take, None)] == [(4, 3), (0, 3), (0, 2)]
    assert len(catalog) == 0
    catalog.close()


def test_what_others_continue_is_as_recent_as_that(tmp_path: Path) -> None:
    files = shared.opened(tmp_path)
    block, snapshot = write_path(files, 1)
    catalog = ObjectCatalog(files, has_snapshots=True)
    os.utime(block, (1000.0, 1000.0))
    os.utime(snapshot, (2000.0, 2000.0))
    catalog.refresh()
    assert 2000.0 < block.stat().st_mtime < 2000.1
    assert snapshot.stat().st_mtime == 2000.0
    os.utime(snapshot, (1500.0, 1500.0))
    catalog.refresh()
    assert 2000.0 < block.stat().st_mtime < 2000.1
    catalog.close()


def test_beginnings_of_several_are_set_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = shared.opened(tmp_path)
    for end in range(1, 5):
        blocks = StoredBlocks(end - 1, (1,))
        path = StoredPath("tree", encode([7] * 64 * end), blocks, 2, 0, SnapshotKind.MARK, 0, is_shared=False)
        for each, size in ((blocks, shared.BLOCK_BYTES), (None, shared.SNAPSHOT_BYTES)):
            file = files.new_file(path, each, (size,))
            files.write(file, [[bytes(size)]])
            used_s = 1000.0 * end if each is None else 500.0
            os.utime(files.folder / file.name, (used_s, used_s))
    calls, set_used = list[str](), SharedDirectory.set_used
    monkeypatch.setattr(SharedDirectory, "set_used", lambda *args: (calls.append(args[1]), set_used(*args)))
    catalog = ObjectCatalog(files, has_snapshots=True)
    assert (len(calls), len(set(calls))) == (4, 4)
    catalog.refresh()
    catalog.refresh()
    assert len(calls) == 4
    catalog.close()


def test_a_directory_that_is_removed_has_no_files(tmp_path: Path) -> None:
    files = shared.opened(tmp_path)
    write_path(files, 1)
    catalog = ObjectCatalog(files, has_snapshots=True)
    list(iter(catalog.take, None))
    shutil.rmtree(files.folder.parent)
    catalog.refresh()
    assert sum(len(each.gone) for each in iter(catalog.take, None)) == 2
    write_path(files, 2)
    catalog.refresh()
    assert sum(len(each.paths) for each in iter(catalog.take, None)) == 1
    catalog.close()
