"""What a dry run compiles is what an engine launches: its start compiles nothing after that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strandline.engine.processes.kernel_compiler import LOCKS
from strandline.env import COMPILE_AHEAD

ROOT = Path(__file__).parents[3]

START = """
from strandline import LLM

with LLM({model!r}, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=16, memory="1GiB") as llm:
    print(*llm.engine.describe(), sep="\\n")
"""


@pytest.mark.parametrize("name", ["tiny-qwen3.5", "tiny-granite", "tiny-lfm2"])
def test_start_compiles_nothing_that_was_not_compiled_ahead(name: str, tmp_path: Path) -> None:
    program = START.format(model=str(ROOT / "benchmarks" / "configs" / name))
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ
        | {COMPILE_AHEAD: "1", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (done,) = (path for path in tmp_path.glob("strandline-*") if path.name != LOCKS)
    # Launchers and the driver's module are built ahead, too.
    built = [*tmp_path.glob("*/*.cubin"), *tmp_path.glob("*/*.so")]
    late = [path.stem for path in built if path.stat().st_mtime > done.stat().st_mtime]
    assert not late
