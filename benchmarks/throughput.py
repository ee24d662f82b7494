"""Prefill and decode throughput, and what the prefix cache saves, on a CPU.

    python benchmarks/throughput.py --model benchmarks/configs/tiny-qwen3.5 --load-format dummy

Every figure is the median of ``--repeats`` runs in one process, after one warm-up. ``peer_cpu.py`` has vLLM do the
same work: what is measured, and how, is ``measure``, which both call.
"""

import argparse
import platform
import time
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from random import Random
from statistics import median

import torch

from strandline import LLM, SamplingParams
from strandline.bench.workloads import Batch, MultiTurn, SharedPrefix

Load = Callable[[], LLM]
"""Gives an engine whose cache is empty."""

PARTS = ("prefill", "decode", "chat", "shared")


def main() -> None:
    options = parse().parse_args()
    describe(options)
    loads = {
        label: partial(load, options, enable_prefix_caching=is_on) for label, is_on in (("off", False), ("on", True))
    }
    measure(loads, options)


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", default=PARTS, choices=PARTS, help="parts to measure, to alternate engines"
    )
    return parser


def describe(options: argparse.Namespace) -> None:
    print(
        f"{date.today()} · {platform.processor() or platform.machine()} · {torch.get_num_threads()} threads · "
        f"torch {torch.__version__} · Python {platform.python_version()}"
    )
    print(f"model {options.model} · load format {options.load_format} · dtype {options.dtype}")


def load(options: argparse.Namespace, **more: object) -> LLM:
    return LLM(
        options.model,
        dtype=options.dtype,
        load_format=options.load_format,
        deterministic=options.deterministic,
        skip_tokenizer_init=True,
        **more,
    )


def measure(loads: Mapping[str, Load], options: argparse.Namespace) -> None:
    """Print every figure of the engines that ``loads`` gives: ``off`` without a prefix cache, the others with one."""
    if "prefill" in options.only:
        measure_prefill(loads["off"](), options.repeats)
    if "decode" in options.only:
        for batch_size in (1, 8, 32):
            measure_decode(loads["off"](), batch_size, options.repeats)
    if "chat" in options.only:
        measure_cache(loads, "chat, 8 conversations x 6 turns", MultiTurn(), options.repeats)
    if "shared" in options.only:
        name = "shared 1,000 + own 200"
        measure_cache(loads, f"32 requests in turn, {name}", SharedPrefix(), options.repeats)
        measure_cache(loads, f"32 requests at once, {name}", SharedPrefix(concurrency=32), options.repeats)


def measure_prefill(llm: LLM, repeats: int) -> None:
    for num_requests, prompt_tokens in ((1, 2000), (8, 1000)):
        workload = Batch(num_requests, prompt_tokens, output_tokens=1)
        workload.run(llm)
        walls = [workload.run(llm).wall_s for _ in range(repeats)]
        print(
            f"prefill {num_requests} x {prompt_tokens:,}: {num_requests * prompt_tokens / median(walls):,.0f} tokens/s"
        )


def measure_decode(llm: LLM, batch_size: int, repeats: int) -> None:
    """Time the steps in which every sequence decodes."""
    rates = []
    for repeat in range(repeats + 1):
        rng = Random(repeat)
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        for index in range(batch_size):
            llm.engine.add_request(f"{repeat}-{index}", rng.choices(range(llm.engine.vocab_size), k=128), params)
        started: set[str] = set()
        while len(started) < batch_size:
            started.update(output.request_id for output in llm.engine.step())
        start, num_tokens = time.perf_counter(), 0
        while llm.engine.has_unfinished:
            num_tokens += len(llm.engine.step())
        rates.append(num_tokens / (time.perf_counter() - start))
    rate = median(rates[1:])
    print(f"decode at {batch_size}: {rate:,.0f} tokens/s, {batch_size / rate * 1000:.2f} ms per step")


def measure_cache(loads: Mapping[str, Load], name: str, workload: MultiTurn | SharedPrefix, repeats: int) -> None:
    print(f"\n{name}")
    walls = {}
    for label, load_empty in loads.items():
        reports = [workload.run(load_empty()) for _ in range(repeats)]
        walls[label] = median(report.wall_s for report in reports)
        last = reports[-1]
        print(
            f"  cache {label}: {walls[label]:.2f} s · {last.prompt_tokens:,} prompt tokens, {last.hit_share:.1%} hit · "
            f"mean TTFT {last.mean_ttft_s * 1000:.0f} ms"
        )
    for label in list(walls)[1:]:
        print(f"  {label} / off: {walls[label] / walls['off']:.3f} of the wall time")


if __name__ == "__main__":
    main()
