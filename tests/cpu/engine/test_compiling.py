"""Kernels are compiled by processes while weights load, once for each configuration and version."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from strandline.config import EngineConfig
from strandline.engine.startup import compiling as module
from strandline.engine.startup.compiling import Share, compiling, share_of
from strandline.env import COMPILE_AHEAD
from strandline.kernels.gpu import GPUS, Gpu

pytest.importorskip("triton")
from triton.backends.nvidia import driver as nvidia

from strandline.engine.processes import kernel_compiler
from strandline.engine.processes.dry_run import dry_config
from strandline.kernels import recording_triton
from tests.cpu.server.forked import run_forked

ROOT = Path(__file__).parents[3]
CUDA = torch.device("cuda")
MODEL = str(ROOT / "benchmarks" / "configs" / "tiny-qwen3.5")


@pytest.mark.parametrize(("num_ranks", "num_engines", "num_cores"), [(1, 1, 1), (1, 1, 8), (2, 2, 9), (4, 1, 2)])
def test_shares_of_all_ranks_and_engines_are_all_kernels(num_ranks: int, num_engines: int, num_cores: int) -> None:
    found, counts, num_processes = list[int](), set[int](), 0
    for engine in range(num_engines):
        config = EngineConfig(
            model=MODEL,
            tensor_parallel_size=num_ranks,
            data_parallel_size=num_engines,
            data_parallel_rank=engine,
        )
        for rank in range(num_ranks):
            share = share_of(config, GPUS["sm_90"], rank, num_cores)
            found.append(share.number)
            counts.add(share.num_shares)
            num_processes += share.num_processes
    (count,) = counts
    assert sorted(found) == list(range(count))
    assert num_processes <= max(num_ranks * num_engines, num_cores - 1)


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
        process = subprocess.Popen([sys.executable, "-S", "-c", self.program], stderr=subprocess.PIPE, process_group=0)
        self.processes.append(process)
        return process


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_kernels_are_compiled_once(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    def starts_processes(**options: Any) -> bool:
        before = len(machine.processes)
        with compiling(EngineConfig(model=MODEL, **options), CUDA) as compilation:
            assert not compilation.waited_s
        assert (compilation.waited_s > 0) == (len(machine.processes) > before)
        return len(machine.processes) > before

    assert [starts_processes(), starts_processes(), starts_processes(kv_cache_dtype="fp8")] == [True, False, True]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # engines' processes log no others
    assert "once for this configuration, which may take minutes" in caplog.text


def test_failure_is_logged_and_next_start_tries_again(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.program = "raise SystemExit('no compiler')"
    for _ in range(2):
        before = len(machine.processes)
        with compiling(EngineConfig(model=MODEL), CUDA):
            pass
        assert len(machine.processes) > before
    failures = [record.message for record in caplog.records if "not all could be compiled ahead" in record.message]
    assert len(failures) == 2
    assert all("(no compiler)" in message for message in failures)


def test_engines_start_where_the_cache_can_only_be_read(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()  # root cannot make a directory in it either
    monkeypatch.setattr(recording_triton, "cache_directory", lambda: tmp_path / "file" / "cache")
    with compiling(EngineConfig(model=MODEL), CUDA):
        pass
    assert machine.processes
    assert "no file can be written" in caplog.text


def test_a_process_that_hangs_is_ended(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.1)
    machine.program = "import time; time.sleep(60)"
    with compiling(EngineConfig(model=MODEL), CUDA):
        pass
    assert machine.processes
    assert all(process.poll() is not None for process in machine.processes)
    assert "(it took more than 0.1 s)" in caplog.text


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


def test_processes_that_a_compiler_has_started_end_with_it(machine: Machine, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    machine.program = f"""
import pathlib, subprocess, time
started = subprocess.Popen(["sleep", "60"])
pathlib.Path({str(pid)!r}).write_text(str(started.pid))
time.sleep(60)
"""

    def fail_once_it_has_started() -> None:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        raise KeyError

    with pytest.raises(KeyError), compiling(EngineConfig(model=MODEL), CUDA):
        fail_once_it_has_started()
    started = Path("/proc") / pid.read_text()
    while started.exists() and (started / "stat").read_text().split()[2] != "Z":
        time.sleep(0.01)


def test_nothing_is_compiled_where_it_is_turned_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILE_AHEAD, "0")
    with compiling(EngineConfig(model=MODEL), CUDA):
        pass
    assert not machine.processes


def test_nothing_is_compiled_on_cpus(machine: Machine) -> None:
    with compiling(EngineConfig(model=MODEL), torch.device("cpu")):
        pass
    assert not machine.processes


DRIVER_FUNCTIONS = (
    *("cuCtxGetCurrent", "cuCtxGetLimit", "cuCtxSetCurrent", "cuCtxSetLimit", "cuDeviceGet", "cuDeviceGetAttribute"),
    *("cuDevicePrimaryCtxRetain", "cuFuncGetAttribute", "cuFuncSetAttribute", "cuFuncSetCacheConfig"),
    *("cuGetErrorString", "cuLaunchKernelEx", "cuModuleGetFunction", "cuModuleLoadData"),
    *("cuOccupancyMaxActiveClusters", "cuPointerGetAttribute", "cuTensorMapEncodeTiled"),
)
"""Functions of NVIDIA's driver that modules which launch kernels call."""


COMPILE_FIRST = """
import runpy
from strandline.kernels import recording_triton

recording, found = recording_triton.recording, []
recording_triton.recording = lambda gpu, take: recording(gpu, lambda variant: found or found.append(take(variant)))
runpy.run_module("strandline.engine.processes.kernel_compiler", run_name="__main__")
"""
"""The program of a compiler, which compiles the first kernel that is found."""


def test_share_is_compiled_into_the_cache(tmp_path: Path) -> None:
    cache, has_launchers = tmp_path / "cache", hasattr(nvidia, "make_launcher") and shutil.which("gcc") is not None
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / "src")}
    if has_launchers:  # functions that do nothing are enough to link and load them
        functions = "".join(f"int {name}(void) {{ return 0; }}" for name in DRIVER_FUNCTIONS)
        command = ["gcc", "-shared", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")]
        subprocess.run(command, input=functions, text=True, check=True)
        environment |= {"LD_LIBRARY_PATH": str(tmp_path)}
    share = Share(EngineConfig(model=MODEL, max_num_seqs=8, max_num_batched_tokens=1024), GPUS["sm_90"], 2, 0, 1)
    command = [sys.executable, "-c", COMPILE_FIRST]
    run = subprocess.run(command, input=pickle.dumps(share), env=environment, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    assert len(list(cache.glob("*/*.cubin"))) >= 1
    assert bool(list(cache.glob("*/__triton_launcher*.so"))) == has_launchers
    assert bool(list(cache.glob("*/cuda_utils*.so"))) == has_launchers


@pytest.mark.parametrize(
    "options",
    [
        {"disk_cache": "cache", "disk_cache_size": "1GiB"},
        {"object_store": "s3://bucket", "object_store_size": "1GiB"},
        {"host_memory": "1GiB", "snapshot_dtype": "bfloat16"},
        {"merge_lora": "adapter=directory"},
        {"reasoning_config": {"reasoning_end_str": "</think>"}},
    ],
    ids=str,
)
def test_no_option_of_tiers_or_files_prevents_a_dry_run(options: dict[str, Any]) -> None:
    dry_config(EngineConfig(model=MODEL, **options))


def dry_start(*arguments: str) -> list[str]:
    """Return the names of kernels that ``dry_starts`` prints, in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = run_forked("tests.cpu.engine.dry_starts", *arguments, environment=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_sums_are_found_for_each_rank() -> None:
    own = {*dry_start("of the second rank alone", MODEL)}
    assert own >= {"collectives.rank_sums_triton._sum_kernel", "collectives.rank_sums_triton._gather_kernel"}


INDEXED_LENGTHS = (129, 2047, 2049, 2060)
"""Around 2,048 tokens, up to which contexts are read whole, and past a block beside a short decode."""

LAUNCHING = {
    "qwen3.5-35b-a3b-fp8": ((9, 31, 200, 257, 300, 320, 511, 2047), (0,)),
    "qwen3.5-27b-fp8": ((96, 132, 144, 192, 208), (0,)),
    "qwen3.5-35b-a3b-nvfp4": ((3, 4, 128, 129, 257), (0,)),
    "glm-5.3-flash-cut": (INDEXED_LENGTHS, (0, 1)),
    "qwen4-exp-cut": (INDEXED_LENGTHS, (0, 1)),
}
"""Configurations, and prompts and decodes beside them that compile nothing."""


@pytest.mark.parametrize(
    "name",
    [
        "qwen3.5-35b-a3b-fp8",
        pytest.param("qwen3.5-27b-fp8", marks=pytest.mark.long),
        pytest.param("qwen3.5-35b-a3b-nvfp4", marks=pytest.mark.long),
        "glm-5.3-flash-cut",
        pytest.param("qwen4-exp-cut", marks=pytest.mark.long),
    ],
)
def test_prompts_of_any_length_launch_what_the_start_compiled(name: str, tmp_path: Path) -> None:
    config = json.loads((ROOT / "benchmarks" / "configs" / name / "config.json").read_text())
    text, (lengths, decodes) = config.get("text_config", config), LAUNCHING[name]
    text |= {key: value[:4] for key, value in text.items() if isinstance(value, list) and key.endswith("_types")}
    text |= {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not dry_start("after the start", str(tmp_path), json.dumps(lengths), json.dumps(decodes))


class Found(NamedTuple):
    """A kernel that notes its compilation."""

    name: str
    compiled: list[str]
    digest: str = "0"

    def compile(self, gpu: Gpu) -> tuple[None, None]:
        assert gpu == GPUS["sm_90"]
        self.compiled.append(self.name)
        return None, None


class InThisProcess:
    exitcode = sentinel = 0

    def __init__(self, target: Callable[..., None]) -> None:
        self.start = target


@pytest.fixture
def finding(monkeypatch: pytest.MonkeyPatch) -> list[Found]:
    """What dry runs find; it is compiled in this process."""
    found = list[Found]()

    @contextmanager
    def recording(_: Gpu, take: Callable[[Any], None]) -> Iterator[None]:
        for each in found:
            take(each)
        yield

    monkeypatch.setattr(kernel_compiler, "can_build_launchers", lambda: False)
    monkeypatch.setattr(kernel_compiler, "wait", lambda _: None)
    monkeypatch.setattr(kernel_compiler, "recording", recording)
    monkeypatch.setattr(kernel_compiler, "run_start", lambda *_: None)
    monkeypatch.setattr(kernel_compiler, "get_context", lambda _: SimpleNamespace(Process=InThisProcess))
    return found


def test_kernels_found_before_a_fault_are_compiled(finding: list[Found], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("no such operation")

    compiled = list[str]()
    finding += [Found(name, compiled) for name in "abc"]
    monkeypatch.setattr(kernel_compiler, "run_start", fail)
    with pytest.raises(NotImplementedError):
        kernel_compiler.compile_share(Share(EngineConfig(model=MODEL), GPUS["sm_90"], 2, 0, 1))
    assert compiled == ["a", "b", "c"]


def test_ranks_compile_their_part_of_the_kernels_first(finding: list[Found], monkeypatch: pytest.MonkeyPatch) -> None:
    config, runs, compiled = EngineConfig(model=MODEL, tensor_parallel_size=2), list[int](), list[str]()
    monkeypatch.setattr(kernel_compiler, "run_start", lambda _, rank: runs.append(rank))
    finding += [Found(name, compiled, digest) for name, digest in (("a", "a1"), ("b", "a2"), ("c", "a3"), ("d", "a4"))]
    for rank in range(2):
        kernel_compiler.compile_share(share_of(config, GPUS["sm_90"], rank, 8))
    assert runs == [0, 1]
    assert compiled == ["b", "d", "a", "c", "a", "c", "b", "d"]


def test_processes_compile_one_kernel_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And other kernels at the same time."""
    monkeypatch.setattr(kernel_compiler, "cache_directory", lambda: tmp_path / "cache")
    context = get_context("fork")
    ended = context.Queue()

    def compile_again(digest: str) -> None:
        with kernel_compiler.compiling_alone(digest):
            ended.put(digest)

    with kernel_compiler.compiling_alone("a" * 64):
        processes = [context.Process(target=compile_again, args=(digit * 64,)) for digit in "ab"]
        for process in processes:
            process.start()
        processes[1].join()
        assert ended.get() == "b" * 64
        assert processes[0].is_alive()
    assert ended.get() == "a" * 64
    processes[0].join()
