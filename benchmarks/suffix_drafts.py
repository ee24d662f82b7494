"""What suffix decoding costs per token and gains in agents' loops, beside plain decoding and n-grams.

    OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 python benchmarks/suffix_drafts.py --dtype float32

The first table times the index: to index a prompt, to append a token, to search; medians.

The second runs conversations, one request at a time: *edits* of one document, *calls* of tools with long arguments, and
*chat*, questions about the project. Each conversation is held twice, as two agents would that know nothing of each
other; the second time the first one's answers are known. The demo model is not trained to edit or to call tools, so a
grammar admits one text there; chat is sampled freely, greedily. Engines take turns. A figure is the median of
``--repeats`` runs after one warm-up, each under a salt of its own, from the first token of an answer to its last.
"""

import argparse
import json
import platform
import time
from dataclasses import dataclass
from datetime import date
from random import Random
from statistics import median
from typing import Any, Final

import torch

from strandline import LLM, SamplingParams
from strandline.engine.requests.suffix_index import SuffixIndex
from strandline.records.sampling_params import StructuredOutputsParams
from strandline.records.tokens import TokenBuffer

SPECULATION: Final[dict[str, dict[str, Any] | None]] = {
    "plain": None,
    "ngram 3": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "ngram 8": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix 8": {"method": "suffix", "num_speculative_tokens": 8},
    "suffix 16": {"method": "suffix", "num_speculative_tokens": 16},
    "mtp 3 fixed": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False},
    "suffix 7 fixed": {"method": "suffix", "num_speculative_tokens": 7, "adaptive": False},
    "mtp and suffix 3 fixed": {"method": ["mtp", "suffix"], "num_speculative_tokens": 3, "adaptive": False},
    "mtp and suffix 7 fixed": {"method": ["mtp", "suffix"], "num_speculative_tokens": 7, "adaptive": False},
    "suffix 16 fixed": {"method": "suffix", "num_speculative_tokens": 16, "adaptive": False},
}

DOCUMENT: Final = """def total(orders):
    result = 0
    for order in orders:
        if order.is_paid:
            result += order.price * order.count
    return result


def report(orders, name):
    lines = [f"Orders of {name}"]
    for order in orders:
        lines.append(f"{order.number}: {order.count} x {order.price}")
    lines.append(f"Total: {total(orders)}")
    return lines
"""
EDITS: Final = (("is_paid", "is_open"), ("lines", "rows"))
FILES: Final = ("orders.py", "report.py", "total.py")
QUESTIONS: Final = ("What is speculative decoding?", "What is a prefix cache?", "Who are you?")
NUM_APPENDED: Final = 1000
GREETINGS: Final = ("I work on the shop.", "Hello! Another agent asked me to help it.")

Turns = list[tuple[str, str | None]]
"""What the user says, and the one answer that a grammar admits, or None."""


@dataclass
class Figures:
    """What an engine did in one sighting of a workload."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=SPECULATION, default=list(SPECULATION), metavar="NAME")
    parser.add_argument("--index-only", action="store_true", help="print only the first table")
    options = parser.parse_args()
    print(f"{date.today()}, torch {torch.__version__}, {platform.processor()}, {torch.get_num_threads()} threads")
    time_index()
    if options.index_only:
        return
    settings = {"dtype": options.dtype, "memory": options.memory, "device": "cpu", "enable_prefix_caching": False}
    engines = {
        name: LLM(options.model, speculative_config=SPECULATION[name], **settings)
        for name in dict.fromkeys(["plain", *options.engines])
    }
    found: dict[tuple[str, str], list[Figures]] = {}
    answers: dict[str, list[list[int]]] = {}
    for repeat in range(1 + options.repeats):
        answers = {name: [] for name in engines}
        for kind, turns in workloads().items():
            for sighting, greeting in enumerate(GREETINGS, 1):
                for name, llm in engines.items():
                    figures = hold(llm, greeting, turns, f"{repeat}", answers[name])
                    if repeat:
                        found.setdefault((name, f"{kind}, {sighting}"), []).append(figures)
    show(list(engines), found, answers)


def show(names: list[str], found: dict[tuple[str, str], list[Figures]], answers: dict[str, list[list[int]]]) -> None:
    """Print tokens per second, tokens per step and acceptance of every engine."""
    columns = [column for name, column in found if name == names[0]]
    print("| | " + " | ".join(columns) + " | tokens as plain |")
    print("| --- |" + " --- |" * (len(columns) + 1))
    for name in names:
        cells = []
        for column in columns:
            runs = found[name, column]
            rate = median(run.num_tokens / run.seconds for run in runs)
            per_step = median(run.num_tokens / run.num_steps for run in runs)
            accepted = median(run.num_accepted / max(run.num_drafted, 1) for run in runs)
            cells.append(f"{rate:.0f} ({per_step:.1f}; {accepted:.0%})")
        print(f"| {name} | {' | '.join(cells)} | {'yes' if answers[name] == answers['plain'] else 'no'} |")


def workloads() -> dict[str, Turns]:
    """Return the turns of each kind of conversation."""
    edits, text = list[tuple[str, str | None]](), DOCUMENT
    for old, new in EDITS:
        asked = f"Rename {old} to {new} in this file:\n{text}"
        text = text.replace(old, new)
        edits.append((asked, text))
    calls: Turns = []
    for file in FILES:
        arguments = {"path": f"src/shop/{file}", "first_line": 1, "last_line": 200, "encoding": "utf-8"}
        calls.append((f"Show {file}.", json.dumps({"name": "read_file", "arguments": arguments})))
        command = {"command": f"python -m pytest tests/test_{file} --maxfail=1 --quiet", "timeout_seconds": 600}
        calls.append((f"Test {file}.", json.dumps({"name": "run_command", "arguments": command})))
    return {"edits": edits, "calls": calls, "chat": [(question, None) for question in QUESTIONS]}


def hold(llm: LLM, greeting: str, turns: Turns, salt: str, answers: list[list[int]]) -> Figures:
    """Hold a conversation; append its answers."""
    figures = Figures()
    messages: list[dict[str, str]] = [{"role": "system", "content": greeting}]
    before = llm.engine.core.stats().speculation
    for number, (asked, forced) in enumerate(turns):
        messages = [*messages, {"role": "user", "content": asked}]
        rendered: Any = llm.render(messages)
        structure = None if forced is None else StructuredOutputsParams(choice=[forced])
        params = SamplingParams(temperature=0, max_tokens=600, structured_outputs=structure)
        llm.engine.add_request(f"{salt}/{number}", list(rendered["prompt_token_ids"]), params, salt=salt)
        outputs = llm.engine.step()
        start_s = time.perf_counter()
        while llm.engine.has_unfinished:
            figures.num_steps += 1
            outputs = llm.engine.step()
        figures.seconds += time.perf_counter() - start_s
        output = outputs[-1].outputs[0]
        figures.num_tokens += len(output.token_ids) - 1
        answers.append(list(output.token_ids))
        messages = [*messages, {"role": "assistant", "content": output.text}]
    after = llm.engine.core.stats().speculation
    figures.num_drafted = after.num_draft_tokens - before.num_draft_tokens
    figures.num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return figures


def time_index() -> None:
    """Print what the index costs, by text: random phrases of 2 to 30 tokens, and one token that is repeated."""
    rng = Random(1)
    phrases = [rng.choices(range(150_000), k=rng.randint(2, 30)) for _ in range(3000)]
    print("| text | index a prompt, µs per token | append, µs | search, µs | bytes per token |")
    print("| --- | --- | --- | --- | --- |")
    for num_tokens in (1_000, 10_000, 100_000, 250_000):
        text = [token for phrase in rng.choices(phrases, k=num_tokens) for token in phrase]
        print(f"| {num_tokens:,} tokens {cells_of(text[: num_tokens + NUM_APPENDED])}")
    print(f"| 10,000 times one token {cells_of([7] * (10_000 + NUM_APPENDED))}")


def cells_of(text: list[int]) -> str:
    """Return the times of a text whose last tokens are appended one by one."""
    tokens = TokenBuffer(text[:-NUM_APPENDED])
    num_tokens = len(tokens)
    builds_s = list[float]()
    for _ in range(5):
        start_s = time.perf_counter()
        SuffixIndex(tokens)
        builds_s.append(time.perf_counter() - start_s)
    index = SuffixIndex(tokens)
    num_bytes = index.num_bytes
    append_s, search_s = list[float](), list[float]()
    for token in text[-NUM_APPENDED:]:
        tokens.append(token)
        start_s = time.perf_counter()
        index.update()
        indexed_s = time.perf_counter()
        index.find(tokens.slice(len(tokens) - 16, len(tokens)), 8)
        search_s.append(time.perf_counter() - indexed_s)
        append_s.append(indexed_s - start_s)
    times = (
        f"| {1e6 * median(builds_s) / num_tokens:.2f} | {1e6 * median(append_s):.1f} | {1e6 * median(search_s):.1f} "
    )
    return f"{times}| {num_bytes / num_tokens:.0f} |"


if __name__ == "__main__":
    main()
