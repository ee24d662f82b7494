"""Checks that a GPU can run the kernels, before anything is loaded."""

import torch

from strandline import env
from strandline.device.hardware.dtypes import FIRST_CAPABILITY
from strandline.errors import ConfigError
from strandline.kernels.gpu import gpu_of


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
