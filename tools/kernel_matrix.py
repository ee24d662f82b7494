"""Compile the kernels of configurations for GPUs, without one, and compare what they take with what the GPUs have.

    python tools/kernel_matrix.py --gpus sm_89,sm_120 benchmarks/configs/qwen3.5-4b
    make kernels-matrix

Which kernels an engine needs is found out by a dry run (``engine/processes/dry_run.py``) for each configuration and
GPU. Of a GPU's kernels that Triton does not tell apart, one is compiled. Each dry run and each kernel takes a process,
as many at once as ``--processes`` says; what is compiled goes first. With ``--store`` a run takes up where another one
ended, by ``--limit`` or by a signal: what is stored are facts, a few hundred bytes of a kernel. Registers and spills
are the assembler's, of a thread; Triton itself checks neither these nor shared memory when it compiles. A configuration
is compiled as it is, with ``--deterministic``, with adapters, and some with drafts; ``--families`` adds the tiny models
of ``tests/cpu/models``.

For GPUs of one generation (8.0, 8.6 and 8.9; 10.0 and 10.3; 12.0 and 12.1) Triton writes the same PTX of most kernels.
What is compiled for one of them is therefore assembled for the others, too. The first kernels of each name and one of
32 thereafter are compiled for each GPU; where their PTX differs by more than the GPU's name, all of that name are.

The exit status is 1 if a kernel does not run, else 3 if the time did not suffice for all.
"""

import argparse
import gc
import hashlib
import io
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
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

SAMPLE = 32
"""Of so many kernels, one is compiled for each GPU of a generation, whatever others of its name have shown."""

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

    gpu: str
    digest: str
    """The variant's."""
    kernel: str
    options: dict[str, Any]
    """Sizes that are compiled in."""
    is_reduced: bool
    resources: Resources | None
    code: str = ""
    """A digest of its PTX, without the GPU's name."""
    compiled_for: str = ""
    """The GPU whose PTX was assembled: this one, or another one of its generation."""
    error: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.gpu, self.digest


def find_kernels(start: Start) -> Found:
    """Return what an engine compiles at its start."""
    from strandline.engine.processes.dry_run import record_start  # loading Triton takes a second

    try:
        variants = record_start(EngineConfig(model=start.model, **start.options), GPUS[start.gpu])
    except ConfigError as refusal:
        return Found(start, [], str(refusal))
    return Found(start, variants)


class Job(NamedTuple):
    """A kernel that is to be compiled."""

    variant: Any
    gpu: str
    alike: list[str]
    """Other GPUs, for which Triton writes the same PTX."""
    unlike: list[str]
    """Other GPUs of the generation."""
    known: Mapping[tuple[str, str], tuple[int, int]]
    """Registers and bytes of a stack of a thread, by GPU and the digest of PTX."""


def compile_one(job: Job) -> list[Compiled]:
    """Compile a kernel for a GPU, and for others of its generation as far as it fits there."""
    import_module("tools.kernel_assembly")  # loading Triton takes a second
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(io.StringIO()):  # the assembler's errors hold PTX
        os.environ |= {"TRITON_CACHE_DIR": directory, "TRITON_DISABLE_LINE_INFO": "1"}
        own, *others = _compile(job, job.gpu, job.alike)
        for gpu in job.unlike if not own.error else ():
            others += _compile(job, gpu, [])
    # What fails elsewhere is compiled again once it is found there, perhaps with another launch.
    return [own, *(other for other in others if not other.error and would_launch(own, other))]


def _compile(job: Job, compiled_for: str, others: list[str]) -> list[Compiled]:
    """Compile a kernel for a GPU, and assemble it for this one and others."""
    compiler: Any = import_module("tools.kernel_assembly")
    variant = job.variant
    try:
        with compiler.without_assembler():
            kernel, taken = variant.compile(GPUS[compiled_for])
        code = compiler.code_of(kernel)
    except Exception as failure:  # noqa: BLE001 -- whatever the compiler fails with
        asked = (variant.digest, variant.name, _sizes(variant.options))
        return [Compiled(compiled_for, *asked, False, None, "", compiled_for, _short(failure))]
    found = list[Compiled]()
    for gpu in (compiled_for, *others):
        resources, error = None, ""
        try:
            per_thread = job.known.get((gpu, code)) or compiler.assemble(kernel, GPUS[gpu])
            resources = Resources(kernel.metadata.shared, *per_thread)
        except Exception as failure:  # noqa: BLE001 -- whatever the assembler fails with
            error = _short(failure)
        facts = (variant.digest, variant.name, _sizes(taken), taken != variant.options, resources, code, compiled_for)
        found.append(Compiled(gpu, *facts, error))
    return found


def _sizes(options: dict[str, Any]) -> dict[str, int]:
    return {key: value for key, value in options.items() if isinstance(value, int)}


def _short(failure: Exception) -> str:
    return f"{type(failure).__name__}: {_last_line(str(failure))}"


def would_launch(own: Compiled, other: Compiled) -> bool:
    """Whether a kernel that fits a GPU would be launched with as many stages on another one."""
    assert other.resources is not None
    room_bytes = GPUS[other.gpu].shared_bytes
    has_choice = other.compiled_for == other.gpu or room_bytes == GPUS[own.gpu].shared_bytes or not own.is_reduced
    return has_choice and other.resources.shared_bytes <= room_bytes


def generation(gpu: str, gpus: Iterable[str]) -> list[str]:
    """Return the other GPUs of a GPU's generation."""
    return [other for other in gpus if other != gpu and GPUS[other].capability[0] == GPUS[gpu].capability[0]]


def is_sample(digest: str) -> bool:
    """Whether a kernel is compiled for each GPU of a generation."""
    return int(digest[:8], 16) % SAMPLE == 0


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
        self.compiled = dict[tuple[str, str], Compiled]()
        self.known = dict[tuple[str, str], tuple[int, int]]()
        """What a thread takes, by GPU and the digest of PTX."""
        self._alike = dict[tuple[str, frozenset[str]], bool]()
        self._found = dict[str, tuple[list[str], str]]()
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._code.update(repr([version(name) for name in ("torch", "triton", "transformers")]).encode())
        for path in (*sorted(PACKAGE.rglob("*.py")), *sorted(Path(CONFIGS).glob("*/config.json"))):
            self._code.update(path.read_bytes())
        for gpu, digest, kernel, options, is_reduced, resources, *rest in self._lines("kernels"):
            self._keep(Compiled(gpu, digest, kernel, options, is_reduced, Resources(*resources), *rest))
        self._found = {key: (digests, refusal) for key, digests, refusal in self._lines("starts")}

    def _lines(self, name: str) -> Iterator[list[Any]]:
        assert self._directory is not None
        path = self._directory / f"{name}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(json.JSONDecodeError):  # empty, or a run ended while it wrote
                yield json.loads(line)

    def _add(self, name: str, line: tuple[Any, ...]) -> None:
        assert self._directory is not None
        with (self._directory / f"{name}.jsonl").open("a") as file:
            file.write(f"\n{json.dumps(line, default=str)}")

    def _key(self, start: Start, choice: str) -> str:
        digest = self._code.copy()
        digest.update(repr((start.gpu, Path(start.model).name, start.options, choice)).encode())
        digest.update((Path(start.model) / "config.json").read_bytes())
        return digest.hexdigest()[:16]

    def load(self, start: Start, choice: str) -> tuple[list[str], str] | None:
        """Return the digests of the kernels of a start, and why no engine can be built, if all have been compiled.

        Args:
            choice: which of a start's kernels are compiled.
        """
        found = self._found.get(self._key(start, choice)) if self._found else None
        return found if found is not None and all(self.has(start.gpu, digest) for digest in found[0]) else None

    def has(self, gpu: str, digest: str) -> bool:
        """Whether a kernel has been compiled, and its PTX may be that of the GPU it was compiled for."""
        compiled = self.compiled.get((gpu, digest))
        if compiled is None or compiled.error:
            return False
        return compiled.compiled_for == gpu or self.is_alike(compiled.kernel, gpu, compiled.compiled_for)

    def is_alike(self, kernel: str, gpu: str, other: str) -> bool:
        """Whether all kernels of this name that were compiled for both GPUs have the same PTX; there are some."""
        return self._alike.get((kernel, frozenset((gpu, other))), False)

    def take_start(self, found: Found, choice: str) -> None:
        """Keep what a start has been found to compile."""
        if self._directory is not None:
            digests = [variant.digest for variant in found.variants]
            self._add("starts", (self._key(found.start, choice), digests, found.refusal))

    def take(self, results: list[Compiled]) -> None:
        """Keep what was compiled; a failure, which may be the machine's, for this run alone."""
        for each in results:
            if each.compiled_for == each.gpu or each.key not in self.compiled:
                self._keep(each)
                if self._directory is not None and not each.error:
                    self._add("kernels", tuple(each))

    def _keep(self, compiled: Compiled) -> None:
        self.compiled[compiled.key] = compiled
        if compiled.resources is None:
            return
        self.known[compiled.gpu, compiled.code] = compiled.resources[1:]
        for gpu in generation(compiled.gpu, GPUS) if compiled.compiled_for == compiled.gpu else ():
            other = self.compiled.get((gpu, compiled.digest))
            if other is not None and other.compiled_for == gpu and other.options == compiled.options:
                pair = compiled.kernel, frozenset((gpu, compiled.gpu))
                self._alike[pair] = self._alike.get(pair, True) and other.code == compiled.code


Result = Found | list[Compiled]
Task = Callable[[], Result]


def run_all(next_task: Callable[[], Task | None], num_processes: int, limit_s: float) -> Iterator[Result]:
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
                    result: Result = receiver.recv()
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
        self._gpus = list(dict.fromkeys(start.gpu for start in self._starts))
        self._pattern, self._is_brief, self._choice = pattern, is_brief, repr((pattern, is_brief))
        self._found = list[tuple[Start, list[str], str]]()
        self._unknown = deque(self._starts)
        self._waiting = deque[tuple[Any, str]]()
        self._begun = set[tuple[str, str]]()
        self.num_unfinished = len(self._starts)

    def run(self, num_processes: int, limit_s: float = MAX_S) -> None:
        """Find and compile all kernels, as far as the time suffices."""
        for result in run_all(self._next_task, num_processes, limit_s):
            self.num_unfinished -= 1
            if isinstance(result, Found):
                variants = chosen(result.variants, self._pattern, is_brief=self._is_brief)
                self._take(result._replace(variants=variants))
            else:
                self._store.take(result)

    def rows(self) -> Iterator[Row]:
        """Yield the kernels that have been compiled, under each configuration, and the configurations refused."""
        for start, digests, refusal in sorted(self._found, key=lambda found: self._starts.index(found[0])):
            if refusal:
                yield Row(start.gpu, _label(start), "the engine", start.options, False, None, refusal)
            for digest in digests:
                found = self._store.compiled.get((start.gpu, digest))
                if found is not None:
                    facts = (found.kernel, found.options, found.is_reduced, found.resources, found.error)
                    yield Row(start.gpu, _label(start), *facts)

    def _next_task(self) -> Task | None:
        while self._unknown and not self._waiting:
            start = self._unknown.popleft()
            stored = self._store.load(start, self._choice)
            if stored is None:
                return partial(find_kernels, start)
            self.num_unfinished -= 1
            self._found.append((start, *stored))
        return partial(compile_one, self._job(*self._waiting.popleft())) if self._waiting else None

    def _job(self, variant: Any, gpu: str) -> Job:
        others = [each for each in generation(gpu, self._gpus) if not self._store.has(each, variant.digest)]
        alike, unlike = list[str](), list[str]()
        for other in others:
            is_known = self._store.is_alike(variant.name, gpu, other) and not is_sample(variant.digest)
            (alike if is_known else unlike).append(other)
        return Job(variant, gpu, alike, unlike, self._store.known)

    def _take(self, found: Found) -> None:
        self._store.take_start(found, self._choice)
        gpu = found.start.gpu
        self._found.append((found.start, [variant.digest for variant in found.variants], found.refusal))
        new = [each for each in found.variants if (gpu, each.digest) not in self._begun]
        new = [each for each in new if not self._store.has(gpu, each.digest)]
        self._begun |= {(gpu, each.digest) for each in new}
        self._waiting += [(variant, gpu) for variant in new]
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
    import_module("tools.kernel_assembly")
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
