"""Host memory below the device: how fast a prefix returns from it, and what keeping prefixes there costs.

    python benchmarks/host_memory.py --model benchmarks/configs/qwen3.5-4b --load-format dummy --memory 8GiB \
        --host-memory 32GiB
    python benchmarks/host_memory.py --length 1024 --memory 64MiB --host-memory 256MiB --decodes 4 --output-len 64

Return: the time to the first token of a prompt of ``--length`` tokens that is computed, that hits on the device, and
that returns from host memory. Everything is loaded, whether that pays or not. Times are medians of ``--rounds``
prompts.

Demotion: the memory of the device is filled with prefixes that are never used again, so that everything that is
allocated evicts something, which with ``--host-memory`` is stored there. Prefill: prompts of ``--length`` tokens that
share nothing, one token out. Decode: ``--decodes`` sequences of ``--output-len`` tokens that all decode. Engines with
and without host memory take turns, in ``--rounds`` rounds; rates are medians.
"""

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from datetime import date
from random import Random
from statistics import median

import torch

from strandline import LLM, SamplingParams
from strandline.cache.evict_all import evict_all

WARM_UPS = 2


def main() -> None:
    options = parse()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{date.today()} · {device} · torch {torch.__version__} · Python {platform.python_version()} · {options.model}"
    )
    with_host = load(options, host_memory=options.host_memory)
    if "return" in options.only:
        measure_return(with_host, options)
    if "demotion" in options.only:
        measure_demotion({"without host memory": load(options), "with host memory": with_host}, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--memory", required=True, help="of each of the two engines on the device, such as 8GiB")
    parser.add_argument("--host-memory", required=True, help="such as 32GiB")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the prompts")
    parser.add_argument("--decodes", type=int, default=16, help="sequences that decode at once")
    parser.add_argument("--output-len", type=int, default=512, help="tokens of each of them")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=("return", "demotion"), choices=("return", "demotion"))
    return parser.parse_args()


def load(options: argparse.Namespace, **more: object) -> LLM:
    return LLM(
        options.model,
        load_format=options.load_format,
        memory=options.memory,
        max_model_len=max(options.length, options.output_len) + 256,
        skip_tokenizer_init=True,
        **more,
    )


def some_tokens(llm: LLM, rng: Random, count: int) -> list[int]:
    return rng.choices(range(llm.engine.vocab_size), k=count)


def params_for(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def measure_return(llm: LLM, options: argparse.Namespace) -> None:
    """Print how long a prompt takes until its first token, by where its prefix is."""
    rng, length = Random(1), options.length
    times = dict[str, list[float]]()
    for _ in range(options.rounds + WARM_UPS):
        prompt = some_tokens(llm, rng, length)
        found = {
            "computed": ttft_ms(llm, prompt, num_cached=0),
            "hit on the device": ttft_ms(llm, [*prompt, 1], num_cached=length),
        }
        put_away(llm)
        num_loads = num_loads_of(llm)
        found["returned from host memory"] = ttft_ms(llm, [*prompt, 2], num_cached=length)
        if num_loads_of(llm) != num_loads + 1:
            raise SystemExit("nothing was loaded from host memory: it is too small for one prompt")
        for name, time_ms in found.items():
            times.setdefault(name, []).append(time_ms)
    print(
        f"\n{'prompt of ' + format(length, ',') + ' tokens':<28}{'first token after':>18}{'fastest':>10}   ms, medians"
    )
    for name, all_ms in times.items():
        print(f"{name:<28}{median(all_ms[WARM_UPS:]):>18.1f}{min(all_ms[WARM_UPS:]):>10.1f}", flush=True)


def ttft_ms(llm: LLM, prompt: list[int], *, num_cached: int) -> float:
    """Return the time to the first token of a prompt."""
    for tier in llm.engine.core.loads.tiers:
        tier.costs.token_s = None
    [output] = llm.generate([prompt], params_for(1), use_tqdm=False)
    if output.num_cached_tokens != num_cached or output.times.ttft_s is None:
        raise SystemExit(f"{output.num_cached_tokens} tokens were cached, not {num_cached}")
    return 1000 * output.times.ttft_s


def num_loads_of(llm: LLM) -> int:
    [host] = llm.engine.core.loads.tiers
    return host.num_loads


def put_away(llm: LLM) -> None:
    """Evict everything from the device, and wait until it has been stored."""
    core = llm.engine.core
    evict_all(core.cache)
    core.executor.carry_out(core.cache.take_actions())
    synchronize()
    core.scheduler.loading.complete(core.executor.wait_for_transfers(0.1))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_demotion(engines: dict[str, LLM], options: argparse.Namespace) -> None:
    """Print the throughput of engines whose memory is full."""
    for llm in engines.values():
        fill(llm, options)
    print(f"\n{'full device, tokens/s':<28}{'prefill':>12}{'decode':>12}{'demoted':>12}   medians")
    measures: list[Callable[[LLM, argparse.Namespace, int], float]] = [prefill_rate, decode_rate]
    rates = {name: [list[float](), list[float]()] for name in engines}
    for number in range(options.rounds + WARM_UPS):
        for name, llm in turns(engines, number):
            for kept, measure in zip(rates[name], measures, strict=True):
                kept.append(measure(llm, options, number))
    medians = {name: [median(kept[WARM_UPS:]) for kept in both] for name, both in rates.items()}
    for name, (prefill, decode) in medians.items():
        tiers = engines[name].engine.core.loads.stats()
        num_blocks = sum(tier.num_blocks_demoted for tier in tiers)
        print(f"{name:<28}{prefill:>12,.0f}{decode:>12,.0f}{num_blocks:>12,} blocks")
    without, with_host = medians.values()
    costs = [1 - after / before for before, after in zip(without, with_host, strict=True)]
    print(f"{'cost of demotion':<28}{costs[0]:>12.1%}{costs[1]:>12.1%}", flush=True)


def turns(engines: dict[str, LLM], number: int) -> Iterator[tuple[str, LLM]]:
    """Yield the engines in alternating order, so that neither profits from being the first."""
    return iter(list(engines.items())[:: 1 if number % 2 else -1])


def fill(llm: LLM, options: argparse.Namespace) -> None:
    """Compute prompts until the device has evicted blocks and, with host memory, that is full too."""
    rng = Random(2)
    core = llm.engine.core
    while not core.cache.stats().num_blocks_evicted or any(
        tier.num_used_bytes < 0.9 * tier.num_bytes and not tier.num_snapshots_evicted for tier in core.loads.stats()
    ):
        llm.generate([some_tokens(llm, rng, options.length)], params_for(1), use_tqdm=False)


def prefill_rate(llm: LLM, options: argparse.Namespace, number: int) -> float:
    rng = Random(f"prefill {number}")
    prompts = [some_tokens(llm, rng, options.length) for _ in range(4)]
    synchronize()
    start_s = time.perf_counter()
    llm.generate(prompts, params_for(1), use_tqdm=False)
    num_tokens: int = len(prompts) * options.length
    return num_tokens / (time.perf_counter() - start_s)


def decode_rate(llm: LLM, options: argparse.Namespace, number: int) -> float:
    """Return the rate of the steps in which all sequences decode."""
    rng, engine = Random(f"decode {number}"), llm.engine
    for index in range(options.decodes):
        engine.add_request(f"{number} {index}", some_tokens(llm, rng, 128), params_for(options.output_len))
    started = set[str]()
    while len(started) < options.decodes:
        started.update(output.request_id for output in engine.step())
    start_s, num_tokens = time.perf_counter(), 0
    while engine.has_unfinished:
        outputs = engine.step()
        num_tokens += len(outputs)
    return num_tokens / (time.perf_counter() - start_s)


if __name__ == "__main__":
    main()
