"""Kernels that Triton compiles to PTX, and what they take once that is assembled for a GPU."""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import Language
from triton.compiler.compiler import make_backend
from triton.knobs import runtime

from strandline.kernels.gpu import Gpu
from strandline.kernels.recording_triton import target_of


@contextmanager
def without_assembler() -> Iterator[None]:
    """Let Triton's compiler end with PTX."""
    runtime.add_stages_inspection_hook = _leave_ptx
    try:
        yield
    finally:
        runtime.add_stages_inspection_hook = None


def _leave_ptx(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str]:
    """Take the assembler off the compiler's stages; without any, return what is added to the keys of its cache."""
    if stages is not None:
        stages["cubin"] = lambda ptx, metadata: b""
    return "PTX", "PTX"


def assemble(kernel: Any, gpu: Gpu) -> tuple[int, int]:
    """Assemble a kernel's PTX for a GPU of the generation that it was compiled for; as ``measure``."""
    target = target_of(gpu)
    backend, stages = make_backend(target), dict[str, Any]()
    backend.add_stages(stages, backend.parse_options({}), Language.TRITON)
    ptx = re.sub(r"(?m)^\.target sm_\d+", f".target sm_{target.arch}", kernel.asm["ptx"])
    return measure(stages["cubin"](ptx, {}))


def measure(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread of an assembled kernel, and the bytes of its stack."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack_bytes = (int(re.findall(rf"{name}:(\d+)", text)[0]) for name in ("REG", "STACK"))
    return registers, stack_bytes


def code_of(kernel: Any) -> str:
    """Return a digest of a kernel's PTX but for the GPU's name."""
    ptx = re.sub(r"(?m)^\.target .*$", "", kernel.asm["ptx"])
    return hashlib.sha256(ptx.encode()).hexdigest()[:16]
