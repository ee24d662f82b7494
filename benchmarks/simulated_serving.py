"""Serving without a device: the engine's scheduler and cache, steps that take what was measured on a machine.

    python benchmarks/simulated_serving.py
    python benchmarks/simulated_serving.py --machine h200-bf16 --long-prefill-token-threshold 0

Clients in a closed loop: each sends its next prompt when it has an answer. For each workload: requests/s; time to
first token, mean and median; time per output token; a request's whole time, mean; gaps between tokens, P99 and longest;
share of prompt tokens hit. Compares policies of the scheduler; overlapping, the front end and drafts are left out.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from statistics import mean, median

import numpy as np

from strandline.cache import PrefixCache
from strandline.cache.policy import new_cache
from strandline.cache.size import CacheSize
from strandline.cache.tiers import Loads
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.ids import RequestId
from strandline.records.events import Submission
from strandline.records.plan import NewRequest, StepPlan, StepResult
from strandline.records.sampling_params import SamplingParams

NUM_SLABS = 2400
BLOCKS_PER_SLAB = 50


@dataclass(frozen=True)
class Machine:
    """Times of steps, in seconds."""

    counts: tuple[int, ...]
    decode_s: tuple[float, ...]
    """Of steps in which as many sequences as in ``counts`` decode, and nothing else."""
    prompt_s: float
    """What a step with prompts takes beside its tokens, at least."""
    token_s: float
    """Of a prompt's token."""

    def step_s(self, num_prompt_tokens: int, num_decodes: int) -> float:
        decode_s = float(np.interp(num_decodes, self.counts, self.decode_s))
        return max(self.prompt_s, decode_s) + num_prompt_tokens * self.token_s if num_prompt_tokens else decode_s


MACHINES = {
    # Qwen3.5-35B-A3B in FP8 on two H100s, 2026-11-25.
    "2-h100-fp8": Machine((0, 1, 16, 64, 256), (0, 0.0018, 0.0053, 0.0092, 0.0174), 0.014, 8.5e-6),
    # The same in bfloat16 on one H200, 2026-11-24.
    "h200-bf16": Machine((0, 1, 16, 64, 256), (0, 0.0022, 0.0091, 0.0168, 0.029), 0.015, 12.5e-6),
}


@dataclass(frozen=True)
class Workload:
    """Prompts, in the order in which they are sent."""

    name: str
    prompts: list[list[int]]
    num_clients: int
    output_tokens: int
    is_cached: bool = True


@dataclass
class Seen:
    """What clients have seen."""

    sent_s: dict[str, float] = field(default_factory=dict)
    arrivals_s: dict[str, list[float]] = field(default_factory=dict)
    """Of each token, by request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=MACHINES, default="2-h100-fp8")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--long-prefill-token-threshold", type=int, default=2048)
    options = parser.parse_args()
    print(
        "| workload | requests/s | first token: mean | median, ms | per token, ms | whole, s | gaps: P99 | longest, ms "
        "| hit |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for workload in workloads(Random(0)):
        cache = new_cache(CacheSize(NUM_SLABS, BLOCKS_PER_SLAB), enabled=workload.is_cached)
        scheduler = Scheduler(
            cache,
            Loads(cache),
            StepLimits(256, options.max_num_batched_tokens, options.long_prefill_token_threshold, 1024),
        )
        report(workload, serve(workload, scheduler, MACHINES[options.machine].step_s), scheduler.cache)


def workloads(rng: Random) -> list[Workload]:
    def some(count: int) -> list[int]:
        return rng.choices(range(1000, 200_000), k=count)

    prefixes = [some(6000) for _ in range(16)]
    shared = [prefixes[index % 16] + some(2000) for index in rng.sample(range(128), k=128)]
    mixed = [some(30_000) if index % 16 == 15 else some(400) for index in range(160)]
    return [
        Workload("16 prefixes of 6,000, 2,000 more; 64 clients; no cache", shared, 64, 400, is_cached=False),
        Workload("the same, cached", shared, 64, 400),
        Workload("6,000 tokens, nothing shared; 16 clients", [some(6000) for _ in range(64)], 16, 300),
        Workload("the same; 64 clients", [some(6000) for _ in range(160)], 64, 300),
        Workload("400 tokens, each 16th has 30,000; 32 clients", mixed, 32, 200),
        Workload("one of 60,000 beside 15 of 400", [*map(some, (*[400] * 15, 60_000, *[400] * 20))], 16, 400),
    ]


def serve(workload: Workload, scheduler: Scheduler, step_s: Callable[[int, int], float]) -> Seen:
    """Answer all prompts."""
    seen, now_s = Seen(), 0.0
    params = SamplingParams(max_tokens=workload.output_tokens, temperature=0, ignore_eos=True)
    to_send = list(enumerate(workload.prompts))[::-1]

    def send() -> None:
        number, prompt = to_send.pop()
        request_id = RequestId(str(number))
        new = NewRequest(request_id, tuple(prompt), params, number, frozenset(), ())
        scheduler.add(Request(Submission(new, len(prompt) + workload.output_tokens)))
        seen.sent_s[request_id], seen.arrivals_s[request_id] = now_s, []

    for _ in range(min(workload.num_clients, len(to_send))):
        send()
    while (plan := scheduler.plan()) is not None:
        now_s += step_s(*count_tokens(plan))
        sampled = [sequence.request_id for sequence in plan.sequences if sequence.is_sampled]
        for request_id in sampled:
            seen.arrivals_s[request_id].append(now_s)
        # Other tokens in each answer: equal ones would share a path.
        tokens = [(int(sequence.request_id),) if sequence.is_sampled else () for sequence in plan.sequences]
        scheduler.commit(plan, StepResult(tuple(tokens)))
        num_ended = sum(len(seen.arrivals_s[request_id]) == workload.output_tokens for request_id in sampled)
        for _ in range(min(num_ended, len(to_send))):
            send()
    return seen


def count_tokens(plan: StepPlan) -> tuple[int, int]:
    """Return how many tokens of prompts a step computes, and how many sequences decode."""
    counts = [sequence.end - sequence.start for sequence in plan.sequences]
    return sum(count for count in counts if count > 1), counts.count(1)


def report(workload: Workload, seen: Seen, cache: PrefixCache) -> None:
    arrivals = list(seen.arrivals_s.values())
    first_ms = [1e3 * (times[0] - sent) for times, sent in zip(arrivals, seen.sent_s.values(), strict=True)]
    per_token_ms = [1e3 * (times[-1] - times[0]) / (len(times) - 1) for times in arrivals]
    whole_s = [times[-1] - sent for times, sent in zip(arrivals, seen.sent_s.values(), strict=True)]
    gaps_ms = 1e3 * np.concatenate([np.diff(times) for times in arrivals])
    hit = cache.stats().hit_tokens / sum(map(len, workload.prompts))
    print(
        f"| {workload.name} | {len(arrivals) / max(times[-1] for times in arrivals):.2f} | {mean(first_ms):,.0f} | "
        f"{median(first_ms):,.0f} | {mean(per_token_ms):.1f} | {mean(whole_s):.2f} | {np.percentile(gaps_ms, 99):.0f} "
        f"| {gaps_ms.max():.0f} | {hit:.1%} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
