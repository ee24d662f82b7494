"""The directory of a disk cache: what is found again, what is removed and why, and who may use it."""

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from strandline.errors import ConfigError
from strandline.records.account import SnapshotKind
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.path_hashes import block_hashes, root_hash
from strandline.records.tokens import encode
from strandline.transfer import disk_files
from strandline.transfer.disk_directory import DiskDirectory, Found
from strandline.transfer.disk_files import (
    DamagedFileError,
    Header,
    open_for_reading,
    read_header,
    read_item,
    write_file,
)

BLOCK_BYTES, SLOT_BYTES = 512, 3000
LAYOUT = {"weights": "one", "block": "small"}
DATA = encode(range(200))
STORED = StoredBlocks(1, (5, 6))
PATH = StoredPath("tree", DATA, STORED, 7, 8, SnapshotKind.PROMPT_END, 3, is_shared=True)


def opened(path: Path, layout: dict[str, str] = LAYOUT, rank: int = 0) -> DiskDirectory:
    return DiskDirectory(path, layout, BLOCK_BYTES, [SLOT_BYTES], rank)


def content(size: int, seed: int = 1) -> bytes:
    return bytes((seed + 7 * index) % 251 for index in range(size))


def sizes_of(path: StoredPath, blocks: StoredBlocks | None) -> tuple[int, ...]:
    """Return the sizes of a file's items; None: the snapshot's."""
    num_blocks = int(path.tail_address > 0) if blocks is None else len(blocks.addresses)
    return (SLOT_BYTES,) * (blocks is None) + (BLOCK_BYTES,) * num_blocks


def write(directory: DiskDirectory, path: StoredPath = PATH) -> list[str]:
    """Write a path's two files; return their names."""
    names = []
    for blocks in (path.blocks, None):
        file = directory.new_file(path, blocks, sizes_of(path, blocks))
        items = [[content(size, seed)] for seed, size in enumerate(file.header.sizes)]
        write_file(directory.descriptor, file.name, file.header, items)
        names.append(file.name)
    return names


def rescanned(directory: DiskDirectory, layout: dict[str, str] = LAYOUT) -> Found:
    """Close a directory, and return what the next process finds."""
    directory.close()
    again = opened(directory.path, layout)
    found = again.scan()
    again.close()
    return found


@pytest.fixture
def directory(tmp_path: Path) -> DiskDirectory:
    return opened(tmp_path / "cache")


def test_files_are_found_again_with_all_that_they_say(directory: DiskDirectory) -> None:
    write(directory)
    found = rescanned(directory)
    [blocks], [snapshot] = found.persisted
    hashes = [root_hash("tree"), *block_hashes(root_hash("tree"), DATA)]
    assert (blocks.tree, blocks.before, blocks.tokens) == ("tree", hashes[1], DATA[256:768])
    assert (snapshot.before, snapshot.key, snapshot.kind) == (hashes[3], DATA[768:], SnapshotKind.PROMPT_END)
    assert (snapshot.interarrival_bin, snapshot.is_shared, snapshot.idle_s < 600) == (3, True, True)
    assert sorted(found.addresses) == sorted((*blocks.addresses, snapshot.address, snapshot.tail_address))


def test_items_read_as_written(directory: DiskDirectory) -> None:
    name, _ = write(directory)
    file = open_for_reading(directory.descriptor, name)
    header = read_header(file)
    target = bytearray(BLOCK_BYTES)
    read_item(file, header, 1, header.offsets()[1], memoryview(target))
    assert target == content(BLOCK_BYTES, 1)
    with pytest.raises(DamagedFileError, match="checksum is wrong"):
        read_item(file, header, 0, header.offsets()[1], memoryview(target))
    os.close(file)


def test_headers_take_about_270_bytes_per_block(directory: DiskDirectory) -> None:
    sizes = []
    for num_blocks in (100, 1100):
        path = replace(PATH, data=encode(range(64 * num_blocks)))
        blocks = StoredBlocks(0, tuple(range(num_blocks)))
        header = directory.new_file(path, blocks, sizes_of(path, blocks)).header
        sizes.append(len(disk_files.encode_header(header)))
        assert header.start % 4096 == 0
        assert 0 <= header.start - sizes[-1] < 4096
    assert 265 < (sizes[1] - sizes[0]) / 1000 < 275


def test_owner_alone_can_read(directory: DiskDirectory) -> None:
    write(directory)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in directory.path.iterdir()]
    assert (set(modes), len(modes)) == ({0o600}, 4)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700


def header_of(directory: DiskDirectory, name: str) -> Header:
    file = open_for_reading(directory.descriptor, name)
    try:
        return read_header(file)
    finally:
        os.close(file)


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: damage(path, 0), "does not begin as files"),
        (lambda path: damage(path, 8), "format"),
        (lambda path: damage(path, 40), "checksum of its header"),
        (lambda path: os.truncate(path, 10), "too short for a header"),
        (lambda path: os.truncate(path, 60), "header is torn"),
        (lambda path: os.truncate(path, 4096), "torn"),
        (lambda path: path.rename(path.with_suffix(path.suffix + ".tmp")), "ended while it wrote"),
    ],
    ids=["magic", "format", "header", "start", "half a header", "no items", "unfinished"],
)
def test_bad_files_are_removed_with_a_reason(
    directory: DiskDirectory, harm: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, name = write(directory)
    assert callable(harm)
    harm(directory.path / name)
    found = rescanned(directory)
    assert (len(found.persisted.blocks), len(found.persisted.snapshots)) == (1, 0)
    assert reason in caplog.text
    assert "removed 1 file of the disk cache" in caplog.text
    assert len(list(directory.path.iterdir())) == 3


def test_damaged_headers_are_found_before_their_lengths_are_used(
    directory: DiskDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = write(directory)
    path = directory.path / name
    whole, read = path.read_bytes(), os.pread
    header_size = len(disk_files.encode_header(header_of(directory, name)))

    def read_within_file(file: int, size: int, offset: int) -> bytes:
        assert size <= max(disk_files.FIRST_READ_BYTES, len(whole)), f"{size} bytes of a file of {len(whole)}"
        return read(file, size, offset)

    monkeypatch.setattr(disk_files.os, "pread", read_within_file)
    for offset in range(header_size):
        for bits in (0x01, 0x80, 0xFF):
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ bits]) + whole[offset + 1 :])
            with pytest.raises(DamagedFileError):
                header_of(directory, name)


def test_lengths_that_were_exchanged_are_found(directory: DiskDirectory) -> None:
    name, _ = write(directory)
    path = directory.path / name
    prefix = list(disk_files.PREFIX.unpack_from(path.read_bytes()))
    prefix[2], prefix[3] = prefix[2] + 4, prefix[3] - 4
    path.write_bytes(disk_files.PREFIX.pack(*prefix) + path.read_bytes()[disk_files.PREFIX.size :])
    with pytest.raises(DamagedFileError, match="its header cannot be read"):
        header_of(directory, name)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_files_that_cannot_be_read_now_are_kept(
    directory: DiskDirectory, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(directory)

    def fail(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(disk_files.os, "pread", fail)
        assert not any(directory.scan().persisted)
    assert f"2 files of the disk cache {directory.path} could not be read and are not used" in caplog.text
    assert all(rescanned(directory).persisted)


def test_files_cut_off_at_a_block_keep_the_others(directory: DiskDirectory) -> None:
    name, _ = write(directory)
    file = open_for_reading(directory.descriptor, name)
    end = read_header(file).offsets()[1]
    os.close(file)
    disk_files.cut_off(directory.descriptor, name, end + 100)
    [blocks] = rescanned(directory).persisted.blocks
    assert (blocks.tokens, len(blocks.addresses)) == (DATA[256:512], 1)


def test_files_of_another_model_are_removed(directory: DiskDirectory, caplog: pytest.LogCaptureFixture) -> None:
    write(directory)
    found = rescanned(directory, LAYOUT | {"weights": "two"})
    assert not any(found.persisted)
    assert "weights: two here, one there" in caplog.text
    assert {path.name for path in directory.path.iterdir()} == {"lock", "key"}


def test_files_under_a_lost_key_are_removed(directory: DiskDirectory, caplog: pytest.LogCaptureFixture) -> None:
    write(directory)
    (directory.path / "key").write_bytes(b"short")
    assert not any(rescanned(directory).persisted)
    assert "the key that they were written with is gone" in caplog.text


def test_other_files_are_left_alone(directory: DiskDirectory) -> None:
    (directory.path / "notes.txt").write_text("mine")
    assert not any(rescanned(directory).persisted)
    assert (directory.path / "notes.txt").exists()


def test_a_second_process_is_refused(directory: DiskDirectory) -> None:
    message = rf"--disk-cache .*cache is in use by process {os.getpid()}; give each server a directory of its own"
    with pytest.raises(ConfigError, match=message):
        opened(directory.path)
    directory.close()
    opened(directory.path).close()


def test_open_directories_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared" / "file").touch()
    with pytest.raises(ConfigError, match="can be read by other users and holds other files"):
        opened(tmp_path / "shared")
    (tmp_path / "shared" / "file").unlink()
    opened(tmp_path / "shared").close()
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o700


def test_each_rank_has_a_directory_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.mkdir(mode=0o755)
    ranks = [opened(path, rank=rank) for rank in (2, 0, 1)]
    assert [each.path for each in ranks] == [path / "rank-2", path, path / "rank-1"]
    assert {stat.S_IMODE(each.path.stat().st_mode) for each in ranks} == {0o700}
    with pytest.raises(ConfigError, match=rf"--disk-cache {path}/rank-1 is in use by process {os.getpid()}"):
        opened(path, rank=1)
    for each in ranks:
        write(each)
    assert [len(rescanned(each).persisted.blocks) for each in ranks] == [1, 1, 1]


def test_another_engine_may_open_its_directory_first(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.mkdir(mode=0o755)
    engines = [opened(path / "engine-1"), opened(path)]
    assert {stat.S_IMODE(each.path.stat().st_mode) for each in engines} == {0o700}


def test_files_of_ranks_that_are_no_more_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cache"
    ranks = [opened(path, LAYOUT | {"tensor-parallel size": "4"}, rank) for rank in range(4)]
    for each in ranks:
        write(each)
    for each in ranks[:3]:
        each.close()
    first = opened(path, LAYOUT | {"tensor-parallel size": "2"})
    first.remove_ranks_from(2)
    assert "cache/rank-2: they are another model's, or were computed in another way" in caplog.text
    assert "tensor-parallel size: 2 here, 4 there" in caplog.text
    assert "files of rank 3 in the disk cache" in caplog.text
    assert "is in use by process" in caplog.text
    left = [len(list((path / f"rank-{rank}").glob("*.*"))) for rank in (1, 2, 3)]
    assert left == [2, 0, 2], "those of the second rank are its own business, the last one is in use"
    first.close()
    ranks[3].close()


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--disk-cache .*file cannot be used"):
        opened(tmp_path / "file")


def test_failed_writes_leave_nothing(directory: DiskDirectory) -> None:
    file = directory.new_file(PATH, STORED, sizes_of(PATH, STORED))

    def items() -> Iterator[list[bytes]]:
        yield [content(BLOCK_BYTES)]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_file(directory.descriptor, file.name, file.header, items())
    assert {path.name for path in directory.path.iterdir()} == {"lock", "key"}


WRITER = """
    import sys
    from pathlib import Path
    from tests.cpu.transfer.test_disk_directory import opened, write
    directory = opened(Path(sys.argv[1]))
    print("writing", flush=True)
    while True:
        write(directory)
"""


def test_killed_processes_leave_only_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while not list(path.glob("*.snapshot")):
            pass
        process.send_signal(signal.SIGKILL)
    directory = opened(path)
    found = directory.scan()
    assert found.persisted.blocks
    assert not list(path.glob("*.tmp"))
    for located in found.addresses.values():
        file = open_for_reading(directory.descriptor, located.file.name)
        target = bytearray(located.file.header.sizes[located.item])
        read_item(file, located.file.header, located.item, located.file.offsets[located.item], memoryview(target))
        os.close(file)
        assert target == content(len(target), located.item)
    directory.close()
