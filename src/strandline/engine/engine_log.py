"""The log of an engine's processes: their warnings name the engine where a server has several."""

import logging

from strandline.config import EngineConfig


def name_engine_in_log(config: EngineConfig) -> None:
    """Have what this process logs from now on begin with the engine's number; called before anything is logged."""
    if config.data_parallel_size > 1:
        logging.basicConfig(format=f"engine {config.data_parallel_rank}: %(message)s")
