"""Launches that begin early read nothing that launches which may still run have written.

Kernels run in the interpreter, where programs follow each other: no result would show such a read. Instead every
address is noted: what a launch stores, and what it loads before it waits.
"""
# mypy: ignore-errors

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from strandline.device.uni_executor import choose_kernels
from strandline.kernels import binding, overlap_triton
from strandline.kernels.experts import few_triton
from strandline.kernels.gemm.formats import fp8
from strandline.kernels.gemm.gemms_triton import linear
from strandline.kernels.gemm.low_rank import LowRankTerm
from strandline.kernels.gemm.weights import DenseWeight, StackedWeight
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.norm_triton import rms_norm
from strandline.models.model_options import ModelOptions
from strandline.models.weights import load_model
from tests.cpu.kernels.experts.test_projected_mixture import Layer
from tests.cpu.kernels.gemm import formats
from tests.cpu.kernels.gemm.formats import of_every_format
from tests.cpu.kernels.gemm.test_gemms_triton import PRELOADED, preloading
from tests.cpu.kernels.gemm.test_low_rank import Case, build, random_slots, tiles
from tests.cpu.kernels.test_triton_models import NO_LAUNCHES, save_in
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.families import prompt

WORD_BYTES = 4
"""Addresses are compared by words of this size."""


@dataclass
class Launch:
    """A kernel's launch: what it stored, and whether all its programs let the next launch begin before they waited."""

    name: str
    releases_first: bool = True
    num_waits: int = 0
    stored: list[np.ndarray] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Notes what launches read too early, and operations of torch, which begin when all before has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self.faults: set[str] = set()
        self._running: list[Launch] = []
        self._launch = Launch("")
        self._is_launching, self._has_waited, self._has_released = False, True, True
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        builder = interpreter.InterpreterBuilder
        self._wrap(monkeypatch, interpreter.GridExecutor, "__call__", self._begin)
        self._wrap(monkeypatch, builder, "set_grid_idx", self._begin_program)
        self._wrap(monkeypatch, builder, "create_masked_load", self._load)
        self._wrap(monkeypatch, builder, "create_masked_store", self._store)
        monkeypatch.setattr(overlap_triton, "gdc_wait", self._wait)
        monkeypatch.setattr(overlap_triton, "gdc_launch_dependents", self._release)
        monkeypatch.setattr(overlap_triton, "_options", lambda *_: {"OVERLAPS": True, "launch_pdl": True})

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Any) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            found = original(*args, **kwargs)
            if note == self._begin:
                self._end()
            return found

        monkeypatch.setattr(owner, name, noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The interpreter's own operations on arguments are none of the device's.
        if not self._is_launching and not func.is_view and func.overloadpacket not in NO_LAUNCHES:
            self._running.clear()
        return func(*args, **(kwargs or {}))

    def _begin(self, executor: Any, *args: Any, launch_pdl: bool = False, **kwargs: Any) -> None:
        if not launch_pdl:
            self._running.clear()
        self._is_launching = True
        self._launch, self._can_overlap = Launch(executor.fn.__name__), launch_pdl
        self.names.append(self._launch.name)
        self._has_waited = self._has_released = True

    def _begin_program(self, *args: Any) -> None:
        self._end_program()
        self._has_waited = self._has_released = not self._can_overlap

    def _end_program(self) -> None:
        """A program that ends lets the next launch begin, too."""
        if not self._has_waited:
            self._has_released = True

    def _end(self) -> None:
        self._is_launching = False
        self._end_program()
        launch = self._launch
        if not launch.num_waits:
            if self._can_overlap:
                self.faults.add(f"{launch.name} never waits")
            launch.releases_first = False
        if not launch.releases_first:
            self._running.clear()
        self._running.append(launch)

    def _wait(self, *args: Any, **kwargs: Any) -> None:
        self._launch.num_waits += 1
        if not self._has_released:
            self._launch.releases_first = False
        self._has_waited = True

    def _release(self, *args: Any, **kwargs: Any) -> None:
        self._has_released = True

    def _load(self, _: Any, pointers: Any, mask: Any, *args: Any, **options: Any) -> None:
        if self._has_waited:
            return
        loaded = words(pointers, mask)
        for launch in self._running:
            if any(np.isin(loaded, stored).any() for stored in launch.stored):
                self.faults.add(f"{self._launch.name} reads what {launch.name} writes")

    def _store(self, _: Any, pointers: Any, value: Any, mask: Any, *args: Any, **options: Any) -> None:
        if not self._has_waited:
            self.faults.add(f"{self._launch.name} writes before it waits")
        self._launch.stored.append(words(pointers, mask))


def words(pointers: Any, mask: Any) -> np.ndarray:
    return np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)] // WORD_BYTES)


def watch_steps(name: str, form: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Run and watch a prompt and two decodes of one sequence."""
    dtype = torch.float32 if form == "dense" else torch.bfloat16
    model = partial(
        load_model, save_in(form, name, directory), ModelOptions(dtype=dtype, keeps_quantized=form != "dense")
    )()
    model.lay_out(DenseWeight)
    monkeypatch.setattr(binding, "_why_no_triton", lambda device_type: None)
    driver, sequence = Driver(model, kernels=choose_kernels(model, "cuda", is_deterministic=False)), Running()
    watch = Watch(monkeypatch)
    with watch:
        driver.step([Part(sequence, prompt(6))])
        for token in prompt(2):
            driver.step([Part(sequence, [token])])
    return watch


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3_5_moe", "FP8"),
        ("kimi_linear", "dense"),
        ("nemotron_h", "dense"),
        ("jamba", "dense"),
        # Most of their kernels are those of the others.
        *(
            pytest.param(name, "dense", marks=pytest.mark.long)
            for name in (
                "gpt_oss",
                "recurrent_gemma",
                "minimax",
                "zaya",
                "glm5_next",
                "inkling",
                "inkling2",
                "qwen4_exp",
            )
        ),
        *(pytest.param("qwen3_5_moe", form, marks=pytest.mark.long) for form in ("dense", "compressed", "modelopt")),
    ],
)
def test_no_launch_reads_what_may_not_be_written_yet(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_steps(name, form, tmp_path, monkeypatch)
    assert "_norm_kernel" in watch.names
    assert watch.faults == set()


@pytest.mark.parametrize("num_rows", [1, 4, 20])
@of_every_format
def test_products_with_adapters_read_nothing_too_early(
    case: formats.Case, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = Case(random_slots(num_rows, 2), [0] * 100 + [1] * 28, [[5, 16], [16, 1]], 128)
    term = LowRankTerm(build(adapted, torch.bfloat16, "cpu"), tiles(adapted.slots_T, 2, "cpu"))
    weights = [case.weight(128, 128, dtype=torch.bfloat16) for _ in range(2)]
    x_TI, gain_I = torch.randn(num_rows, 128).bfloat16(), torch.ones(128, dtype=torch.bfloat16)
    watch = Watch(monkeypatch)
    with watch:
        x_TI = rms_norm(x_TI, gain_I, 1e-6)
        for weight in weights:
            x_TI = linear(x_TI, weight, None, term)
    assert ("_tiles_kernel" if num_rows > 4 else "_gemv_kernel") in watch.names
    assert watch.faults == set()


def test_preloaded_products_read_only_weights_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8.FP8, "launches", preloading(PRELOADED._replace(min_numbers=1)))
    # The interpreter runs no assembly; this one copies registers.
    builder = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
    monkeypatch.setattr(builder, "create_inline_asm", lambda *args: SimpleNamespace(get_result=args[3].__getitem__))
    dense = DenseWeight(torch.randn(20, 512).bfloat16())
    weights = formats.scaled_weight(512, 512), StackedWeight((formats.scaled_weight(512, 512), dense))
    x_TI, gain_I = torch.randn(3, 512).bfloat16(), torch.ones(512, dtype=torch.bfloat16)
    watch = Watch(monkeypatch)
    with watch:
        x_TI = rms_norm(x_TI, gain_I, 1e-6)
        for weight in weights:
            x_TI = linear(x_TI, weight)
    assert watch.names.count("_preloaded_kernel") == 2
    assert watch.faults == set()


@pytest.mark.parametrize("is_fp8", [False, True])
def test_layers_of_experts_read_nothing_too_early(monkeypatch: pytest.MonkeyPatch, *, is_fp8: bool) -> None:
    layer, gain_D = Layer((128, 128, 128), "cpu", is_fp8=is_fp8, is_gated=True), torch.ones(128)
    x_TD, residual_TD = torch.randn(2, 2, 128)
    watch = Watch(monkeypatch)
    with watch:
        x_TD = rms_norm(x_TD, gain_D, 1e-6)
        for _ in range(2):
            x_TD, residual_TD = layer.run(x_TD, residual_TD, is_zero_centered=True, launches=Launches.MEASURED)
    assert watch.names == ["_norm_kernel", *["_gemv_kernel", "_few_up_kernel", "_few_down_kernel"] * 2]
    assert watch.faults == set()


@triton.jit
def _do_nothing(OVERLAPS: tl.constexpr):
    pass


def test_a_missing_wait_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_triton, "wait_for_previous", _do_nothing)
    watch = watch_steps("nemotron_h", "dense", tmp_path, monkeypatch)
    assert watch.faults == {
        "_few_up_kernel never waits",
        "_few_up_kernel reads what _gemv_kernel writes",
        "_few_up_kernel writes before it waits",
        "_few_down_kernel never waits",
        "_few_down_kernel reads what _few_up_kernel writes",
        "_few_down_kernel writes before it waits",
    }
