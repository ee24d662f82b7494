"""What kernels need to know of a GPU, and the GPUs that they can be compiled for without one.

Tensors on the device ``meta`` stand for those of the GPU that ``standing_for`` names: kernels are compiled for it, and
never launched (``recording_triton.py``).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Final, NamedTuple

import torch

UNLIMITED_BYTES: Final = 1 << 30
"""More shared memory than there is."""

OVERLAP_CAPABILITY: Final = (9, 0)
"""Compute capability of the first GPUs whose launches can overlap."""


class Gpu(NamedTuple):
    """A GPU, as far as kernels depend on it."""

    architecture: str
    """``sm_90`` and so on."""
    shared_bytes: int
    """The most shared memory that a program may use."""

    @property
    def capability(self) -> tuple[int, int]:
        """NVIDIA's compute capability; (0, 0) of other GPUs."""
        vendor, _, number = self.architecture.partition("_")
        major, minor = divmod(int(number), 10) if vendor == "sm" else (0, 0)
        return major, minor

    @property
    def is_nvidia(self) -> bool:
        return self.architecture.startswith("sm_")

    @property
    def multiplies_from_registers(self) -> bool:
        """Whether tensor cores read all operands from registers: those of compute capability 9 and 10 read tiles from
        shared memory."""
        return self.is_nvidia and self.capability[0] not in (9, 10)

    @property
    def can_overlap(self) -> bool:
        """Whether a launch may begin before the one before it has ended."""
        return self.capability >= OVERLAP_CAPABILITY


HOST: Final = Gpu("host", UNLIMITED_BYTES)
"""A CPU, on which kernels are interpreted."""

GPUS: Final[Mapping[str, Gpu]] = {
    gpu.architecture: gpu
    for gpu in (
        Gpu("sm_80", 163 * 1024),
        Gpu("sm_86", 99 * 1024),
        Gpu("sm_89", 99 * 1024),
        Gpu("sm_90", 227 * 1024),
        Gpu("sm_100", 227 * 1024),
        Gpu("sm_103", 227 * 1024),
        Gpu("sm_120", 99 * 1024),
        Gpu("sm_121", 99 * 1024),
    )
}
"""GPUs that kernels are compiled for in tests: A100, RTX 30, RTX 40, H100 and H200, B200, B300, RTX 50, GB10."""

_META: ContextVar[Gpu] = ContextVar("meta", default=HOST)


@contextmanager
def standing_for(gpu: Gpu) -> Iterator[None]:
    """Let the device ``meta`` stand for a GPU."""
    token = _META.set(gpu)
    try:
        yield
    finally:
        _META.reset(token)


def is_stood_for() -> bool:
    """Whether the device ``meta`` stands for a GPU now."""
    return _META.get() is not HOST


def kind_of(device: torch.device) -> str:
    """Return the type of a device, or of that which it stands for."""
    return "cuda" if device.type == "meta" and is_stood_for() else device.type


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU that a device is, or stands for."""
    return _META.get() if device.type == "meta" else _found(device)


@cache
def _found(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return HOST
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Gpu(properties.gcnArchName, properties.shared_memory_per_block)
    return Gpu(f"sm_{properties.major}{properties.minor}", properties.shared_memory_per_block_optin)
