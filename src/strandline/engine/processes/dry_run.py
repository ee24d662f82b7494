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
from strandline.kernels.collectives import many_row_sums, rank_sums
from strandline.kernels.collectives.connection import Connection
from strandline.kernels.collectives.many_row_sums import ManyRowSums
from strandline.kernels.collectives.rank_sums import FewRowSums
from strandline.kernels.expert_choices import Summand, added_up, like, without_factors
from strandline.kernels.gpu import Gpu
from strandline.kernels.ranks import ONE_RANK
from strandline.kernels.recording_triton import Variant, recording


class _OneOfSeveral:
    """A rank of several, whose sums go through symmetric memory as far as that has room."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.few_rows = FewRowSums(self._connection(rank_sums.counter_shape(size)))
        self.many_rows = ManyRowSums(self._connection(many_row_sums.counter_shape(size)))

    def _connection(self, counter_shape: tuple[int, ...]) -> Connection:
        addresses_N = torch.empty(self.size, dtype=torch.int64, device=META)
        return Connection(self.rank, addresses_N, torch.empty(counter_shape, dtype=torch.int32, device=META))

    def connect(self) -> None:
        """Do nothing."""

    def sum(self, x: Summand) -> Tensor:
        """Return what has the shape of a sum of several; as ``ProcessRanks.sum``."""
        if self.few_rows.can_sum(like(x)):
            return self.few_rows.sum(added_up(x))
        x = without_factors(x)
        x = x if self.many_rows.can_sum(x) else added_up(x)
        return self.many_rows.sum(x) if self.many_rows.can_sum(x) else added_up(x)

    def gather(self, x: Tensor) -> Tensor:
        """Return what has the shape of several matrices side by side; as ``ProcessRanks.gather``."""
        return self.few_rows.gather(x) if self.few_rows.can_gather(x) else torch.cat([x] * self.size, dim=1)

    def least(self, number: int) -> int:
        """Return ``number``."""
        return number


def dry_config(config: EngineConfig) -> EngineConfig:
    """Return a configuration that launches the same kernels, without weights, tokenizer, tiers and other engines."""
    return replace(
        config,
        load_format="dummy",
        merge_lora=None,
        skip_tokenizer_init=True,
        reasoning_config=None,
        host_memory=None,
        disk_cache=None,
        disk_cache_size=None,
        object_store=None,
        object_store_size=None,
        snapshot_dtype="float32",
        kv_events_config=None,
        kv_transfer_config=None,
        distributed_executor_backend="uni",
    )


def record_start(config: EngineConfig, gpu: Gpu, rank: int = 0) -> list[Variant]:
    """Return the kernels that a rank of an engine with this configuration compiles on a GPU.

    Raises:
        ConfigError: no engine can be built so.
    """
    variants = list[Variant]()
    with recording(gpu, variants.append):
        run_start(config, rank)
    return variants


def run_start(config: EngineConfig, rank: int = 0) -> None:
    """Start a rank of an engine on the device ``meta``, and end it; see ``record_start``."""
    dry = dry_config(config)
    with zeros_from_meta():
        num_ranks = config.tensor_parallel_size
        ranks = ONE_RANK if num_ranks == 1 else _OneOfSeveral(rank, num_ranks)
        executor = load_uni_executor(dry, None, ranks, device=META)
        new_warm_up(dry, executor).run()
        executor.capture_graphs()
        executor.close()
