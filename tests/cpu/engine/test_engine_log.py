"""Warnings of a server with several engines name the engine."""

import subprocess
import sys

import pytest

LOG = """
import logging

from strandline.config import EngineConfig
from strandline.engine.processes.engine_log import name_engine_in_log

name_engine_in_log(EngineConfig(model="demo", data_parallel_size={size}, data_parallel_rank={rank}))
logging.getLogger("strandline.device.stores.file_store").warning("a checksum is wrong")
"""


@pytest.mark.parametrize(
    ("size", "rank", "text"), [(1, 0, "a checksum is wrong\n"), (3, 2, "engine 2: a checksum is wrong\n")]
)
def test_warnings_name_one_of_several_engines(size: int, rank: int, text: str) -> None:
    command = [sys.executable, "-c", LOG.format(size=size, rank=rank)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr == text
