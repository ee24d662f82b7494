"""CPU time of prefills and decodes with Numba kernels and with the reference implementation, on a machine that is busy.

    PYTHONPATH=src python benchmarks/cpu_time.py --models tiny-granite tiny-lfm2

Models of ``benchmarks/configs`` with random weights, one thread, no cache of prefixes. Both engines live in one process
and take turns. What is measured is the CPU time of the process, which other processes lengthen by what they displace
from caches alone; the least and the median of ``--rounds`` are printed.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from random import Random
from statistics import median

import torch

from strandline import LLM, SamplingParams
from strandline.env import NUMBA

CONFIGS = Path(__file__).parent / "configs"
VERSIONS = {"Numba": "1", "torch": "0"}
PROMPTS = (512, 2000)
BATCHES = (1, 8)
DECODED = 64

Work = tuple[str, Callable[[LLM, int, int], float], int]
"""Its title, what measures it, and its size."""


def load(model: str, is_compiled: str) -> LLM:
    os.environ[NUMBA] = is_compiled
    return LLM(
        str(CONFIGS / model),
        load_format="dummy",
        device="cpu",
        memory="512MiB",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )


def prefill_ms(llm: LLM, num_tokens: int, seed: int) -> float:
    """Return the CPU time of one prompt."""
    prompt = Random(seed).choices(range(llm.engine.vocab_size), k=num_tokens)
    begun_s = time.process_time()
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    return 1e3 * (time.process_time() - begun_s)


def decode_ms(llm: LLM, batch_size: int, seed: int) -> float:
    """Return the CPU time of a step in which every sequence decodes a token behind 128 and more."""
    params, rng = SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True), Random(seed)
    for index in range(batch_size):
        llm.engine.add_request(str(index), rng.choices(range(llm.engine.vocab_size), k=128), params)
    started = set[str]()
    while len(started) < batch_size:
        started.update(output.request_id for output in llm.engine.step())
    begun_s, num_tokens = time.process_time(), 0
    while llm.engine.has_unfinished:
        num_tokens += len(llm.engine.step())
    return 1e3 * (time.process_time() - begun_s) * batch_size / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-granite", "tiny-lfm2", "tiny-qwen3.5"])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{date.today()} · {platform.machine()} · torch {torch.__version__} · Python {platform.python_version()}")
    for model in options.models:
        engines = {name: load(model, is_compiled) for name, is_compiled in VERSIONS.items()}
        work: list[Work] = [(f"prefill of {x:,} tokens", prefill_ms, x) for x in PROMPTS]
        work += [(f"decode step at {x}", decode_ms, x) for x in BATCHES]
        for title, measure, size in work:
            times: dict[str, list[float]] = {name: [] for name in engines}
            for seed in range(options.rounds + 1):
                for name, llm in engines.items():
                    times[name].append(measure(llm, size, seed))
            found = [f"{name} {min(ms[1:]):.1f} ms (median {median(ms[1:]):.1f})" for name, ms in times.items()]
            print(f"{model}, {title}: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
