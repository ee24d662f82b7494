"""Tokens and hits with drafts beside those without, request by request, over conversations in text.

    python benchmarks/speculation_hits.py CALLS.jsonl.gz ... --seconds 1200

A line of a file is one call of a model: an object with ``session_id`` and ``input``, the prompt. Sessions are run one
after the other, those of several files in turns, each call by itself: its prompt, and then a second turn that repeats
the prompt and the answer and goes on. All engines run the same calls in the same order, each with a cache of its own.
Prompts that are too long for the model lose their end. After ``--seconds`` no further call begins.

A draft layer adds to a block, so that its engine evicts earlier: memory must be enough that none does.

In float32, tokens and hits must be equal. It exits with an error if they are not, and names the requests.
"""

import argparse
import gzip
import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final

import torch

from strandline import LLM, SamplingParams
from strandline.records.events import SpeculationStats

SPECULATION: Final[Mapping[str, dict[str, Any] | None]] = {
    "plain": None,
    "mtp": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False},
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
        "adaptive": False,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 6, "adaptive": False},
}
NEXT_TURN: Final = "\nuser: And then?\nassistant:"

Session = list[str]
"""Prompts, in order."""


@dataclass
class Found:
    """What an engine found so far."""

    hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    differences: list[str] = field(default_factory=list)
    """Requests whose tokens or hits are not those without drafts."""
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    processor_s: float = 0.0


@dataclass
class Comparison:
    """What was run, and what each engine found."""

    found: dict[str, Found]
    num_sessions: int = 0
    num_calls: int = 0
    num_cut: int = 0
    """Prompts that were too long."""

    @property
    def is_equal(self) -> bool:
        return not any(found.differences for found in self.found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--memory", default="3GiB")
    parser.add_argument("--max-tokens", type=int, default=12, help="of an answer (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    settings = {"dtype": "float32", "memory": options.memory, "device": "cpu"}
    engines = {name: LLM(options.model, speculative_config=value, **settings) for name, value in SPECULATION.items()}
    sessions = [list(read_sessions(path)) for path in options.files]
    num_sessions, num_calls = sum(map(len, sessions)), sum(len(calls) for each in sessions for calls in each)
    in_turns = [calls for calls in chain.from_iterable(zip_longest(*sessions)) if calls]
    comparison = compare(engines, in_turns, options.max_tokens, options.seconds)
    print(f"{date.today()}, {platform.processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        f"{comparison.num_sessions} of {num_sessions} sessions, {comparison.num_calls} of {num_calls} calls, ", end=""
    )
    print(f"{comparison.num_cut} prompts cut")
    print(
        "| | calls that differ | hit tokens | prompt tokens | output tokens | drafts accepted | evicted | processor s |"
    )
    print("| --- |" + " --- |" * 7)
    for name, found in comparison.found.items():
        drafts = f"{found.speculation.num_accepted_tokens:,} of {found.speculation.num_draft_tokens:,}"
        stats = engines[name].engine.core.stats()
        evicted = stats.num_snapshots_evicted + stats.num_blocks_evicted
        counts = f"{found.hit_tokens:,} | {found.prompt_tokens:,} | {found.output_tokens:,} | {drafts} | {evicted:,}"
        print(f"| {name} | {len(found.differences)} | {counts} | {found.processor_s:.0f} |")
    for name, found in comparison.found.items():
        for difference in found.differences:
            print(f"{name}: {difference}")
    if not comparison.is_equal:
        sys.exit("drafts have changed tokens or hits")


def read_sessions(path: Path) -> Iterator[Session]:
    """Yield the sessions of a file, in the order of their first calls."""
    sessions: dict[str, Session] = {}
    with gzip.open(path, "rt") as file:
        for line in file:
            call = json.loads(line)
            sessions.setdefault(call["session_id"], []).append(call["input"])
    yield from sessions.values()


def compare(
    engines: Mapping[str, LLM], sessions: Sequence[Session], max_tokens: int, seconds: float = float("inf")
) -> Comparison:
    """Run sessions on all engines, and compare each with the first."""
    comparison = Comparison({name: Found() for name in engines})
    reference = next(iter(engines.values()))
    tokenizer, longest = reference.get_tokenizer(), reference.engine.max_model_len
    next_turn = list(tokenizer.encode(NEXT_TURN))
    room = longest - 2 * max_tokens - len(next_turn)
    end_s = time.monotonic() + seconds
    for number, session in enumerate(sessions):
        for call, text in enumerate(session):
            if time.monotonic() >= end_s:
                return comparison
            comparison.num_sessions += call == 0
            whole = list(tokenizer.encode(text)) or next_turn
            prompt = whole[:room]
            comparison.num_calls += 1
            comparison.num_cut += len(whole) > room
            expected = None
            for name, llm in engines.items():
                outcome = _two_turns(llm, prompt, next_turn, max_tokens, comparison.found[name])
                expected = expected or outcome
                if outcome != expected:
                    comparison.found[name].differences.append(f"session {number}, call {call}: {outcome}, {expected}")
    return comparison


Turn = tuple[int, tuple[int, ...]]
"""Hit tokens, and the answer."""


def _two_turns(llm: LLM, prompt: list[int], next_turn: list[int], max_tokens: int, found: Found) -> list[Turn]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    turns, start_s = list[Turn](), time.process_time()
    for _ in range(2):
        [output] = llm.generate([prompt], params, use_tqdm=False)
        answer = tuple(output.outputs[0].token_ids)
        turns.append((output.num_cached_tokens, answer))
        found.hit_tokens += output.num_cached_tokens
        found.prompt_tokens += len(prompt)
        found.output_tokens += len(answer)
        found.speculation += output.speculation
        prompt = [*prompt, *answer, *next_turn]
    found.processor_s += time.process_time() - start_s
    return turns


if __name__ == "__main__":
    main()
