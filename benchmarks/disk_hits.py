"""A hit on the disk cache against computing the prompt, by its length, after a restart.

    python benchmarks/disk_hits.py --lengths 256,1024,4096,8000
    python benchmarks/disk_hits.py --model benchmarks/configs/qwen3.5-4b --load-format dummy --memory 16GiB \
        --lengths 1024,4096,16384 --directory /fast/disk

For each length: the time to the first token of a prompt that is computed; of the same prompt that a restarted engine
reads from files which the system has in memory; and from files which it has not. Everything is loaded, whether that
pays or not. Times are medians of ``--rounds`` prompts.
"""

import argparse
import os
import platform
from datetime import date
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import torch

from strandline import LLM, SamplingParams
from strandline.cache.evict_all import evict_all

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def main() -> None:
    options = parse()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{date.today()} · {device} · torch {torch.__version__} · Python {platform.python_version()} · {options.model}"
    )
    print(f"{'tokens':>7}{'MiB':>8}{'computed':>10}{'in memory':>11}{'from disk':>11}   ms to the first token, medians")
    for length in map(int, options.lengths.split(",")):
        with TemporaryDirectory(dir=options.directory) as directory:
            measure(options, length, directory)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--memory", default="1GiB", help="of the device (default: %(default)s)")
    parser.add_argument("--lengths", default="256,1024,4096,8000", help="tokens of the prompts")
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length")
    parser.add_argument("--directory", help="where the files go (default: the system's temporary directory)")
    return parser.parse_args()


def load(options: argparse.Namespace, directory: str, seed: int) -> LLM:
    llm = LLM(
        model=options.model,
        load_format=options.load_format,
        disk_cache=directory,
        memory=options.memory,
        max_model_len=max(map(int, options.lengths.split(","))) + 64,
        skip_tokenizer_init=True,
    )
    ttft_ms(llm, [seed] * 100)
    return llm


def measure(options: argparse.Namespace, length: int, directory: str) -> None:
    """Print one line."""
    choose = Random(length)
    prompts = [choose.choices(range(10, 4000), k=length) for _ in range(options.rounds)]
    llm = load(options, directory, 3)
    computed = [ttft_ms(llm, prompt) for prompt in prompts]
    leave(llm)
    mib = sum(path.stat().st_size for path in Path(directory).iterdir()) / 2**20 / (options.rounds + 1)
    times = []
    for forget in (False, True):
        llm = load(options, directory, 4 + forget)
        if forget:
            forget_pages(Path(directory))
        times.append([ttft_ms(llm, prompt, num_cached=length) for prompt in prompts])
        llm.engine.core.close()
    warm, cold = times
    print(f"{length:>7,}{mib:>8.1f}{median(computed):>10.1f}{median(warm):>11.1f}{median(cold):>11.1f}", flush=True)


def ttft_ms(llm: LLM, prompt: list[int], *, num_cached: int = 0) -> float:
    """Return the time to the first token of a prompt."""
    for tier in llm.engine.core.loads.tiers:
        tier.costs.token_s = None
    [output] = llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
    if output.num_cached_tokens != num_cached or output.times.ttft_s is None:
        raise SystemExit(f"{output.num_cached_tokens} tokens were cached, not {num_cached}")
    return 1000 * output.times.ttft_s


def leave(llm: LLM) -> None:
    """Evict everything, wait until it has reached the disk, and end the engine."""
    core = llm.engine.core
    if not core.loads.spills:
        raise SystemExit("there is no disk cache")
    [spills] = core.loads.spills
    evict_all(core.cache)
    core.executor.carry_out(core.cache.take_actions())
    while len(spills):
        core.scheduler.loading.complete(core.executor.wait_for_transfers(1.0))
        core.executor.carry_out(core.cache.take_actions())
    core.close()


def forget_pages(directory: Path) -> None:
    """Have the system forget what it has in memory of some files."""
    for path in directory.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


if __name__ == "__main__":
    main()
