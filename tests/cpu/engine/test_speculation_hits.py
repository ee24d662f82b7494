"""Tokens and hits of agents' conversations in text are those without drafts, request by request."""

import gzip
import json
import random
from pathlib import Path

from benchmarks.speculation_hits import SPECULATION, compare, read_sessions
from strandline import LLM

NUM_SESSIONS, NUM_CALLS, MAX_TOKENS = 2, 4, 5
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
    engines = {name: LLM("demo", speculative_config=value, **settings) for name, value in SPECULATION.items()}
    comparison = compare(engines, sessions, MAX_TOKENS)
    plain = comparison.found["plain"]
    assert comparison.num_sessions == NUM_SESSIONS
    assert comparison.num_calls > NUM_SESSIONS * NUM_CALLS
    for name, found in comparison.found.items():
        assert found.differences == [], name
        assert (found.hit_tokens, found.prompt_tokens) == (plain.hit_tokens, plain.prompt_tokens)
        assert (found.speculation.num_accepted_tokens > 0) == (name != "plain")
    assert plain.hit_tokens > 0.7 * plain.prompt_tokens


def test_a_difference_is_found(tmp_path: Path) -> None:
    write_calls(tmp_path / "calls.jsonl.gz")
    [session, *_] = read_sessions(tmp_path / "calls.jsonl.gz")
    engines = {name: LLM("demo", memory="64MiB", device="cpu") for name in "ab"}
    engines["b"].generate([list(engines["b"].get_tokenizer().encode(session[0]))], use_tqdm=False)
    comparison = compare(engines, [session[:1]], MAX_TOKENS)
    assert not comparison.is_equal
    assert len(comparison.found["b"].differences) == 1
