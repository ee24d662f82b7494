"""Requests with stop strings have drafts, and end where plain decoding ends them: text, tokens, hits and states."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from strandline import LLM, SamplingParams
from strandline.engine.requests.request import Request
from strandline.env import DEBUG_CACHE
from strandline.records.events import SpeculationStats
from strandline.records.outputs import RequestOutput
from tests.cpu.engine.small_demo import small_demo

MAX_TOKENS, NUM_DIALOGUES = 24, 5
SOURCES = [
    "Copy this list: red apple, green pear, red apple, green pear, red apple, green pear, red apple",
    "Once there was a teacher who read an old letter. And who wrote the letter that the teacher read? ",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, ",
]


def load(config: dict[str, Any] | None, **options: Any) -> LLM:
    return LLM(small_demo(), memory="64MiB", dtype="float32", device="cpu", speculative_config=config, **options)


class Dialogue(NamedTuple):
    """A request, and how it and the turns after it end without drafts."""

    prompt: list[int]
    params: SamplingParams
    ends: list[Any]
    answer: list[int]
    """Without stop strings."""


class Oracle:
    """Drafts known answers, so that stop strings end among drafts that are right."""

    def __init__(self, dialogues: list[Dialogue]) -> None:
        self._answers = {tuple(dialogue.prompt): dialogue.answer for dialogue in dialogues}

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        return tuple(self._answers.get(request.prompt_ids, [])[len(request.output_ids) :][:max_tokens])


@pytest.fixture(scope="module", autouse=True)
def checked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEBUG_CACHE, "1")
        yield


@pytest.fixture(scope="module")
def dialogues(checked: None) -> list[Dialogue]:
    llm, rng = load(None), random.Random(0)
    found = []
    for index in range(NUM_DIALOGUES):
        source = SOURCES[index % len(SOURCES)]
        prompt = list(llm.get_tokenizer().encode(source[rng.randrange(10) :]))
        free = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        output = run(llm, prompt, free, "free")[0].outputs[0]
        params = some_params(rng, output.text)
        found.append(Dialogue(prompt, params, hold(llm, prompt, params, str(index))[0], list(output.token_ids)))
    assert {dialogue.ends[0][2] for dialogue in found} == {"stop", "length"}
    return found


def some_params(rng: random.Random, text: str) -> SamplingParams:
    """Return parameters whose stop strings are parts of a text, or miss it; they begin and end within tokens, too."""
    stops = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text))
        stops.append(text[start : start + rng.randint(1, 12)] + rng.choice(["", "#"]))
    return SamplingParams(
        temperature=0,
        max_tokens=MAX_TOKENS,
        stop=stops,
        include_stop_str_in_output=rng.random() < 0.5,
        min_tokens=rng.choice([0, 0, 7]),
        logprobs=rng.choice([None, None, 1]),
        ignore_eos=True,
    )


def run(llm: LLM, prompt: list[int], params: SamplingParams, salt: str) -> tuple[RequestOutput, list[str]]:
    """Run a request; return its output, and the text after every step that gave it tokens."""
    llm.engine.add_request(f"{salt} {len(prompt)}", prompt, params, salt=salt)
    texts = []
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            texts.append(output.outputs[0].text)
    return output, texts


def end_of(output: RequestOutput) -> tuple[Any, ...]:
    one = output.outputs[0]
    num_logprobs = None if one.logprobs is None else len(one.logprobs)
    return one.text, list(one.token_ids), one.finish_reason, one.stop_reason, num_logprobs, output.num_cached_tokens


def hold(llm: LLM, prompt: list[int], params: SamplingParams, salt: str) -> tuple[list[Any], SpeculationStats]:
    """Run a request and two that continue it; return how they end, and what became of the first one's drafts."""
    output, texts = run(llm, prompt, params, salt)
    assert all(texts[-1].startswith(text) for text in texts), "text was taken back"
    token_ids = list(output.outputs[0].token_ids)
    # The first is a whole hit: its next token comes from the hidden state that the request left.
    turns = [*prompt, *token_ids[:-1]], [*prompt, *token_ids, 5, 6, 7]
    again = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    return [end_of(output), *(end_of(run(llm, turn, again, salt)[0]) for turn in turns)], output.speculation


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
@pytest.mark.parametrize("method", ["mtp", "ngram", "suffix", "oracle"])
def test_stop_strings_end_requests_as_without_drafts(dialogues: list[Dialogue], method: str, num_drafts: int) -> None:
    source = "ngram" if method == "oracle" else method
    config: dict[str, Any] = {"method": source, "num_speculative_tokens": num_drafts, "adaptive": False}
    if method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    llm, total = load(config), SpeculationStats()
    if method == "oracle":
        llm.engine.scheduler.drafts.drafter = Oracle(dialogues)
    for index, (prompt, params, expected, _) in enumerate(dialogues):
        found, speculation = hold(llm, prompt, params, str(index))
        assert found == expected, params
        num_tokens, cached_after = len(found[0][1]), [end[-1] for end in found[1:]]
        assert cached_after == [len(prompt) + num_tokens - 1] * 2
        total += speculation
    assert total.num_accepted_tokens > 0


@pytest.mark.parametrize("speculation", [None, {"method": "mtp", "num_speculative_tokens": 2}], ids=str)
def test_stop_string_is_found_while_the_next_step_runs(
    dialogues: list[Dialogue], speculation: dict[str, Any] | None
) -> None:
    llm = load(speculation, async_scheduling=True)
    for index, (prompt, params, expected, _) in enumerate(dialogues):
        found, _ = hold(llm, prompt, params, str(index))
        # The step under way may have computed the last token, too: the next turn hits it, or lacks a state before it.
        assert found[0] == expected[0], params
        assert [end[:-1] for end in found] == [end[:-1] for end in expected]
        assert found[2][-1] - expected[2][-1] in (0, 1)
    assert not llm.engine.cache.internals().leases


def test_stop_token_that_completes_a_stop_string_ends_there(
    dialogues: list[Dialogue],
) -> None:
    prompt = dialogues[0].prompt
    llm = load(None, async_scheduling=True)
    free = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    answer = list(run(llm, prompt, free, "free")[0].outputs[0].token_ids)
    index = next(index for index in range(2, MAX_TOKENS) if answer[index] not in answer[:index])
    stop = llm.get_tokenizer().decode([answer[index]]).strip()
    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, stop=stop, stop_token_ids=[answer[index]]
    )
    found, _ = hold(llm, prompt, params, "both")
    assert found[0][1] == answer[: index + 1]
    assert (found[0][2], found[0][3]) == ("stop", stop)
    assert found[1][1][0] == answer[index]
    assert found[1][-1] == len(prompt) + index
