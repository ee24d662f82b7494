"""Compile the kernels of configurations for GPUs, without one, and compare what they take with what the GPUs have.

    python tools/kernel_matrix.py --gpus sm_89,sm_120 benchmarks/configs/qwen3.5-4b
    make kernels-matrix

Which kernels an engine needs is found out by a dry run (``engine/processes/dry_run.py``) for each configuration and
GPU. Of kernels that several configurations share, one is compiled. Registers and spills are the assembler's, of a
thread; Triton itself checks neither these nor shared memory when it compiles. A configuration is compiled as it is,
with ``--deterministic``, with adapters, and some with drafts; ``--families`` adds the tiny models of
``tests/cpu/models``.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.kernels.gpu import GPUS

MAX_STACK_BYTES = 1024
"""What a thread may spill: beyond, a kernel reads and writes its own registers more than anything else."""

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


class Task(NamedTuple):
    """Kernels to be compiled in one process."""

    gpu: str
    model: str
    options: dict[str, Any]
    """Of the engine."""
    share: tuple[int, int]
    """Which of how many parts of the kernels."""
    is_brief: bool
    """Whether only the largest tile of each kernel with stages is compiled: these take most shared memory."""
    pattern: str = "*"
    """Names of the kernels that are compiled."""


def compile_all(task: Task) -> list[Row]:
    """Compile kernels of a configuration for a GPU."""
    from strandline.engine.processes.dry_run import record_start  # loading Triton takes a second
    from strandline.kernels.stages_triton import fewer_stages

    name, model, options, (index, count), is_brief, pattern = task
    gpu, label = GPUS[name], f"{Path(model).name}{_label(options)}"
    try:
        variants = record_start(EngineConfig(model=model, **options), gpu)
    except ConfigError as refusal:
        return [Row(name, label, "the engine", options, False, None, str(refusal))]
    variants = [variant for variant in variants if fnmatchcase(variant.name, pattern)]
    if is_brief:
        variants = [variant for variant in variants if fewer_stages(variant.options)]
        variants = list({variant.name: variant for variant in sorted(variants, key=_tile_size)}.values())
    rows = list[Row]()
    for variant in variants[index::count]:
        taken = variant.options
        try:
            kernel, taken = variant.compile(gpu)
            resources, error = measure(kernel), ""
        except Exception as failure:  # noqa: BLE001 -- whatever the compiler or the assembler fails with
            resources, error = None, f"{type(failure).__name__}: {_last_line(str(failure))}"
        sizes = {key: value for key, value in taken.items() if isinstance(value, int)}
        rows.append(Row(name, label, variant.name, sizes, taken != variant.options, resources, error))
    return rows


def _label(options: dict[str, Any]) -> str:
    drafts = options.get("speculative_config")
    names = [name for name in ("deterministic", "enable_lora") if options.get(name)]
    return "".join(f" {name}" for name in [*names, *([drafts["method"]] if drafts else [])])


def _tile_size(variant: Any) -> int:
    return prod(size for name, size in variant.options.items() if name.startswith("BLOCK_"))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


def options_of(model: str, *, is_brief: bool) -> Iterator[dict[str, Any]]:
    """Yield the options that a configuration is compiled with."""
    if is_brief:
        yield FEW_STEPS
        return
    yield from ({}, {"deterministic": True}, {"enable_lora": True})
    yield from ({"speculative_config": drafts} for drafts in DRAFTS.get(Path(model).name, []))


def write_families(directory: Path) -> list[str]:
    """Write the configurations of the tiny models that tests have of each family; return their directories."""
    families: Any = import_module("tests.cpu.models.families")  # with transformers
    for name in families.CONFIGS:
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(families.config_of(name).to_json_string())
    return [str(directory / name) for name in families.CONFIGS]


def compile_matrix(
    models: Iterable[str], gpus: Iterable[str], num_processes: int, *, is_brief: bool = False, pattern: str = "*"
) -> Iterator[Row]:
    """Compile configurations for GPUs; arguments as the attributes of ``Task``."""
    context = multiprocessing.get_context("spawn")
    for gpu in gpus:
        tasks = [
            Task(gpu, model, options, (index, num_processes), is_brief, pattern)
            for model in models
            for options in options_of(model, is_brief=is_brief)
            for index in range(num_processes)
        ]
        with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
            for rows in pool.map(compile_all, tasks):
                yield from rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="directories with a config.json")
    parser.add_argument("--families", action="store_true", help="also the tiny models of all families")
    parser.add_argument("--gpus", default=",".join(GPUS))
    parser.add_argument("--brief", action="store_true", help="only the largest tile of each kernel with stages")
    parser.add_argument("--kernel", default="*", metavar="GLOB", help="only kernels of such a name")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    rows, gpus = list[Row](), options.gpus.split(",")
    with tempfile.TemporaryDirectory() as directory:
        models = [*options.models, *(write_families(Path(directory)) if options.families else [])]
        limits = {"is_brief": options.brief, "pattern": options.kernel}
        for row in compile_matrix(models, gpus, options.processes, **limits):
            rows.append(row)
            if row.problem:
                print(f"{row.gpu} {row.configuration}: {row.kernel} {row.options}: {row.problem}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], default=str))
    print_summary(rows)
    return int(any(row.problem for row in rows))


COLUMNS = (
    *("GPU", "configuration", "kernels", "most shared memory, KiB", "most registers", "with a stack"),
    *("with fewer stages", "do not run"),
)


def print_summary(rows: list[Row]) -> None:
    """Print a line for each GPU and configuration."""
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for gpu, configuration in dict.fromkeys((row.gpu, row.configuration) for row in rows):
        own = [row for row in rows if (row.gpu, row.configuration) == (gpu, configuration)]
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
