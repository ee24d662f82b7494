"""Conversations with ``LLM``: answers that come back are encoded as they were generated, and answered alike."""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from strandline import LLM, SamplingParams
from strandline.config import REMEMBERED_ANSWERS, EngineConfig, parse_bytes
from strandline.errors import ConfigError, RequestError

QUESTION: Final = [{"role": "user", "content": "Tell me of the teacher."}]
NEXT: Final = {"role": "user", "content": "And now?"}
SAMPLED: Final = SamplingParams(temperature=1.5, max_tokens=30, seed=7, logit_bias=dict.fromkeys((0, 1, 2), -100.0))
"""Without control tokens, which the text would leave out."""
SHORT: Final = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def load(**options: Any) -> LLM:
    return LLM("demo", memory="64MiB", max_model_len=512, **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with load() as llm:
        yield llm


def with_answer(messages: list[Any], text: str) -> list[Any]:
    return [*messages, {"role": "assistant", "content": text}, NEXT]


def remembered(llm: LLM, messages: list[Any], **options: Any) -> int:
    """Return how many tokens of a conversation are encoded as they were generated."""
    account: dict[str, Any] = llm.explain(llm.render(messages, **options))["account"]
    return int(account.get("remembered", 0))


def test_same_tokens_give_the_same_answer_without_a_cache(llm: LLM) -> None:
    cold, messages = load(enable_prefix_caching=False), list(QUESTION)
    for _ in range(3):
        prompt: Any = llm.render(messages)
        [warm] = llm.generate(prompt, SHORT, use_tqdm=False)
        [other] = cold.generate({"prompt_token_ids": prompt["prompt_token_ids"]}, SHORT, use_tqdm=False)
        assert warm.outputs[0].token_ids == other.outputs[0].token_ids
        [sampled] = llm.generate(prompt, SAMPLED, use_tqdm=False)
        messages = with_answer(messages, sampled.outputs[0].text)
        [after] = llm.chat(messages, SHORT, use_tqdm=False)
        ids = [*sampled.prompt_token_ids, *sampled.outputs[0].token_ids]
        assert list(after.prompt_token_ids[: len(ids)]) == ids
        assert after.num_cached_tokens >= len(ids) - 1
    assert llm.get_tokenizer().encode(after.prompt) != after.prompt_token_ids, "the tokenizer would choose others"


def test_all_outputs_of_a_request_are_remembered(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Several."}, *QUESTION]
    [output] = llm.chat(messages, SamplingParams(n=3, temperature=1.5, max_tokens=20, seed=1), use_tqdm=False)
    for each in output.outputs:
        assert remembered(llm, with_answer(messages, each.text)) >= len(each.token_ids) - 1
        assert remembered(llm, with_answer(messages, each.text), cache_salt="other") == 0


def test_salts_of_chats_are_apart(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Salted."}, *QUESTION]
    [output] = llm.chat(messages, SAMPLED, use_tqdm=False, cache_salt="tenant")
    after = with_answer(messages, output.outputs[0].text)
    assert remembered(llm, after, cache_salt="tenant") == 30
    assert remembered(llm, after) == 0
    [again] = llm.chat(after, SHORT, use_tqdm=False, cache_salt="tenant")
    assert again.cache_account is not None
    assert again.cache_account.num_remembered == 30


@pytest.mark.parametrize(("salt", "message"), [(3, "cache_salt must be a string"), ("\ud800", "not valid Unicode")])
def test_salts_are_texts(llm: LLM, salt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(QUESTION, SHORT, cache_salt=salt)


def test_completions_are_not_remembered(llm: LLM) -> None:
    before = llm.engine.frontend.answers.num_bytes  # type: ignore[union-attr]
    llm.generate("The teacher", SHORT, use_tqdm=False)
    assert llm.engine.frontend.answers.num_bytes == before  # type: ignore[union-attr]


def test_aborted_answer_is_remembered(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Aborted."}, *QUESTION]
    stream = llm.stream(llm.render(messages), SAMPLED)
    for output in stream:
        if len(output.outputs[0].token_ids) >= 9:
            break
    stream.close()
    assert remembered(llm, with_answer(messages, output.outputs[0].text)) >= 8


@pytest.mark.parametrize(("size", "count"), [(None, 0), (0, 0), ("1MiB", 30)])
def test_deterministic_engine_remembers_only_if_asked(size: str | int | None, count: int) -> None:
    with load(deterministic=True, remembered_answers=size) as llm:
        [output] = llm.chat(QUESTION, SAMPLED, use_tqdm=False)
        assert remembered(llm, with_answer(QUESTION, output.outputs[0].text)) == count


def test_recollection_of_a_prompt_is_checked(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"recollection must be what LLM\.render returned, got 'x'"):
        llm.generate({"prompt_token_ids": [1], "recollection": "x"}, SHORT, use_tqdm=False)


def test_size_is_read_as_other_sizes_are() -> None:
    def size(**options: Any) -> int:
        return EngineConfig(model="demo", **options).remembered_bytes

    assert size() == parse_bytes(REMEMBERED_ANSWERS)
    assert size(deterministic=True) == size(remembered_answers="0") == size(remembered_answers=0) == 0
    assert size(deterministic=True, remembered_answers="2KiB") == 2048
    for wrong in ("-1", "much", "", -5):
        with pytest.raises(ConfigError, match="--remembered-answers must be a size"):
            size(remembered_answers=wrong)
