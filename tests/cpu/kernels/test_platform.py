"""Every operation has one signature, whichever version of it runs."""

import inspect
import pkgutil
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from strandline import kernels
from strandline.kernels import platform

MODULES = [
    import_module(f"strandline.kernels.{found.name}")
    for found in pkgutil.iter_modules(kernels.__path__)
    if not found.name.endswith(("_triton", "_numba")) and found.name != "platform"
]

OPERATIONS = {
    name: function
    for module in MODULES
    for name, function in vars(module).items()
    if hasattr(function, "__wrapped__") and function.__module__ == module.__name__
}

TWINS = {*platform.TWINS, *platform.INVARIANT_TWINS}


def test_every_operation_with_a_twin_is_listed() -> None:
    assert {name for _, name in TWINS} >= set(OPERATIONS)


@pytest.mark.skipif(find_spec("triton") is None, reason="the twins' files import Triton, which is not installed")
@pytest.mark.parametrize(("module", "name"), sorted(TWINS))
def test_a_twin_has_the_signature_of_its_reference(module: str, name: str) -> None:
    twin = getattr(import_module(module), name)
    reference = inspect.unwrap(OPERATIONS[name])
    parameters = [list(inspect.signature(function).parameters.values()) for function in (twin, reference)]
    names = [[(p.name, p.kind, p.default) for p in signature] for signature in parameters]
    assert names[0] == names[1]


def test_other_devices_run_the_torch_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not platform.runs_triton("cpu")
    assert not platform.runs_triton("xpu")
    monkeypatch.setenv("STRANDLINE_TRITON", "0")
    platform.runs_triton.cache_clear()
    assert not platform.runs_triton("cuda")
    platform.runs_triton.cache_clear()


def test_a_tensor_on_a_cpu_never_loads_the_twin() -> None:
    @platform.has_twins(triton="no_such_module")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert double(torch.ones(1)).item() == 2
    platform.TWINS.pop()


def test_the_invariant_twin_is_left_alone_on_a_cpu() -> None:
    @platform.has_invariant_twin("no_such_module")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    platform.set_deterministic(True)
    try:
        assert double(torch.ones(1)).item() == 2
    finally:
        platform.set_deterministic(False)
        platform.INVARIANT_TWINS.pop()


def test_other_devices_say_why_the_torch_versions_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRANDLINE_TRITON", raising=False)
    assert platform.why_torch_serves("xpu", torch.float32) == "there is no working Triton for xpu here"
    monkeypatch.setenv("STRANDLINE_TRITON", "0")
    assert platform.why_torch_serves("xpu", torch.float32) == "STRANDLINE_TRITON is 0"
