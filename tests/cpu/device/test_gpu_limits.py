import ctypes
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from strandline import env
from strandline.device.hardware import gpu_limits
from strandline.device.hardware.gpu_limits import fetch_whole_lines, require_tensor_cores
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


@pytest.mark.parametrize("status", [0, 1])
def test_the_cache_fetches_whole_lines_where_it_can(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = list[tuple[int, int]]()

    def set_limit(number: int, size: ctypes.c_size_t) -> int:
        limits.append((number, size.value))
        return status

    monkeypatch.setattr(gpu_limits, "gpu_of", lambda device: GPUS["sm_90"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuCtxSetLimit=set_limit))
    with caplog.at_level(logging.WARNING):
        fetch_whole_lines(CUDA)
    assert limits == [(5, 128)]
    assert len(caplog.records) == status


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_have_no_limit_of_fetches(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_limits, "gpu_of", lambda device: GPUS["sm_90"])
    monkeypatch.delattr(ctypes, "CDLL")
    fetch_whole_lines(torch.device(device))
