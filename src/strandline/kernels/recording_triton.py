"""Kernels that host functions would launch, recorded instead of launched, to be compiled without a GPU.

A *variant* is a kernel with what it is compiled for: types and divisibility of arguments, constants and options. Which
variants an engine needs follows from shapes and dtypes alone, so that tensors without memory (device ``meta``) do.
Variants can be pickled: kernels and device functions by their names.
"""
# mypy: ignore-errors

import copyreg
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import compile, make_backend
from triton.knobs import cache as compiled_files
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction, compute_cache_key

from strandline.kernels.gpu import Gpu, standing_for
from strandline.kernels.stages_triton import with_fewer_stages

VERSION = triton.__version__

OPTIONS_OF_TARGET = {"arch", "supported_fp8_dtypes", "deprecated_fp8_dot_operand_dtypes"}
"""Options of the compiler that follow from the GPU it compiles for."""


class Source(NamedTuple):
    """What Triton compiles."""

    language: type
    """Triton's class of sources."""
    function: JITFunction
    signature: dict[str, Any]
    """Types of arguments by name."""
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    """Properties of arguments, such as divisibility."""
    compiler_options: dict[str, Any]
    """But for those that follow from the GPU."""

    def compile(self, target: GPUTarget) -> Any:
        """Return what Triton compiles, from its cache on disk if that has been done."""
        source = self.language(self.function, self.signature, self.constants, self.attributes)
        return compile(source, target=target, options=self.compiler_options)


class Variant(NamedTuple):
    """A kernel, and what it is compiled for."""

    name: str
    """Module and function."""
    digest: str
    """Equal for launches that run one compiled kernel."""
    choices: tuple[tuple[dict[str, Any], Source], ...]
    """Constants that are compiled in, and options of the compiler, with what is compiled: those of the launch, then
    those with fewer and fewer stages."""

    @property
    def options(self) -> dict[str, Any]:
        """Constants that are compiled in, and options of the compiler."""
        return self.choices[0][0]

    def compile(self, gpu: Gpu) -> tuple[Any, dict[str, Any]]:
        """Return what Triton compiles for a GPU, with fewer stages if it does not fit, and the options."""
        for options, source in self.choices:
            found = source.compile(target_of(gpu)), options
            if found[0].metadata.shared <= gpu.shared_bytes:
                break
        return found


class _NoDevice:
    """What Triton asks its driver about a GPU, where there is none."""

    def __init__(self, gpu: Gpu) -> None:
        self._target = target_of(gpu)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        # Functions cache what they know of a device by this.
        return str(self._target)

    def get_current_stream(self, device: Any = None) -> int:
        return 0


def target_of(gpu: Gpu) -> GPUTarget:
    """Return a GPU as Triton's compiler names it."""
    return GPUTarget("cuda", int(gpu.architecture.removeprefix("sm_")), 32)


def read_compiler(gpu: Gpu) -> None:
    """Take digests of the compiler and its tools, a second of work that processes forked afterwards need not repeat."""
    triton_key()
    make_backend(target_of(gpu)).hash()


def can_build_launchers() -> bool:
    """Return whether this machine has NVIDIA's driver, and launchers have to be built."""
    if not hasattr(nvidia, "make_launcher"):  # later versions launch all kernels by one function
        return False
    try:
        return bool(nvidia.libcuda_dirs())
    except (AssertionError, OSError):
        return False


def build_driver() -> None:
    """Build the module by which Triton loads kernels, which it does before its first launch."""
    nvidia.CudaUtils()


def build_launcher(kernel: Any) -> None:
    """Build the module that launches kernels of this one's signature.

    Triton does so before the first launch, a fifth of a second for each signature.
    """
    nvidia.CudaLauncher(kernel.src, kernel.metadata)


def cache_directory() -> Path:
    """Return the directory where Triton stores what it has compiled."""
    return Path(compiled_files.dir)


@contextmanager
def recording(gpu: Gpu, take: Callable[[Variant], None]) -> Iterator[None]:
    """Pass on each variant once that is launched on a GPU that the device ``meta`` stands for; launch nothing."""
    seen = set()
    run = JITFunction.run

    def record(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del grid, warmup
        _, keys, _, backend, binder = function.device_caches[driver.active.get_current_device()]

        def specialized(kwargs: dict[str, Any]) -> tuple:
            return binder(*args, **kwargs, debug=False, instrumentation_mode="")

        key = compute_cache_key(keys, *specialized(kwargs)[1:])
        if (function, key) in seen:
            return
        seen.add((function, key))

        def source(kwargs: dict[str, Any]) -> Source:
            bound, specialization, options = specialized(kwargs)
            options, *parts = function._pack_args(backend, dict(kwargs), bound, specialization, options)
            others = {key: value for key, value in options.__dict__.items() if key not in OPTIONS_OF_TARGET}
            return Source(function.ASTSource, function, *parts, others)

        copyreg.pickle(type(function), _by_name)
        name = f"{function.__module__.removeprefix('strandline.kernels.')}.{function.__name__}"
        digest = hashlib.sha256(repr((VERSION, name, function.cache_key, key)).encode()).hexdigest()[:32]
        take(Variant(name, digest, tuple((options, source(options)) for options in with_fewer_stages(kwargs))))

    JITFunction.run = record
    driver.set_active(_NoDevice(gpu))
    try:
        with standing_for(gpu):
            yield
    finally:
        JITFunction.run = run
        driver.set_active(None)  # the machine's own, if it has one, from the next use on


def _by_name(function: JITFunction) -> tuple:
    """Return how a function is found when it is unpickled."""
    return _function, (function.__module__, function.__name__)


def _function(module: str, name: str) -> JITFunction:
    function = getattr(import_module(module), name)
    copyreg.pickle(type(function), _by_name)  # Triton has several classes
    return function


copyreg.pickle(JITFunction, _by_name)
