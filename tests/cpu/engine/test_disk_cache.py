"""The disk cache: what is evicted comes back from files, after a restart too, and the tokens are always right."""

import errno
import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest

from strandline import LLM
from strandline.cache.evict_all import evict_all
from strandline.device.stores import lower_stores
from strandline.errors import ConfigError, EngineError
from strandline.records.account import Reason
from strandline.records.tier_stats import TierStats
from strandline.specs import SNAPSHOT_DTYPES
from strandline.tier_sizes import buffer_blocks
from strandline.transfer import disk_directory, disk_files
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import GREEDY, answers
from tests.cpu.engine.test_host_memory import LENGTHS, PROMPTS, slabs, stats, tier_stats
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import families


def disk_of(llm: LLM) -> TierStats:
    _, disk = tier_stats(llm)
    return disk


def settle(llm: LLM) -> None:
    """Wait until nothing is on its way to the disk."""
    core = llm.engine.core
    [spills] = core.loads.spills
    for _ in range(1000):
        core.executor.carry_out(core.cache.take_actions())
        if not len(spills):
            return
        core.scheduler.loading.complete(core.executor.wait_for_transfers(1.0))
    raise AssertionError("spills do not end")


def close(llm: LLM) -> None:
    llm.engine.core.close()


def serve(llm: LLM, prompts: list[list[int]] = PROMPTS) -> tuple[list[list[int]], list[int]]:
    """Return answers and hits of prompts that come one after the other."""
    outputs = []
    for prompt in prompts:
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        outputs.append((list(output.outputs[0].token_ids), output.num_cached_tokens))
        settle(llm)
    return [answer for answer, _ in outputs], [hit for _, hit in outputs]


def test_start_without_memory_for_the_buffer_names_the_flag(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = make_llm().engine.core.spec
    num_bytes = buffer_blocks(spec, "float32") * spec.block_bytes
    least_bytes = (spec.blocks_per_slab + 1) * spec.block_bytes
    monkeypatch.setattr(lower_stores, "machine_bytes", lambda: num_bytes - 1)
    text = (
        f"--disk-cache needs a buffer of {num_bytes:,} bytes of host memory, which is more than the {num_bytes - 1:,} "
        f"bytes of memory that there are; give --host-memory, of at least {least_bytes:,} bytes, or leave out"
    )
    with pytest.raises(ConfigError, match=text):
        make_llm(disk_cache=str(tmp_path / "cache"))
    close(make_llm(disk_cache=str(tmp_path / "cache"), host_memory=least_bytes))
    monkeypatch.setattr(lower_stores, "machine_bytes", lambda: num_bytes)
    close(make_llm(disk_cache=str(tmp_path / "cache")))


@pytest.fixture
def expected(make_llm: MakeLLM) -> list[list[int]]:
    return answers(make_llm(enable_prefix_caching=False), PROMPTS)


def with_disk(make_llm: MakeLLM, directory: Path, **options: Any) -> LLM:
    """Build an LLM whose device has room for few prompts, with a disk below it."""
    memory = slabs(make_llm(), 14)
    return make_llm(memory=memory, disk_cache=str(directory / "cache"), max_model_len=512, **options)


def test_evicted_prompts_come_back_from_files_after_a_restart(
    make_llm: MakeLLM, tmp_path: Path, expected: list[list[int]]
) -> None:
    first = with_disk(make_llm, tmp_path)
    assert serve(first) == (expected, [0] * len(PROMPTS))
    found, hits = serve(first)
    assert (found, hits) == (expected, list(LENGTHS)), "what the device has evicted comes back"
    assert disk_of(first).num_loads > 0
    assert disk_of(first).num_loaded_bytes > 0
    close(first)
    second = with_disk(make_llm, tmp_path)
    before = disk_of(second)
    assert (before.num_loads, before.num_snapshots > 0) == (0, True)
    found, hits = serve(second)
    assert found == expected
    assert sum(hit > 0 for hit in hits) >= len(PROMPTS) - 2, hits
    after = disk_of(second)
    assert after.num_loads >= len(PROMPTS) - 2
    assert after.num_loaded_bytes >= after.num_loads * second.engine.core.spec.raw_slot_bytes
    close(second)


def test_files_of_other_weights_are_not_hit_after_a_restart(
    make_llm: MakeLLM, tmp_path: Path, expected: list[list[int]]
) -> None:
    first, misses = with_disk(make_llm, tmp_path), [0] * len(PROMPTS)
    assert serve(first) == (expected, misses)
    first.update_weights_from_disk(str(save_tiny_model(tmp_path / "other", seed=7)))
    others, hits = serve(first)
    assert (others != expected, hits) == (True, misses), "nor while the process lasts"
    assert serve(first) == (others, list(LENGTHS))
    assert disk_of(first).num_loads > 0
    close(first)
    assert list((tmp_path / "cache").glob("*.snapshot"))
    second = with_disk(make_llm, tmp_path)
    assert serve(second) == (expected, misses)
    close(second)


def test_prompts_come_back_from_each_tier_and_after_a_restart(
    make_llm: MakeLLM, tmp_path: Path, expected: list[list[int]]
) -> None:
    """Evict to host memory, from there to the disk, and restart: tokens are equal, and each tier's counters move."""

    def start() -> LLM:
        return with_disk(make_llm, tmp_path, host_memory=slabs(make_llm(), 10))

    first = start()
    serve(first, PROMPTS[:1])
    evict_all(first.engine.core.cache)
    assert serve(first, PROMPTS[:1]) == (expected[:1], list(LENGTHS[:1]))
    assert [tier.num_loads > 0 for tier in tier_stats(first)] == [True, False]
    assert serve(first, PROMPTS[1:]) == (expected[1:], [0] * (len(PROMPTS) - 1))
    assert all(tier.num_snapshots_demoted > 0 for tier in tier_stats(first))
    for _ in range(2):
        # Backwards, as what was served last is nearest.
        found, hits = serve(first, PROMPTS[::-1])
        assert found == expected[::-1]
        assert sum(hit > 0 for hit in hits) >= len(PROMPTS) - 2, "host memory is too small to pass on all in time"
    after = stats(first)
    slot_bytes = first.engine.core.spec.raw_slot_bytes
    for tier in tier_stats(first):
        assert tier.num_loads > 0, tier.name
        assert tier.num_loaded_bytes >= tier.num_loads * slot_bytes
        assert tier.num_failed_loads == 0
    assert after.loads.num_done == sum(tier.num_loads for tier in tier_stats(first))
    close(first)
    second = start()
    host, disk = tier_stats(second)
    assert (host.num_snapshots, host.num_loads, disk.num_loads) == (0, 0, 0)
    assert disk.num_snapshots > 0
    found, hits = serve(second)
    assert found == expected
    assert sum(hits) > 0
    _, disk = tier_stats(second)
    assert disk.num_loads > 0
    assert disk.num_loaded_bytes >= disk.num_loads * slot_bytes
    close(second)


QUESTIONS = ["What is 2 + 3?", "What is 12 + 30?", "My name is Ada. What is my name?"]


def ask(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Return answers and hits of some conversations, one after the other."""
    outputs = []
    for question in QUESTIONS:
        [output] = llm.chat([{"role": "user", "content": question}], GREEDY, use_tqdm=False)
        outputs.append((list(output.outputs[0].token_ids), output.num_cached_tokens))
    return [answer for answer, _ in outputs], [hit for _, hit in outputs]


@pytest.mark.parametrize("options", [{}, {"host_memory": "64MiB", "snapshot_dtype": "float32"}], ids=["disk", "both"])
def test_what_only_memory_has_outlives_an_orderly_end(tmp_path: Path, options: dict[str, str]) -> None:
    options = {"device": "cpu", "memory": "64MiB", "disk_cache": str(tmp_path / "cache"), **options}
    with LLM("demo", **options) as first:
        expected, hits = ask(first)
        assert disk_of(first).num_snapshots == 0, "nothing had to leave the device"
    with LLM("demo", **options) as second:
        assert disk_of(second).num_snapshots > 0
        found, again = ask(second)
        assert found == expected
        assert all(now > then for then, now in zip(hits, again, strict=True)), (hits, again)
        assert disk_of(second).num_loads > 0
        assert disk_of(second).num_loaded_bytes >= disk_of(second).num_loads * second.engine.core.spec.raw_slot_bytes


def test_snapshots_rest_on_a_disk_alone_in_fewer_bits(make_llm: MakeLLM, tmp_path: Path) -> None:
    sizes = []
    for dtype in SNAPSHOT_DTYPES:
        options = {"disk_cache": str(tmp_path / dtype), "snapshot_dtype": dtype}
        with make_llm(**options) as first:
            serve(first, PROMPTS[:2])
            evict_all(first.engine.core.cache)
            settle(first)
            answers(first, PROMPTS[2:4])
            assert disk_of(first).num_snapshots > 0, "two came there by eviction, two are flushed"
        with make_llm(**options) as second:
            assert serve(second, PROMPTS[:4])[1] == list(LENGTHS[:4])
            assert disk_of(second).num_loads == 4
        sizes.append(sum(path.stat().st_size for path in (tmp_path / dtype).glob("*.snapshot")))
    assert max(sizes[1:]) < sizes[0], "files are smaller with fewer bits"


def test_keys_and_values_without_states_are_flushed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = llm_maker(families.save("llama", tmp_path_factory.mktemp("families")), monkeypatch, device="cpu")
    with make(disk_cache=str(tmp_path / "cache")) as first:
        expected = answers(first, PROMPTS[:2])
    with make(disk_cache=str(tmp_path / "cache")) as second:
        assert serve(second, PROMPTS[:2]) == (expected, [256, 256])


def test_a_flush_writes_what_was_being_loaded(make_llm: MakeLLM, tmp_path: Path) -> None:
    options = {"disk_cache": str(tmp_path / "cache"), "host_memory": "64MiB"}
    with make_llm(**options) as first:
        answers(first, PROMPTS[:1])
        core = first.engine.core
        evict_all(core.cache)
        first.engine.add_request("again", PROMPTS[0], GREEDY)
        assert core.scheduler.plan() is None
        assert len(core.loads) == 1
    with make_llm(**options) as second:
        assert serve(second, PROMPTS[:1])[1] == list(LENGTHS[:1])


def test_a_flush_that_is_stopped_leaves_the_rest(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(disk_cache=str(tmp_path / "cache"))
    answers(llm, PROMPTS)
    report = llm.engine.core.flush(lambda: True)
    assert report is not None
    assert (report.num_bytes, report.num_left >= len(PROMPTS)) == (0, True)
    assert "there was no time for" in str(report)
    assert llm.engine.core.flush() is None
    with pytest.raises(EngineError, match="the engine has been closed"):
        answers(llm, PROMPTS)
    close(llm)


def fail_to_write(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("is_repaired", [True, False])
def test_a_flush_in_a_pause_tries_again_and_says_why(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_repaired: bool
) -> None:
    llm = with_disk(make_llm, tmp_path)
    room_bytes = disk_of(llm).num_free_bytes
    monkeypatch.setattr(disk_files.os, "pwrite", fail_to_write)
    monkeypatch.setattr(disk_directory.os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=5, f_frsize=4096))
    serve(llm)
    disk = disk_of(llm)
    assert (disk.num_snapshots, disk.num_free_bytes) == (0, 5 * 4096), "what the disk has"
    if is_repaired:
        monkeypatch.undo()
    report = llm.engine.core.flush()
    assert report is not None
    assert report.num_left == 0
    assert (report.num_bytes > 0, report.num_failed > 0) == (is_repaired, not is_repaired)
    disk = disk_of(llm)
    assert disk.num_free_bytes == (room_bytes - disk.num_used_bytes if is_repaired else 5 * 4096)
    assert str(report).endswith("could not be written: [Errno 28] No space left on device") == (not is_repaired)
    close(llm)


def test_an_interrupted_close_closes(make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(disk_cache=str(tmp_path / "cache"))

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.core, "flush", interrupt)
    llm.close()
    make_llm(disk_cache=str(tmp_path / "cache")).close()


def test_an_llm_that_is_dropped_leaves_what_it_had(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(disk_cache=str(tmp_path / "cache"))
    answers(llm, PROMPTS[:1])
    assert isinstance(llm._close, finalize)
    assert llm._close.atexit, "a script's end does the same"
    del llm
    gc.collect()
    assert len(list((tmp_path / "cache").glob("*.snapshot"))) > 0
    make_llm(disk_cache=str(tmp_path / "cache")).close()


def test_damaged_files_cost_time_but_no_token(make_llm: MakeLLM, tmp_path: Path, expected: list[list[int]]) -> None:
    first = with_disk(make_llm, tmp_path)
    serve(first)
    close(first)
    damaged = sorted((tmp_path / "cache").glob("*.snapshot"))
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    second = with_disk(make_llm, tmp_path)
    assert disk_of(second).num_snapshots == len(damaged)
    found, hits = serve(second)
    assert (found, hits) == (expected, [0] * len(PROMPTS))
    assert stats(second).missed_tokens[Reason.LOAD_FAILED] > 0
    assert (disk_of(second).num_loads, disk_of(second).num_failed_loads > 0) == (0, True)
    close(second)


def test_bits_outlive_a_restart_with_host_memory(make_llm: MakeLLM, tmp_path: Path) -> None:
    cold = make_llm(enable_prefix_caching=False, deterministic=True)
    expected = answers(cold, PROMPTS)
    for is_first in (True, False):
        llm = with_disk(make_llm, tmp_path, deterministic=True, host_memory=slabs(cold, 5))
        assert serve(llm)[0] == expected
        assert is_first or disk_of(llm).num_loads > 0
        close(llm)


def test_keys_and_values_without_states_outlive_a_restart(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = llm_maker(families.save("llama", tmp_path_factory.mktemp("families")), monkeypatch, device="cpu")
    cold = make(enable_prefix_caching=False)
    expected = answers(cold, PROMPTS)
    for is_first in (True, False):
        llm = make(memory=slabs(cold, 12), disk_cache=str(tmp_path / "cache"), max_model_len=512)
        assert serve(llm)[0] == expected
        assert is_first or disk_of(llm).num_loaded_bytes > 0
        close(llm)


def test_sizes_without_room_for_a_snapshot_are_refused(make_llm: MakeLLM, tmp_path: Path) -> None:
    spec = make_llm().engine.core.spec
    least = spec.slab_bytes + spec.block_bytes
    for name, options in (("--host-memory", {"host_memory": least - 1}), ("--disk-cache-size", {"disk_cache_size": 9})):
        message = rf"{name} of .* bytes has no room for a snapshot of this model; give at least {least:,} bytes"
        with pytest.raises(ConfigError, match=message):
            make_llm(disk_cache=str(tmp_path / "cache"), **options)
    with pytest.raises(ConfigError, match="--host-memory of 9 bytes has no room"):
        make_llm(host_memory=9)
    close(make_llm(disk_cache=str(tmp_path / "cache"), host_memory=least, disk_cache_size=least))


def test_wrong_disk_caches_are_refused(make_llm: MakeLLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--disk-cache holds what the cache evicts; drop --no-enable-prefix-caching"):
        make_llm(disk_cache="d", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="--disk-cache holds what the cache evicts; drop --mamba-cache-mode none"):
        make_llm(disk_cache="d", mamba_cache_mode="none")
    with pytest.raises(ConfigError, match="--disk-cache-size must be a size"):
        make_llm(disk_cache="d", disk_cache_size="much")
    with pytest.raises(ConfigError, match="add --disk-cache DIR"):
        make_llm(disk_cache_size="1GiB")
    llm = with_disk(make_llm, tmp_path)
    with pytest.raises(ConfigError, match="is in use by process"):
        with_disk(make_llm, tmp_path)
    close(llm)
