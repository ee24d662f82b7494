"""Memory below the devices of several ranks: what is evicted comes back to all of them, or is computed again.

Ranks are threads here; ``test_rank_processes.py`` has processes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM
from strandline.cache.tiers import LoadCosts
from strandline.device.stores.host_store import HOST_STORE
from strandline.device.stores.transfers import Store, Transfers
from strandline.errors import ConfigError
from strandline.kernels.arena import ArenaTensors
from strandline.records.account import Reason
from strandline.records.actions import Completion, LoadIn
from tests.cpu.engine.test_disk_cache import close, disk_of
from tests.cpu.engine.test_disk_cache import serve as serve_and_settle
from tests.cpu.engine.test_exactness import GREEDY, answers
from tests.cpu.engine.test_host_memory import LENGTHS, PROMPTS, slabs, stats, tier_stats
from tests.cpu.engine.test_ranks import MakeLLM, making
from tests.cpu.transfer.object_server import delete_objects

pytestmark = pytest.mark.usefixtures("loads_pay")


@pytest.fixture
def loads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load whatever rests, however slow this machine is."""
    monkeypatch.setattr(LoadCosts, "pays", lambda *_: True)


@pytest.fixture(scope="module")
def make_threaded(model_dir: Path) -> Iterator[MakeLLM]:
    """Build LLMs whose two ranks are threads."""
    with making(model_dir, 2) as make:
        yield make


@pytest.fixture(scope="module")
def expected(make_threaded: MakeLLM) -> list[list[int]]:
    """What one rank answers without a cache."""
    return answers(make_threaded(divided=False, enable_prefix_caching=False), PROMPTS)


def with_host_memory(make: MakeLLM, **options: Any) -> LLM:
    """Build an LLM whose devices have room for few prompts."""
    return make(memory=slabs(make(), 16), host_memory="8MiB", **options)


def serve(llm: LLM, prompts: list[list[int]] = PROMPTS) -> tuple[list[list[int]], list[int]]:
    """Return answers and hits of prompts that come one after the other."""
    outputs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    return [output.outputs[0].token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


def with_disk(make: MakeLLM, directory: Path, *, divided: bool = True) -> LLM:
    """Build an LLM whose devices have room for few prompts, with files below them."""
    memory = slabs(make(divided=divided), 16)
    return make(divided=divided, memory=memory, disk_cache=str(directory / "cache"))


def transfers_of(llm: LLM, rank: int) -> Transfers:
    executor: Any = llm.engine.core.executor
    transfers: Transfers = executor.ranks[rank].runner.transfers
    return transfers


def test_evicted_prompts_come_back_to_all_ranks(make_threaded: MakeLLM, expected: list[list[int]]) -> None:
    llm = with_host_memory(make_threaded)
    assert serve(llm) == (expected, [0] * len(PROMPTS))
    assert serve(llm) == (expected, list(LENGTHS))
    [host] = tier_stats(llm)
    assert host.num_snapshots_demoted > 0
    assert host.num_loads >= len(PROMPTS) - 3
    assert host.num_loaded_bytes >= host.num_loads * llm.engine.core.spec.raw_slot_bytes
    assert "host memory: 8 MiB on each of 2 ranks" in "\n".join(llm.engine.core.describe())


def test_snapshots_of_all_ranks_rest_in_fewer_bits(make_threaded: MakeLLM, expected: list[list[int]]) -> None:
    llm = with_host_memory(make_threaded, snapshot_dtype="bfloat16")
    serve(llm)
    assert serve(llm)[1] == list(LENGTHS)
    assert stats(llm).loads.num_snapshots > 0


class Late:
    """Ends of a rank's transfers that it reports some calls after they are known."""

    def __init__(self, transfers: Transfers, num_calls: int) -> None:
        self._take = transfers.take
        self._known: list[tuple[Completion, ...]] = [()] * num_calls

    def __call__(self, timeout_s: float = 0.0) -> tuple[Completion, ...]:
        self._known.append(self._take())
        return self._known.pop(0)


def test_requests_wait_for_the_slowest_rank(
    make_threaded: MakeLLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = with_host_memory(make_threaded)
    transfers = transfers_of(llm, 1)
    late = Late(transfers, 3)
    monkeypatch.setattr(transfers, "take", late)
    monkeypatch.setattr(transfers, "wait", late)
    assert serve(llm)[0] == expected
    assert [answers(llm, PROMPTS) for _ in range(2)] == [expected] * 2
    assert stats(llm).loads.num_done > 0


class FailingLoads:
    """A store whose loads fail, after they have written a part."""

    def __init__(self, store: Store, transfers: Transfers) -> None:
        self._store, self._completions = store, transfers.completions
        self.store, self.drop, self.cancel, self.close = store.store, store.drop, store.cancel, store.close
        self.num_failed = 0

    def load(self, action: LoadIn, arena: ArenaTensors) -> None:
        self.num_failed += 1
        for slot, *_ in action.snapshots:
            arena.slot(slot).fill_(1)
        self._completions.put(Completion(action.transfer, is_done=False))


def test_a_load_that_fails_on_one_rank_is_computed(make_threaded: MakeLLM, expected: list[list[int]]) -> None:
    llm = with_host_memory(make_threaded)
    serve(llm)
    transfers = transfers_of(llm, 1)
    failing = FailingLoads(transfers._stores[HOST_STORE], transfers)
    transfers.attach(HOST_STORE, failing)
    assert serve(llm)[0] == expected
    [host] = tier_stats(llm)
    assert host.num_loads == 0
    assert 0 < host.num_failed_loads <= failing.num_failed, "a load has one transfer or several"
    assert stats(llm).missed_tokens[Reason.LOAD_FAILED] > 0


def test_evicted_prompts_come_back_from_files_of_all_ranks(
    make_threaded: MakeLLM, expected: list[list[int]], tmp_path: Path
) -> None:
    first = with_disk(make_threaded, tmp_path)
    assert serve_and_settle(first) == (expected, [0] * len(PROMPTS))
    assert serve_and_settle(first) == (expected, list(LENGTHS))
    disk = disk_of(first)
    assert (disk.num_loads > 0, disk.num_loaded_bytes > 0, disk.num_failed_loads) == (True, True, 0)
    assert f" MiB on each of 2 ranks in {tmp_path}/cache" in "\n".join(first.engine.core.describe())
    close(first)
    second = with_disk(make_threaded, tmp_path)
    assert disk_of(second).num_snapshots > 0
    found, hits = serve_and_settle(second)
    assert found == expected
    assert sum(hit > 0 for hit in hits) >= len(PROMPTS) - 2, hits
    assert disk_of(second).num_loads >= len(PROMPTS) - 2
    close(second)


def test_evicted_prompts_come_back_from_objects_of_all_ranks(
    make_threaded: MakeLLM,
    expected: list[list[int]],
    store_url: str,
) -> None:
    memory = slabs(make_threaded(), 16)
    first = make_threaded(memory=memory, object_store=store_url)
    assert serve_and_settle(first) == (expected, [0] * len(PROMPTS))
    second = make_threaded(memory=memory, object_store=store_url)
    assert disk_of(second).num_snapshots > 0
    assert serve_and_settle(second)[0] == expected
    assert (disk_of(second).num_loads > 0, disk_of(second).num_failed_loads) == (True, 0)
    llms = first, second
    assert delete_objects(store_url, keeps=1) > 0
    assert [serve_and_settle(llm)[0] for llm in llms] == [expected] * 2
    for llm in llms:
        close(llm)


def test_what_one_rank_cannot_store_rests_on_none(
    make_threaded: MakeLLM, expected: list[list[int]], tmp_path: Path
) -> None:
    llm = with_disk(make_threaded, tmp_path)
    executor: Any = llm.engine.core.executor
    executor.ranks[1]._files._paused_until_s = float("inf")
    assert [serve_and_settle(llm)[0] for _ in range(2)] == [expected] * 2
    disk = disk_of(llm)
    assert (disk.num_snapshots, disk.num_used_bytes, disk.num_loads) == (0, 0, 0)
    assert disk.num_snapshots_demoted == 0
    close(llm)


def test_files_that_one_rank_lacks_are_of_no_use(
    make_threaded: MakeLLM, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with with_disk(make_threaded, tmp_path) as first:
        serve_and_settle(first)
    for path in (tmp_path / "cache" / "rank-1").glob("*.snapshot"):
        path.unlink()
    second = with_disk(make_threaded, tmp_path)
    assert disk_of(second).num_snapshots == 0
    assert "other ranks lack them" in caplog.text
    assert serve_and_settle(second)[0] == expected
    close(second)


def test_files_for_another_number_of_ranks_are_removed(
    make_threaded: MakeLLM, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_files = []
    for divided in (True, False, True):
        llm = with_disk(make_threaded, tmp_path, divided=divided)
        assert disk_of(llm).num_snapshots == 0
        assert serve_and_settle(llm) == (expected, [0] * len(PROMPTS))
        close(llm)
        num_files.append([len(list((tmp_path / "cache").glob(f"{address}*.snapshot"))) for address in ("", "rank-1/")])
    assert [[count > 0 for count in counts] for counts in num_files] == [[True, True], [True, False], [True, True]]
    assert "cache/rank-1: they are another model's, or were computed in another way" in caplog.text
    assert "tensor-parallel size: 1 here, 2 there" in caplog.text
    assert "tensor-parallel size: 2 here, 1 there" in caplog.text


def test_host_memory_is_that_of_each_rank(make_threaded: MakeLLM) -> None:
    with pytest.raises(ConfigError, match=r"--host-memory of .* for each of 2 ranks is more than the"):
        make_threaded(host_memory="1000GiB")
