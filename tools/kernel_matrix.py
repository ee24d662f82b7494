"""Compile the kernels of configurations for GPUs, without one, and compare what they take with what the GPUs have.

    python tools/kernel_matrix.py --gpus sm_89,sm_120 benchmarks/configs/qwen3.5-4b
    make kernels-matrix

Which kernels an engine needs is found out by a dry run (``engine/processes/dry_run.py``) for each configuration and
GPU. Of a GPU's kernels that Triton does not tell apart, one is compiled. Each dry run and each kernel takes a process,
as many at once as ``--processes`` says; what is compiled goes first. With ``--store`` a run takes up where another one
ended, by ``--limit`` or by a signal. Registers and spills are the assembler's, of a thread; Triton itself checks
neither these nor shared memory when it compiles. A configuration is compiled as it is, with ``--deterministic``, with
adapters, and some with drafts; ``--families`` adds the tiny models of ``tests/cpu/models``.

The exit status is 1 if a kernel does not run, else 3 if the time did not suffice for all.
"""

import argparse
import gc
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.kernels.gpu import GPUS

PACKAGE = Path(__file__).parents[1] / "src/strandline"

MAX_STACK_BYTES = 1024
"""What a thread may spill: beyond, a kernel reads and writes its own registers more than anything else."""

MAX_S = 86_400.0
"""How long a run may take."""

CONFIGS = "benchmarks/configs"
MTP = {"method": "mtp", "num_speculative_tokens": 2}
DFLASH = {"method": "dflash", "model": f"{CONFIGS}/qwen3.5-35b-a3b-dflash", "num_speculative_tokens": 15}
DRAFTS: dict[str, list[dict[str, Any]]] = {
    "qwen3.5-35b-a3b": [MTP, DFLASH],
    "qwen3.5-35b-a3b-fp8": [MTP],
    "qwen3.5-35b-a3b-nvfp4": [MTP],
}
"""Drafters of configurations that are also compiled with drafts."""

FEW_STEPS = {"max_num_seqs": 16, "max_num_batched_tokens": 2048}
"""Options for which a dry run has few sizes of steps."""


class Resources(NamedTuple):
    """What a compiled kernel takes."""

    shared_bytes: int
    """Of a program."""
    registers: int
    stack_bytes: int
    """Of a thread: arrays, and registers that were spilled."""


class Row(NamedTuple):
    """A kernel of a configuration, compiled for a GPU."""

    gpu: str
    configuration: str
    kernel: str
    options: dict[str, Any]
    """Sizes that are compiled in, with fewer stages than the launch asks for if that fits."""
    is_reduced: bool
    resources: Resources | None
    """None: it cannot be compiled."""
    error: str = ""

    @property
    def problem(self) -> str:
        """Why it cannot run; empty: it can."""
        if self.resources is None:
            return self.error
        limit = GPUS[self.gpu].shared_bytes
        if self.resources.shared_bytes > limit:
            return f"{self.resources.shared_bytes} bytes of shared memory, {limit} are there"
        if self.resources.stack_bytes > MAX_STACK_BYTES:
            return f"a thread spills {self.resources.stack_bytes} bytes, more than {MAX_STACK_BYTES}"
        return ""


def measure(kernel: Any) -> Resources:
    """Return what a kernel takes that Triton has compiled."""
    import triton  # loading it takes a second, which a parent process need not spend

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack_bytes = (int(re.findall(rf"{name}:(\d+)", text)[0]) for name in ("REG", "STACK"))
    return Resources(kernel.metadata.shared, registers, stack_bytes)


class Start(NamedTuple):
    """The start of an engine on a GPU."""

    gpu: str
    model: str
    options: dict[str, Any]


class Found(NamedTuple):
    """The kernels of a start."""

    start: Start
    variants: list[Any]
    refusal: str = ""
    """Why no engine can be built so."""


class Compiled(NamedTuple):
    """A kernel, compiled for a GPU."""

    digest: str
    """The variant's."""
    options: dict[str, Any]
    """Sizes that are compiled in."""
    is_reduced: bool
    resources: Resources | None
    error: str = ""


def find_kernels(start: Start) -> Found:
    """Return what an engine compiles at its start."""
    from strandline.engine.processes.dry_run import record_start  # loading Triton takes a second

    try:
        variants = record_start(EngineConfig(model=start.model, **start.options), GPUS[start.gpu])
    except ConfigError as refusal:
        return Found(start, [], str(refusal))
    return Found(start, variants)


def compile_one(variant: Any, gpu: str) -> Compiled:
    """Compile a kernel for a GPU."""
    taken = variant.options
    try:
        kernel, taken = variant.compile(GPUS[gpu])
        resources, error = measure(kernel), ""
    except Exception as failure:  # noqa: BLE001 -- whatever the compiler or the assembler fails with
        resources, error = None, f"{type(failure).__name__}: {_last_line(str(failure))}"
    sizes = {key: value for key, value in taken.items() if isinstance(value, int)}
    return Compiled(variant.digest, sizes, taken != variant.options, resources, error)


def chosen(variants: list[Any], pattern: str, *, is_brief: bool) -> list[Any]:
    """Return the kernels of such a name; if that is to be brief, the largest tile of each that has stages, which takes
    most shared memory."""
    variants = [variant for variant in variants if fnmatchcase(variant.name, pattern)]
    if is_brief:
        variants = [variant for variant in variants if len(variant.choices) > 1]
        variants = list({variant.name: variant for variant in sorted(variants, key=_tile_size)}.values())
    return variants


def _label(start: Start) -> str:
    drafts = start.options.get("speculative_config")
    names = [name for name in ("deterministic", "enable_lora") if start.options.get(name)]
    return " ".join([Path(start.model).name, *names, *([drafts["method"]] if drafts else [])])


def _tile_size(variant: Any) -> int:
    return math.prod(size for name, size in variant.options.items() if name.startswith("BLOCK_"))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


def options_of(model: str, *, is_brief: bool) -> Iterator[dict[str, Any]]:
    """Yield the options that a configuration is compiled with."""
    if is_brief:
        yield FEW_STEPS
        return
    yield from ({}, {"deterministic": True}, {"enable_lora": True})
    yield from ({"speculative_config": drafts} for drafts in DRAFTS.get(Path(model).name, []))


def starts_of(models: list[str], gpus: list[str], *, is_brief: bool) -> Iterator[Start]:
    """Yield the starts of configurations, one GPU's after another's."""
    for gpu in gpus:
        for model in models:
            yield from (Start(gpu, model, options) for options in options_of(model, is_brief=is_brief))


def write_families(directory: Path) -> list[str]:
    """Write the configurations of the tiny models that tests have of each family; return their directories."""
    families: Any = import_module("tests.cpu.models.families")  # with transformers
    for name in families.CONFIGS:
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(families.config_of(name).to_json_string())
    return [str(directory / name) for name in families.CONFIGS]


class Store:
    """What earlier runs have found and compiled; without a directory, what this run has."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._code = hashlib.sha256()
        self.compiled = dict[str, Compiled]()
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._code.update(repr([version(name) for name in ("torch", "triton", "transformers")]).encode())
        for path in (*sorted(PACKAGE.rglob("*.py")), *sorted(Path(CONFIGS).glob("*/config.json"))):
            self._code.update(path.read_bytes())
        for line in self._kernels.read_text().splitlines() if self._kernels.exists() else ():
            with suppress(json.JSONDecodeError):  # empty, or a run ended while it wrote
                digest, options, is_reduced, resources, error = json.loads(line)
                taken = Resources(*resources) if resources else None
                self.compiled[digest] = Compiled(digest, options, is_reduced, taken, error)

    @property
    def _kernels(self) -> Path:
        assert self._directory is not None
        return self._directory / "kernels.jsonl"

    def _path(self, start: Start) -> Path:
        assert self._directory is not None
        digest = self._code.copy()
        digest.update(repr((start.gpu, start.options)).encode())
        digest.update((Path(start.model) / "config.json").read_bytes())
        return self._directory / f"{start.gpu}-{_label(start).replace(' ', '-')}-{digest.hexdigest()[:16]}.pickle"

    def load(self, start: Start) -> Found | None:
        """Return what a start has been found to compile."""
        if self._directory is None or not self._path(start).exists():
            return None
        found: Found = pickle.loads(self._path(start).read_bytes())
        return found._replace(start=start)  # its directory may have been a temporary one

    def take(self, result: Found | Compiled) -> None:
        """Keep a result; a failure, which may be the machine's, for this run alone."""
        if isinstance(result, Compiled):
            self.compiled[result.digest] = result
        if self._directory is None or (isinstance(result, Compiled) and result.error):
            return
        if isinstance(result, Compiled):
            with self._kernels.open("a") as file:
                file.write(f"\n{json.dumps(result, default=str)}")
            return
        path = self._path(result.start)
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(result))
        part.replace(path)


Task = Callable[[], Found | Compiled]


def run_all(next_task: Callable[[], Task | None], num_processes: int, limit_s: float) -> Iterator[Found | Compiled]:
    """Run tasks, each in a copy of this process, and yield their results as they come; end when the time is up.

    Args:
        next_task: returns what is to be run; None: nothing before another result.

    Raises:
        RuntimeError: a process ended without a result; it has written why.
    """
    context, end_s = multiprocessing.get_context("fork"), time.monotonic() + limit_s
    running = dict[Any, BaseProcess]()
    try:
        while True:
            while len(running) < num_processes and (task := next_task()) is not None:
                receiver, sender = context.Pipe(duplex=False)
                running[receiver] = context.Process(target=_run, args=(task, sender))
                running[receiver].start()
                sender.close()
            left_s = end_s - time.monotonic()
            if not running or left_s <= 0:
                return
            ready: list[Any] = wait(list(running), left_s)
            for receiver in ready:
                process = running.pop(receiver)
                try:
                    result: Found | Compiled = receiver.recv()
                except EOFError:
                    process.join()
                    raise RuntimeError(f"a process ended with {process.exitcode}") from None
                process.join()
                yield result
    finally:
        for process in running.values():
            process.terminate()


def _run(task: Task, sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    sender.send(task())


class Matrix:
    """Starts of engines, the kernels that they have been found to compile, and what these take."""

    def __init__(self, starts: Iterable[Start], store: Store, pattern: str = "*", *, is_brief: bool = False) -> None:
        self._starts, self._store = list(starts), store
        self._pattern, self._is_brief = pattern, is_brief
        self._found = list[Found]()
        self._unknown = deque(self._starts)
        self._waiting = deque[tuple[Any, str]]()
        self._begun = set(store.compiled)
        self.num_unfinished = len(self._starts)

    def run(self, num_processes: int, limit_s: float = MAX_S) -> None:
        """Find and compile all kernels, as far as the time suffices."""
        for result in run_all(self._next_task, num_processes, limit_s):
            self._store.take(result)
            self.num_unfinished -= 1
            if isinstance(result, Found):
                self._take(result)

    def rows(self) -> Iterator[Row]:
        """Yield the kernels that have been compiled, under each configuration, and the configurations refused."""
        for start, variants, refusal in sorted(self._found, key=lambda found: self._starts.index(found.start)):
            if refusal:
                yield Row(start.gpu, _label(start), "the engine", start.options, False, None, refusal)
            for variant in variants:
                if variant.digest in self._store.compiled:
                    yield Row(start.gpu, _label(start), variant.name, *self._store.compiled[variant.digest][1:])

    def _next_task(self) -> Task | None:
        while self._unknown and not self._waiting:
            start = self._unknown.popleft()
            found = self._store.load(start)
            if found is None:
                return partial(find_kernels, start)
            self.num_unfinished -= 1
            self._take(found)
        return partial(compile_one, *self._waiting.popleft()) if self._waiting else None

    def _take(self, found: Found) -> None:
        variants = chosen(found.variants, self._pattern, is_brief=self._is_brief)
        self._found.append(found._replace(variants=[variant._replace(choices=()) for variant in variants]))
        new = {variant.digest: variant for variant in variants if variant.digest not in self._begun}
        self._begun |= set(new)
        self._waiting += [(variant, found.start.gpu) for variant in new.values()]
        self.num_unfinished += len(new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="directories with a config.json")
    parser.add_argument("--families", action="store_true", help="also the tiny models of all families")
    parser.add_argument("--gpus", default=",".join(GPUS))
    parser.add_argument("--brief", action="store_true", help="only the largest tile of each kernel with stages")
    parser.add_argument("--kernel", default="*", metavar="GLOB", help="only kernels of such a name")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--store", type=Path, metavar="DIR", help="keep results here, and take those of earlier runs")
    parser.add_argument("--limit", type=float, default=MAX_S, metavar="SECONDS", help="end after so long")
    options = parser.parse_args()
    end_s = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory() as directory:
        models = [*options.models, *(write_families(Path(directory)) if options.families else [])]
        starts = starts_of(models, options.gpus.split(","), is_brief=options.brief)
        matrix = Matrix(starts, Store(options.store), options.kernel, is_brief=options.brief)
        load_compiler(options.gpus.split(","))
        matrix.run(options.processes, end_s - time.monotonic())
    rows = list(matrix.rows())
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], default=str))
    for row in rows:
        if row.problem:
            print(f"{row.gpu} {row.configuration}: {row.kernel} {row.options}: {row.problem}")
    print_summary(rows)
    if matrix.num_unfinished:
        print(f"not complete: at least {matrix.num_unfinished} dry runs and kernels are left")
    return 1 if any(row.problem for row in rows) else 3 if matrix.num_unfinished else 0


def load_compiler(gpus: Iterable[str]) -> None:
    """Load what processes that are copies of this one need."""
    from strandline.kernels.recording_triton import read_compiler

    import_module("strandline.engine.processes.dry_run")
    for gpu in gpus:
        read_compiler(GPUS[gpu])
    gc.freeze()


COLUMNS = (
    *("GPU", "configuration", "kernels", "most shared memory, KiB", "most registers", "with a stack"),
    *("with fewer stages", "do not run"),
)


def print_summary(rows: list[Row]) -> None:
    """Print a line for each GPU and configuration."""
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for (gpu, configuration), group in groupby(rows, lambda row: (row.gpu, row.configuration)):
        own = list(group)
        taken = [row.resources for row in own if row.resources is not None]
        values = (
            len(own),
            max((each.shared_bytes for each in taken), default=0) // 1024,
            max((each.registers for each in taken), default=0),
            sum(each.stack_bytes > 0 for each in taken),
            sum(row.is_reduced for row in own),
            sum(bool(row.problem) for row in own),
        )
        print(f"| {gpu} | {configuration} | {' | '.join(map(str, values))} |")


if __name__ == "__main__":
    sys.exit(main())
