"""Kernels fit into GPUs with less shared memory than those that they are measured on, and each is compiled once."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cpu.server.forked import run_forked
from tools import kernel_matrix
from tools.kernel_matrix import Compiled, Found, Job, Matrix, Resources, Row, Start, Store

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("architecture", "model", "kernel"),
    [
        ("sm_89", "qwen3.5-4b", "*_advance_kernel"),
        pytest.param("sm_89", "qwen3.5-35b-a3b", "*", marks=pytest.mark.long),
        pytest.param("sm_120", "qwen3.5-35b-a3b-fp8", "*", marks=pytest.mark.long),
        pytest.param("sm_86", "nemotron-3-nano-30b-a3b", "*", marks=pytest.mark.long),
        pytest.param("sm_86", "qwen3.5-35b-a3b-mxfp8", "*", marks=pytest.mark.long),
        pytest.param("sm_120", "glm-5.3-flash-cut", "*", marks=pytest.mark.long),
        pytest.param("sm_120", "inkling-cut", "*", marks=pytest.mark.long),
        pytest.param("sm_120", "qwen4-exp-cut", "*", marks=pytest.mark.long),
    ],
)
def test_largest_tiles_fit(architecture: str, model: str, kernel: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    options = ["--brief", "--processes", "1", "--gpus", architecture, "--kernel", kernel]
    directory = ROOT / "benchmarks" / "configs" / model
    run = run_forked("tools.kernel_matrix", *options, str(directory), environment=environment)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert f"| {architecture} | {model}" in run.stdout


@pytest.mark.parametrize(
    ("shared_kib", "stack_bytes", "problem"),
    [
        (99, 1024, ""),
        (100, 0, "102400 bytes of shared memory, 101376 are there"),
        (99, 1032, "a thread spills 1032 bytes, more than 1024"),
    ],
)
def test_kernel_beyond_a_limit_is_a_problem(shared_kib: int, stack_bytes: int, problem: str) -> None:
    row = Row("sm_89", "model", "kernel", {}, False, Resources(shared_kib * 1024, 255, stack_bytes))
    assert row.problem == problem


class Kernel(NamedTuple):
    """A kernel that is not compiled."""

    name: str
    digest: str
    choices: tuple[()] = ()


MODELS = {"one": ["a1", "b1"], "two": ["b1", "c1"]}
"""Configurations, and what they compile."""

TAKEN = Resources(1024, 32, 0)


@pytest.fixture
def starts(tmp_path: Path) -> list[Start]:
    for model in MODELS:
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text("{}")
    return [Start(gpu, str(tmp_path / model), {}) for gpu in ("sm_89", "sm_120") for model in MODELS]


def compiled(gpu: str, digest: str, code: str = "", compiled_for: str = "") -> Compiled:
    return Compiled(gpu, digest, digest[0], {"BLOCK": 32}, False, TAKEN, code, compiled_for or gpu)


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with a line for each dry run and each kernel compiled; neither takes place."""
    path = tmp_path / "done"

    def find(start: Start) -> Found:
        with path.open("a") as file:
            file.write(f"{start.gpu} {Path(start.model).name}\n")
        return Found(start, [Kernel(name, name) for name in MODELS[Path(start.model).name]])

    def compile_one(job: Job) -> list[Compiled]:
        kernel = job.variant.name
        with path.open("a") as file:
            file.write(f"{job.gpu} {kernel}\n")
        return [compiled(job.gpu, job.variant.digest)]

    monkeypatch.setattr(kernel_matrix, "find_kernels", find)
    monkeypatch.setattr(kernel_matrix, "compile_one", compile_one)
    return path


EVERYTHING = [f"{gpu} {each}" for gpu in ("sm_89", "sm_120") for each in (*MODELS, "a1", "b1", "c1")]
ROWS = [
    Row(gpu, model, name[0], {"BLOCK": 32}, False, TAKEN)
    for gpu in ("sm_89", "sm_120")
    for model, names in MODELS.items()
    for name in names
]


@pytest.mark.parametrize("num_processes", [1, 3])
def test_kernel_of_several_configurations_is_compiled_once(starts: list[Start], done: Path, num_processes: int) -> None:
    matrix = Matrix(starts, Store(None))
    matrix.run(num_processes)
    assert list(matrix.rows()) == ROWS
    assert sorted(done.read_text().splitlines()) == sorted(EVERYTHING)
    assert not matrix.num_unfinished


def test_run_continues_where_another_one_ended(starts: list[Start], done: Path, tmp_path: Path) -> None:
    Matrix(starts[:1], Store(tmp_path / "store"), "a*").run(1)
    with (tmp_path / "store" / "kernels.jsonl").open("a") as file:
        file.write('\n["sm_89", "b", {"BLO')  # ended while it wrote
    matrix = Matrix(starts, Store(tmp_path / "store"))
    matrix.run(1)
    assert list(matrix.rows()) == ROWS
    again = Matrix(starts, Store(tmp_path / "store"))
    again.run(1)
    assert list(again.rows()) == ROWS
    assert sorted(done.read_text().splitlines()) == sorted(
        ["sm_89 one", *EVERYTHING]
    )  # first, one kernel was asked for


def test_kernel_that_failed_is_compiled_again(
    starts: list[Start], done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Job) -> list[Compiled]:
        facts = (job.variant.digest, job.variant.name, {}, False, None, "", job.gpu, f"no {job.gpu}")
        return [Compiled(job.gpu, *facts)]

    with monkeypatch.context() as patch:
        patch.setattr(kernel_matrix, "compile_one", fail)
        matrix = Matrix(starts[:1], Store(tmp_path / "store"))
        matrix.run(1)
        assert [row.problem for row in matrix.rows()] == ["no sm_89"] * 2
    matrix = Matrix(starts[:1], Store(tmp_path / "store"))
    matrix.run(1)
    assert list(matrix.rows()) == ROWS[:2]
    assert done.read_text().splitlines() == ["sm_89 one", "sm_89 one", "sm_89 a1", "sm_89 b1"]


@pytest.mark.usefixtures("done")
def test_run_ends_when_time_is_up(starts: list[Start]) -> None:
    matrix = Matrix(starts, Store(None))
    matrix.run(1, limit_s=0)
    assert not list(matrix.rows())
    assert matrix.num_unfinished == len(starts)


def test_process_that_ends_without_a_result_is_an_error(starts: list[Start], monkeypatch: pytest.MonkeyPatch) -> None:
    def end(start: Start) -> Any:
        os._exit(5)

    monkeypatch.setattr(kernel_matrix, "find_kernels", end)
    with pytest.raises(RuntimeError, match="a process ended with 5"):
        Matrix(starts, Store(None)).run(2)


def share(monkeypatch: pytest.MonkeyPatch, starts: list[Start], kernels: list[str], unlike: list[str]) -> list[str]:
    """Compile kernels, whose names are the first letters of their digests, for both GPUs of a generation.

    Args:
        unlike: kernels whose PTX differs.

    Returns:
        Each compilation: the GPU and the kernel, then the other GPU, unless the kernel is assembled for that alone.
    """
    jobs = list[str]()

    def compile_one(job: Job) -> list[Compiled]:
        digest = job.variant.digest
        jobs.append(" ".join((job.gpu, digest, *job.unlike)))
        own = [compiled(gpu, digest, gpu if digest in unlike else "") for gpu in (job.gpu, *job.unlike)]
        return own + [compiled(gpu, digest, own[0].code, job.gpu) for gpu in job.alike]

    def run_all(next_task: Any, *_: Any) -> Any:
        while (task := next_task()) is not None:
            yield task()

    found = [Kernel(digest[0], digest) for digest in kernels]
    monkeypatch.setattr(kernel_matrix, "find_kernels", lambda start: Found(start, found))
    monkeypatch.setattr(kernel_matrix, "compile_one", compile_one)
    monkeypatch.setattr(kernel_matrix, "run_all", run_all)
    monkeypatch.setattr(kernel_matrix, "is_sample", lambda digest: digest.endswith("s"))
    matrix = Matrix([starts[0]._replace(gpu=gpu) for gpu in ("sm_120", "sm_121")], Store(None))
    matrix.run(1)
    assert len(list(matrix.rows())) == 2 * len(kernels)
    assert not matrix.num_unfinished
    return jobs


def test_same_ptx_is_only_assembled_again(monkeypatch: pytest.MonkeyPatch, starts: list[Start]) -> None:
    jobs = share(monkeypatch, starts, ["a1", "a2", "b1", "b2", "as", "a3"], ["b1", "b2"])
    assert jobs == [
        "sm_120 a1 sm_121",
        "sm_120 a2",
        "sm_120 b1 sm_121",
        "sm_120 b2 sm_121",
        "sm_120 as sm_121",
        "sm_120 a3",
    ]


def test_kernels_are_compiled_again_once_one_differs(monkeypatch: pytest.MonkeyPatch, starts: list[Start]) -> None:
    jobs = share(monkeypatch, starts, ["a1", "a2", "as", "a3"], ["as"])
    assert jobs == ["sm_120 a1 sm_121", "sm_120 a2", "sm_120 as sm_121", "sm_120 a3 sm_121", "sm_121 a2"]


@pytest.mark.parametrize(
    ("gpu", "other", "shared_kib", "is_reduced", "launches"),
    [
        ("sm_89", "sm_86", 90, True, True),
        ("sm_80", "sm_86", 90, False, True),
        ("sm_80", "sm_86", 90, True, False),
        ("sm_80", "sm_86", 100, False, False),
    ],
)
def test_assembled_kernels_are_those_launched(
    gpu: str, other: str, shared_kib: int, *, is_reduced: bool, launches: bool
) -> None:
    taken = Resources(shared_kib * 1024, 32, 0)
    own, assembled = (compiled(each, "a1", "", gpu)._replace(resources=taken) for each in (gpu, other))
    assert kernel_matrix.would_launch(own._replace(is_reduced=is_reduced), assembled) is launches
