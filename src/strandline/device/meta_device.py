"""Steps on tensors without memory: what kernels they launch is known without a GPU, and without computing anything.

Tensors on the device ``meta`` have shapes and dtypes alone. The host reads zeros from them, and nothing is pinned.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

META: Final = torch.device("meta")


@contextmanager
def zeros_from_meta() -> Iterator[None]:
    """Let the host read zeros from tensors without memory."""
    operations = _Operations()  # type: ignore[no-untyped-call]
    with operations:
        yield


class _Operations(TorchDispatchMode):
    """Copies from tensors without memory to the host's, memory that would be pinned, and what torch 2.11 cannot do with
    tensors without memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would load its compiler for this mode, a second or two, which then is to leave it out."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        named = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        match func.overloadpacket:
            case torch.ops.aten.copy_ if args[1].is_meta and not args[0].is_meta:
                return args[0].zero_()
            case torch.ops.aten._to_copy | torch.ops.aten.to if args[0].is_meta and _is_host(named.get("device")):
                return torch.zeros(args[0].shape, dtype=named.get("dtype") or args[0].dtype)
            case torch.ops.aten._local_scalar_dense | torch.ops.aten.item if args[0].is_meta:
                return 0
            case torch.ops.aten._scaled_mm if "out" in named and named["out"].is_meta:
                return named["out"]
        return func(*args, **named)


def _is_host(device: torch.device | None) -> bool:
    return device is not None and device.type == "cpu"
