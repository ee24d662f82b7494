"""The kernels of attention to a prefix, compiled for a Hopper GPU without one: ``compiled_prefix older | newer``.

Gluon's functions first get their older or newer names. What is compiled ahead has to be what launches look for in
Triton's cache. Triton's interpreter must be off.
"""

import sys
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime.jit import JITFunction

from strandline.device.meta_device import META
from strandline.kernels.batch import KVMemory
from strandline.kernels.gpu import GPUS
from strandline.kernels.recording_triton import Variant, recording

GPU = GPUS["sm_90"]

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


def attend() -> None:
    """Attend to two whole blocks in e4m3, which are widened first."""
    from strandline.kernels.attention.attention_prefix_triton import attend_prefix  # after names have changed

    kv_B2PGD = torch.empty(2, 2, 64, 1, 64, dtype=torch.float8_e4m3fn, device=META)
    q_THD = torch.empty(1, 1, 64, dtype=torch.bfloat16, device=META)
    memory = KVMemory(kv_B2PGD[:, 0], kv_B2PGD[:, 1])
    attend_prefix(q_THD, memory, torch.empty(2, dtype=torch.int32, device=META), 2, 1.0)


def compile_ahead() -> list[Any]:
    """Return what is compiled before launches."""
    found = list[Variant]()
    with recording(GPU, found.append):
        attend()
    return [variant.compile(GPU)[0] for variant in found]


def compile_at_launches() -> list[Any]:
    """Return what launches would run."""
    found, run = list[Any](), JITFunction.run

    def compile_only(function: Any, *args: Any, warmup: bool, **options: Any) -> None:
        del warmup
        found.append(run(function, *args, warmup=True, **options))

    with recording(GPU, found.append):
        JITFunction.run = compile_only
        attend()
    return found


if __name__ == "__main__":
    take_names(sys.argv[1])
    ahead, launched = compile_ahead(), compile_at_launches()
    assert [kernel.hash for kernel in ahead] == [kernel.hash for kernel in launched]
    sys.stdout.write(ahead[-1].asm["ptx"])
