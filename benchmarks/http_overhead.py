"""What HTTP costs: the demo model behind ``strandline serve`` against the same engine in this process.

    python benchmarks/http_overhead.py --clients 1 16 64

Both run the same requests, that many at a time: prompts of random tokens that share nothing, greedy, outputs of a
fixed length. Requests per second, the mean time to the first token, and the difference of the two: seconds per
request, and per token when outputs are streamed token by token. Each figure is the median of ``--repeats`` runs, in
turns, after a warm-up. On a machine with few cores the HTTP process takes them from the engine: that is in the
figures, as it is in practice.
"""

import argparse
import asyncio
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random
from statistics import fmean, median

from strandline import LLM, SamplingParams
from strandline.bench.serving.load import Load
from strandline.bench.serving.load_client import ServerUnderLoad
from strandline.bench.serving.options import Pace, Target
from strandline.bench.serving.prompt_vocabulary import Vocabulary
from strandline.bench.serving.session import Ask, single
from strandline.version import VERSION

LISTENING = re.compile(r"serving \S+ on (http://\S+)")
VOCAB_SIZE = 3000


@dataclass(frozen=True)
class Timing:
    """One run."""

    wall_s: float
    ttft_s: float
    itl_s: float


def offline(llm: LLM, prompts: list[list[int]], num_clients: int, num_tokens: int) -> Timing:
    """Run the prompts in the engine, ``num_clients`` at a time: another enters when one is done."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    waiting = list(enumerate(prompts))[::-1]
    sent_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    ttfts_s, gaps_s = [], []
    begin_s = time.perf_counter()
    while waiting or llm.engine.has_unfinished:
        while waiting and len(sent_s) < num_clients:
            index, prompt = waiting.pop()
            llm.engine.add_request(name := f"{begin_s}-{index}", prompt, params)
            sent_s[name] = time.perf_counter()
        for output in llm.engine.step():
            name, now_s = output.request_id, time.perf_counter()
            if name in last_s:
                gaps_s.append(now_s - last_s[name])
            else:
                ttfts_s.append(now_s - sent_s[name])
            last_s[name] = now_s
            if output.finished:
                del sent_s[name]
    return Timing(time.perf_counter() - begin_s, fmean(ttfts_s), fmean(gaps_s))


def over_http(url: str, prompts: list[list[int]], num_clients: int, num_tokens: int) -> Timing:
    """Run the prompts through the server, streamed."""
    body = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True}
    target = Target(url, "/v1/completions", False, {}, body)

    async def execute() -> Timing:
        async with ServerUnderLoad(target) as server:
            pace = Pace(max_concurrency=num_clients, num_requests=len(prompts))
            run = await Load(server, pace, Vocabulary(())).execute([single(Ask(p, num_tokens)) for p in prompts])
        failed = [answer.error for answer in run.answers if answer.error]
        if failed:
            raise RuntimeError(failed[0])
        # Per token, not per piece: a token that is part of a character has no piece of its own.
        gaps_s = fmean(answer.tpot_s for answer in run.answers)
        return Timing(run.duration_s, fmean(answer.ttft_s for answer in run.answers), gaps_s)

    return asyncio.run(execute())


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[str]:
    """Give the address of a server."""
    command = [sys.executable, "-m", "strandline", "serve", options.model, "--port", "0"]
    command += ["--memory", options.memory, "--dtype", options.dtype, "--max-queue", "100000"]
    with tempfile.NamedTemporaryFile("r") as log:
        process = subprocess.Popen(command, stderr=open(log.name, "w"), env=dict(os.environ))  # noqa: SIM115
        try:
            while (found := LISTENING.search(Path(log.name).read_text())) is None:
                if process.poll() is not None:
                    raise RuntimeError(Path(log.name).read_text())
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


def fresh_prompts(rng: Random, options: argparse.Namespace, num_clients: int) -> list[list[int]]:
    """Return new prompts, enough to keep all clients busy."""
    count = max(options.min_requests, options.requests_per_client * num_clients)
    return [rng.choices(range(1, VOCAB_SIZE), k=options.prompt_tokens) for _ in range(count)]


def measure(llm: LLM, url: str, rng: Random, options: argparse.Namespace, num_clients: int) -> None:
    """Print a line for one number of clients."""
    timings: dict[str, list[Timing]] = {"offline": [], "http": []}
    count = 0
    for _ in range(options.repeats):
        prompts = fresh_prompts(rng, options, num_clients)
        count = len(prompts)
        timings["offline"].append(offline(llm, prompts, num_clients, options.output_tokens))
        timings["http"].append(over_http(url, prompts, num_clients, options.output_tokens))
    wall_s = {name: median(timing.wall_s for timing in each) for name, each in timings.items()}
    ttft_s = {name: median(timing.ttft_s for timing in each) for name, each in timings.items()}
    itl_s = {name: median(timing.itl_s for timing in each) for name, each in timings.items()}
    more_s = (wall_s["http"] - wall_s["offline"]) / count
    print(
        f"{num_clients:>7} {count:>8} {count / wall_s['offline']:>9.2f} {count / wall_s['http']:>9.2f} "
        f"{ttft_s['offline'] * 1e3:>10.1f} {ttft_s['http'] * 1e3:>9.1f} {itl_s['offline'] * 1e3:>9.2f} "
        f"{itl_s['http'] * 1e3:>9.2f} {more_s * 1e3:>14.2f} {more_s / options.output_tokens * 1e6:>12.0f}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--requests-per-client", type=int, default=3)
    parser.add_argument("--min-requests", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    print(
        f"{date.today()} · strandline {VERSION} · {platform.machine()}, {os.cpu_count()} cores · "
        f"Python {platform.python_version()} · {options.model}, {options.dtype} · {options.prompt_tokens} prompt and "
        f"{options.output_tokens} output tokens · median of {options.repeats}\n"
    )
    print(f"{'':>16}{'requests per s':>20}{'TTFT, ms':>21}{'ms per token':>20}{'HTTP adds, of wall time':>27}")
    print(
        f"{'clients':>7} {'requests':>8} {'engine':>9} {'HTTP':>9} {'engine':>10} {'HTTP':>9} {'engine':>9} "
        f"{'HTTP':>9} {'ms/request':>14} {'us/token':>12}"
    )
    rng = Random(options.seed)
    llm = LLM(options.model, dtype=options.dtype, memory=options.memory, skip_tokenizer_init=False)
    with serving(options) as url:
        warm_up = fresh_prompts(rng, options, 1)
        offline(llm, warm_up, 4, options.output_tokens)
        over_http(url, warm_up, 4, options.output_tokens)
        for num_clients in options.clients:
            measure(llm, url, rng, options, num_clients)


if __name__ == "__main__":
    main()
