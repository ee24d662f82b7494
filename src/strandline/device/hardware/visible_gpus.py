"""The GPUs of an engine that is one of several on a machine: engine i takes the i-th group of one GPU for each rank."""

import os
from collections.abc import MutableMapping
from typing import Final

import torch

from strandline.config import EngineConfig
from strandline.errors import ConfigError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def take_gpus(config: EngineConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """Hide the GPUs of other engines from this process, which computes. Called before CUDA is initialised.

    Does nothing for a single engine, and on a machine without GPUs.

    Raises:
        ConfigError: there are too few GPUs, or they cannot be hidden any more.
    """
    num_engines, num_ranks = config.data_parallel_size, config.tensor_parallel_size
    if num_engines == 1 or config.device == "cpu":
        return
    num_gpus = torch.cuda.device_count()  # asks NVML: CUDA would read the variable now, and never again
    if num_gpus == 0:
        return
    if num_engines * num_ranks > num_gpus:
        raise ConfigError(
            f"--data-parallel-size {num_engines} with --tensor-parallel-size {num_ranks} needs "
            f"{num_engines * num_ranks} GPUs, and torch finds {num_gpus}; lower one of them, or use --device cpu"
        )
    names = environment.get(VISIBLE, ",".join(map(str, range(num_gpus)))).split(",")
    first = config.data_parallel_rank * num_ranks
    environment[VISIBLE] = ",".join(names[first : first + num_ranks])
    torch.cuda.init()
    if torch.cuda.device_count() > num_ranks:
        raise ConfigError(
            "CUDA was initialised before an engine could hide the GPUs of the others, as NVML is missing; start a "
            f"server for each GPU, with {VISIBLE}"
        )
