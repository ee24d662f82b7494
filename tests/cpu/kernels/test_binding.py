"""Every operation has one signature, and an engine's kernels are chosen once, by what backends declare."""

import inspect
import logging
import os
import pkgutil
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from strandline import kernels
from strandline.env import FUSION
from strandline.kernels import binding
from strandline.kernels.attention.attention import paged_attention
from strandline.kernels.attention.qkv import prepare_qkv
from strandline.kernels.binding import bind_kernels, why_unavailable
from strandline.kernels.gemm.linear import linear
from strandline.kernels.gpu import GPUS, standing_for
from strandline.kernels.operation import Launches, Operation, Workload, operation, triton
from strandline.kernels.recurrences.gdn import gdn_decode, gdn_prefill
from strandline.kernels.rowwise.norm import rms_norm_zero_centered
from strandline.specs import TensorSpec

MODULES = [
    import_module(found.name)
    for found in pkgutil.walk_packages(kernels.__path__, "strandline.kernels.")
    if not found.name.endswith(("_triton", "_numba"))
]

OPERATIONS = {
    found.name: found
    for module in MODULES
    for found in vars(module).values()
    if isinstance(found, Operation) and found.reference.__module__ == module.__name__
}

FUNCTIONS = [
    (name, backend.module, backend.takes_launches)
    for name, declared in sorted(OPERATIONS.items())
    for backend in declared.backends
]

LAUNCHES = ("launches", inspect.Parameter.KEYWORD_ONLY, Launches.MEASURED)

HAS_NUMBA = why_unavailable("Numba", "cpu") is None
NEEDS_NUMBA = pytest.mark.skipif(not HAS_NUMBA, reason="Numba is not installed, or torch's threads are not GNU's")


def state(dtype: str) -> tuple[TensorSpec, ...]:
    return (TensorSpec("state", (2, 8, 8), dtype),)


@pytest.mark.skipif(find_spec("triton") is None, reason="the backends' files import Triton, which is not installed")
@pytest.mark.parametrize(("name", "module", "takes_launches"), FUNCTIONS)
def test_backend_has_the_signature_of_the_reference(name: str, module: str, takes_launches: bool) -> None:
    backend = getattr(import_module(f"strandline.kernels.{module}"), name)
    own, expected = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (backend, OPERATIONS[name].reference)
    )
    assert own == [*expected, LAUNCHES] if takes_launches else own == expected


@pytest.mark.parametrize("device_type", ["xpu", "cuda"])
def test_devices_without_triton_run_references(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bound = bind_kernels([gdn_decode, linear], Workload(device_type, "bfloat16", state("float32")))
    assert (bound[gdn_decode], bound[linear]) == (gdn_decode.reference, linear.reference)
    assert [(x.operation, x.backend, x.reason) for x in bound.fallbacks] == [
        (name, "Triton", f"there is no working Triton for {device_type} here") for name in ("gdn_decode", "linear")
    ]


def test_operations_without_triton_stay_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    @operation()
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bind_kernels([double], Workload("cuda", "float32")).is_compiled_on_gpu


def test_cpu_never_loads_triton_versions() -> None:
    @operation(triton("no_such_module", takes_launches=True))
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for is_deterministic in (False, True):
        bound = bind_kernels([double], Workload("cpu", "float32", is_deterministic=is_deterministic))
        assert bound[double] is double.reference
        assert not bound.fallbacks


@NEEDS_NUMBA
def test_cpu_binds_numba_versions() -> None:
    bound = bind_kernels([gdn_decode, linear], Workload("cpu", "bfloat16", state("float32")))
    assert bound[gdn_decode] is import_module("strandline.kernels.recurrences.gdn_decode_numba").gdn_decode
    assert bound[linear] is linear.reference
    assert not bound.fallbacks


@NEEDS_NUMBA
@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (Workload("cpu", "float16"), "activations are float16, supported: float32 and bfloat16"),
        (Workload("cpu", "bfloat16", state("bfloat16")), "the state is bfloat16, supported: float32"),
    ],
    ids=["activations", "state"],
)
def test_unsupported_dtype_is_reported_at_start(workload: Workload, reason: str) -> None:
    bound = bind_kernels([gdn_prefill, gdn_decode], workload)
    assert bound[gdn_prefill] is gdn_prefill.reference
    assert [(x.operation, x.backend, x.reason) for x in bound.fallbacks] == [
        (name, "Numba", reason) for name in ("gdn_prefill", "gdn_decode")
    ]


@NEEDS_NUMBA
def test_unsupported_head_size_is_reported_at_start() -> None:
    keys = TensorSpec("key", (2, 5), "float32")
    bound = bind_kernels([paged_attention], Workload("cpu", "float32", (keys,)))
    (fallback,) = bound.fallbacks
    assert fallback.reason == "the key has 5 channels, supported: multiples of 2"


def test_environment_is_read_when_kernels_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRANDLINE_NUMBA", "0")
    bound = bind_kernels([rms_norm_zero_centered], Workload("cpu", "float32"))
    assert bound[rms_norm_zero_centered] is rms_norm_zero_centered.reference
    assert [x.reason for x in bound.fallbacks] == ["STRANDLINE_NUMBA is 0"]
    monkeypatch.setenv("STRANDLINE_TRITON", "0")
    assert why_unavailable("Triton", "cuda") == "STRANDLINE_TRITON is 0"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_triton_fuses_products_unless_told_otherwise(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FUSION, before or "")
    if before is None:
        monkeypatch.delenv(FUSION)
    bind_kernels([], Workload("cpu", "float32"))
    assert os.environ.get(FUSION) == before
    with standing_for(GPUS["sm_90"]):
        bind_kernels([], Workload("cuda", "bfloat16"))
    assert os.environ[FUSION] == after


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_deterministic_and_ordinary_kernels_coexist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRANDLINE_TRITON", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ordinary, invariant = (
        bind_kernels(
            [prepare_qkv, rms_norm_zero_centered], Workload("cuda", "bfloat16", is_deterministic=is_deterministic)
        )
        for is_deterministic in (False, True)
    )
    function, fixed = import_module("strandline.kernels.attention.qkv_triton").prepare_qkv, invariant[prepare_qkv]
    assert ordinary[prepare_qkv] is function
    assert isinstance(fixed, partial)
    assert (fixed.func, fixed.args, fixed.keywords) == (function, (), {"launches": Launches.FIXED})
    assert ordinary[rms_norm_zero_centered] is invariant[rms_norm_zero_centered]


@NEEDS_NUMBA
@pytest.mark.parametrize(("num_threads", "num_missing"), [(2, 2), (1, 2), (2, 1)], ids=["both", "one-core", "one"])
def test_several_missing_kernels_are_compiled_on_several_cores(
    num_threads: int, num_missing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = list[tuple[Sequence[str], int]]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(binding, "uncompiled", lambda modules: modules[:num_missing])
    monkeypatch.setattr(
        binding, "compile_modules", lambda modules, num_processes, _report: runs.append((modules, num_processes))
    )
    workload = Workload("cpu", "float32", (TensorSpec("key", (2, 5), "float32"),))  # too few channels for attention
    bind_kernels([linear, gdn_decode, paged_attention, rms_norm_zero_centered], workload)
    is_compiled_ahead = (num_threads, num_missing) == (2, 2)
    assert runs == ([(["recurrences.gdn_decode_numba", "rowwise.norm_numba"], 2)] if is_compiled_ahead else [])
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * is_compiled_ahead


@pytest.mark.parametrize(("times_s", "logged"), [([0, 1, 9], []), ([0, 1, 11, 20], ["2 of 3 are loaded"])])
def test_kernels_that_take_long_to_load_are_logged_once(
    times_s: Sequence[float], logged: Sequence[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(binding, "SYSTEM_CLOCK", iter([0, *times_s]).__next__)
    bind_kernels([linear, gdn_decode, gdn_prefill], Workload("any", "float32"))
    assert [record.message.split("; ")[1] for record in caplog.records] == logged
    assert all(record.levelno == logging.WARNING for record in caplog.records)  # engines' processes log no others


def test_unbound_operation_is_an_error() -> None:
    bound = bind_kernels([linear], Workload("cpu", "float32"))
    with pytest.raises(KeyError, match="gdn_decode"):
        bound[gdn_decode]
