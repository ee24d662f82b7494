"""The garbage collector of the front end, which holds up all streams while it looks."""

import os
import subprocess
import sys
from pathlib import Path

from strandline.server.launch import YOUNG_OBJECTS
from tests.cpu.server.process import START_TIMEOUT_S

PROGRAM = """
import gc, sys
from strandline.config import EngineConfig
from strandline.server import launch

async def say_what_is_frozen(app, listener):
    names = [name for name in sys.modules if name.startswith(("torch.", "transformers.", "fastapi."))]
    loaded = [sys.modules[name] for name in names]
    walked = {id(each) for each in gc.get_objects()}
    print(sum(id(module.__dict__) in walked for module in loaded), len(loaded), gc.get_threshold()[0])
    return 0

launch._run_http = say_what_is_frozen
engine = EngineConfig(model=sys.argv[1], memory="16MiB", device="cpu")
sys.exit(launch.serve(engine, launch.ServerConfig(port=0)))
"""


def test_what_was_loaded_at_the_start_is_not_looked_at_again(bytes_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(bytes_dir)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=START_TIMEOUT_S,
    )
    num_walked, num_modules, young_objects = map(int, done.stdout.split())
    assert num_modules > 100
    assert num_walked == 0
    assert young_objects == YOUNG_OBJECTS
