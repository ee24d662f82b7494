"""The catalog of an object store: files that cannot be read neither hide others nor are forgotten."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from strandline.engine.caching.object_catalog import Discovery, ObjectCatalog
from strandline.transfer.bucket import Bucket
from strandline.transfer.object_files import MAX_READS, ObjectFiles
from strandline.transfer.stored_files import StoredFile
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
