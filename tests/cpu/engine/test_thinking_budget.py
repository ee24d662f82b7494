"""Budgets of reasoning: forced tokens are those of a prompt that ends the reasoning there, however steps are run.

CUDA graphs are replaced (``eager_graphs.py``).
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strandline import LLM, SamplingParams, StructuredOutputsParams
from strandline.device.sizing import slabs_for
from strandline.env import DEBUG_CACHE
from strandline.errors import RequestError
from tests.cpu.engine.small_demo import small_demo
from tests.cpu.engine.test_drafts_ahead import MAX_NUM_SEQS, Steps, make

__all__ = ["make"]

END = "\nI answer now.\n</think>\n\n"
CONFIG = {"reasoning_end_str": END}
MAX_TOKENS = 60
BUDGETS = [2, None, 0, 1, 7, 12, -1, 9, 17, 30, 100]
Request = tuple[list[int], SamplingParams]
Answers = dict[str, tuple[list[int], str | None]]


@pytest.fixture(scope="module", autouse=True)
def checked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEBUG_CACHE, "1")
        yield


def load(**options: Any) -> LLM:
    settings: dict[str, Any] = {"memory": "64MiB", "dtype": "float32", "device": "cpu", "max_num_seqs": MAX_NUM_SEQS}
    return LLM(small_demo(), **{**settings, "reasoning_config": CONFIG, **options})


def some_requests(llm: LLM, seed: int) -> list[Request]:
    """Prompts with open reasoning and without, budgets from none to more than the answer has, any sampling."""
    rng = random.Random(seed)
    text = "What is seven times eight? And who wrote the letter that the teacher read? "
    tokens = llm.get_tokenizer().encode(3 * text)
    requests = []
    for index, budget in enumerate(BUDGETS):
        prompt = tokens[: rng.randint(1, len(tokens))]
        prompt += llm.get_tokenizer().encode(rng.choice(["\n<think>\n", "\n<think>\nWell, "] if index else [" "]))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7]),
            top_k=4,
            seed=index,
            max_tokens=rng.choice([3, *[MAX_TOKENS] * 5]),
            min_tokens=rng.choice([0, 0, 3]),
            presence_penalty=0.5 if index % 5 == 4 else 0.0,
            logprobs=rng.choice([None, None, 2]),
            ignore_eos=True,
            thinking_token_budget=budget,
        )
        requests.append((prompt, params))
    return requests


def expected_answers(llm: LLM, requests: list[Request]) -> Answers:
    """Return answers of an engine without budgets, of prompts that hold the end where the budget forces it."""
    tokenizer, answers = llm.get_tokenizer(), {}
    for index, (prompt, params) in enumerate(requests):
        parts, budget = [MAX_TOKENS], params.thinking_token_budget
        opened = tokenizer.decode(prompt).rpartition("<think>")[2]
        if budget is not None and budget >= 0 and "<think>" in tokenizer.decode(prompt):
            parts = [max(budget - len(tokenizer.encode(opened)), 0), MAX_TOKENS]
        answer, end = list[int](), tokenizer.encode(END)
        for number, part in enumerate(parts):
            answer += end if number else []
            least, most = max(params.min_tokens - len(answer), 0), (params.max_tokens or 0) - len(answer)
            if min(part, most) < 1:
                continue
            free = SamplingParams(
                temperature=params.temperature,
                top_k=4,
                seed=params.seed,
                max_tokens=min(part, most),
                min_tokens=min(least, part, most),
                ignore_eos=True,
            )
            [output] = llm.generate([[*prompt, *answer]], free, use_tqdm=False)
            answer += output.outputs[0].token_ids
        answers[str(index)] = answer[: params.max_tokens], "length"
    return answers


def serve(llm: LLM, requests: list[Request], seed: int) -> Answers:
    """Run requests that come in while others run."""
    rng, answers = random.Random(seed), dict[str, tuple[list[int], str | None]]()

    def step() -> None:
        for output in llm.engine.step():
            if output.finished:
                answers[output.request_id] = (list(output.outputs[0].token_ids), output.outputs[0].finish_reason)

    for index, (prompt, params) in enumerate(requests):
        llm.engine.add_request(str(index), prompt, params)
        for _ in range(rng.randint(0, 3)):
            step()
    while llm.engine.has_unfinished:
        step()
    assert not llm.engine.cache.internals().leases
    return answers


def without_penalties(requests: list[Request]) -> list[Request]:
    """Leave out what depends on the whole output, which a prompt would not be part of."""
    return [(prompt, params) for prompt, params in requests if not params.presence_penalty]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "deterministic": {"deterministic": True},
    "ranks": {"tensor_parallel_size": 2, "async_scheduling": True},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "mtp": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}},
    "overlapped mtp": {
        "async_scheduling": True,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False},
    },
}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return load()


@pytest.fixture(scope="module")
def expected(plain: LLM) -> Answers:
    return expected_answers(plain, without_penalties(some_requests(plain, 1)))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n == "ranks" else ()) for n in VARIANTS])
def test_forced_tokens_are_those_of_a_prompt_that_holds_them(name: str, plain: LLM, expected: Answers) -> None:
    requests = without_penalties(some_requests(plain, 1))
    with load(**VARIANTS[name]) as llm:
        assert serve(llm, requests, 1) == expected
        # Beside a request whose budget is about to end, no step runs ahead.
        for index, request in enumerate(requests if "async_scheduling" in VARIANTS[name] else ()):
            assert serve(llm, [request], 1)["0"] == expected[str(index)]


@pytest.mark.parametrize("num_drafts", [*(pytest.param(n, marks=pytest.mark.long) for n in (0, 1)), 3])
def test_budgets_end_between_graphs_that_run_ahead(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, plain: LLM, num_drafts: int
) -> None:
    requests = some_requests(plain, 3)
    expected = serve(plain, requests, 3)
    llm, steps = make(num_drafts, reasoning_config=CONFIG), Steps(monkeypatch)
    assert serve(llm, requests, 3) == expected
    end = plain.get_tokenizer().encode(END)
    prompt = plain.get_tokenizer().encode("What is seven times eight?\n<think>\n")
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, thinking_token_budget=40)
    expected = serve(plain, [(prompt, params)], 3)
    assert expected["0"][0][39 : 39 + len(end)] == end
    steps.are_ahead.clear()
    assert serve(llm, [(prompt, params)], 3) == expected
    # Only the steps around the end of the budget wait for the ones before.
    first, last = steps.are_ahead[1:].index(False), len(steps.are_ahead) - 1 - steps.are_ahead[-2::-1].index(False)
    assert 10 < first < last < first + len(end) + 2 * (1 + num_drafts)
    assert not any(steps.are_ahead[1 + first : last])


def test_preempted_request_keeps_its_budget(plain: LLM) -> None:
    spec = plain.engine.core.spec
    requests = some_requests(plain, 5)
    llm = load(memory=(slabs_for(spec, 256) + 1) * spec.slab_bytes, max_model_len=256, async_scheduling=True)
    assert serve(llm, requests, 5) == serve(plain, requests, 5)
    assert llm.engine.scheduler.num_preemptions > 0


def test_grammar_begins_after_the_forced_end(plain: LLM) -> None:
    llm = plain
    structure = StructuredOutputsParams(choice=["blue", "red"], after="</think>")
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=structure, thinking_token_budget=4)
    [output] = llm.generate(["Hi<think>"], params, use_tqdm=False)
    reasoning, _, answer = output.outputs[0].text.partition(END)
    assert len(llm.get_tokenizer().encode(reasoning)) <= 4
    assert answer.lstrip() in ("blue", "red")
    bound = StructuredOutputsParams(choice=["<think>a b c d e f g h"])
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=bound, thinking_token_budget=0)
    assert llm.generate(["Hi"], params, use_tqdm=False)[0].outputs[0].text == "<think>a b c d e f g h"


def test_outputs_of_a_request_have_the_same_budget(plain: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, thinking_token_budget=6)
    [output] = plain.generate(["What is it?\n<think>"], params, use_tqdm=False)
    tokens = [one.token_ids for one in output.outputs]
    end = plain.get_tokenizer().encode(END)
    assert all(ids[6 : 6 + len(end)] == end for ids in tokens)
    assert len({tuple(ids[:6]) for ids in tokens}) > 1


def test_stop_string_of_the_forced_end_ends_the_output() -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop="answer", ignore_eos=True, thinking_token_budget=2)
    [output] = load(async_scheduling=True).generate(["Hi<think>"], params, use_tqdm=False)
    assert output.outputs[0].text.endswith("\nI ")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "answer")


def test_forced_tokens_have_log_probabilities_and_overrule_bans(plain: LLM) -> None:
    llm = plain
    end = llm.get_tokenizer().encode(END)
    params = SamplingParams(
        temperature=0,
        max_tokens=len(end) + 2,
        logprobs=1,
        logit_bias=dict.fromkeys(end, -100.0),
        bad_words=["answer"],
        thinking_token_budget=0,
        ignore_eos=True,
    )
    [output] = llm.generate(["Hi<think>\n"], params, use_tqdm=False)
    [one] = output.outputs
    assert one.token_ids[: len(end)] == end
    assert [next(iter(entry)) for entry in one.logprobs or ()] == one.token_ids


def test_budget_without_a_text_that_ends_reasoning_is_refused() -> None:
    llm = load(reasoning_config=None)
    with pytest.raises(RequestError, match="thinking_token_budget needs reasoning that is parsed"):
        llm.generate(["Hi"], SamplingParams(thinking_token_budget=3), use_tqdm=False)
    llm.generate(["Hi"], SamplingParams(thinking_token_budget=-1, max_tokens=1), use_tqdm=False)
    with pytest.raises(RequestError, match="thinking_token_budget must be a whole number of at least -1"):
        SamplingParams(thinking_token_budget=-2)
