"""Two engines on one machine: what a prompt costs that one computes and the other continues.

    python benchmarks/hand_over.py --lengths 4096,32000
    python benchmarks/hand_over.py --lengths 4096,32000 --connector NixlConnector
    python benchmarks/hand_over.py --lengths 4096,32000 --gpus 0,1

P computes prompts, D continues them: two servers of one model with random weights, on the same device or, with
``--gpus 0,1``, on two. For each length, medians of ``--rounds`` fresh prompts, in milliseconds: P's answer (prefill);
D's answer of one token to the prompt that P hands over, which is the time to its first token; the transfer in it, by
D's metrics, with its bytes; D's answer to another fresh prompt, which it computes; and to a prompt that it has cached.

Then the time between tokens on D, while ``--streams`` requests generate: without other work, beside prompts that D
fetches one after the other, and beside fresh prompts of the same length that D computes. P has computed the fetched
ones before, since both may share a device.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from strandline.config_fields import read_vocab_size
from strandline.model_config import read_model_config
from strandline.text.model_files import find_model
from strandline.version import VERSION

LISTENING = re.compile(r"serving \S+ on (http://\S+)")
CONFIGS = Path(__file__).parent / "configs"
FIRST_ID = 10
"""Token ids below may be special."""


@dataclass(frozen=True)
class Round:
    """One prompt on P and on D, and another on D alone. Seconds."""

    prefill_s: float
    handed_over_s: float
    transfer_s: float
    num_bytes: float
    computed_s: float
    cached_s: float


def main() -> None:
    options = parse()
    vocab_size = read_vocab_size(read_model_config(find_model(options.model)).text)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    print(
        f"{date.today()} · strandline {VERSION} · torch {torch.__version__} · Python {platform.python_version()} · "
        f"{platform.machine()}, {device} · {options.model} · {options.connector}, {options.roles}",
        flush=True,
    )
    start_s = time.perf_counter()
    with TemporaryDirectory() as directory:
        tokenizer = save_tokenizer(Path(directory) / "tokenizer", vocab_size)
        with running_servers(options, Path(directory), tokenizer) as (prefill, decode):
            print(f"both serve after {time.perf_counter() - start_s:.0f} s\n", flush=True)
            asyncio.run(measure(options, Engines(prefill, decode), Random(options.seed), vocab_size))
    print(f"\n{time.perf_counter() - start_s:.0f} s in all")


def parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(CONFIGS / "qwen3.5-4b") if on_gpu else "demo")
    parser.add_argument("--connector", default="SocketConnector", help="or NixlConnector")
    parser.add_argument("--roles", default="split", choices=["split", "both"], help="both: each engine is kv_both")
    parser.add_argument("--kv-port", type=int, default=0, help="the port that P gives on (default: any)")
    parser.add_argument("--memory", default="8GiB" if on_gpu else "512MiB", help="of each engine")
    parser.add_argument("--max-model-len", default=33000 if on_gpu else 8192, type=int)
    parser.add_argument("--serve-args", default="", help="further flags of both servers, as one string")
    parser.add_argument("--gpus", help="of P and of D, such as 0,1 (default: the first one)")
    parser.add_argument("--lengths", default="4096,32000" if on_gpu else "256,1024", help="tokens of the prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16 if on_gpu else 2)
    parser.add_argument("--stream-prompt", type=int, default=128)
    parser.add_argument("--stream-tokens", type=int, default=400 if on_gpu else 100)
    parser.add_argument("--beside-length", type=int, default=4096 if on_gpu else 512)
    parser.add_argument("--beside-prompts", type=int, default=12, help="most prompts beside the streams")
    parser.add_argument("--start-timeout-s", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def save_tokenizer(directory: Path, vocab_size: int) -> Path:
    """Write a tokenizer with a word for each token, so that each token of an answer is streamed."""
    words = {f"t{index}": index for index in range(vocab_size)}
    directory.mkdir()
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


@contextmanager
def running_servers(options: argparse.Namespace, directory: Path, tokenizer: Path) -> Iterator[tuple[str, str]]:
    """Yield the addresses of two servers; end both afterwards, whatever has happened."""
    roles = ("kv_both", "kv_both") if options.roles == "both" else ("kv_producer", "kv_consumer")
    logs = [directory / "prefill.log", directory / "decode.log"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        gpus = options.gpus.split(",") if options.gpus else (None, None)
        for role, log, port, gpu in zip(roles, logs, (options.kv_port, 0), gpus, strict=True):
            environment = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
            with log.open("wb") as file:
                command = command_of(options, tokenizer, role, port)
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        deadline = time.monotonic() + options.start_timeout_s
        first, second = (address_of(*pair, deadline) for pair in zip(processes, logs, strict=True))
        yield first, second
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def command_of(options: argparse.Namespace, tokenizer: Path, role: str, port: int) -> list[str]:
    """Return the command that starts a server."""
    transfer = {
        "kv_connector": options.connector,
        "kv_role": role,
        "kv_port": port,
        "kv_connector_extra_config": {"lease_s": 600, "timeout_s": 30},
    }
    return [
        *(sys.executable, "-m", "strandline", "serve", options.model, "--port", "0"),
        *("--load-format", "dummy", "--tokenizer", str(tokenizer), "--served-model-name", "m"),
        *("--memory", options.memory, "--max-model-len", str(options.max_model_len)),
        *("--kv-transfer-config", json.dumps(transfer), *options.serve_args.split()),
    ]


def address_of(process: subprocess.Popen[bytes], log: Path, deadline: float) -> str:
    """Wait until a server is healthy; return its address."""
    while time.monotonic() < deadline:
        found = LISTENING.search(log.read_text(errors="replace"))
        if found is not None and httpx.get(f"{found[1]}/health", trust_env=False).status_code == httpx.codes.OK:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise SystemExit(f"a server does not start:\n{log.read_text(errors='replace')[-6000:]}")


class Engines:
    """Requests to both servers, over one client. Use it as an async context."""

    def __init__(self, prefill: str, decode: str) -> None:
        self.prefill, self.decode = prefill, decode
        self._http = httpx.AsyncClient(timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def __aenter__(self) -> "Engines":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def ask(self, url: str, prompt: list[int], num_cached: int, transfer: Any = None) -> tuple[float, Any]:
        """Request one token; return the seconds until it came, and the response's ``kv_transfer_params``.

        Args:
            num_cached: how many tokens of the prompt need not be computed; anything else ends the benchmark.
        """
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "kv_transfer_params": transfer}
        start_s = time.perf_counter()
        response = await self._http.post(f"{url}/v1/completions", json=body)
        seconds = time.perf_counter() - start_s
        if response.status_code != httpx.codes.OK:
            raise SystemExit(response.text)
        answer = response.json()
        found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if found != num_cached:
            raise SystemExit(f"{found} of {len(prompt)} tokens were cached, not {num_cached}")
        return seconds, answer.get("kv_transfer_params")

    async def keep(self, prompt: list[int]) -> tuple[float, Any]:
        """Have P compute a prompt; return the seconds, and what D needs."""
        seconds, params = await self.ask(self.prefill, prompt, 0, {"do_remote_decode": True})
        if params is None:
            raise SystemExit("P keeps nothing; raise --memory")
        return seconds, params

    async def fetched(self) -> tuple[float, float]:
        """Return the bytes that D has fetched so far, and the seconds of its transfers."""
        text = (await self._http.get(f"{self.decode}/metrics")).text
        pattern = r'^strandline:kv_transfer_{}_total\{{[^}}]*direction="fetched"[^}}]*\}} (\S+)$'
        values = [re.findall(pattern.format(name), text, re.MULTILINE) for name in ("bytes", "seconds")]
        return float(values[0][0]), float(values[1][0])

    async def stream(self, prompt: list[int], num_tokens: int, begun: asyncio.Semaphore) -> list[float]:
        """Generate tokens on D; return when each came, or several together.

        Args:
            begun: released at the first, or if none comes.
        """
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body["return_token_ids"] = True
        times_s: list[float] = []
        num_streamed = 0
        try:
            async with self._http.stream("POST", f"{self.decode}/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        times_s.append(time.perf_counter())
                        num_streamed += sum(len(each["token_ids"]) for each in json.loads(line[6:])["choices"])
                        if len(times_s) == 1:
                            begun.release()
        finally:
            if not times_s:
                begun.release()
        if num_streamed != num_tokens:
            raise SystemExit(f"{num_streamed} of {num_tokens} tokens were streamed")
        return times_s


async def measure(options: argparse.Namespace, engines: Engines, rng: Random, vocab_size: int) -> None:
    """Print both tables."""

    def fresh(length: int) -> list[int]:
        return rng.choices(range(FIRST_ID, vocab_size), k=length)

    async with engines:
        print(
            "| tokens | P computes, ms | D continues, ms | transfer, ms | MB | MB/s | sum, ms | D computes, ms "
            "| D has it cached, ms |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
        )
        for length in map(int, options.lengths.split(",")):
            await one_round(engines, fresh, length)  # a warm-up
            rounds = [await one_round(engines, fresh, length) for _ in range(options.rounds)]
            print(row_of(length, rounds), flush=True)
        print("\n| between tokens on D | median, ms | P99, ms | longest, ms | prompts beside |\n" + "| --- " * 5 + "|")
        await beside(options, engines, fresh, "warm-up")
        await beside(options, engines, fresh, "nothing beside")
        params = [(prompt, (await engines.keep(prompt))[1]) for prompt in prompts_beside(options, fresh)]
        work = [partial(engines.ask, engines.decode, prompt, len(prompt), each) for prompt, each in params]
        await beside(options, engines, fresh, "beside prompts that D fetches", work)
        work = [partial(engines.ask, engines.decode, prompt, 0) for prompt in prompts_beside(options, fresh)]
        await beside(options, engines, fresh, "beside prompts that D computes", work)


def prompts_beside(options: argparse.Namespace, fresh: Callable[[int], list[int]]) -> list[list[int]]:
    """Return fresh prompts for the time between tokens."""
    return [fresh(options.beside_length) for _ in range(options.beside_prompts)]


async def one_round(engines: Engines, fresh: Callable[[int], list[int]], length: int) -> Round:
    """Measure one prompt that is handed over, and one that is not."""
    prompt, other = fresh(length), fresh(length)
    prefill_s, params = await engines.keep(prompt)
    bytes_before, seconds_before = await engines.fetched()
    handed_over_s, _ = await engines.ask(engines.decode, prompt, length, params)
    bytes_after, seconds_after = await engines.fetched()
    cached_s, _ = await engines.ask(engines.decode, prompt, length)
    computed_s, _ = await engines.ask(engines.decode, other, 0)
    transfer_s, num_bytes = seconds_after - seconds_before, bytes_after - bytes_before
    return Round(prefill_s, handed_over_s, transfer_s, num_bytes, computed_s, cached_s)


def row_of(length: int, rounds: list[Round]) -> str:
    """Return a line of the first table."""
    names = ("prefill_s", "handed_over_s", "transfer_s", "num_bytes", "computed_s", "cached_s")
    prefill, handed_over, transfer, num_bytes, computed, cached = (
        median(getattr(one, name) for one in rounds) for name in names
    )
    rate = median(one.num_bytes / one.transfer_s for one in rounds)
    total = median(one.prefill_s + one.handed_over_s for one in rounds)
    times = [f"{seconds * 1e3:,.1f}" for seconds in (prefill, handed_over, transfer)]
    others = [f"{seconds * 1e3:,.1f}" for seconds in (total, computed, cached)]
    return f"| {' | '.join([f'{length:,}', *times, f'{num_bytes / 1e6:,.1f}', f'{rate / 1e6:,.0f}', *others])} |"


async def beside(
    options: argparse.Namespace,
    engines: Engines,
    fresh: Callable[[int], list[int]],
    name: str,
    work: Sequence[Callable[[], Awaitable[object]]] = (),
) -> None:
    """Print a line of the second table: the gaps while the work runs, or all after the first tokens."""
    prompts = [fresh(options.stream_prompt) for _ in range(options.streams)]
    begun, num_done = asyncio.Semaphore(0), 0
    streams = [asyncio.create_task(engines.stream(prompt, options.stream_tokens, begun)) for prompt in prompts]
    for _ in streams:
        await begun.acquire()
    start_s, end_s = time.perf_counter(), float("inf")
    for one in work:
        if any(stream.done() for stream in streams):
            break
        await one()
        num_done += 1
        end_s = time.perf_counter()
    times = await asyncio.gather(*streams)
    end_s = min(end_s, *(each[-1] for each in times))
    gaps = [gap for each in times for at, gap in zip(each[1:], np.diff(each), strict=True) if start_s <= at <= end_s]
    if name != "warm-up":
        p50, p99, longest = (f"{float(np.percentile(gaps, share)) * 1e3:.2f}" for share in (50, 99, 100))
        print(f"| {name} | {p50} | {p99} | {longest} | {num_done} |", flush=True)


if __name__ == "__main__":
    main()
