"""Files in a bucket: what is written is found and read by others, and what fails says so."""

import asyncio
from collections.abc import Iterator
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from strandline.clock import SYSTEM_CLOCK
from strandline.errors import ConfigError
from strandline.records.account import SnapshotKind
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.tokens import encode
from strandline.transfer.bucket import Bucket
from strandline.transfer.disk_files import Header, encode_header, new_header
from strandline.transfer.object_files import LAYOUT, MAX_READS, ObjectFiles
from strandline.transfer.stored_files import FilePart, LostItemsError, StoredFile

obstore = pytest.importorskip("obstore")

BLOCK_BYTES, SLOT_BYTES = 512, 3000
DATA = encode(range(200))
PATH = StoredPath("tree", DATA, StoredBlocks(1, (5, 6)), 7, 8, SnapshotKind.PROMPT_END, 3, is_shared=True)
NEVER = float("inf")


def content(size: int, seed: int) -> bytes:
    return bytes((seed + 7 * index) % 251 for index in range(size))


def opened(url: str, **layout: str) -> ObjectFiles:
    return ObjectFiles(url, {"weights": "one", **layout}, BLOCK_BYTES, [SLOT_BYTES])


def write(files: ObjectFiles, seed: int = 0) -> list[StoredFile]:
    """Write a path's two files."""
    written = []
    for blocks, sizes in ((PATH.blocks, (BLOCK_BYTES,) * 2), (None, (SLOT_BYTES, BLOCK_BYTES))):
        file = files.new_file(PATH, blocks, sizes)
        files.write(file, [[content(size, seed + item)] for item, size in enumerate(sizes)])
        written.append(file)
    return written


def read(files: ObjectFiles, file: StoredFile, *sizes: int, deadline_s: float = NEVER) -> bytes:
    part = FilePart(StoredFile(file.name, len(sizes)), tuple(range(len(sizes))), sizes)
    [data] = files.read([part], deadline_s)
    return bytes(data)


@pytest.fixture
def files(store_url: str) -> Iterator[ObjectFiles]:
    files = opened(store_url)
    yield files
    files.close()


def test_another_process_finds_and_reads_what_was_written(files: ObjectFiles, store_url: str) -> None:
    files.require_access()
    blocks, snapshot = write(files)
    other = opened(store_url)
    other.require_access()
    assert {info.name for info in other.list()} == {blocks.name, snapshot.name}
    headers = list(other.headers([blocks.name, snapshot.name]))
    assert [header.sizes for header in headers if header] == [(BLOCK_BYTES,) * 2, (SLOT_BYTES, BLOCK_BYTES)]
    assert read(other, blocks, BLOCK_BYTES, BLOCK_BYTES) == content(BLOCK_BYTES, 0) + content(BLOCK_BYTES, 1)
    assert read(other, snapshot, SLOT_BYTES, BLOCK_BYTES) == content(SLOT_BYTES, 0) + content(BLOCK_BYTES, 1)
    other.close()


def test_models_share_a_bucket_without_meeting(files: ObjectFiles, store_url: str) -> None:
    write(files)
    other = opened(store_url, weights="two")
    assert other.list() == []
    other.close()


def test_the_same_tokens_are_written_once(files: ObjectFiles) -> None:
    [first, _], [second, _] = write(files), write(files, seed=9)
    assert first.name == second.name
    assert read(files, second, BLOCK_BYTES, BLOCK_BYTES) == content(BLOCK_BYTES, 0) + content(BLOCK_BYTES, 1)
    assert second.header == first.header


def test_replaced_files_are_read_with_their_new_header(files: ObjectFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = write(files)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectFiles, "_read_header", gone)  # another engine has not seen the first one's file
        write(files, seed=9)
    assert first.header is not None
    [data] = files.read([FilePart(first, (1,), (BLOCK_BYTES,))], NEVER)
    assert bytes(data) == content(BLOCK_BYTES, 10)


async def gone(*_: object) -> None:
    raise FileNotFoundError


def test_damaged_and_missing_files_are_lost(files: ObjectFiles, store_url: str) -> None:
    blocks, snapshot = write(files)
    bucket = Bucket(store_url)
    name = f"{files.folder}/{blocks.name}"
    data, size = bucket.run(bucket.read(name, 0, 10**6))
    damaged = bytearray(data)
    damaged[4096 + BLOCK_BYTES] ^= 1
    bucket.write(name, damaged)
    with pytest.raises(LostItemsError, match="a checksum is wrong") as error:
        read(files, blocks, BLOCK_BYTES, BLOCK_BYTES)
    assert error.value.items == (1,)
    bucket.write(name, damaged[: size - 1])
    assert list(files.headers([blocks.name, "0" * 32 + ".blocks"]))[1] is None
    with pytest.raises(LostItemsError, match=r"0\.blocks is gone"):
        read(files, StoredFile("0" * 32 + ".blocks", 1), BLOCK_BYTES)
    with pytest.raises(LostItemsError, match="have other sizes"):
        read(files, snapshot, SLOT_BYTES + 1)
    bucket.close()


def test_answers_that_end_early_are_no_damage(files: ObjectFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, snapshot = write(files)
    get_async = obstore.get_async

    async def get_half(store: Any, path: str, **options: Any) -> Any:
        found = await get_async(store, path, **options)
        data = memoryview(await found.bytes_async())

        async def half() -> memoryview:
            return data[: len(data) // 2]

        return SimpleNamespace(meta=found.meta, bytes_async=half)

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "get_async", get_half)
        [header] = files.headers([blocks.name])
        assert isinstance(header, OSError)
        with pytest.raises(OSError, match=r"the server sent 3,804 of 7,608 bytes"):
            read(files, snapshot, SLOT_BYTES, BLOCK_BYTES)
    assert read(files, snapshot, SLOT_BYTES, BLOCK_BYTES) == content(SLOT_BYTES, 0) + content(BLOCK_BYTES, 1)
    [header] = files.headers([blocks.name])
    assert isinstance(header, Header)


def test_a_deadline_ends_a_load(files: ObjectFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, _ = write(files)

    async def hang(*_: object) -> tuple[bytes, int]:
        await asyncio.sleep(60)
        return b"", 0

    monkeypatch.setattr(Bucket, "read", hang)
    start_s = monotonic()
    with pytest.raises(TimeoutError, match="computing takes less time"):
        read(files, blocks, BLOCK_BYTES, BLOCK_BYTES, deadline_s=SYSTEM_CLOCK() + 0.05)
    assert monotonic() - start_s < 10


def test_the_folder_says_what_it_is_of(files: ObjectFiles, store_url: str) -> None:
    files.require_access()
    bucket = Bucket(store_url)
    data, _ = bucket.run(bucket.read(f"{files.folder}/{LAYOUT}", 0, 100))
    assert b'"weights": "one"' in bytes(data)
    assert files.list() == []
    bucket.close()


def test_damaged_files_are_written_again(files: ObjectFiles, store_url: str) -> None:
    blocks, _ = write(files)
    bucket = Bucket(store_url)
    name = f"{files.folder}/{blocks.name}"
    data, _ = bucket.run(bucket.read(name, 0, 10**6))
    damaged = bytearray(data)
    damaged[-1] ^= 1
    bucket.write(name, damaged)
    bucket.close()
    with pytest.raises(LostItemsError):
        read(files, blocks, BLOCK_BYTES, BLOCK_BYTES)
    write(files)
    assert read(files, blocks, BLOCK_BYTES, BLOCK_BYTES) == content(BLOCK_BYTES, 0) + content(BLOCK_BYTES, 1)


def test_foreign_objects_are_not_used(files: ObjectFiles, store_url: str, caplog: pytest.LogCaptureFixture) -> None:
    blocks, _ = write(files)
    bucket = Bucket(store_url)
    whole, _ = bucket.run(bucket.read(f"{files.folder}/{blocks.name}", 0, 10**6))
    without_layout = encode_header(new_header({"kind": "blocks"}, b"", (1,)))
    not_described = encode_header(new_header([], b"", (1,)))  # type: ignore[arg-type]
    names = []
    for number, data in enumerate(
        (bytes(whole), b"", b"text", without_layout + bytes(9000), not_described + bytes(9000))
    ):
        names.append(f"{number:032x}.blocks")
        bucket.write(f"{files.folder}/{names[-1]}", data)
    bucket.write(f"{files.folder}/README", b"of another user")
    bucket.close()
    assert {each.name for each in files.list()} - {*names} == {each.name for each in write(files)}
    assert list(files.headers(names)) == [None] * len(names)
    for name in names:
        with pytest.raises(LostItemsError):
            read(files, StoredFile(name, 2), BLOCK_BYTES, BLOCK_BYTES)
    assert "it has the content of another file" in caplog.text
    assert "do not say what this version writes" in caplog.text


def test_few_parts_of_a_load_are_in_memory_at_once(files: ObjectFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    async def read_part(_: ObjectFiles, part: FilePart, *__: object) -> memoryview:
        begun.append(part)
        return memoryview(b"")

    monkeypatch.setattr(ObjectFiles, "_read_part", read_part)
    parts = [FilePart(StoredFile(str(number), 1), (0,), (1,)) for number in range(50)]
    for number, _ in enumerate(files.read(parts, NEVER), 1):
        assert len(begun) <= number + MAX_READS
    assert number == 50


@pytest.mark.parametrize("url", ["bucket/prefix", "s3://", "https://bucket", "s3://a b", "s3://b/c//d", "s3://b/../c"])
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must be s3://BUCKET"):
        Bucket(url)


@pytest.mark.parametrize("endpoint", ["minio:9000", "http://", "http://host:port", "http://a b"])
def test_wrong_endpoints_are_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigError, match="environment variable AWS_ENDPOINT_URL must be a URL such as http"):
        Bucket("s3://bucket")


def test_errors_have_the_words_of_the_server(store_url: str) -> None:
    files = opened("s3://no-such-bucket")
    with pytest.raises(OSError, match=r"404 Not Found: NoSuchBucket: The specified bucket does not exist$"):
        files.require_access()
    files.close()


def test_servers_that_are_gone_are_errors(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    files = opened(store_url)
    with pytest.raises(OSError, match=r"http://127.0.0.1:9/.* error sending request"):
        files.list()
    files.close()
