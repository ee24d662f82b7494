"""The prefix kernel, compiled for a Hopper GPU without one: ``compiled_prefix older | newer``.

Gluon's functions first get their older or newer names. Triton's interpreter must be off.
"""

import sys
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from strandline.device.meta_device import META
from strandline.kernels.batch import KVMemory
from strandline.kernels.gpu import GPUS
from strandline.kernels.recording_triton import Variant, recording
from tools.kernel_assembly import without_assembler

RENAMED: list[tuple[Any, str, str]] = [
    (gl, "thread_barrier", "barrier"),
    (tma, "async_copy_global_to_shared", "async_load"),
]
"""Modules, and the older and the newer name of a function."""


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("this function has been removed")


def take_names(kind: str) -> None:
    """Let functions have their older names alone, or their newer ones, and a function that fails by the older."""
    for module, older, newer in RENAMED:
        if kind == "older" and hasattr(module, newer):
            setattr(module, older, getattr(module, newer))
            delattr(module, newer)
        elif kind == "newer" and not hasattr(module, newer):
            setattr(module, newer, getattr(module, older))
            setattr(module, older, fail)


def compile_prefix() -> str:
    """Return the PTX of attention to whole blocks."""
    from strandline.kernels.attention.attention_prefix_triton import attend_prefix  # after names have changed

    kv_B2PGD = torch.empty(2, 2, 64, 1, 64, dtype=torch.bfloat16, device=META)
    q_THD = torch.empty(1, 1, 64, dtype=torch.bfloat16, device=META)
    found = list[Variant]()
    with recording(GPUS["sm_90"], found.append):
        memory = KVMemory(kv_B2PGD[:, 0], kv_B2PGD[:, 1])
        attend_prefix(q_THD, memory, torch.empty(2, dtype=torch.int32, device=META), 2, 1.0)
    (kernel,) = found
    with without_assembler():
        ptx: str = kernel.compile(GPUS["sm_90"])[0].asm["ptx"]
    return ptx


if __name__ == "__main__":
    take_names(sys.argv[1])
    sys.stdout.write(compile_prefix())
