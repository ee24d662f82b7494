"""Gluon, the part of Triton for kernels with explicit layouts and barriers, under one name for each function.

Gluon is experimental, and versions of Triton rename its functions. Kernels take those that have been renamed from here,
and are defined only if ``IS_AVAILABLE``.
"""
# mypy: ignore-errors

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # The newer name comes first: the older one may still exist and raise an error when it is called.
    thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.6
    copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # up to Triton 3.7
    IS_AVAILABLE = True
except (ImportError, AttributeError):
    IS_AVAILABLE = False

__all__ = [
    "IS_AVAILABLE",
    "TensorDescriptor",
    "copy_block",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "thread_barrier",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
