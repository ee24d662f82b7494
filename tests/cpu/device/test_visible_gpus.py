"""Which GPUs each of several engines uses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strandline.config import EngineConfig
from strandline.device.hardware.visible_gpus import VISIBLE, take_gpus
from strandline.errors import ConfigError

NUM_GPUS = 8


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment variables of a process on a machine with GPUs."""
    variables: dict[str, str] = {}

    def device_count() -> int:
        return len(variables[VISIBLE].split(",")) if VISIBLE in variables else NUM_GPUS

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(device_count=device_count, init=lambda: None))
    return variables


def config(rank: int, **options: Any) -> EngineConfig:
    return EngineConfig(model="demo", **{"data_parallel_size": 4, "data_parallel_rank": rank, **options})


@pytest.mark.parametrize(
    ("given", "options", "taken"),
    [
        (None, {}, ["0", "1", "2", "3"]),
        (None, {"tensor_parallel_size": 2}, ["0,1", "2,3", "4,5", "6,7"]),
        ("7,5,GPU-a,1", {}, ["7", "5", "GPU-a", "1"]),
    ],
)
def test_each_engine_takes_the_next_gpus(
    environment: dict[str, str], given: str | None, options: dict[str, Any], taken: list[str]
) -> None:
    for rank, expected in enumerate(taken):
        environment.clear()
        environment.update({} if given is None else {VISIBLE: given})
        take_gpus(config(rank, **options), environment)
        assert environment == {VISIBLE: expected}


def test_too_few_gpus_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="needs 12 GPUs, and torch finds 8"):
        take_gpus(config(0, tensor_parallel_size=3), environment)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gpus_that_cannot_be_hidden_are_refused(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: NUM_GPUS)
    with pytest.raises(ConfigError, match="NVML is missing"):
        take_gpus(config(1, tensor_parallel_size=num_ranks), environment)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"data_parallel_size": 1}])
def test_cpus_and_single_engines_hide_no_gpus(environment: dict[str, str], options: dict[str, Any]) -> None:
    take_gpus(config(0, **options), environment)
    assert environment == {}
