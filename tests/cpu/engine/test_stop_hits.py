"""Hits of the turn after one that ended at a stop string: the whole answer, as far as it was returned."""

from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline import LLM, SamplingParams
from strandline.cache.inspection.invariants import check
from strandline.device.drafters import draft_layer
from strandline.records.plan import NewRequest
from strandline.text.stop_finder import TextStopFinder
from tests.cpu.engine.eager_graphs import complete_on_device, replay_eagerly, single_rows_on_the_host
from tests.cpu.engine.small_demo import small_demo
from tests.cpu.engine.test_state_oracle import check_published_slots

QUESTION: Final = [{"role": "user", "content": "Tell me of the teacher."}]
NEXT: Final = {"role": "user", "content": "And now?"}
GREEDY: Final = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(small_demo(), device="cpu", memory="64MiB", max_model_len=512) as llm:
        yield llm


def chat(llm: LLM, messages: Any, params: SamplingParams = GREEDY) -> Any:
    return llm.chat(messages, params, use_tqdm=False)


def answer_with_stop(llm: LLM, messages: Any, stop: Any, num_others: int = 0, **more: Any) -> Any:
    """Answer a conversation up to a stop string, with this many others at the same time; return its output."""
    params = SamplingParams(temperature=0, max_tokens=40, stop=stop, ignore_eos=True, **more)
    others = [[{"role": "user", "content": f"What is {number} + 3?"}] for number in range(num_others)]
    return chat(llm, [messages, *others], params)[0]


def tokens_before(llm: LLM, token_ids: list[int], text: str) -> int:
    """Return how many tokens of an answer lie within a text that it begins with."""
    tokenizer = llm.get_tokenizer()
    return max(count for count in range(len(token_ids) + 1) if text.startswith(tokenizer.decode(token_ids[:count])))


def common_tokens(first: list[int], second: list[int]) -> int:
    """Return how many tokens two prompts share."""
    differ = (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    return next(differ, min(len(first), len(second)))


def turn_after(llm: LLM, messages: Any, text: str) -> Any:
    [output] = chat(llm, [*messages, {"role": "assistant", "content": text}, NEXT], SamplingParams(max_tokens=1))
    return output


@pytest.mark.parametrize("num_others", [0, 5])
def test_next_turn_hits_all_that_was_returned(llm: LLM, num_others: int) -> None:
    """Without logs, and with them: four sequences or more keep them."""
    question = [{"role": "user", "content": f"Tell me of the teacher, {num_others}."}]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for number, (start, end) in enumerate([(9, 10), (8, 14), (3, 12), (12, 33), (17, 20), (6, 9)]):
        messages = [{"role": "system", "content": str(number)}, *question]
        whole = chat(llm, messages, params)[0].outputs[0].text
        stop = whole[start:end]
        output = answer_with_stop(llm, messages, stop, num_others)
        text, ids = output.outputs[0].text, list(output.outputs[0].token_ids)
        assert (output.outputs[0].finish_reason, text) == ("stop", whole[: whole.index(stop)])
        after = turn_after(llm, messages, text)
        assert after.num_cached_tokens >= len(output.prompt_token_ids) + tokens_before(llm, ids, text)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31), start=st.integers(0, 60), length=st.integers(1, 12), num_others=st.sampled_from([0, 4])
)
def test_hits_reach_any_stop_string(llm: LLM, seed: int, start: int, length: int, num_others: int) -> None:
    """Answers are sampled, so their tokens are not the tokenizer's; beginnings of the stop string may precede it."""
    messages = [{"role": "system", "content": str(seed)}, *QUESTION]
    sampling = {"temperature": 1.2, "max_tokens": 30, "ignore_eos": True, "skip_special_tokens": False, "seed": seed}
    [probe] = llm.generate(llm.render(messages), SamplingParams(**sampling), use_tqdm=False)
    whole = probe.outputs[0].text
    stop = whole[start % max(len(whole), 1) :][:length]
    if not stop or "\ufffd" in whole:
        return
    fresh = [{"role": "system", "content": f"{seed} again"}, *QUESTION]
    others = [[{"role": "user", "content": f"What is {number} + 3?"}] for number in range(num_others)]
    output = chat(llm, [fresh, *others], SamplingParams(**sampling, stop=stop))[0]
    [found] = output.outputs
    check(llm.engine.cache)
    if found.finish_reason != "stop":
        return
    after = turn_after(llm, fresh, found.text)
    expected = len(output.prompt_token_ids) + tokens_before(llm, list(found.token_ids), found.text)
    num_same = common_tokens(after.prompt_token_ids, [*output.prompt_token_ids, *found.token_ids])
    assert after.num_cached_tokens >= min(expected, num_same)
    assert num_same >= expected


def test_stop_string_that_is_returned_is_hit_too(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Return it."}, *QUESTION]
    whole = chat(llm, messages)[0].outputs[0].text
    output = answer_with_stop(llm, messages, whole[4:12], include_stop_str_in_output=True)
    text, ids = output.outputs[0].text, list(output.outputs[0].token_ids)
    assert text.endswith(whole[4:12])
    assert turn_after(llm, messages, text).num_cached_tokens >= len(output.prompt_token_ids) + len(ids) - 1


def test_states_before_stop_strings_are_right(llm: LLM) -> None:
    """What resumes behind them answers as what is computed from the beginning."""
    cold = LLM(small_demo(), device="cpu", memory="64MiB", max_model_len=512, enable_prefix_caching=False)
    for num_others in (0, 5):
        messages = [{"role": "system", "content": f"States {num_others}."}, *QUESTION]
        whole = chat(llm, messages)[0].outputs[0].text
        output = answer_with_stop(llm, messages, whole[10:18], num_others)
        text = output.outputs[0].text
        prompt = llm.render([*messages, {"role": "assistant", "content": text}, NEXT])
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        [warm] = llm.generate(prompt, params, use_tqdm=False)
        [other] = cold.generate({"prompt_token_ids": prompt["prompt_token_ids"]}, params, use_tqdm=False)  # type: ignore[index,call-overload]
        assert warm.num_cached_tokens > len(output.prompt_token_ids)
        assert warm.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize(
    ("method", "is_async"), [("mtp", False), ("ngram", False), ("suffix", False), ("mtp", True), ("ngram", True)]
)
def test_states_before_stop_strings_are_right_with_drafts(llm: LLM, method: str, is_async: bool) -> None:
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    options: dict[str, Any] = {"speculative_config": config, "async_scheduling": is_async}
    drafting = LLM(small_demo(), device="cpu", memory="64MiB", max_model_len=512, **options)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    num_hit = num_returned = 0
    for number in range(6):
        messages = [{"role": "system", "content": f"Drafts {number}."}, *QUESTION]
        whole = chat(llm, messages, params)[0].outputs[0].text
        stop = whole[3 + 2 * number :][: 3 + 3 * number]
        output = answer_with_stop(drafting, messages, [stop, stop[:2] + " never"], num_others=2)
        assert output.outputs[0].text == whole[: whole.index(stop)]
        prompt: Any = drafting.render([*messages, {"role": "assistant", "content": output.outputs[0].text}, NEXT])
        [warm] = drafting.generate(prompt, params, use_tqdm=False)
        [cold] = llm.generate({"prompt_token_ids": prompt["prompt_token_ids"], "cache_salt": "x"}, params)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        num_hit += warm.num_cached_tokens - len(output.prompt_token_ids)
        num_returned += tokens_before(drafting, list(output.outputs[0].token_ids), output.outputs[0].text)
        check(drafting.engine.cache)
    assert is_async or num_hit >= num_returned / 2, (
        "where a stop string begins among drafts of an earlier step, they are lost"
    )
    assert not drafting.engine.cache.internals().leases


def stop_answers(llm: LLM, judge: LLM) -> None:
    """Answer conversations up to stop strings, and end the step under way; four sequences or more keep logs."""
    for number, (start, end) in enumerate([(9, 10), (8, 14), (3, 12), (12, 33), (17, 20), (1, 9)]):
        messages = [{"role": "system", "content": f"Oracle {number}."}, *QUESTION]
        whole = chat(judge, messages)[0].outputs[0].text
        answer_with_stop(llm, messages, [whole[start:end], whole[start] + " never"], num_others=5 * (number % 2))
    while llm.engine.core.has_unfinished:
        llm.engine.step()


def oracle_options(method: str) -> dict[str, Any]:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "memory": "64MiB", "max_model_len": 512}
    if method == "none":
        return options
    methods = ["mtp", "ngram"] if method == "mtp" else method
    config = {"method": methods, "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    return {**options, "speculative_config": config}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("method", ["none", "mtp", "ngram"])
def test_snapshots_before_stop_strings_hold_states_of_their_tokens(method: str, is_async: bool) -> None:
    """Windows of convolutions and final hidden states, too."""
    llm = LLM(small_demo(), **oracle_options(method), async_scheduling=is_async)
    judge = LLM(small_demo(), **oracle_options("none"))
    stop_answers(llm, judge)
    check_published_slots(llm, judge)


def test_states_before_stop_strings_come_from_graphs_that_verify_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs are replaced (``eager_graphs.py``)."""
    monkeypatch.setattr(draft_layer, "single_rows", single_rows_on_the_host)
    llm = LLM(small_demo(), **oracle_options("mtp"), max_num_seqs=6, async_scheduling=True)
    executor: Any = llm.engine.core.executor
    replay_eagerly(executor.runner, num_drafts=3, max_num_seqs=6, max_model_len=512)
    complete_on_device(llm.engine.scheduler.drafts)
    judge = LLM(small_demo(), **oracle_options("none"))
    stop_answers(llm, judge)
    assert llm.engine.core.stats().speculation.num_accepted_tokens > 20
    check_published_slots(llm, judge)


@pytest.mark.parametrize("is_async", [False, True])
def test_answers_continue_before_their_stop_strings(is_async: bool) -> None:
    """The final hidden state in the snapshot gives the next token."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "memory": "64MiB", "max_model_len": 512}
    llm, cold = (
        LLM(small_demo(), **options, async_scheduling=is_async),
        LLM(small_demo(), **options, enable_prefix_caching=False),
    )
    for number, (start, end) in enumerate([(9, 10), (8, 14), (3, 12), (1, 9)]):
        messages = [{"role": "system", "content": f"Continue {number}."}, *QUESTION]
        whole = chat(cold, messages)[0].outputs[0].text
        text = answer_with_stop(llm, messages, whole[start:end], num_others=5).outputs[0].text
        answered = [*messages, {"role": "assistant", "content": text}]
        prompt: Any = llm.render(answered, add_generation_prompt=False, continue_final_message=True)
        [warm] = llm.generate(prompt, GREEDY, use_tqdm=False)
        [other] = cold.generate({"prompt_token_ids": prompt["prompt_token_ids"]}, GREEDY, use_tqdm=False)  # type: ignore[call-overload]
        assert warm.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize("is_async", [False, True])
def test_beginnings_of_stop_strings_change_nothing(is_async: bool) -> None:
    """Every second token begins one, and memory is short."""
    plain = LLM(small_demo(), device="cpu", memory="8MiB", max_model_len=256)
    stopping = LLM(small_demo(), device="cpu", memory="8MiB", max_model_len=256, async_scheduling=is_async)
    talks = [[{"role": "user", "content": f"Tell me of {number}."}] for number in range(6)]
    params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    expected = chat(plain, talks, SamplingParams(**params))
    found = chat(stopping, talks, SamplingParams(**params, stop=["e never", "a never", " never ever", ".never"]))
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    check(stopping.engine.cache)
    leases = stopping.engine.cache.internals().leases
    assert not leases


# Which tokens belong to a stop string


def finder(llm: LLM, *stops: str, **more: Any) -> TextStopFinder:
    params = SamplingParams(stop=list(stops), **more)
    return TextStopFinder(llm.get_tokenizer(), NewRequest("r", (1,), params, 0, frozenset(), ()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stops", "counts"),
    [
        (("xyz",), [0, 0, 0, 0, 0]),
        (("b",), [0, 1]),
        (("cd",), [0, 0, 1, 2]),
        (("bcx", "cde"), [0, 1, 2, 2, 3]),
        (("abcx", "d"), [1, 2, 3, 1]),
        (("e" * 200,), [0, 0, 0, 0, 1]),
    ],
)
def test_tokens_of_possible_stop_strings_are_counted(llm: LLM, stops: tuple[str, ...], counts: list[int]) -> None:
    found, finding = [], finder(llm, *stops)
    for character in "abcde":
        [token] = llm.get_tokenizer().encode(character, add_special_tokens=False)
        stop = finding.append(token)
        found.append(finding.num_stop_tokens)
        if stop is not None:
            break
    assert found == counts


def test_parts_of_characters_belong_to_them(llm: LLM) -> None:
    tokenizer, finding = llm.get_tokenizer(), finder(llm, "日本x")
    ids = tokenizer.encode("日本", add_special_tokens=False)
    assert len(ids) > 2
    for token in tokenizer.encode("a", add_special_tokens=False) + ids:
        finding.append(token)
    assert finding.num_stop_tokens == len(ids)


def test_stop_strings_that_are_returned_count_nothing(llm: LLM) -> None:
    finding = finder(llm, "ab", include_stop_str_in_output=True)
    for character in "ab":
        finding.append(llm.get_tokenizer().encode(character)[0])
        assert finding.num_stop_tokens == 0
