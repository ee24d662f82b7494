"""Compilation of an engine's kernels by several processes, while its weights load.

Triton compiles a kernel when it is first launched, one after the other: a minute or two for a model. Here a process
finds out by a dry run (``dry_run.py``) which kernels will be launched, and begins others that compile one each, from
when it is found, into Triton's cache on disk, from where the engine's warm-up requests take them. What is missing there
is compiled at its first launch, as without this: a process that fails or hangs costs time and nothing else.

When all have been compiled, a file in that cache says so, by a digest of what the kernels depend on; the next start
then begins no process.
"""

import hashlib
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

import torch

from strandline import env
from strandline.clock import SYSTEM_CLOCK
from strandline.config import EngineConfig
from strandline.device.hardware.threads import num_cores
from strandline.kernels.binding import why_unavailable
from strandline.kernels.gpu import Gpu, gpu_of
from strandline.text.model_files import find_model

LOGGER: Final = logging.getLogger("strandline.engine")

PACKAGE: Final = Path(__file__).parents[1]

MAX_PROCESSES: Final = 16
"""With more, the kernels of a model that take longest to compile decide."""

MAX_WAIT_S: Final = 600.0
"""How long processes may go on once the weights are loaded: far longer than the compilation of any model's kernels."""


class Share(NamedTuple):
    """What a rank of an engine compiles."""

    config: EngineConfig
    gpu: Gpu
    num_processes: int
    """As many compile at once."""
    number: int
    """Among the shares of the engines that start together."""
    num_shares: int
    """Each compiles its part of the kernels; ranks then what others have not, since some are of one rank alone."""

    @property
    def rank(self) -> int:
        """The engine's rank that compiles."""
        return self.number % self.config.tensor_parallel_size


@dataclass
class Compilation:
    """The compilation of an engine's kernels."""

    waited_s: float = 0.0
    """How long it took beyond what it was to overlap with."""


@contextmanager
def compiling(config: EngineConfig, device: torch.device, rank: int = 0) -> Iterator[Compilation]:
    """Compile the kernels of an engine while the body runs, and wait for them; where a device has none, do nothing."""
    found, done = Compilation(), None
    if device.type == "cuda" and not env.is_compiling_late() and why_unavailable("Triton", device.type) is None:
        compiler = import_module("strandline.kernels.recording_triton")
        digest = _digest(repr((config, rank, gpu_of(device), compiler.VERSION, torch.__version__)), config.model)
        done = compiler.cache_directory() / f"strandline-{digest}"
    if done is None or done.exists():
        yield found
        return
    share = share_of(config, gpu_of(device), rank, num_cores())
    process = _start(share)
    LOGGER.warning(
        "kernels: compiled by %d processes while weights load, once for this configuration, which may take minutes",
        share.num_processes,
    )
    try:
        yield found
        begun_s = SYSTEM_CLOCK()
        error = _finish(process)
        found.waited_s = SYSTEM_CLOCK() - begun_s
    except BaseException:
        _end(process)
        raise
    if not process.returncode:
        _note(done)
        return
    reason = (error or "unknown").splitlines()[-1]
    LOGGER.warning("kernels: not all could be compiled ahead, others follow at their first launch (%s)", reason)


def share_of(config: EngineConfig, gpu: Gpu, rank: int, cores: int) -> Share:
    """Return what one rank of an engine compiles: together with its other ranks, and the server's other engines, which
    start at the same time on the same cores, all kernels.

    A core is left for the weights.
    """
    num_ranks = config.tensor_parallel_size * config.data_parallel_size
    num_processes = max(1, min(MAX_PROCESSES, cores - 1) // num_ranks)
    return Share(config, gpu, num_processes, config.data_parallel_rank * config.tensor_parallel_size + rank, num_ranks)


def _start(share: Share) -> subprocess.Popen[bytes]:
    """Start a process that compiles; it does not use the GPU."""
    process = subprocess.Popen(
        [sys.executable, "-m", "strandline.engine.processes.kernel_compiler"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        process_group=0,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # broken: the process has ended, and says why
        pickle.dump(share, pipe)
    process.stdin = None  # else ``communicate`` would flush it
    return process


def _finish(process: subprocess.Popen[bytes]) -> str:
    """Wait for a process, and return its errors; end it if it takes too long."""
    try:
        _, errors = process.communicate(timeout=MAX_WAIT_S)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"it took more than {MAX_WAIT_S:g} s"
    return errors.decode(errors="replace").strip()


def _note(done: Path) -> None:
    """Write the file that says that all kernels have been compiled, unless the cache can only be read."""
    try:
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()
    except OSError as error:
        LOGGER.warning("kernels: the next start looks for all of them again, as no file can be written (%s)", error)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _digest(options: str, model: str) -> str:
    """Return a digest of what an engine's kernels depend on: options, code, and the sizes of the model."""
    digest = hashlib.sha256(options.encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    for path in sorted(find_model(model).glob("*.json")):
        digest.update(path.read_bytes() if path.name == "config.json" else path.name.encode())
    return digest.hexdigest()[:32]
