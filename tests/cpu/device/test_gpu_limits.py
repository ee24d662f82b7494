import pytest
import torch

from strandline import env
from strandline.device.hardware import gpu_limits
from strandline.device.hardware.gpu_limits import require_tensor_cores
from strandline.errors import ConfigError
from strandline.kernels.gpu import GPUS, Gpu

CUDA = torch.device("cuda")


def test_gpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_limits, "gpu_of", lambda device: Gpu("sm_75", 64 * 1024))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5, and the kernels need 8\.0"):
        require_tensor_cores(CUDA)
    monkeypatch.setenv(env.TRITON, "0")
    require_tensor_cores(CUDA)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if gpu.is_nvidia])
def test_gpus_with_bfloat16_are_admitted(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_limits, "gpu_of", lambda device: gpu)
    require_tensor_cores(CUDA)


def test_cpu_is_admitted() -> None:
    require_tensor_cores(torch.device("cpu"))
