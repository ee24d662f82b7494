"""Kernels are compiled by processes while weights load, once for each configuration and version."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline.config import EngineConfig
from strandline.engine.startup import compiling as module
from strandline.engine.startup.compiling import Share, compiling, shares
from strandline.kernels.gpu import GPUS

pytest.importorskip("triton")
from strandline.kernels import recording_triton

ROOT = Path(__file__).parents[3]
CUDA = torch.device("cuda")
MODEL = str(ROOT / "benchmarks" / "configs" / "tiny-qwen3.5")


@pytest.mark.parametrize(("num_ranks", "num_engines", "num_cores"), [(1, 1, 1), (1, 1, 8), (2, 2, 9), (4, 1, 2)])
def test_shares_of_all_ranks_and_engines_are_all_kernels(num_ranks: int, num_engines: int, num_cores: int) -> None:
    found = list[Share]()
    for engine in range(num_engines):
        config = EngineConfig(
            model=MODEL,
            tensor_parallel_size=num_ranks,
            data_parallel_size=num_engines,
            data_parallel_rank=engine,
        )
        for rank in range(num_ranks):
            found += shares(config, GPUS["sm_90"], rank, num_cores)
    (step,) = {share.step for share in found}
    assert sorted(share.first for share in found) == list(range(step))
    assert len(found) <= max(num_ranks * num_engines, num_cores - 1)


class Machine:
    """A machine with a GPU, whose compilers run the program ``program``."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program = "pass"
        self.processes: list[subprocess.Popen[bytes]] = []
        monkeypatch.setattr(module, "why_unavailable", lambda *_: None)
        monkeypatch.setattr(module, "gpu_of", lambda _: GPUS["sm_90"])
        monkeypatch.setattr(recording_triton, "cache_directory", lambda: directory)
        monkeypatch.setattr(module, "_start", self._start)

    def _start(self, share: Share) -> subprocess.Popen[bytes]:
        del share
        process = subprocess.Popen([sys.executable, "-S", "-c", self.program], stderr=subprocess.PIPE)
        self.processes.append(process)
        return process


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_kernels_are_compiled_once(machine: Machine) -> None:
    def starts_processes(**options: Any) -> bool:
        before = len(machine.processes)
        with compiling(EngineConfig(model=MODEL, **options), CUDA) as compilation:
            assert not compilation.waited_s
        assert (compilation.waited_s > 0) == (len(machine.processes) > before)
        return len(machine.processes) > before

    assert [starts_processes(), starts_processes(), starts_processes(kv_cache_dtype="fp8")] == [True, False, True]


def test_failure_is_logged_and_next_start_tries_again(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.program = "raise SystemExit('no compiler')"
    for _ in range(2):
        before = len(machine.processes)
        with compiling(EngineConfig(model=MODEL), CUDA):
            pass
        assert len(machine.processes) > before
    assert all("not all could be compiled ahead" in record.message for record in caplog.records)
    assert all("(no compiler)" in record.message for record in caplog.records)
    assert len(caplog.records) == 2


def test_a_process_that_hangs_is_ended(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.1)
    machine.program = "import time; time.sleep(60)"
    with compiling(EngineConfig(model=MODEL), CUDA):
        pass
    assert machine.processes
    assert all(process.poll() is not None for process in machine.processes)
    assert "(a process took more than 0.1 s)" in caplog.text


def test_signal_while_waiting_ends_the_compilers(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> str:
        raise KeyboardInterrupt

    machine.program = "import time; time.sleep(60)"
    monkeypatch.setattr(module, "_finish", interrupt)
    with pytest.raises(KeyboardInterrupt), compiling(EngineConfig(model=MODEL), CUDA):
        pass
    assert machine.processes
    assert all(process.poll() is not None for process in machine.processes)


def test_weights_that_cannot_be_loaded_end_the_compilers(machine: Machine) -> None:
    machine.program = "import time; time.sleep(60)"
    with pytest.raises(KeyError), compiling(EngineConfig(model=MODEL), CUDA):
        raise KeyError
    assert machine.processes
    assert all(process.poll() is not None for process in machine.processes)


def test_nothing_is_compiled_on_cpus(machine: Machine) -> None:
    with compiling(EngineConfig(model=MODEL), torch.device("cpu")):
        pass
    assert not machine.processes


def test_share_is_compiled_into_the_cache(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    share = Share(EngineConfig(model=MODEL, max_num_seqs=8, max_num_batched_tokens=1024), GPUS["sm_90"], 3, 25)
    command = [sys.executable, "-m", "strandline.engine.processes.kernel_compiler"]
    run = subprocess.run(command, input=pickle.dumps(share), env=environment, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    assert len(list(tmp_path.glob("*/*.cubin"))) >= 2
