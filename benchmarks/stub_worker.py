"""A worker process whose executor computes nothing: what ``worker_plans.py`` starts in place of the engine's own.

Results say when their step began, by ``time.perf_counter``, which all processes of a machine share on Linux.
"""

import sys
import time
from types import SimpleNamespace
from typing import Any

from strandline.device.executor import ExecutorFacts
from strandline.engine.loading import load_uni_executor
from strandline.engine.processes import worker
from strandline.ids import RequestId
from strandline.records.plan import StepPlan, StepResult
from strandline.specs import ModelSpec

BEGUN = RequestId("begun")
"""Where a result has the time, among its failures."""


NUM_SLABS = 20_000


class StubStep:
    """A step that is done when it is launched."""

    is_launch_bound = False

    def __init__(self, plan: StepPlan) -> None:
        begun_s = time.perf_counter()
        self._result = StepResult(((7,),) * len(plan.sequences), failures={BEGUN: str(begun_s)})

    def result(self) -> StepResult:
        return self._result


def load_stub(*_: Any, **__: Any) -> Any:
    """Return what a ``Worker`` needs of an executor."""
    spec = ModelSpec((), 8, "float32")
    facts = ExecutorFacts(spec, 1000, 10**6, "cpu", NUM_SLABS, 0, needs_warm_up=False, fallbacks=())
    return SimpleNamespace(
        facts=facts, launch=StubStep, carry_out=len, forget_requests=lambda: None, close=lambda: None
    )


if __name__ == "__main__":
    setattr(worker, load_uni_executor.__name__, load_stub)
    sys.exit(worker.main())
