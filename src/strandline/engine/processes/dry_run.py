"""The kernels that an engine compiles at its start, found out without a GPU and without weights.

A *dry run* builds the engine on the device ``meta``, runs its warm-up requests and the steps of its CUDA graphs, and
records what they would launch. Of layers that are alike it runs two.
"""

from dataclasses import replace

import torch
from torch import Tensor

from strandline.config import EngineConfig
from strandline.device.meta_device import META, zeros_from_meta
from strandline.engine.core import new_warm_up
from strandline.engine.loading import load_uni_executor
from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.gpu import Gpu
from strandline.kernels.ranks import ONE_RANK
from strandline.kernels.recording_triton import Variant, recording


class _OneOfSeveral:
    """A rank for which the others answer as it would."""

    few_rows, many_rows = None, None

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def sum(self, x: Summand) -> Tensor:
        """Return ``x``, added up."""
        return added_up(x)

    def gather(self, x: Tensor) -> Tensor:
        """Return ``x``, as often as there are ranks."""
        return torch.cat([x] * self.size, dim=1)

    def least(self, number: int) -> int:
        """Return ``number``."""
        return number


def record_start(config: EngineConfig, gpu: Gpu) -> list[Variant]:
    """Return the kernels that an engine with this configuration compiles on a GPU; of several ranks, those of the first
    one, without sums over ranks.

    Raises:
        ConfigError: no engine can be built so.
    """
    variants = list[Variant]()
    with recording(gpu, variants.append):
        run_start(config)
    return variants


def run_start(config: EngineConfig) -> None:
    """Start an engine on the device ``meta``, and end it; see ``record_start``."""
    dry = replace(
        config,
        load_format="dummy",
        skip_tokenizer_init=True,
        reasoning_config=None,
        host_memory=None,
        disk_cache=None,
        kv_events_config=None,
        kv_transfer_config=None,
        distributed_executor_backend="uni",
    )
    with zeros_from_meta():
        num_ranks = config.tensor_parallel_size
        executor = load_uni_executor(dry, None, ONE_RANK if num_ranks == 1 else _OneOfSeveral(num_ranks), device=META)
        new_warm_up(dry, executor).run()
        executor.capture_graphs()
        executor.close()
