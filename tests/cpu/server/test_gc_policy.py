"""The garbage collectors of both processes, whose collections stall all streams."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strandline.gc_policy import YOUNG_OBJECTS
from tests.cpu.server.process import START_TIMEOUT_S

SAY_WHAT_IS_FROZEN = """
import gc, os, sys
from strandline.config import EngineConfig

def say_what_is_frozen():
    names = [name for name in sys.modules if name.startswith(("torch.", "transformers.", "fastapi."))]
    loaded = [sys.modules[name] for name in names]
    walked = {id(each) for each in gc.get_objects()}
    print(sum(id(module.__dict__) in walked for module in loaded), len(loaded), gc.get_threshold()[0])

engine = EngineConfig(model=sys.argv[1], memory="16MiB", device="cpu")
"""

FRONT_END = """
from strandline.server import launch
from strandline.server.config import ServerConfig

async def serve_http(*_):
    say_what_is_frozen()
    return False

launch.serve_http = serve_http
sys.exit(launch.serve(engine, ServerConfig(port=0)))
"""

CORE = """
import zmq
from strandline.engine.processes import core_loop, core_process
from strandline.records.heartbeat import Heartbeat
from strandline.records.messages import ENCODER, Start

core_loop.CoreLoop.run = lambda loop: say_what_is_frozen()
with zmq.Context() as context, context.socket(zmq.PAIR) as front, context.socket(zmq.PAIR) as back:
    front.bind("inproc://core")
    back.connect("inproc://core")
    front.send(ENCODER.encode(Start(engine)))
    sys.exit(core_process.serve_core(back, os.pipe()[0], Heartbeat(os.memfd_create("heartbeat"))))
"""


@pytest.mark.parametrize("program", [FRONT_END, CORE], ids=["front end", "core"])
def test_modules_loaded_at_start_are_not_collected(program: str, bytes_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAY_WHAT_IS_FROZEN + program, str(bytes_dir)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=START_TIMEOUT_S,
    )
    num_walked, num_modules, young_objects = map(int, done.stdout.split())
    assert num_modules > 50
    assert num_walked == 0
    assert young_objects == YOUNG_OBJECTS
