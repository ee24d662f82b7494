"""Allocations that fail: how their errors are recognised, and what is reported to users."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames
from typing import Final

import torch

from strandline.errors import OutOfMemoryError

GIB: Final = 2**30
HOST_ALLOCATOR: Final = "DefaultCPUAllocator: can't allocate memory"
"""What torch's error contains when the host has no memory."""
DRIVER: Final = "CUDA error: out of memory"
"""What torch's error contains when the driver has none, such as for a captured graph."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised in the handling of, is an allocation that has failed."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or HOST_ALLOCATOR in str(error) or DRIVER in str(error):
        return True
    return is_out_of_memory(error.__context__)


def reserved_bytes(device: torch.device) -> int:
    """Return how much memory of a GPU torch has; 0 for another device."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    """Return how much memory of a GPU torch can allocate for tensors."""
    unused = reserved_bytes(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


@contextmanager
def allocating(what: str, num_bytes: int, device: torch.device) -> Iterator[None]:
    """Return a context that raises an ``OutOfMemoryError`` which says what is lacking where an allocation fails.

    Args:
        what: what takes memory, in the message.
        num_bytes: how much of ``device`` it takes.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _clear_frames(error)
        raise lack_of_memory(what, num_bytes, device) from error


def _clear_frames(error: BaseException | None) -> None:
    """Drop the local variables of the functions that an error was raised in: what they had allocated is free again."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__context__


def lack_of_memory(what: str, num_bytes: int, device: torch.device) -> OutOfMemoryError:
    """Return an error that says what a device was to hold, what is free there, and what to do."""
    free = "the host has less"
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        free = f"{free_bytes / GIB:.2f} GiB of the {total_bytes / GIB:.2f} GiB of {device} are free"
    return OutOfMemoryError(
        f"{what} need {num_bytes / GIB:.2f} GiB, and {free}; nothing was changed: free what other processes use, "
        "and try again"
    )
