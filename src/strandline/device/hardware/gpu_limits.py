"""What an engine asks of a GPU before anything is loaded: that it can run the kernels, and limits of its context."""

import ctypes
import logging
from typing import Final

import torch

from strandline import env
from strandline.device.hardware.dtypes import FIRST_CAPABILITY
from strandline.errors import ConfigError
from strandline.kernels.gpu import gpu_of

LOGGER: Final = logging.getLogger(__name__)

CUDA_DRIVER: Final = "libcuda.so.1"

FETCHED_BYTES: Final = 128
"""What the L2 cache fetches from memory at once: a line. Tiles of weights in 4 bits read 64 bytes of each row, and the
other half of a line soon after."""

MAX_L2_FETCH_GRANULARITY: Final = 5
"""The number of this limit in CUDA's driver (``CU_LIMIT_MAX_L2_FETCH_GRANULARITY``)."""


def set_up_gpu(device: torch.device) -> None:
    """Require tensor cores, and set limits."""
    require_tensor_cores(device)
    fetch_whole_lines(device)


def require_tensor_cores(device: torch.device) -> None:
    """Refuse an NVIDIA GPU whose tensor cores do not multiply bfloat16; Triton would fail at some later request.

    Raises:
        ConfigError: they do not, and kernels are not turned off.
    """
    gpu = gpu_of(device)
    if not gpu.is_nvidia or env.is_triton_off() or gpu.capability >= FIRST_CAPABILITY:
        return
    found, needed = (".".join(map(str, capability)) for capability in (gpu.capability, FIRST_CAPABILITY))
    raise ConfigError(
        f"{torch.cuda.get_device_name(device)} has compute capability {found}, and the kernels need {needed}, which "
        f"A100, RTX 30 and later GPUs have; use --device cpu, or set {env.TRITON}=0 to run the reference "
        "implementations, which are slow"
    )


def fetch_whole_lines(device: torch.device) -> None:
    """Have an NVIDIA GPU's L2 cache fetch whole lines for this process: a hint, without which reads are slower."""
    if device.type != "cuda" or not gpu_of(device).is_nvidia:
        return
    torch.cuda.synchronize(device)  # a context exists then
    with torch.cuda.device(device):
        set_limit = ctypes.CDLL(CUDA_DRIVER).cuCtxSetLimit
        status = set_limit(MAX_L2_FETCH_GRANULARITY, ctypes.c_size_t(FETCHED_BYTES))
    if status:
        LOGGER.warning("the L2 cache fetches less than lines: cuCtxSetLimit returned %d", status)
