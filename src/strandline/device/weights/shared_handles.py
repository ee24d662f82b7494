"""Memory that a trainer on the same machine shares: handles of it, and tensors there.

Handles are what ``torch.multiprocessing`` makes of a GPU's tensor, by the GPU's UUID; engines on a CPU take the path of
a file, such as one in shared memory, under the name ``cpu``. They come as a pickle, and any types in it but tensors'
own are refused.
"""

import base64
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from strandline.errors import ConfigError

CPU: Final = "cpu"
DEVICE_ARGUMENT: Final = 6
"""Which argument of ``rebuild_cuda_tensor`` is the number of the device."""
TYPES: Final = frozenset(
    [
        ("torch", "Tensor"),
        ("torch._tensor", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch", "Size"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "UntypedStorage"),
        ("torch", "UntypedStorage"),
    ]
)
"""What handles name."""


def read_handles(pickled: str) -> Any:
    """Return what was pickled and encoded in base64: a handle, or a list of them.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return _HandleUnpickler(io.BytesIO(base64.b64decode(pickled, validate=True))).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise ConfigError(f"ipc_handles_pickled cannot be read: {error}") from error


class _HandleUnpickler(pickle.Unpickler):
    """Takes tensors' types and dtypes alone: any other class could run code."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None)
        if (module, name) in TYPES or (module == "torch" and isinstance(found, torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def open_shared(handle: Any, device: torch.device) -> Tensor:
    """Return the tensor that a trainer shares on this device.

    Args:
        handle: arguments by which it is opened, by device.

    Raises:
        ConfigError: the trainer shares none, or it cannot be opened.
    """
    name = CPU if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    if not isinstance(handle, Mapping) or name not in handle:
        found = list(handle) if isinstance(handle, Mapping) else type(handle).__name__
        raise ConfigError(f"the trainer shares no memory of {name}, which the engine computes on; it names {found}")
    arguments = list(handle[name])
    try:
        if device.type == "cpu":
            return torch.frombuffer(bytearray(Path(*arguments).read_bytes()), dtype=torch.uint8)
        arguments[DEVICE_ARGUMENT] = device.index or 0
        opened: Tensor = rebuild_cuda_tensor(*arguments)
        return opened
    except (RuntimeError, TypeError, ValueError, IndexError, OSError) as error:
        raise ConfigError(f"memory that the trainer shares cannot be opened: {error}") from error
