"""A container's quota bounds the threads; what the user chose counts more."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strandline.device.hardware import threads
from strandline.device.hardware.threads import limit_threads
from tests.cpu.engine.conftest import MakeLLM

NUM_CORES = 6


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(threads.NUM_THREADS, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_CORES)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("quota", "num_threads"),
    [("max 100000", 6), ("800000 100000", 6), ("600000 100000", 6), ("250000 100000", 2), ("50000 100000", 1)],
)
def test_a_quota_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, num_threads: int
) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(threads, "QUOTAS", (tmp_path / "cpu.max", tmp_path / "nowhere" / "cpu.cfs_quota_us"))
    note = limit_threads()
    assert torch.get_num_threads() == num_threads
    assert (note is None) == (num_threads == NUM_CORES)
    if quota.startswith("25"):
        assert note == (
            "threads: 2, since this container may use the time of 2.5 of its 6 cores (OMP_NUM_THREADS=6 takes them all)"
        )


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1)])
def test_a_quota_bounds_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(threads, "QUOTAS", (tmp_path / "cpu.max",))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert threads.num_cores() == cores


@pytest.mark.parametrize(("quota", "num_threads"), [("-1", 6), ("300000", 3)])
def test_cgroup_v1_quota_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, num_threads: int
) -> None:
    (tmp_path / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / threads.PERIOD_FILE).write_text("100000\n")
    monkeypatch.setattr(threads, "QUOTAS", (tmp_path / "cpu.cfs_quota_us",))
    limit_threads()
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize(
    ("processes", "num_threads", "note"),
    [
        ((2,), 3, "threads: 3 for each of 2 ranks on 6 cores"),
        ((1, 2), 3, "threads: 3 for each of 2 engines on 6 cores"),
        ((2, 3), 1, "threads: 1 for each of 2 ranks of 3 engines on 6 cores"),
    ],
)
def test_ranks_and_engines_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, processes: tuple[int, ...], num_threads: int, note: str
) -> None:
    monkeypatch.setattr(threads, "QUOTAS", ())
    assert limit_threads(*processes) == note
    assert torch.get_num_threads() == num_threads


def test_chosen_number_of_threads_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr(threads, "QUOTAS", (tmp_path / "cpu.max",))
    monkeypatch.setenv(threads.NUM_THREADS, str(NUM_CORES))
    assert limit_threads() is None
    assert torch.get_num_threads() == NUM_CORES


def test_engine_on_cpu_applies_quota_and_logs_it(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    monkeypatch.setattr(threads, "QUOTAS", (tmp_path / "cpu.max",))
    make_llm()
    assert torch.get_num_threads() == 2
    assert [record.message.partition(",")[0] for record in caplog.records] == ["threads: 2"]
