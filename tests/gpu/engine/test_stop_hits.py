"""States before stop strings on a GPU: what resumes from them answers as what is computed from the beginning.

With overlapped steps and without, in CUDA graphs and launched, without drafts and with both kinds. Greedy tokens are
compared exactly, in float32; states and final hidden states with those of prompts that are computed whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import pytest

from strandline import LLM, SamplingParams
from strandline.cache.inspection.invariants import check
from strandline.env import DEBUG_CACHE
from tests.cpu.engine.test_state_oracle import check_published_slots
from tests.cpu.engine.test_stop_hits import chat, tokens_before
from tests.cpu.engine.tokenizers import ascii_tokenizer
from tests.cpu.models import families

DEVICE: Final = "cuda"
MAX_NUM_SEQS: Final = 4
NUM_TOKENS: Final = 24
SETTINGS: Final[dict[str, Any]] = {
    "device": DEVICE,
    "dtype": "float32",
    "memory": "256MiB",
    "max_num_seqs": MAX_NUM_SEQS,
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
}
DRAFTS: Final = {
    name: {"method": methods, "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    for name, methods in {"ngram": "ngram", "mtp": ["mtp", "ngram"]}.items()
}
MODELS: Final = {
    "demo": ("none", "ngram", "mtp"),
    "kimi_linear": ("none", "ngram"),
    "mamba2": ("none", "ngram"),
    "qwen3_5": ("none", "ngram"),
}
"""Gated DeltaNet with attention twice, KDA, Mamba-2; and how they can draft. The demo model's tokens have several
characters, those of the others one."""

OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "graphs-overlapped": {"async_scheduling": True},
    "graphs-settled": {"async_scheduling": False},
    "eager-overlapped": {"async_scheduling": True, "enforce_eager": True},
    "eager-settled": {"async_scheduling": False, "enforce_eager": True},
}
CASES: Final = [(model, name, drafts) for model, kinds in MODELS.items() for drafts in kinds for name in OPTIONS]

SHORT_STOPS: Final = [(1, 2), (2, 5), (4, 5), (0, 3), (5, 7), (3, 4), (2, 3), (1, 6)]
STOPS: Final = [(5, 6), (9, 12), (14, 15), (6, 14), (20, 22), (11, 12), (3, 4), (7, 9)]
"""Tokens of answers whose text is a stop string: some are one token, some several. The demo model's texts are short."""

ANSWER: Final[dict[str, Any]] = {
    "temperature": 0,
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "skip_special_tokens": False,
}
GREEDY: Final = SamplingParams(**ANSWER)


class Engines(NamedTuple):
    """An engine; one that computes prompts whole and keeps their states; and one without a cache."""

    llm: LLM
    judge: LLM
    cold: LLM
    options: dict[str, Any]
    stops: list[tuple[int, int]]


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model, name, drafts = request.param
    directory = "demo"
    if model != "demo":
        directory = str(families.save(model, tmp_path_factory.mktemp("stops")))
        ascii_tokenizer().save_pretrained(directory)
    options = {**OPTIONS[name], "speculative_config": DRAFTS.get(drafts)}
    plain = {"async_scheduling": False, "enforce_eager": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEBUG_CACHE, "1")
        yield Engines(
            LLM(directory, **SETTINGS, **options),
            LLM(directory, **SETTINGS, **plain),
            LLM(directory, **SETTINGS, **plain, enable_prefix_caching=False),
            options,
            SHORT_STOPS if model == "demo" else STOPS,
        )


each_case = pytest.mark.parametrize("engines", CASES, indirect=True, ids="-".join, scope="module")


def question(number: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": f"Conversation {number}."},
        {"role": "user", "content": "Tell me of the teacher."},
    ]


def cold_tokens(engines: Engines, prompt_token_ids: Sequence[int], params: SamplingParams = GREEDY) -> list[int]:
    prompt: Any = {"prompt_token_ids": prompt_token_ids}
    [output] = engines.cold.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].token_ids


def stop_of(llm: LLM, token_ids: list[int], place: tuple[int, int]) -> str:
    """Return the text of an answer's tokens; of the first one, if it has several characters, without its first."""
    tokenizer = llm.get_tokenizer()
    start, end = (len(tokenizer.decode(token_ids[:count])) for count in place)
    is_inside = place[1] - place[0] > 2 and len(tokenizer.decode([token_ids[place[0]]])) > 2
    return str(tokenizer.decode(token_ids))[start + is_inside : end]


def check_next_turns(engines: Engines, messages: list[dict[str, str]], num_prompt: int, answer: Any) -> int:
    """Continue an answer, and the conversation after it; return how many tokens of the answer the latter hit."""
    llm = engines.llm
    answered = [*messages, {"role": "assistant", "content": answer.text}]
    prompts: list[Any] = [
        llm.render([*answered, {"role": "user", "content": "And now?"}]),
        llm.render(answered, add_generation_prompt=False, continue_final_message=True),
    ]
    turns = llm.generate(prompts, GREEDY, use_tqdm=False)
    for turn in turns:
        assert turn.outputs[0].token_ids == cold_tokens(engines, turn.prompt_token_ids)
    return int(turns[0].num_cached_tokens) - num_prompt


def settle(llm: LLM) -> None:
    """End the step under way, and carry out what the cache asks for."""
    while llm.engine.core.has_unfinished:
        llm.engine.step()


def check_nothing_leaks(llm: LLM) -> None:
    settle(llm)
    check(llm.engine.cache)
    internals = llm.engine.cache.internals()
    assert (dict(internals.leases), internals.logs.used()) == ({}, set())


def check_hits(engines: Engines, num_hit: int, num_returned: int) -> None:
    """Check how many of the tokens before stop strings were hit.

    All, where each step is settled before the next one; with drafts, fewer. None, where the step under way overwrites
    the state, unless the host is too slow to have launched it.
    """
    if engines.options["speculative_config"] is not None:
        assert 0 < num_hit <= num_returned
    elif not engines.options["async_scheduling"]:
        assert num_hit == num_returned
    else:
        assert num_hit <= num_returned


@each_case
def test_turns_after_stop_strings_answer_as_cold_ones(engines: Engines) -> None:
    llm, hits, num_returned = engines.llm, list[int](), 0
    for number, index in enumerate(engines.stops):
        messages, other = question(number), question(100 + number)
        prompt: Any = llm.render(messages)
        whole = cold_tokens(engines, prompt["prompt_token_ids"])
        stop = stop_of(llm, whole, index)
        params = [SamplingParams(**ANSWER, stop=[stop, stop[:1] + "\x7fnever"]), GREEDY]
        output, beside = llm.chat([messages, other], params, use_tqdm=False)
        assert beside.outputs[0].token_ids == cold_tokens(engines, beside.prompt_token_ids)
        [answer], text = output.outputs, str(llm.get_tokenizer().decode(whole))
        assert (answer.finish_reason, answer.text) == ("stop", text[: text.index(stop)])
        hits.append(check_next_turns(engines, messages, len(output.prompt_token_ids), answer))
        num_returned += tokens_before(llm, list(answer.token_ids), answer.text)
        check_nothing_leaks(llm)
    assert min(hits) >= 0
    check_hits(engines, sum(hits), num_returned)


@each_case
def test_forks_stop_by_themselves(engines: Engines) -> None:
    """One of three outputs ends at a stop string, and what the others answer stays the same."""
    messages, sampling = question(200), {**ANSWER, "temperature": 1.0, "top_k": 3, "seed": 5, "n": 3}
    [plain] = chat(engines.cold, messages, SamplingParams(**sampling))
    stop = stop_of(engines.llm, plain.outputs[1].token_ids, engines.stops[1])
    [output] = chat(engines.llm, messages, SamplingParams(**sampling, stop=stop))
    for found, expected in zip(output.outputs, plain.outputs, strict=True):
        assert found.text == expected.text.partition(stop)[0]
        assert found.token_ids == expected.token_ids[: len(found.token_ids)]
        if found.finish_reason == "stop":
            check_next_turns(engines, messages, len(output.prompt_token_ids), found)
    assert output.outputs[1].finish_reason == "stop"
    check_nothing_leaks(engines.llm)


@each_case
def test_snapshots_before_stop_strings_hold_the_states_of_their_tokens(engines: Engines) -> None:
    for number, index in enumerate(engines.stops):
        messages = question(300 + number)
        prompt: Any = engines.llm.render(messages)
        stop = stop_of(engines.llm, cold_tokens(engines, prompt["prompt_token_ids"]), index)
        chat(engines.llm, messages, SamplingParams(**ANSWER, stop=stop))
    settle(engines.llm)
    check_published_slots(engines.llm, engines.judge)
