"""Measure kernels, on a GPU or, for some cases, on a CPU: one runner for all cases of this folder.

    PYTHONPATH=src python benchmarks/kernels --list
    PYTHONPATH=src python benchmarks/kernels --case 'linear/*' --where rows=1,16 --sweep
    PYTHONPATH=src python benchmarks/kernels --case 'linear/*' --case 'experts/*' --digest --json before.json
    PYTHONPATH=src python benchmarks/kernels --case 'linear/*' --case 'experts/*' --digest --compare before.json

A time on a GPU is that of a call in a CUDA graph that holds one call for each of several sets of arguments, together
larger than the cache; it is the least of three medians of replays, and the cache is overwritten before each. A floor is
the time for the least bytes that have to move (4.3 TB/s on an H200, 3.0 on an H100), or for the operations (700
TFLOP/s, 1,400 in FP8), whichever is longer. Results are compared with the reference implementation.

``--compare`` exits with 1 if a row's time is beyond ``--limit``, its results have other bits (``--digest``), or its
Triton kernels have other numbers of registers, spills or shared bytes. Rows that are beyond the limit are timed twice
more, and the least time counts. Without ``--compare``, it exits with 1 if a result is wrong.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from case import CASES, Case, Launch, Shape, Skipped, Work
from report import Row, bytes_per_s, compare, load, save
from timing import checksum, cpu_times_us, gpu_time_us, recorded_kernels, relative_error, tensors_of
from torch import Tensor

CASE_FILES = (
    "linear",
    "adapters",
    "experts",
    "attention",
    "recurrences",
    "recurrence_peers",
    "logs",
    "norms",
    "sampling",
)
"""Modules that register cases."""

RETRIES = 2


@dataclass
class Measurement:
    """One shape on a device, being measured."""

    work: Work
    device: str
    options: argparse.Namespace
    references: Mapping[tuple[str, str], Row]

    def variants(self) -> Iterator[tuple[str, Callable[..., Any], Launch | None]]:
        """Yield the chosen ways to compute the result, by name, with the launch parameters that they replace."""
        found = [(name, call, None) for name, call in self.work.variants.items()]
        yield from (item for item in found if fnmatchcase(item[0], self.options.variant))
        if self.options.sweep:
            first = next(iter(self.work.variants.values()))
            yield from ((launch.name, first, launch) for launch in self.work.launches())

    def rows(self, shape: str) -> Iterator[Row]:
        """Yield the row of each variant, after a check of its results."""
        work = self.work
        self.expected = self._results(work.reference)[1] if work.reference is not None else None
        moved_us, computed_us = 1e6 * work.num_bytes / bytes_per_s(), 1e6 * work.num_flops / work.flops_per_s
        self.before_us = self._before_us()
        checked: list[tuple[Row, Callable[..., Any]]] = []
        for name, call, launch in self.variants():
            row = Row(shape, name, floor_us=max(moved_us, computed_us) or None, notes=dict(work.notes))
            with launch.in_force() if launch else nullcontext():
                try:
                    self.check(row, call)
                    if self.device == "cuda" and not self.options.untimed:
                        self.time(row, call)
                except Exception as error:  # noqa: BLE001 - a variant that does not run is a result, too
                    row.problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]!r}"
            if self.device == "cuda" or row.problem is not None or launch is not None:
                yield row
            else:
                checked.append((row, call))
        yield from self.rows_on_cpu(checked)

    def rows_on_cpu(self, checked: list[tuple[Row, Callable[..., Any]]]) -> Iterator[Row]:
        """Time variants in turns, and yield their rows."""
        if checked and not self.options.untimed:
            calls = [partial(self._call, call, self.work.arguments[0]) for _, call in checked]
            for (row, _), (least_us, median_us) in zip(checked, cpu_times_us(calls), strict=True):
                row.us, row.notes = least_us, {**row.notes, "median": f"{median_us:.2f} us"}
        yield from (row for row, _ in checked)

    def check(self, row: Row, call: Callable[..., Any]) -> None:
        """Note the kernels that a variant launches, and the error and the checksum of what it returns and writes."""
        with recorded_kernels() as row.kernels:
            returned, results = self._results(call)
        if row.variant in self.work.partial:
            return
        if self.expected is not None:
            row.error = relative_error(results, self.expected)
            row.limit = None if row.variant in self.work.peers else self.work.limit
        if self.options.digest and row.variant not in self.work.peers:
            row.digest = checksum(results)
        del returned

    def time(self, row: Row, call: Callable[..., Any]) -> None:
        """Note the time of a variant."""
        calls = [partial(self._call, call, arguments) for arguments in self.work.arguments]
        in_graph, reference = row.variant not in self.work.eager, self.references.get(row.key)
        row.us = gpu_time_us(calls, in_graph=in_graph) - self.before_us
        for _ in range(RETRIES):
            if reference is not None and reference.us is not None and row.us > self.options.limit * reference.us:
                row.us = min(row.us, gpu_time_us(calls, in_graph=in_graph) - self.before_us)

    def _call(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        before = self.work.before
        return call(*arguments) if before is None else call(before(*arguments), *arguments)

    def _before_us(self) -> float:
        if self.work.before is None or self.device != "cuda" or self.options.untimed:
            return 0.0
        return gpu_time_us([partial(self.work.before, *arguments) for arguments in self.work.arguments])

    def _results(self, call: Callable[..., Any]) -> tuple[Any, list[Tensor]]:
        """Return what a call returns, and the tensors that it returns and writes; what it wrote is restored."""
        arguments = self.work.arguments[0]
        memory = self.work.memory(*arguments)
        saved = [tensor.clone() for tensor in memory]
        returned = self._call(call, arguments)
        results = [*tensors_of(returned), *(tensor.clone() for tensor in memory)]
        for tensor, old in zip(memory, saved, strict=True):
            tensor.copy_(old)
        return returned, results


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; of the command line, unless there are arguments."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", metavar="GLOB", help="cases to measure (default: all); repeatable")
    parser.add_argument(
        "--where", action="append", default=[], metavar="AXIS=GLOB,...", help="values of an axis; repeatable"
    )
    parser.add_argument("--variant", default="*", metavar="GLOB", help="variants to measure (default: all)")
    parser.add_argument("--list", action="store_true", help="print cases and axes, and measure nothing")
    parser.add_argument("--sweep", action="store_true", help="also try launch parameters")
    parser.add_argument("--digest", action="store_true", help="take checksums of results")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows there")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare with the rows of an earlier --json")
    parser.add_argument("--limit", type=float, default=1.01, help="largest ratio of times (default: %(default)s)")
    parser.add_argument("--untimed", action="store_true", help="check results only; compiles what will be timed")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th shape, from the I-th on")
    parser.add_argument("--tiny", action="store_true", help="the smallest shape of each case, of no use for times")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: where a case's times mean something")
    parser.add_argument("--threads", type=int, help="of a CPU (default: torch's)")
    return parser.parse_args(arguments)


def chosen_cases(patterns: list[str] | None) -> list[Case]:
    """Return the cases that match a pattern, or all."""
    for name in CASE_FILES:
        import_module(name)
    wanted = patterns or ["*"]
    if missing := [pattern for pattern in wanted if not any(fnmatchcase(name, pattern) for name in CASES)]:
        raise SystemExit(f"no case matches {' or '.join(missing)}; there are {', '.join(CASES)}")
    return [found for name, found in CASES.items() if any(fnmatchcase(name, pattern) for pattern in wanted)]


def chosen_shapes(options: argparse.Namespace) -> list[Shape]:
    """Return the shapes to measure."""
    cases, where = chosen_cases(options.case), dict(item.partition("=")[::2] for item in options.where)
    if unknown := set(where) - {axis for found in cases for axis in found.axes}:
        raise SystemExit(f"no chosen case has the axis {' or '.join(sorted(unknown))}")
    patterns = {axis: text.split(",") for axis, text in where.items()}
    shapes = [s for c in cases for s in ([c.tiny_shape()] if options.tiny else c.shapes(patterns))]
    index, count = map(int, options.part.split("/"))
    return shapes[index - 1 :: count]


def measure(shape: Shape, options: argparse.Namespace, references: Mapping[tuple[str, str], Row]) -> Iterator[Row]:
    """Yield the rows of a shape; a single one with the reason if it cannot be measured here."""
    device = options.device or shape.case.device
    if device == "cuda" and not torch.cuda.is_available():
        yield Row(shape.name, "*", problem="skipped: it needs a CUDA device")
        return
    torch.manual_seed(crc32(shape.name.encode()))
    try:
        with torch.inference_mode():
            with torch.device(device):
                work = shape.work()
            yield from Measurement(work, device, options, references).rows(shape.name)
    except Skipped as reason:
        yield Row(shape.name, "*", problem=f"skipped: {reason}")
    if device == "cuda":
        torch.cuda.empty_cache()


def print_list(cases: list[Case]) -> None:
    for found in cases:
        axes = "; ".join(f"{axis}: {', '.join(values)}" for axis, values in found.axes.items())
        print(f"{found.name} ({found.device})\n    {axes}")


def print_best(rows: list[Row]) -> None:
    """Print the fastest variants of each shape."""
    by_shape: dict[str, list[Row]] = {}
    for row in rows:
        if row.us is not None and not row.is_wrong:
            by_shape.setdefault(row.shape, []).append(row)
    for shape, timed in by_shape.items():
        best = sorted(timed, key=lambda row: row.us or 0.0)[:5]
        print(f"BEST {shape}: {'; '.join(f'{row.variant} {row.us:.2f}' for row in best)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the options choose, and return the exit status."""
    options = parse(arguments)
    if options.list:
        print_list(chosen_cases(options.case))
        return 0
    if options.threads:
        torch.set_num_threads(options.threads)
    references = load(options.compare)[1] if options.compare else {}
    rows: list[Row] = []
    for shape in chosen_shapes(options):
        for row in measure(shape, options, references):
            rows.append(row)
            print(row.line(), flush=True)
    if options.sweep:
        print_best(rows)
    if options.json:
        save(rows, options.json)
    is_right = not any(row.is_wrong for row in rows)
    if options.compare:
        is_right = compare(rows, options.compare, options.limit) and is_right
    return 0 if is_right else 1
