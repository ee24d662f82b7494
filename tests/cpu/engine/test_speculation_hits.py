"""Tokens and hits with drafts are those without, request by request: of conversations, and of synthetic workloads."""

import gzip
import json
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speculation_hits import SPECULATION, compare, read_sessions
from strandline import LLM, SamplingParams
from strandline.bench.synthetic import SYNTHETIC, Conversations, Resends, Workload
from tests.cpu.engine.small_demo import small_demo

TRACES = Path(__file__).parents[2] / "traces"
NUM_SESSIONS, NUM_CALLS, MAX_TOKENS = 2, 4, 12
TOOLS = "You are an agent. Tools: search(text), read(page), book(flight). Answer in the form of the examples.\n"
THINGS = ("a flight to Lima", "the old letter", "seven red apples", "the archive's last page", "a boat on the river")


def write_calls(path: Path) -> None:
    """Write calls as agents make them: most go on, some begin anew behind the instructions, some are sent twice."""
    rng = random.Random(2)
    calls = []
    for session in range(NUM_SESSIONS):
        transcript = TOOLS
        for _ in range(NUM_CALLS):
            transcript += f"user: Find {rng.choice(THINGS)}, then {rng.choice(THINGS)}.\nassistant:"
            texts = [transcript] * rng.choice([1, 1, 2]) + [f"{TOOLS}user: Sum up: {transcript[-60:]}"] * rng.choice(
                [0, 1]
            )
            calls += [{"session_id": f"{session}", "input": text, "output": ""} for text in texts]
            transcript += f" I found {rng.choice(THINGS)}.\n"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(call) + "\n" for call in calls)


def test_conversations_in_text_hit_as_without_drafts(
    tmp_path: Path,
) -> None:
    write_calls(tmp_path / "calls.jsonl.gz")
    sessions = list(read_sessions(tmp_path / "calls.jsonl.gz"))
    settings = {"memory": "64MiB", "dtype": "float32", "device": "cpu"}
    engines = {name: LLM(small_demo(), speculative_config=value, **settings) for name, value in SPECULATION.items()}
    comparison = compare(engines, sessions, MAX_TOKENS)
    plain = comparison.found["plain"]
    assert comparison.num_sessions == NUM_SESSIONS
    assert comparison.num_calls > NUM_SESSIONS * NUM_CALLS
    for name, found in comparison.found.items():
        assert found.differences == [], name
        assert (found.hit_tokens, found.prompt_tokens) == (plain.hit_tokens, plain.prompt_tokens)
        assert (found.speculation.num_accepted_tokens > 0) == (name != "plain")
    assert plain.hit_tokens > 0.7 * plain.prompt_tokens


@pytest.mark.parametrize(
    ("numbers", "memory"), [((2, 3), "256MiB"), pytest.param(tuple(range(8)), "1GiB", marks=pytest.mark.long)]
)
def test_recorded_conversations_hit_as_without_drafts(numbers: tuple[int, ...], memory: str) -> None:
    recorded = list(read_sessions(TRACES / "agent_text_taubench.jsonl.gz"))
    sessions = [recorded[number] for number in numbers]
    settings = {"memory": memory, "dtype": "float32", "device": "cpu"}
    engines = {name: LLM(small_demo(), speculative_config=value, **settings) for name, value in SPECULATION.items()}
    comparison = compare(engines, sessions, MAX_TOKENS)
    plain = comparison.found["plain"]
    assert (comparison.num_calls, comparison.num_cut) == (sum(map(len, sessions)), 0)
    for name, found in comparison.found.items():
        assert found.differences == [], name
        assert (found.hit_tokens, found.prompt_tokens) == (plain.hit_tokens, plain.prompt_tokens)
        assert (found.speculation.num_accepted_tokens > 0) == (name != "plain")
        assert engines[name].engine.core.stats().num_snapshots_evicted == 0
    assert plain.hit_tokens > 0.8 * plain.prompt_tokens


def test_a_difference_is_found(tmp_path: Path) -> None:
    write_calls(tmp_path / "calls.jsonl.gz")
    [session, *_] = read_sessions(tmp_path / "calls.jsonl.gz")
    engines = {name: LLM(small_demo(), memory="64MiB", device="cpu") for name in "ab"}
    engines["b"].generate([list(engines["b"].get_tokenizer().encode(session[0]))], use_tqdm=False)
    comparison = compare(engines, [session[:1]], MAX_TOKENS)
    assert not comparison.is_equal
    assert len(comparison.found["b"].differences) == 1


ANSWER = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PART = 24
"""How many times as long the prompts of the named workloads are."""


def scaled(workload: Workload) -> Any:
    """Return a workload of the same structure, with fewer and shorter requests."""
    smaller = {}
    for field in fields(workload):
        value = getattr(workload, field.name)
        if field.name.endswith("_tokens"):
            smaller[field.name] = max(value // PART, 5)
        elif field.name.startswith("num_"):
            smaller[field.name] = min(value, 2)
    if not isinstance(workload, Conversations):
        # The second request behind a prefix hits where a chat template ends, the third all of it.
        smaller["num_requests"] = 3 * smaller.get("num_prefixes", 1)
    return replace(workload, **smaller)


def run_workload(llm: LLM, name: str) -> list[tuple[int, list[int]]]:
    """Return the hit tokens and the answer of every request; turns repeat what was generated."""
    workload, rng, found = scaled(SYNTHETIC[name]), random.Random(name), []

    def draw(count: int) -> list[int]:
        return rng.choices(range(1000, llm.engine.vocab_size), k=count)

    def ask(prompts: list[list[int]]) -> list[list[int]]:
        outputs = llm.generate(prompts, ANSWER, use_tqdm=False)
        found.extend([(output.num_cached_tokens, list(output.outputs[0].token_ids)) for output in outputs])
        return [list(output.outputs[0].token_ids) for output in outputs]

    if isinstance(workload, Conversations):
        histories = [system := draw(workload.system_tokens)] + [system] * (workload.num_conversations - 1)
        for _ in range(workload.num_turns):
            histories = [history + draw(workload.user_tokens) for history in histories]
            histories = [history + answer for history, answer in zip(histories, ask(histories), strict=True)]
    elif isinstance(workload, Resends):
        prompt = draw(workload.prompt_tokens)
        for _ in range(workload.num_requests):
            ask([prompt])
    else:
        prefixes = [draw(workload.prefix_tokens) for _ in range(workload.num_prefixes)]
        for index in range(workload.num_requests):
            ask([prefixes[index % len(prefixes)] + draw(workload.suffix_tokens)])
    return found


def test_synthetic_workloads_hit_as_without_drafts() -> None:
    settings = {"memory": "256MiB", "dtype": "float32", "device": "cpu", "max_model_len": 1024}
    engines = {name: LLM(small_demo(), speculative_config=value, **settings) for name, value in SPECULATION.items()}
    for name in SYNTHETIC:
        expected = run_workload(engines["plain"], name)
        assert sum(hit for hit, _ in expected) > 0, name
        for method in ("mtp", "ngram", "suffix"):
            assert run_workload(engines[method], name) == expected, (method, name)
    stats = {name: llm.engine.core.stats() for name, llm in engines.items()}
    assert len({each.hit_tokens for each in stats.values()}) == 1
    accepted = [stats[name].speculation.num_accepted_tokens for name in engines]
    assert (accepted[0], accepted[1] > 100, accepted[2] > 5, accepted[3] > 5) == (0, True, True, True)
