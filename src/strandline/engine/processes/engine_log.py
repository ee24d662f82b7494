"""The log of an engine's processes: their warnings name the engine where a server has several."""

from strandline.config import EngineConfig
from strandline.log_format import configure_log


def name_engine_in_log(config: EngineConfig) -> None:
    """Have what this process logs from now on name the engine; called before anything is logged."""
    rank = config.data_parallel_rank
    configure_log(f"engine {rank}: " if config.data_parallel_size > 1 else "", {"engine": rank})
