"""Checks that a GPU can run the kernels, before anything is loaded."""

from typing import Final

import torch

from strandline import env
from strandline.errors import ConfigError

SHARED_BYTES: Final = 227 * 1024
"""Shared memory that a block of the largest tiles may use: that of Hopper GPUs, which the tiles were chosen on."""


def require_shared_memory(device: torch.device) -> None:
    """Refuse a GPU with too little shared memory for the kernels; Triton would fail at some later request.

    Raises:
        ConfigError: it has too little, and kernels are not turned off.
    """
    if device.type != "cuda" or env.is_triton_off():
        return
    properties = torch.cuda.get_device_properties(device)
    found_bytes = getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES)
    if found_bytes < SHARED_BYTES:
        raise ConfigError(
            f"{properties.name} has {found_bytes // 1024} KiB of shared memory per block, and the kernels need up to "
            f"{SHARED_BYTES // 1024} KiB, which H100, H200 and B200 have; use --device cpu, or set {env.TRITON}=0 to "
            "run the reference implementations, which are slow"
        )
