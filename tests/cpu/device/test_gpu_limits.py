from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strandline import env
from strandline.device.gpu_limits import require_shared_memory
from strandline.errors import ConfigError


def pretend(monkeypatch: pytest.MonkeyPatch, **properties: Any) -> None:
    """Let torch report a GPU with these properties."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))


@pytest.mark.parametrize(
    ("name", "shared_kib"), [("NVIDIA GeForce RTX 4090", 99), ("NVIDIA A100", 163), ("AMD Instinct MI300X", 64)]
)
def test_gpu_with_little_shared_memory_is_refused(name: str, shared_kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, name=name, shared_memory_per_block_optin=shared_kib * 1024)
    with pytest.raises(ConfigError, match=f"{name} has {shared_kib} KiB of shared memory .* need up to 227 KiB"):
        require_shared_memory(torch.device("cuda"))
    require_shared_memory(torch.device("cpu"))
    monkeypatch.setenv(env.TRITON, "0")
    require_shared_memory(torch.device("cuda"))


def test_hopper_gpu_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, name="NVIDIA H100", shared_memory_per_block_optin=232_448)
    require_shared_memory(torch.device("cuda", 1))
