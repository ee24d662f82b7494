"""The kernels that an engine compiles at its start, found out without a GPU and without weights.

A *dry run* builds the engine on the device ``meta``, runs its warm-up requests and the steps of its CUDA graphs, and
records what they would launch. Of layers that are alike it runs two.
"""

from dataclasses import replace

from strandline.config import EngineConfig
from strandline.device.meta_device import META, zeros_from_meta
from strandline.engine.core import new_warm_up
from strandline.engine.loading import load_uni_executor
from strandline.kernels.gpu import Gpu
from strandline.kernels.recording_triton import Variant, recording


def record_start(config: EngineConfig, gpu: Gpu) -> list[Variant]:
    """Return the kernels that an engine with this configuration compiles on a GPU.

    Raises:
        ConfigError: no engine can be built so.
    """
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
    with recording(gpu) as variants, zeros_from_meta():
        executor = load_uni_executor(dry, device=META)
        new_warm_up(dry, executor).run()
        executor.capture_graphs()
        executor.close()
    return variants
