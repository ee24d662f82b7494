"""A worker process whose rank 1 runs out of memory: while it loads, or in the step that has a prompt of some length."""

import os
import sys
from typing import Any, Final

import torch

from strandline.device.runner import Runner
from strandline.engine.processes import worker
from strandline.records.plan import StepPlan

STARVED_AT: Final = "TEST_STARVED_AT"
"""Environment variable: ``start``, or ``step``."""

LAST_WORDS: Final = "rank 1 asks for more memory than there is"
FATAL_TOKENS: Final = 50


def starve(rank: int) -> None:
    if rank == 1:
        sys.stderr.write(LAST_WORDS)
        sys.stderr.flush()
        torch.empty(2**60, dtype=torch.uint8)


def main() -> int:
    """Run the process."""
    launch, load = Runner.launch, worker.load_uni_executor

    def starved_launch(runner: Runner, plan: StepPlan) -> Any:
        if plan.num_tokens >= FATAL_TOKENS:
            starve(runner.kernels.ranks.rank)
        return launch(runner, plan)

    def starved_load(*arguments: Any, **options: Any) -> Any:
        starve(options["ranks"].rank)
        return load(*arguments, **options)

    if os.environ[STARVED_AT] == "step":
        Runner.launch = starved_launch  # type: ignore[method-assign]
    else:
        worker.load_uni_executor = starved_load
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
