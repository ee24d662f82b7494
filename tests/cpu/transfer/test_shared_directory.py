"""A directory that engines share: what one writes, others read, and all of it together has a size."""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from strandline.errors import ConfigError
from strandline.records.account import SnapshotKind
from strandline.records.actions import StoredBlocks, StoredPath
from strandline.records.tier_stats import DirectoryUse
from strandline.records.tokens import encode
from strandline.transfer import shared_directory
from strandline.transfer.shared_directory import SharedDirectory
from strandline.transfer.stored_files import FilePart, LostItemsError, StoredFile

BLOCK_BYTES, SNAPSHOT_BYTES = 512, 30_000
FILE_BYTES = 36_864
"""What a file of a snapshot takes: a header and the snapshot, in whole pages."""
NEVER = float("inf")


def opened(root: Path, max_bytes: int = 10**6, **layout: str) -> SharedDirectory:
    files = SharedDirectory(root / "shared", {"weights": "one", **layout}, BLOCK_BYTES, [SNAPSHOT_BYTES], max_bytes)
    files.require_access()
    return files


def new_file(files: SharedDirectory, seed: int = 0) -> StoredFile:
    """Return the file of a snapshot after one block, not written yet."""
    data = encode([seed] * 64)
    path = StoredPath("tree", data, StoredBlocks(1, ()), 7, 0, SnapshotKind.PROMPT_END, 3, is_shared=True)
    return files.new_file(path, None, (SNAPSHOT_BYTES,))


def write(files: SharedDirectory, seed: int = 0, used_s: float | None = None) -> StoredFile:
    """Write a snapshot, as if it had been used last at some time."""
    file = new_file(files, seed)
    files.write(file, [[bytes([seed]) * SNAPSHOT_BYTES]])
    if used_s is not None:
        os.utime(files.folder / file.name, (used_s, used_s))
    return file


def read(files: SharedDirectory, name: str, deadline_s: float = NEVER) -> bytes:
    [data] = files.read([FilePart(StoredFile(name, 1), (0,), (SNAPSHOT_BYTES,))], deadline_s)
    return bytes(data)


def names(files: SharedDirectory) -> set[str]:
    return {each.name for each in files.list()}


def num_bytes(root: Path) -> int:
    """Return what all files but ``layout.json`` take."""
    files = [each for each in root.glob("shared/*/*.*") if each.suffix != ".json"]
    return sum(shared_directory._rounded(each.stat().st_size) for each in files)


def test_another_engine_finds_and_reads_what_was_written(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    file = write(first, 5)
    assert names(second) == {file.name}
    [header] = second.headers([file.name])
    assert header is not None
    assert not isinstance(header, OSError)
    assert header.sizes == (SNAPSHOT_BYTES,)
    assert read(second, file.name) == bytes([5]) * SNAPSHOT_BYTES
    with pytest.raises(TimeoutError):
        read(second, file.name, deadline_s=0.0)


def test_the_same_tokens_are_written_once(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    file = write(first, 5, used_s=1000.0)
    again = new_file(second, 5)
    second.write(again, [[bytes([6]) * SNAPSHOT_BYTES]])
    assert again.name == file.name
    assert read(first, file.name) == bytes([5]) * SNAPSHOT_BYTES


def test_models_and_ranks_do_not_meet_but_share_the_size(tmp_path: Path) -> None:
    first, second = opened(tmp_path, 3 * FILE_BYTES), opened(tmp_path, 3 * FILE_BYTES, weights="two")
    oldest = write(first, 0, used_s=1000.0)
    for seed in (1, 2):
        write(second, seed)
    assert (names(first), len(names(second))) == ({oldest.name}, 2)
    write(second, 3)
    assert (names(first), len(names(second))) == (set(), 2), "a little more room than needed is made"


def test_what_was_used_least_recently_is_removed(tmp_path: Path) -> None:
    files = opened(tmp_path, 4 * FILE_BYTES)
    written = [write(files, seed, used_s=1000.0 + seed) for seed in range(4)]
    read(files, written[0].name)
    write(files, 9)
    assert {written[0].name, new_file(files, 9).name} <= names(files)
    assert written[1].name not in names(files)


def test_stamp_changes_until_no_change_can_be_missed(tmp_path: Path) -> None:
    files = opened(tmp_path)
    os.utime(files.folder, (1000.0, 1000.0))
    assert files.stamp() == files.stamp() == 1000 * 10**9
    os.utime(files.folder)
    assert files.stamp() != 1000 * 10**9
    later_s = time.time() + 1000.0
    os.utime(files.folder, (later_s, later_s))
    assert files.stamp() != files.stamp(), "as if it had changed just now"


def test_uses_are_set_on_all_ranks_and_never_earlier(tmp_path: Path) -> None:
    first, second = (opened(tmp_path, rank=rank, **{"tensor-parallel size": "2"}) for rank in "01")
    name = write(first, 1, used_s=1000.0).name
    write(second, 1, used_s=3000.0)
    first.set_used(name, 2000.0)
    assert [os.stat(each.folder / name).st_mtime for each in (first, second)] == [2000.0, 3000.0]


def test_engines_that_write_by_turns_never_exceed_the_size(tmp_path: Path) -> None:
    size = 10 * FILE_BYTES + 100
    engines = [opened(tmp_path, size) for _ in range(3)]
    for seed in range(60):
        write(engines[seed % 3], seed)
        assert num_bytes(tmp_path) <= size
    assert num_bytes(tmp_path) > size // 2


def test_room_of_files_being_written_is_reserved(tmp_path: Path) -> None:
    first, second = opened(tmp_path, 2 * FILE_BYTES), opened(tmp_path, 2 * FILE_BYTES)
    with first._reserved(f"{1:032x}.snapshot", FILE_BYTES), second._reserved(f"{2:032x}.snapshot", FILE_BYTES):
        assert num_bytes(tmp_path) == 2 * FILE_BYTES
        with pytest.raises(OSError, match="no room for a file of 36,864 bytes while 73,728 bytes are being written"):
            write(first, 3)
    write(first, 3)


def test_what_a_killed_engine_left_unfinished_is_removed(tmp_path: Path) -> None:
    files = opened(tmp_path, 2 * FILE_BYTES)
    left = files.folder / f"{'a' * 32}.snapshot.{'b' * 16}.tmp"
    left.write_bytes(bytes(FILE_BYTES))
    for seed in range(3):
        write(files, seed)
    assert not left.exists()
    assert num_bytes(tmp_path) <= 2 * FILE_BYTES


def test_a_full_file_system_frees_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)
    written = [write(files, seed, used_s=1000.0 + seed) for seed in range(4)]

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_directory, "write_items", fail)
    text = r"a file of 34,096 bytes does not fit in the file system of .* lower --object-store-size of 1,000,000 bytes"
    with pytest.raises(OSError, match=text):
        write(files, 9)
    assert written[0].name not in names(files)
    assert written[3].name in names(files)
    assert not list(files.folder.glob("*.tmp"))


def test_damaged_files_are_lost_and_removed(tmp_path: Path) -> None:
    files = opened(tmp_path)
    file = write(files, 5)
    path = files.folder / file.name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(LostItemsError, match="a checksum is wrong"):
        read(files, file.name)
    with pytest.raises(LostItemsError, match="is gone"):
        read(files, file.name)
    assert list(files.headers([file.name])) == [None]


def test_items_that_are_cut_off_are_lost(tmp_path: Path) -> None:
    files, blocks = opened(tmp_path), StoredBlocks(0, (1, 2))
    path = StoredPath("tree", encode([1] * 128), blocks, 2, 0, SnapshotKind.PROMPT_END, 3, is_shared=True)
    file = files.new_file(path, blocks, (BLOCK_BYTES,) * 2)
    files.write(file, [[bytes(BLOCK_BYTES)]] * 2)
    os.truncate(files.folder / file.name, (files.folder / file.name).stat().st_size - 1)
    with pytest.raises(LostItemsError, match="are cut off"):
        list(files.read([FilePart(StoredFile(file.name, 2), (1,), (BLOCK_BYTES,))], NEVER))


def test_a_file_under_the_name_of_another_is_not_used(tmp_path: Path) -> None:
    files = opened(tmp_path)
    first, second = write(files, 1), write(files, 2)
    os.replace(files.folder / first.name, files.folder / second.name)
    assert list(files.headers([second.name])) == [None]
    with pytest.raises(LostItemsError, match="content of another file"):
        read(files, second.name)


def test_a_removed_directory_is_created_again(tmp_path: Path) -> None:
    files = opened(tmp_path)
    write(files, 1)
    for path in [*files.folder.iterdir(), files.folder, files._root / "lock"]:
        path.rmdir() if path.is_dir() else path.unlink()
    files._root.rmdir()
    file = write(files, 2)
    assert names(files) == {file.name}
    assert (files.folder / "layout.json").exists()
    assert (files._root.stat().st_mode | files.folder.stat().st_mode) & 0o077 == 0


def test_sizes_without_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than the file system"):
        opened(tmp_path, 2**60)
    with pytest.raises(ConfigError, match="give at least 45,056 bytes"):
        opened(tmp_path, 45_055)
    files = opened(tmp_path, 45_056)
    data = encode([1] * 64 + [2])
    path = StoredPath("tree", data, StoredBlocks(0, (1,)), 2, 3, SnapshotKind.PROMPT_END, 3, is_shared=True)
    for blocks, sizes in ((path.blocks, (BLOCK_BYTES,)), (None, (SNAPSHOT_BYTES, BLOCK_BYTES))):
        files.write(files.new_file(path, blocks, sizes), [[bytes(size)] for size in sizes])
    assert len(names(files)) == 2


def test_directory_is_measured_over_all_models(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path, weights="two")
    write(first, 1)
    write(second, 2)
    (second.folder / "something else").touch()
    assert second.measure() == DirectoryUse(2, 2 * FILE_BYTES, 10**6 - 2 * FILE_BYTES)


def test_small_directory_holds_several_of_the_largest_files(tmp_path: Path) -> None:
    assert opened(tmp_path, 160_000).max_file_bytes == 10_000
    assert opened(tmp_path, 2**31).max_file_bytes == 64 * 2**20


def test_directories_that_are_of_no_use_are_refused_untouched(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="can be read by other users; give a new directory, or run: chmod 700"):
        opened(tmp_path)
    (root / "another").touch()
    with pytest.raises(ConfigError, match="has other uses; give a new directory, such as one inside it"):
        opened(tmp_path)
    assert [each.name for each in root.iterdir()] == ["another"]
    root.rename(tmp_path / "other")
    root.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="is a symbolic link, not a directory"):
        opened(tmp_path)
    root.unlink()
    root.touch()
    with pytest.raises(ConfigError, match="is a file, not a directory"):
        opened(tmp_path)


def test_what_other_users_put_there_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)
    file = write(files, 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert list(files.headers([file.name])) == [None]
    with pytest.raises(LostItemsError, match="belongs to another user"):
        read(files, file.name)
    with pytest.raises(OSError, match="belongs to another user; give a new directory"):
        write(files, 2)
    with pytest.raises(ConfigError, match="belongs to another user; give a new directory"):
        opened(tmp_path)


@dataclass
class Locked:
    """A file that another process would hold."""

    path: Path

    def is_free(self) -> bool:
        with self.path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


def test_files_are_renamed_while_no_other_engine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, rename, free = opened(tmp_path), os.rename, list[bool]()

    def check_and_rename(source: Path, target: Path) -> None:
        free.append(Locked(files._root / "lock").is_free())
        rename(source, target)

    monkeypatch.setattr(os, "rename", check_and_rename)
    write(files, 1)
    assert free == [False]


def test_the_lock_is_free_while_a_file_is_written(tmp_path: Path) -> None:
    files = opened(tmp_path)
    with files._reserved(f"{1:032x}.snapshot", 100) as (unfinished, _):
        assert Locked(files._root / "lock").is_free()
        assert not Locked(unfinished).is_free()
