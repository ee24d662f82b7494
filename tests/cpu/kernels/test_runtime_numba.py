"""What compiled kernels are made of: rows in memory, exponentials, tasks and threads, and where they are kept."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

import numpy as np

import strandline
from strandline.kernels import runtime_numba as runtime

pytestmark = pytest.mark.skipif(not runtime.has_threads(), reason="torch's threads are not GNU OpenMP's")

PACKAGE = Path(strandline.__file__).parent

NUMBERS = [0.0, -0.0, 1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -3.3, 2**-130, 3.4e38, torch.inf, -torch.inf, torch.nan]
"""Among them ties of rounding, and what bfloat16 rounds to infinity."""


@runtime.kernel("x dtype_of_x y dtype_of_y size counts")
def copy_rows(tasks):  # type: ignore[no-untyped-def]
    args = runtime.arguments(tasks)
    row, counts = np.empty(args.size, np.float32), runtime.ints(args.counts, args.num_tasks)
    task = runtime.claim(tasks)
    while task < args.num_tasks:
        runtime.load(args.x, args.dtype_of_x, task * args.size, row)
        runtime.store(args.y, args.dtype_of_y, task * args.size, row)
        counts[task] += 1
        task = runtime.claim(tasks)


@runtime.kernel("x y sizes factor:float")
def exponentials(tasks):  # type: ignore[no-untyped-def]
    args = runtime.arguments(tasks)
    x, y = runtime.floats(args.x, args.sizes), runtime.floats(args.y, args.sizes)
    task = runtime.claim(tasks)
    while task < args.num_tasks:
        for i in range(x.size):
            y[i] = runtime.exp(np.float32(args.factor) * x[i])
        task = runtime.claim(tasks)


@runtime.kernel("x y bytes sizes factor:float")
def through_e4m3(tasks):  # type: ignore[no-untyped-def]
    args = runtime.arguments(tasks)
    x, y = runtime.floats(args.x, args.sizes), runtime.floats(args.y, args.sizes)
    task = runtime.claim(tasks)
    while task < args.num_tasks:
        runtime.store_e4m3(args.bytes, x, np.float32(args.factor))
        runtime.load_e4m3(args.bytes, y)
        task = runtime.claim(tasks)


def copied(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy rows into another dtype; return them, and how often each was copied."""
    y = torch.empty(x.shape, dtype=dtype)
    counts = torch.zeros(len(x), dtype=torch.int64)
    where = {"x": x.data_ptr(), "y": y.data_ptr(), "counts": counts.data_ptr()}
    kinds = {"dtype_of_x": runtime.kind(x), "dtype_of_y": runtime.kind(y)}
    copy_rows(len(x), size=x.shape[1], **where, **kinds)
    return y, counts


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_converted_as_torch_converts_them(source: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.cat((torch.tensor(NUMBERS), torch.randn(53))).to(source).expand(3, -1).contiguous()
    y, _ = copied(x, dtype)
    torch.testing.assert_close(y, x.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("_two_threads")
def test_every_task_is_done_once_whichever_thread_claims_it() -> None:
    x = torch.randn(5000, 7)
    y, counts = copied(x, torch.float32)
    assert torch.equal(y, x)
    assert counts.tolist() == [1] * 5000


def test_no_tasks_are_no_work() -> None:
    assert copied(torch.empty(0, 4), torch.float32)[0].shape == (0, 4)


def test_exponentials_are_exact_to_two_units_and_let_nan_through() -> None:
    x = torch.cat((torch.linspace(-87, 88, 100_000), torch.tensor([0.0, -1000.0, 1000.0, torch.nan])))
    y = torch.empty_like(x)
    exponentials(1, x=x.data_ptr(), y=y.data_ptr(), sizes=len(x), factor=1.0)
    expected = x[:100_000].double().exp()
    assert ((y[:100_000] - expected).abs() / expected).max() < 2 * 2**-23
    one, least, most, nan = y[100_000:].tolist()
    assert one == 1.0
    assert 0 <= least < 2e-38
    assert 2e38 < most < torch.inf
    assert nan != nan


def test_an_argument_that_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(TypeError, match="factor"):
        exponentials(1, x=0, y=0, sizes=0)
    with pytest.raises(TypeError, match="tempo"):
        exponentials(1, x=0, y=0, sizes=0, factor=1.0, tempo=2)


def test_rows_that_lie_packed_are_not_copied() -> None:
    fused = torch.randn(5, 40)
    rows = fused[:, 8:32].view(5, 3, 8)
    assert runtime.packed_rows(rows) is rows
    assert runtime.packed_rows(fused[:, ::2]).is_contiguous()


def test_kernels_are_compiled_anew_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "strandline").touch()  # a file where the directory should be
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runtime.cache_directory.cache_clear()
    try:
        assert runtime.cache_directory() is None

        @runtime.kernel("out")
        def answer(tasks):  # type: ignore[no-untyped-def]
            runtime.ints(runtime.arguments(tasks).out, 1)[0] = 42

        out = torch.zeros(1, dtype=torch.int64)
        answer(1, out=out.data_ptr())
        assert out.item() == 42
        runtime.cache_directory.cache_clear()
        assert runtime.cache_directory() is None
        [said] = caplog.messages
        assert said.startswith("kernels are compiled at every start")
        assert f"{tmp_path / 'strandline'}" in said
        assert said.endswith("let XDG_CACHE_HOME name a folder that can be written to")
    finally:
        runtime.cache_directory.cache_clear()


def test_kernels_are_kept_by_what_their_sources_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels, constants = tmp_path / "kernels.py", tmp_path / "constants.py"
    kernels.write_text("from constants import EPS")
    monkeypatch.setattr(runtime, "SOURCES", (kernels, constants))
    directories = []
    try:
        for constant in ("EPS = 1e-6", "EPS = 1e-5", "EPS = 1e-6"):
            constants.write_text(constant)
            runtime.cache_directory.cache_clear()
            directories.append(runtime.cache_directory())
    finally:
        runtime.cache_directory.cache_clear()
    first, other, again = directories
    assert first is not None
    assert first.parent == tmp_path / "strandline"
    assert first.is_dir()
    assert first == again != other


ANSWER = """
from strandline.kernels import runtime_numba as runtime

@runtime.kernel("out")
def answer(tasks):
    runtime.ints(runtime.arguments(tasks).out, 1)[0] = {}
"""


def test_kernels_are_shared_by_copies_of_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runtime.cache_directory.cache_clear()
    kept, answers = [], []
    try:
        for folder, number in (("clone", 1), ("other", 1), ("changed", 2)):
            source = tmp_path / folder / "module.py"
            source.parent.mkdir()
            source.write_text(ANSWER.format(number))
            spec = importlib.util.spec_from_file_location("module", source)
            assert spec
            assert spec.loader
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            out = torch.zeros(1, dtype=torch.int64)
            module.answer(1, out=out.data_ptr())
            answers.append(out.item())
            files = tmp_path.glob("strandline/*/*.nb?")
            kept.append({path.name: path.stat().st_mtime_ns for path in files})
    finally:
        runtime.cache_directory.cache_clear()
    assert answers == [1, 1, 2]
    assert len(kept[0]) == 2
    assert kept[0] == kept[1] != kept[2]


def imported(source: Path) -> Iterator[Path]:
    """Find our own files that a file imports names of."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert not node.level
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            path = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
            if path.is_relative_to(PACKAGE) and path.is_file():
                yield path


def test_kernel_sources_include_modules_of_its_constants() -> None:
    reached = set[Path]()
    found = set((PACKAGE / "kernels").rglob("*_numba.py"))
    while found:
        reached |= found
        found = {path for source in found for path in imported(source)} - reached
    assert {PACKAGE / "ids.py", PACKAGE / "kernels" / "recurrences" / "gdn.py"} <= reached
    assert reached <= set(runtime.SOURCES)


@pytest.mark.parametrize("factor", [1.0, 3.0, 2.0**-6])
def test_e4m3_is_rounded_as_in_torch_and_limited(factor: float) -> None:
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    ordered = every[every.isfinite()].unique()
    ties = (ordered[1:] + ordered[:-1]) / 2
    near = [x * (1 + e) for x in (ordered, ties) for e in (-1e-6, 0, 1e-6)]
    x = torch.cat([*near, torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 1e-30]), torch.randn(1000)])
    x, y, stored = x / factor, torch.empty_like(x), torch.empty(len(x), dtype=torch.uint8)
    through_e4m3(1, x=x.data_ptr(), y=y.data_ptr(), bytes=stored.data_ptr(), sizes=len(x), factor=factor)
    expected = (x * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(stored, expected.view(torch.uint8))
    torch.testing.assert_close(y, expected.float(), rtol=0, atol=0, equal_nan=True)
