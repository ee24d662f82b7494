"""Time the Python of a step: scheduler and cache together, with many requests decoding. Nothing runs on a device.

    python benchmarks/scheduler.py --running 241

Prints the median and the 95th percentile over ``--steps`` steps, in milliseconds; block borders are among them.
"""

import argparse
import time
from random import Random

from strandline.cache.policy import new_cache
from strandline.cache.size import CacheSize
from strandline.cache.tiers import Loads
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.ids import RequestId
from strandline.records.events import Submission
from strandline.records.plan import NewRequest, StepResult
from strandline.records.sampling_params import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=241)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    scheduler = fill(options.running, options.prompt_tokens)
    plans, commits = [], []
    for number in range(options.steps):
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None
        result = StepResult(((7 + number % 11,),) * len(plan.sequences))
        ready = time.perf_counter()
        scheduler.commit(plan, result)
        plans.append(planned - start)
        commits.append(time.perf_counter() - ready)
    print(f"{options.running} requests decoding, {options.steps} steps, ms per step")
    report("plan", plans[1:])
    report("commit", commits[1:])
    report("together", [p + c for p, c in zip(plans[1:], commits[1:], strict=True)])


def fill(num_running: int, prompt_tokens: int) -> Scheduler:
    """Return a scheduler with requests that differ from their first token."""
    cache = new_cache(CacheSize(4000, 50))
    scheduler = Scheduler(cache, Loads(cache), StepLimits(num_running, max_num_batched_tokens=10**6))
    params = SamplingParams(max_tokens=10**6)
    rng = Random(0)
    for index in range(num_running):
        prompt = (index, *rng.choices(range(10_000), k=prompt_tokens - 1))
        new = NewRequest(RequestId(str(index)), prompt, params, index, frozenset({5}), ())
        scheduler.add(Request(Submission(new, 10**6)))
    return scheduler


def report(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    print(
        f"  {name:<9} median {ordered[len(ordered) // 2] * 1e3:.3f}   p95 {ordered[len(ordered) * 95 // 100] * 1e3:.3f}"
    )


if __name__ == "__main__":
    main()
