"""The disk cache: what is evicted comes back from files, after a restart too, and the tokens are always right."""

from pathlib import Path
from typing import Any

import pytest

from strandline import LLM
from strandline.cache import Reason
from strandline.cache.stats import LowerStats
from strandline.errors import ConfigError
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import GREEDY, answers
from tests.cpu.engine.test_host_memory import LENGTHS, PROMPTS, slabs, stats
from tests.cpu.models import families


def disk_of(llm: LLM) -> LowerStats:
    _, disk = stats(llm).tiers
    return disk


def settle(llm: LLM) -> None:
    """Wait until nothing is on its way to the disk."""
    core = llm.engine.core
    spills = core.cache.loads.spills
    assert spills is not None
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
    with pytest.raises(ConfigError, match="--disk-cache holds what the cache evicts"):
        make_llm(disk_cache="d", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="--disk-cache does not go with --tensor-parallel-size"):
        make_llm(disk_cache="d", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--disk-cache-size must be a size"):
        make_llm(disk_cache="d", disk_cache_size="much")
    llm = with_disk(make_llm, tmp_path)
    with pytest.raises(ConfigError, match="is in use by process"):
        with_disk(make_llm, tmp_path)
    close(llm)
