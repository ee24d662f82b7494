"""Tokens per second with and without drafts, by kind of task, one request at a time.

    python benchmarks/speculation.py --dtype float32

Kinds are the demo model's held-out tasks, and copies: a text that the model repeats from its prompt. Engines take
turns, so that a change of the machine's speed reaches all. A figure is the median of ``--repeats`` runs after one
warm-up. It says whether tokens are those of plain decoding, as they must be in float32.
"""

import argparse
import platform
import time
from datetime import date
from statistics import median
from typing import Any

import torch

from strandline import LLM, SamplingParams
from strandline.bench.evaluate import make_suite

SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "mtp 1": {"method": "mtp", "num_speculative_tokens": 1, "adaptive": False},
    "mtp 2": {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False},
    "mtp adaptive": {"method": "mtp", "num_speculative_tokens": 3},
    "dflash 3": {"method": "dflash", "model": "demo", "num_speculative_tokens": 3, "adaptive": False},
    "dflash 7": {"method": "dflash", "model": "demo", "num_speculative_tokens": 7, "adaptive": False},
    "dflash adaptive": {"method": "dflash", "model": "demo", "num_speculative_tokens": 7},
    "suffix 8": {"method": "suffix", "num_speculative_tokens": 8},
    "ngram 3": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "ngram 6": {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
}

TEXT = " ".join(
    f"The {adjective} {noun} is {place}."
    for adjective in ("red", "old", "quiet", "small")
    for noun in ("house", "river", "boat", "letter", "garden")
    for place in ("far away", "in the city")
)

Prompts = dict[str, list[list[int]]]
Answers = dict[str, list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--per-kind", type=int, default=8, help="tasks of each kind (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{date.today()}, torch {torch.__version__}, {platform.processor()}, {torch.get_num_threads()} threads")
    settings = {"dtype": options.dtype, "memory": options.memory, "enable_prefix_caching": False}
    engines = {name: LLM(options.model, speculative_config=value, **settings) for name, value in SPECULATION.items()}
    prompts = prompts_of(next(iter(engines.values())), options.per_kind)
    seconds: dict[tuple[str, str], list[float]] = {}
    answers: dict[str, Answers] = {}
    accepted: dict[tuple[str, str], float] = {}
    steps: dict[tuple[str, str], int] = {}
    for repeat in range(1 + options.repeats):
        for name, llm in engines.items():
            answers[name] = {}
            for kind in prompts:
                before = llm.engine.core.stats().speculation
                taken_s, steps[name, kind], answers[name][kind] = decode(llm, prompts[kind], kind)
                after = llm.engine.core.stats().speculation
                num_drafted = after.num_draft_tokens - before.num_draft_tokens
                num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
                accepted[name, kind] = num_accepted / num_drafted if num_drafted else 0.0
                if repeat:
                    seconds.setdefault((name, kind), []).append(taken_s)
    print("| | " + " | ".join(f"{kind}, tokens/s (per step, accepted)" for kind in prompts) + " | tokens as plain |")
    print("| --- |" + " --- |" * (len(prompts) + 1))
    for name in engines:
        cells = []
        for kind in prompts:
            num_tokens = sum(len(answer) - 1 for answer in answers[name][kind])
            per_step = num_tokens / steps[name, kind]
            cells.append(f"{num_tokens / median(seconds[name, kind]):.0f} ({per_step:.2f}, {accepted[name, kind]:.0%})")
        print(f"| {name} | {' | '.join(cells)} | {'yes' if answers[name] == answers['plain'] else 'no'} |")


def prompts_of(llm: LLM, per_kind: int) -> Prompts:
    """Return the prompts by kind, as tokens."""
    tokenizer = llm.get_tokenizer()
    prompts: dict[str, list[list[int]]] = {}
    for task in make_suite(1, per_kind):
        rendered: Any = llm.render(task.messages)
        prompts.setdefault(task.kind, []).append(list(rendered["prompt_token_ids"]))
    copied = TEXT + " " + TEXT
    prompts["copy"] = [list(tokenizer.encode(copied[: -60 * (index + 1)])) for index in range(4)]
    return prompts


def decode(llm: LLM, prompts: list[list[int]], kind: str) -> tuple[float, int, list[list[int]]]:
    """Return the seconds and steps from the first token of each answer to its last, in all, and the answers."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=kind == "copy")
    taken_s, num_steps, answers = 0.0, 0, []
    for index, prompt in enumerate(prompts):
        name = f"{kind}{index}"
        llm.engine.add_request(name, prompt, params)
        llm.engine.step()
        start_s = time.perf_counter()
        tokens: list[int] = []
        while llm.engine.has_unfinished:
            num_steps += 1
            tokens = next((list(x.outputs[0].token_ids) for x in llm.engine.step() if x.finished), tokens)
        taken_s += time.perf_counter() - start_s
        answers.append(tokens)
    return taken_s, num_steps, answers


if __name__ == "__main__":
    main()
