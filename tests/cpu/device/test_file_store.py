"""The disk as a store: bytes come back as they left, and what fails says so and harms nothing else."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
import torch

from strandline.device.stores.arena_copies import ArenaCopies
from strandline.device.stores.file_store import MAX_STORES, FileStore
from strandline.device.stores.host_store import HOST_STORE, HostStore
from strandline.device.stores.transfers import Transfers
from strandline.file_tiers import DISK
from strandline.ids import BlockId, SlotId, TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.account import SnapshotKind
from strandline.records.actions import (
    Completion,
    EnterFiles,
    FoundFile,
    LoadIn,
    SnapshotCopy,
    StoredBlocks,
    StoredPath,
    StoreOut,
)
from strandline.records.tokens import encode
from strandline.specs import LayerSpec, ModelSpec, TensorSpec
from strandline.transfer import disk_directory, disk_files
from strandline.transfer.disk_directory import DiskDirectory

SPEC = ModelSpec(
    (
        LayerSpec(streams=(TensorSpec("key", (2,), "float32"),)),
        LayerSpec(states=(TensorSpec("state", (2, 300), "float32", is_recurrent=True),)),
    ),
    4,
    "float32",
)
DATA = encode(range(200))


class Scene:
    """An arena, host memory with a slot and two blocks of it, and a disk below that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arena = ArenaTensors(SPEC, 12)
        self.arena.bytes.copy_(torch.arange(len(self.arena.bytes)) % 251)
        self.transfers = Transfers(self.arena)
        self.host = HostStore(self.arena, 40, self.transfers.completions)
        self.directory = DiskDirectory(path, {"weights": "one"}, SPEC.raw_block_bytes, [SPEC.raw_slot_bytes])
        self.persisted, self.addresses = self.directory.scan()
        copies = ArenaCopies(self.arena)
        self.disk = FileStore(DISK.store, self.directory, self.addresses, self.host, copies, self.transfers.completions)
        self.transfers.attach(HOST_STORE, self.host)
        self.transfers.attach(DISK.store, self.disk)
        self.begin(
            StoreOut(TransferId(1), HOST_STORE, ((BlockId(21), 1), (BlockId(22), 2)), (SnapshotCopy(SlotId(3), 3),))
        )

    def begin(self, action: StoreOut | LoadIn) -> Completion:
        self.transfers.begin(action)
        [completion] = self.transfers.wait(60.0)
        return completion

    def store(self, first: int = 10, *, is_final: bool = False) -> Completion:
        """Store three blocks, one of them from the device, and the slot with the block that it lies inside."""
        addresses = range(first, first + 5)
        blocks = StoredBlocks(0, tuple(addresses[:3]))
        path = StoredPath("t", DATA, blocks, addresses[3], addresses[4], SnapshotKind.MARK, 0, is_shared=False)
        stored = ((1, addresses[1]), (2, addresses[2]), (3, addresses[3]), (1, addresses[4]))
        blocks_out = ((BlockId(20), addresses[0]),)
        return self.begin(StoreOut(TransferId(2), DISK.store, blocks_out, (), stored, path, is_final=is_final))

    def load(self, first: int = 10) -> Completion:
        addresses = range(first, first + 5)
        blocks = tuple((BlockId(30 + index), address) for index, address in enumerate((*addresses[:3], addresses[4])))
        return self.begin(LoadIn(TransferId(3), DISK.store, blocks, (SnapshotCopy(SlotId(8), addresses[3]),)))

    def files(self, kind: str) -> list[Path]:
        return sorted(self.path.glob(f"*.{kind}"))

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Poll until the threads have done something."""
        deadline_s = monotonic() + timeout_s
        while not is_so():
            assert monotonic() < deadline_s, f"not so within {timeout_s} s: {sorted(self.path.iterdir())}"
            sleep(0.005)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "cache")
    yield scene
    scene.transfers.close()


def test_bytes_come_back_as_they_left(scene: Scene) -> None:
    arena = scene.arena
    assert scene.store().is_done
    done = scene.load()
    assert (done.is_done, done.seconds > 0) == (True, True)
    for block, source in ((30, 20), (31, 21), (32, 22), (33, 21)):
        assert torch.equal(arena.block(BlockId(block)), arena.block(BlockId(source)))
    assert torch.equal(arena.slot(SlotId(8)), arena.slot(SlotId(3)))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_damaged_and_missing_files_are_lost(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.store()
    [blocks], [snapshot] = scene.files("blocks"), scene.files("snapshot")
    flip(blocks, 4096 + SPEC.raw_block_bytes)
    assert scene.load().lost == (11,)
    assert "a checksum is wrong" in caplog.text
    flip(blocks, 4096 + SPEC.raw_block_bytes)
    assert scene.load().is_done
    os.truncate(snapshot, 4096 + 5)
    assert scene.load().lost == (13,) or scene.load().lost == (14,)
    blocks.unlink()
    assert scene.load().lost == (10, 11, 12)


def test_files_on_a_read_only_disk_are_loaded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.store()

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(disk_directory.os, "utime", fail)
    assert scene.load().is_done
    assert torch.equal(scene.arena.slot(SlotId(8)), scene.arena.slot(SlotId(3)))


def test_dropped_places_leave_the_disk(scene: Scene) -> None:
    scene.store()
    [blocks] = scene.files("blocks")
    size = blocks.stat().st_size
    scene.disk.drop([12, 13, 14])
    scene.wait_until(lambda: blocks.stat().st_size == size - SPEC.raw_block_bytes and not scene.files("snapshot"))
    scene.disk.drop([10, 11])
    scene.wait_until(lambda: not scene.files("blocks"))
    assert scene.load().lost == (10,)


def test_a_full_disk_pauses_stores(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene.store()

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_files.os, "pwrite", fail)
    monkeypatch.setattr(disk_directory.os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=5, f_frsize=4096))
    assert not scene.store(20).is_done
    assert "No space left on device" in caplog.text
    assert scene.store(20).max_free_bytes == 5 * 4096
    assert len(list(scene.path.iterdir())) == 4, "lock, key and the files of before"
    monkeypatch.undo()
    assert not scene.store(30).is_done, "none is tried for a while"
    scene.disk._paused_until_s = 0.0
    assert scene.store(40)._replace(seconds=0.0) == Completion(TransferId(2), is_done=True)
    assert scene.load().is_done
    assert scene.load(40).is_done


def test_stores_that_wait_are_not_tried_in_a_pause(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries, may_fail = [], Event()

    def fail(*_: object) -> None:
        tries.append(1)
        assert may_fail.wait(60.0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileStore, "_write", fail)
    path = StoredPath("t", DATA, None, 10, 11, SnapshotKind.MARK, 0, is_shared=False)
    numbers = range(2, 2 + 2 * MAX_STORES)
    for number in numbers:
        scene.transfers.begin(StoreOut(TransferId(number), DISK.store, (), (), ((3, 10), (1, 11)), path))
    scene.wait_until(lambda: len(tries) == MAX_STORES)
    may_fail.set()
    ended = list[Completion]()
    while len(ended) < len(numbers):
        ended += scene.transfers.wait(60.0)
    assert {(each.is_done, each.cause) for each in ended} == {(False, "[Errno 28] No space left on device")}
    assert len(tries) == MAX_STORES
    assert caplog.text.count("nothing is stored") == 1


def test_one_store_is_tried_in_a_pause_before_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail(*_: object) -> int:
        tries.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_files.os, "pwrite", fail)
    for address, is_final, num_tries in ((10, False, 1), (20, False, 1), (30, True, 2), (40, True, 2)):
        done = scene.store(address, is_final=is_final)
        assert (done.is_done, done.cause, len(tries)) == (False, "[Errno 28] No space left on device", num_tries)


def test_a_directory_that_is_gone_is_no_end(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.store()
    shutil.rmtree(scene.path)
    assert scene.load().lost == (10, 11, 12)
    assert not scene.store(20).is_done
    assert "No such file or directory" in caplog.text


def test_a_restart_reads_what_was_written(tmp_path: Path) -> None:
    first = Scene(tmp_path / "cache")
    first.store()
    first.transfers.close()
    second = Scene(tmp_path / "cache")
    assert sorted(second.addresses) == [1, 2, 3, 4, 5]
    by_name = {(found.file.name.split(".")[1], found.item): address for address, found in second.addresses.items()}
    order = [by_name["blocks", 0], by_name["blocks", 1], by_name["blocks", 2]]
    loads = tuple((BlockId(30 + index), address) for index, address in enumerate(order))
    second.arena.block(BlockId(31)).zero_()
    assert second.begin(LoadIn(TransferId(3), DISK.store, loads, ())).is_done
    assert torch.equal(second.arena.block(BlockId(31)), first.arena.block(BlockId(21)))
    second.transfers.close()


def test_what_gets_no_new_name_leaves_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Scene(tmp_path / "cache")
    first.store()
    first.transfers.close()
    second = Scene(tmp_path / "cache")
    [[*blocks]] = [entry.addresses for entry in second.persisted.blocks]
    second.disk.rename({blocks[0]: 90, blocks[1]: blocks[0]})
    size = 4096 + 2 * SPEC.raw_block_bytes
    second.wait_until(
        lambda: not second.files("snapshot") and [x.stat().st_size for x in second.files("blocks")] == [size]
    )
    assert "3 blocks and snapshots of the disk cache" in caplog.text
    assert "are of no use: other ranks lack them" in caplog.text
    loads = ((BlockId(30), 90), (BlockId(31), blocks[0]))
    assert second.begin(LoadIn(TransferId(3), DISK.store, loads, ())).is_done
    for target, source in ((30, 20), (31, 21)):
        assert torch.equal(second.arena.block(BlockId(target)), first.arena.block(BlockId(source)))
    assert second.begin(LoadIn(TransferId(4), DISK.store, ((BlockId(32), blocks[1]),), ())).lost == (blocks[1],)
    second.transfers.close()


def test_cancelled_loads_that_wait_are_reported(scene: Scene) -> None:
    scene.store()
    with scene.disk._changed:
        scene.transfers.begin(LoadIn(TransferId(5), DISK.store, ((BlockId(30), 10),), ()))
        scene.disk.cancel(TransferId(5))
    assert scene.transfers.wait(60.0) == (Completion(TransferId(5), is_done=False),)


def test_files_of_others_are_loaded_until_they_are_forgotten(scene: Scene) -> None:
    scene.store()
    [blocks], [snapshot] = scene.files("blocks"), scene.files("snapshot")
    files = FoundFile(blocks.name, 100, 3), FoundFile(snapshot.name, 103, 2)
    scene.transfers.begin(EnterFiles(DISK.store, files))
    scene.disk._entered[100].file.header = scene.disk._addresses[10].file.header  # those of a directory are known
    scene.disk._entered[103].file.header = scene.disk._addresses[13].file.header
    assert scene.load(100).is_done
    scene.transfers.begin(EnterFiles(DISK.store, (), files[:1]))
    assert scene.load(100).lost == (100,)
    assert set(scene.disk._entered) == {103, 104}
