"""The program of a process that compiles a share of an engine's kernels (``compiling.py``)."""

import pickle
import sys

from strandline.engine.processes.dry_run import record_start
from strandline.engine.startup.compiling import Share


def compile_share(share: Share) -> None:
    """Compile kernels into Triton's cache on disk."""
    for variant in record_start(share.config, share.gpu)[share.first :: share.step]:
        variant.compile(share.gpu)


if __name__ == "__main__":
    compile_share(pickle.load(sys.stdin.buffer))
