"""Prefill, decode and serving through the engine, on a GPU or, for small models, on a CPU.

    python benchmarks/gpu.py --model benchmarks/configs/qwen3.5-4b
    python benchmarks/gpu.py --model benchmarks/configs/qwen3.5-35b-a3b --only decode,serving
    python benchmarks/gpu.py --model benchmarks/configs/qwen3.5-35b-a3b-fp8 --only decode,prefill
    python benchmarks/gpu.py --model benchmarks/configs/qwen3.5-35b-a3b-w4a16 --only decode
    python benchmarks/gpu.py --model benchmarks/configs/nemotron-3-nano-30b-a3b --only decode,prefill
    python benchmarks/gpu.py --model benchmarks/configs/qwen3.5-35b-a3b --only long,beside --max-model-len 262144
    python benchmarks/gpu.py --model demo --load-format auto --only beside --beside-tokens 6000 --max-model-len 8192
    python benchmarks/gpu.py --model benchmarks/configs/qwen3.5-35b-a3b --only decode,prefill --tensor-parallel-size 2
    python benchmarks/gpu.py --model benchmarks/configs/qwen3-next-80b-a3b --only decode,prefill -tp 2
    python benchmarks/gpu.py --model benchmarks/configs/qwen3.5-4b --only adapters --batch-sizes 1,64

Decode: prompts of 1,024 tokens, 256 tokens out; the time per token of a sequence and its tokens per step, while all
decode; with ``--depths``, for each number of drafts in turn. Prefill: prompts that share nothing, one token out.
Serving: one shared prefix of 4,096 tokens, 128 more each, 512 out, 16 requests under way at any time, 128 in all.
Turns: 128 and 500 new tokens behind 4,096 cached ones, alone and while 15 sequences decode; the time to the first
token. Long: one cold prompt of each length, the decode steps of one and of four sequences behind it. Beside: the gaps
between the tokens of one and of four decodes beside the prefill of a long prompt (``--beside-tokens``). Adapters: the
decodes without and with a random adapter, and prefill with it. Weights are
random unless ``--load-format`` says otherwise. Everything is greedy; decode, prefill and serving run once before they
are measured. Decodes without drafts and prefills are compared with their floors (``floors.py``).
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from floors import decode_share, prefill_share
from safetensors.torch import save_file

from strandline import LLM, SamplingParams
from strandline.config import KV_CACHE_DTYPES
from strandline.device.uni_executor import UniExecutor
from strandline.models.lora.adapter_slots import AdapterSlots
from strandline.records.adapters import LoadedAdapter, salt_with

PROFILED_STEPS = 20
ADAPTED = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
FIRST_TOKENS = 4
"""Tokens of a sequence before its steps are measured."""


def main() -> None:
    options = parse()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{date.today()} · {device} · torch {torch.__version__} · Python {platform.python_version()} · {options.model}"
    )
    only = options.only.split(",")
    parts: dict[str, Callable[[LLM, argparse.Namespace], None]] = {
        "decode": measure_decode,
        "prefill": measure_prefill,
        "serving": measure_serving,
        "turns": measure_turns,
        "long": measure_long,
        "beside": measure_beside,
        "adapters": measure_adapters,
    }
    with load(options) as llm:
        for name, measure in parts.items():
            if name in only:
                measure(llm, options)
        if options.profile:
            profile_decode(llm, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="benchmarks/configs/qwen3.5-4b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--only", default="decode,prefill,serving,turns")
    parser.add_argument("--batch-sizes", default="1,16,64,256")
    parser.add_argument("--lengths", default="32000,100000,200000,262000", help="of long prompts, in tokens")
    parser.add_argument("--beside-tokens", type=int, default=100_000, help="of the long prompt beside decodes")
    parser.add_argument("--long-prefill-token-threshold", type=int, help="0: no limit; default: the engine's")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--memory", help="of the cache and of running requests, such as 4GiB; default: the engine's")
    parser.add_argument("--host-memory", help="for evicted entries; default: none")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--no-async-scheduling", action="store_true")
    parser.add_argument("--no-enable-prefix-caching", action="store_true")
    parser.add_argument("--speculative-config", type=json.loads, help="JSON, as of the server")
    parser.add_argument("--depths", type=int, nargs="+", help="drafts of decodes, in turn; without adaptive depth")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES)
    parser.add_argument("--lora-rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--max-loras", type=int, default=1)
    parser.add_argument("--lora-target-modules", nargs="+", default=ADAPTED, help="linear layers that it changes")
    parser.add_argument("--profile", metavar="FILE", help="write a table of a decode step's kernels here")
    return parser.parse_args()


def load(options: argparse.Namespace) -> LLM:
    start_s = time.perf_counter()
    llm = LLM(
        options.model,
        load_format=options.load_format,
        skip_tokenizer_init=True,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        tensor_parallel_size=options.tensor_parallel_size,
        memory=options.memory,
        host_memory=options.host_memory,
        enforce_eager=options.enforce_eager,
        async_scheduling=not options.no_async_scheduling,
        enable_prefix_caching=not options.no_enable_prefix_caching,
        deterministic=options.deterministic,
        dequantize=options.dequantize,
        kv_cache_dtype=options.kv_cache_dtype,
        speculative_config=options.speculative_config,
        **adapter_options(options),
    )
    print(f"loaded in {time.perf_counter() - start_s:.1f} s")
    for line in llm.engine.describe():
        print(f"  {line}")
    return llm


def adapter_options(options: argparse.Namespace) -> dict[str, Any]:
    if "adapters" not in options.only.split(","):
        return {}
    names = {"max_loras": options.max_loras, "max_lora_rank": options.lora_rank}
    return {"enable_lora": True, "lora_target_modules": options.lora_target_modules, **names}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def some_tokens(llm: LLM, rng: Random, count: int) -> list[int]:
    return rng.choices(range(1000, llm.engine.vocab_size), k=count)


def params_for(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def measure_decode(llm: LLM, options: argparse.Namespace) -> None:
    for depth in options.depths or [None]:
        if depth is not None:
            if llm.engine.scheduler.drafts.chooser is not None:
                raise SystemExit('--depths: the engine would choose the depth: "adaptive": false is missing')
            llm.engine.scheduler.drafts.depth = depth
            print(f"{depth} drafts per step")
        measure_batches(llm, options)


def measure_batches(llm: LLM, options: argparse.Namespace) -> None:
    rng = Random(1)
    for batch_size in map(int, options.batch_sizes.split(",")):
        before = after = llm.engine.core.stats().speculation
        windows = []
        for _ in range(2):
            before = after
            windows.append(measure_window(llm, rng, batch_size, options.output_tokens))
            after = llm.engine.core.stats().speculation
        first, last = windows
        context_tokens = 1024 + options.output_tokens // 2
        shown = decode_share(llm.engine.core.executor, batch_size, context_tokens, last.ms_per_token)
        if after.num_drafts > before.num_drafts:
            shown = " with drafts"
        print(
            f"decode at {batch_size}: {last.ms_per_token:.2f} ms per token (first run {first.ms_per_token:.2f}), "
            f"{last.tokens_per_step:.2f} tokens a step{shown}",
            flush=True,
        )


class Window(NamedTuple):
    """Steps in which all sequences decode."""

    ms_per_token: float
    """Of one sequence."""
    tokens_per_step: float
    """Of one sequence, where every step has all of them."""


def measure_window(llm: LLM, rng: Random, batch_size: int, output_tokens: int, salt: str = "") -> Window:
    """Serve prompts, and measure the steps from where all have four tokens until the first one is about to end.

    With drafts sequences end at different steps: the last steps have fewer of them, and fewer drafts.
    """
    engine, speculation = llm.engine, llm.config.speculation
    most_per_step = 1 if speculation is None else 1 + speculation.num_speculative_tokens
    for index in range(batch_size):
        engine.add_request(str(index), some_tokens(llm, rng, 1024), params_for(output_tokens), salt=salt)
    while engine.scheduler.waiting or any(len(r.output_ids) < FIRST_TOKENS for r in engine.scheduler.running):
        engine.step()
    requests = list(engine.scheduler.running)
    lengths = [len(request.output_ids) for request in requests]
    start_s, num_steps = time.perf_counter(), 0
    # A step is planned before the one under way is settled: that may be the whole of two steps from the end.
    while max(len(request.output_ids) for request in requests) <= output_tokens - 2 * most_per_step:
        engine.step()
        num_steps += 1
    elapsed_s = time.perf_counter() - start_s
    num_tokens = sum(len(request.output_ids) for request in requests) - sum(lengths)
    if len(requests) < batch_size or set(engine.scheduler.running) != set(requests) or not num_tokens:
        raise SystemExit(
            f"{batch_size} sequences of 1,024 + {output_tokens} tokens never decode together: {len(requests)} do, for "
            f"{num_steps} steps; raise --memory or --output-tokens, or lower --batch-sizes"
        )
    while engine.has_unfinished:
        engine.step()
    return Window(elapsed_s / num_tokens * batch_size * 1000, num_tokens / num_steps / batch_size)


def measure_adapters(llm: LLM, options: argparse.Namespace) -> None:
    salt = salt_with(load_random_adapter(llm, options.lora_rank), "")
    rng = Random(1)
    for batch_size in map(int, options.batch_sizes.split(",")):
        plain, adapted = (
            [measure_window(llm, rng, batch_size, options.output_tokens, each).ms_per_token for _ in range(3)]
            for each in ("", salt)
        )
        ratio = median(adapted) / median(plain)
        print(
            f"decode at {batch_size}: {median(plain):.3f} ms per token without adapter, {median(adapted):.3f} with one "
            f"({ratio:.3f} of it; runs {', '.join(f'{ms:.3f}' for ms in (*plain, *adapted))})",
            flush=True,
        )
    num_tokens = min(8192, llm.engine.core.limits.max_model_len - 1)
    for each in ("", salt):
        prompts_s = []
        for index in range(3):
            synchronize()
            start_s = time.perf_counter()
            llm.engine.add_request(str(index), some_tokens(llm, rng, num_tokens), params_for(1), salt=each)
            while llm.engine.has_unfinished:
                llm.engine.step()
            prompts_s.append(time.perf_counter() - start_s)
        shown = "with" if each else "without"
        print(f"prompt of {num_tokens:,} tokens {shown} adapter: {min(prompts_s) * 1000:.1f} ms", flush=True)


def load_random_adapter(llm: LLM, rank: int) -> LoadedAdapter:
    """Write an adapter of all linear layers that adapters may change, and load it."""
    executor = llm.engine.core.executor
    assert isinstance(executor, UniExecutor)
    slots = executor.runner.model.adapters
    assert isinstance(slots, AdapterSlots)
    tensors = dict[str, torch.Tensor]()
    for name, (num_outputs, num_inputs) in slots.shapes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, num_inputs) * num_inputs**-0.5
        tensors[f"{module}.lora_B.weight"] = torch.randn(num_outputs, rank) * 0.01
    with TemporaryDirectory() as directory:
        save_file(tensors, f"{directory}/adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
        Path(directory, "adapter_config.json").write_text(json.dumps(config))
        loaded = llm.engine.core.adapters.load("random", directory)
    num_weights = sum(tensor.numel() for tensor in tensors.values())
    print(f"adapter of {len(tensors) // 2} linear layers, {num_weights:,} weights of rank {rank}", flush=True)
    return loaded


def measure_prefill(llm: LLM, options: argparse.Namespace) -> None:
    del options
    rng, length = Random(2), min(8192, llm.engine.core.limits.max_model_len - 1)
    for num_prompts in (1, 8):
        rates = []
        for _ in range(3):
            prompts = [some_tokens(llm, rng, length) for _ in range(num_prompts)]
            synchronize()
            start_s = time.perf_counter()
            for index, prompt in enumerate(prompts):
                llm.engine.add_request(str(index), prompt, params_for(1))
            while llm.engine.has_unfinished:
                llm.engine.step()
            rates.append(num_prompts * length / (time.perf_counter() - start_s))
        shown = ", ".join(f"{rate:,.0f}" for rate in rates)
        share = prefill_share(llm.engine.core.executor, max(rates[1:]))
        print(f"prefill {num_prompts} x {length:,}: {max(rates[1:]):,.0f} tokens/s{share} (runs: {shown})", flush=True)


def measure_serving(llm: LLM, options: argparse.Namespace) -> None:
    del options
    for run, is_shown in ((3, False), (4, True)):
        rng = Random(run)
        prefix = some_tokens(llm, rng, 4096)
        prompts = [prefix + some_tokens(llm, rng, 128) for _ in range(128 if is_shown else 16)]
        added_s: dict[str, float] = {}
        first_s: dict[str, float] = {}
        last_s: dict[str, float] = {}
        hit_tokens = 0
        next_prompt = 0
        start_s = time.perf_counter()
        while len(last_s) < len(prompts):
            while next_prompt < len(prompts) and len(added_s) - len(last_s) < 16:
                name = str(next_prompt)
                added_s[name] = time.perf_counter()
                llm.engine.add_request(name, prompts[next_prompt], params_for(512))
                next_prompt += 1
            for output in llm.engine.step():
                now_s = time.perf_counter()
                if output.request_id not in first_s:
                    first_s[output.request_id] = now_s
                    hit_tokens += output.num_cached_tokens
                if output.finished:
                    last_s[output.request_id] = now_s
        wall_s = time.perf_counter() - start_s
        if is_shown:
            ttft = sorted(first_s[name] - added_s[name] for name in added_s)
            tpot = mean((last_s[name] - first_s[name]) / 511 for name in added_s)
            print(
                f"serving: {len(prompts) / wall_s:.2f} requests/s, TTFT mean {mean(ttft) * 1000:.0f} ms, median "
                f"{ttft[len(ttft) // 2] * 1000:.0f} ms, p99 {ttft[-2] * 1000:.0f} ms, TPOT {tpot * 1000:.2f} ms, "
                f"{hit_tokens / sum(map(len, prompts)):.1%} of prompt tokens hit",
                flush=True,
            )


def measure_turns(llm: LLM, options: argparse.Namespace) -> None:
    del options
    rng = Random(6)
    prefix = some_tokens(llm, rng, 4096)
    engine = llm.engine
    engine.add_request("prefix", prefix, params_for(1))
    for num_decodes in (0, 15):
        for index in range(num_decodes):
            engine.add_request(f"beside {index}", some_tokens(llm, rng, 1024), params_for(4096))
        for num_tokens in (128, 500):
            waits_s = []
            for turn in range(12):
                while engine.scheduler.waiting or any(len(r.output_ids) < 4 for r in engine.scheduler.running):
                    engine.step()
                name = f"turn {num_decodes} {num_tokens} {turn}"
                start_s = time.perf_counter()
                engine.add_request(name, prefix + some_tokens(llm, rng, num_tokens), params_for(1))
                while all(output.request_id != name for output in engine.step()):
                    pass
                waits_s.append(time.perf_counter() - start_s)
            print(
                f"turn of {num_tokens} tokens beside {num_decodes} decodes: first token after "
                f"{median(waits_s[2:]) * 1000:.1f} ms (fastest {min(waits_s[2:]) * 1000:.1f})",
                flush=True,
            )
        for index in range(num_decodes):
            engine.abort(f"beside {index}")


def measure_long(llm: LLM, options: argparse.Namespace) -> None:
    rng = Random(7)
    first_token_s(llm, "warm up", some_tokens(llm, rng, 20_000))
    for length in map(int, options.lengths.split(",")):
        prompt = some_tokens(llm, rng, length)
        wait_s = first_token_s(llm, f"{length}", prompt)
        steps = []
        for num_sequences in (1, 4):
            for index in range(num_sequences):
                llm.engine.add_request(f"{length} {index}", [*prompt, 1000 + index], params_for(64))
            steps.append(median_step_ms(llm))
        print(
            f"{length:,} tokens cold: first token after {wait_s:.3f} s, {length / wait_s:,.0f} tokens/s; decode behind "
            f"it {steps[0]:.2f} ms per step, four sequences {steps[1]:.2f}",
            flush=True,
        )


def measure_beside(llm: LLM, options: argparse.Namespace) -> None:
    rng = Random(8)
    decode_params = params_for(options.max_model_len - 1024)  # they outlast the prefill
    for num_decodes in (1, 4):
        for index in range(num_decodes):
            llm.engine.add_request(f"beside {index}", some_tokens(llm, rng, 1024), decode_params)
        alone_ms = median_step_ms(llm, num_steps=100)
        start_s = time.perf_counter()
        llm.engine.add_request("long", some_tokens(llm, rng, options.beside_tokens), params_for(1))
        gaps_ms, last_s, is_prefilling = [], start_s, True
        while is_prefilling:
            names = {output.request_id for output in llm.engine.step()}
            now_s = time.perf_counter()
            if "beside 0" in names:
                gaps_ms.append((now_s - last_s) * 1000)
                last_s = now_s
            is_prefilling = "long" not in names
        wait_s = time.perf_counter() - start_s
        for index in range(num_decodes):
            llm.engine.abort(f"beside {index}")
        while llm.engine.has_unfinished:
            llm.engine.step()
        print(
            f"{num_decodes} decodes beside a prefill of {options.beside_tokens:,}: {median(gaps_ms):.2f} ms between "
            f"tokens (median; mean {mean(gaps_ms):.2f}, longest {max(gaps_ms):.1f}, alone {alone_ms:.2f}), "
            f"first token of the prompt after {wait_s:.3f} s",
            flush=True,
        )


def first_token_s(llm: LLM, name: str, prompt: list[int]) -> float:
    """Return how long a prompt alone takes until its first token."""
    synchronize()
    start_s = time.perf_counter()
    llm.engine.add_request(name, prompt, params_for(1))
    while llm.engine.has_unfinished:
        llm.engine.step()
    return time.perf_counter() - start_s


def median_step_ms(llm: LLM, num_steps: int = 50) -> float:
    """Return the median time of the decode steps of the requests just added; end those that ask for no more."""
    while llm.engine.scheduler.waiting or any(len(r.output_ids) < 4 for r in llm.engine.scheduler.running):
        llm.engine.step()
    times_ms = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        llm.engine.step()
        times_ms.append((time.perf_counter() - start_s) * 1000)
    while any(r.params.max_tokens == 64 for r in llm.engine.scheduler.running):
        llm.engine.step()
    return median(times_ms)


def profile_decode(llm: LLM, options: argparse.Namespace) -> None:
    """Say where the time of decode steps and of a prefill goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    rng = Random(5)
    tables = []
    for batch_size in map(int, options.batch_sizes.split(",")):
        for index in range(batch_size):
            # None may end before the last prompt is computed.
            tokens = some_tokens(llm, rng, 1024)
            llm.engine.add_request(str(index), tokens, params_for(options.max_model_len - len(tokens)))
        while llm.engine.scheduler.waiting or any(len(r.output_ids) < 4 for r in llm.engine.scheduler.running):
            llm.engine.step()
        if len(llm.engine.scheduler.running) < batch_size:
            raise SystemExit(f"{batch_size} sequences never decode together; raise --memory or --max-model-len")
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED_STEPS):
                llm.engine.step()
            torch.cuda.synchronize()
        for index in range(batch_size):
            llm.engine.abort(str(index))
        table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70)
        tables.append(f"decode at {batch_size}, {PROFILED_STEPS} steps\n{table}\n\n{path_table(profiler)}")
    num_tokens = min(8192, options.max_model_len - 1)
    llm.engine.add_request("long", some_tokens(llm, rng, num_tokens), params_for(1))
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        while llm.engine.has_unfinished:
            llm.engine.step()
        torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70)
    tables.append(f"prefill of {num_tokens:,}\n{table}")
    with open(options.profile, "w") as file:
        file.write("\n\n".join(tables))


def path_table(profiler: Any) -> str:
    """Say what each kernel adds to a decode step: the time between its end and that of the kernel before it.

    Launches overlap, so that the kernels' own times add up to more than the step.
    """
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    ended_us = sorted((event.time_range.end, event.name) for event in events)
    paths_us: dict[str, list[float]] = {}
    for (before_us, _), (end_us, name) in pairwise(ended_us):
        paths_us.setdefault(name, []).append(end_us - before_us)
    rows = sorted(((sum(paths), len(paths), name) for name, paths in paths_us.items()), reverse=True)
    lines = [
        f"{name[:50]:50} {count / PROFILED_STEPS:8.1f} {total_us / PROFILED_STEPS:8.1f} {total_us / count:8.2f}"
        for total_us, count, name in rows
    ]
    return "\n".join([f"{'kernel':50} {'a step':>8} {'path, us':>8} {'each':>8}", *lines])


if __name__ == "__main__":
    main()
