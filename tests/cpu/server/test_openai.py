"""OpenAI's own client: every answer equals the offline engine's, streamed or not."""

import json
from typing import Any

import openai
import pytest

from strandline import LLM, SamplingParams
from strandline.records.outputs import RequestOutput
from tests.cpu.server.process import ServerProcess

PROMPT = "Once upon a time"
MULTI_BYTE = {str(byte): 100 for byte in range(0x80, 0x100)}
"""A bias towards the tokens of characters beyond ASCII: the byte tokenizer sorts its alphabet, so ids are not bytes."""


def offline(offline_llm: LLM, prompt: Any, **wishes: Any) -> RequestOutput:
    return offline_llm.generate(prompt, SamplingParams(**wishes), use_tqdm=False)[0]


def texts(output: RequestOutput) -> list[str]:
    return [completion.text for completion in output.outputs]


def test_completion_equals_offline_one_and_counts_tokens(client: openai.OpenAI, offline_llm: LLM) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    expected = offline(offline_llm, PROMPT, max_tokens=12, temperature=0)
    assert [choice.text for choice in answer.choices] == texts(expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert counts == (len(PROMPT), 12, len(PROMPT) + 12)


SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.5, "seed": 3, "top_p": 0.9},
    "several": {"n": 3, "seed": 5},
    "multi-byte": {"seed": 7, "logit_bias": MULTI_BYTE},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    "vllm": {
        "seed": 9,
        "extra_body": {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 3, "ignore_eos": True}
        | {"stop_token_ids": [200], "bad_words": ["e"], "skip_special_tokens": False},
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_streamed_whole_and_offline_texts_are_the_same(client: openai.OpenAI, offline_llm: LLM, name: str) -> None:
    shape = SHAPES[name]
    wishes = {**shape, **shape.get("extra_body", {})}
    wishes.pop("extra_body", None)
    if "logit_bias" in wishes:
        wishes["logit_bias"] = {int(token): bias for token, bias in wishes["logit_bias"].items()}
    expected = texts(offline(offline_llm, PROMPT, max_tokens=40, **wishes))
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, **shape)
    assert [choice.text for choice in whole.choices] == expected
    parts = [""] * len(expected)
    for chunk in client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, stream=True, **shape):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == expected


@pytest.mark.parametrize("start", [1, 5, 17])
def test_stop_string_ends_streamed_and_whole_answers(client: openai.OpenAI, offline_llm: LLM, start: int) -> None:
    [text] = texts(offline(offline_llm, PROMPT, max_tokens=40, seed=1))
    stop = text[start : start + 3]
    wishes: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 1, "stop": [stop, "\0\0\0"]}
    whole = client.completions.create(**wishes).choices[0]
    assert (whole.text, whole.finish_reason) == (text[: text.index(stop)], "stop")
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **wishes)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]


def test_prompts_may_be_token_ids_and_several(client: openai.OpenAI, offline_llm: LLM) -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=5, n=2, seed=2)
    expected = [text for prompt in prompts for text in texts(offline(offline_llm, [prompt], max_tokens=5, n=2, seed=2))]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    one = client.completions.create(model="tiny", prompt=prompts[0], max_tokens=5, n=2, seed=2)
    assert [choice.text for choice in one.choices] == expected[:2]


def test_log_probabilities_are_the_offline_ones(client: openai.OpenAI, offline_llm: LLM) -> None:
    wishes: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 2}
    answer = client.completions.create(model="tiny", **wishes)
    [completion] = offline(offline_llm, PROMPT, max_tokens=4, temperature=0, logprobs=2).outputs
    found = answer.choices[0].logprobs
    assert found is not None
    assert completion.logprobs is not None
    entries = [list(entry.values()) for entry in completion.logprobs]
    assert found.token_logprobs == pytest.approx([entry[0].logprob for entry in entries])
    assert found.tokens == [entry[0].decoded_token for entry in entries]
    assert [set(top) for top in found.top_logprobs or []] == [
        {item.decoded_token for item in entry} for entry in entries
    ]
    streamed = client.completions.create(model="tiny", stream=True, **wishes)
    pieces = [chunk.choices[0].logprobs for chunk in streamed]
    assert [token for piece in pieces if piece for token in piece.tokens or []] == found.tokens


OFFSETS: dict[str, dict[str, Any]] = {
    "random bytes": {"max_tokens": 24},
    "characters of several tokens": {"structured_outputs": {"choice": ["a\u00e9b\u20acc\U0001f600d"]}},
    "text held for a stop string": {
        "structured_outputs": {"choice": ["to and to and fro"]},
        "stop": ["to and to and to"],
    },
    "a stop string": {"structured_outputs": {"choice": ["to and fro"]}, "stop": ["nd f"]},
}


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("fields", OFFSETS.values(), ids=OFFSETS)
def test_text_offsets_are_positions_in_the_text(server: ServerProcess, fields: dict[str, Any], echo: bool) -> None:
    prompt = "na\u00efve"
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "logprobs": 0, "stop_token_ids": [0], **fields}
    body["echo"] = echo
    [whole] = server.post("/v1/completions", **body).json()["choices"]
    offsets = whole["logprobs"]["text_offset"]
    with server.stream(**body) as events:
        parts = [json.loads(event)["choices"][0]["logprobs"] for event in events if event != "[DONE]"]
    assert [offset for part in parts if part for offset in part["text_offset"]] == offsets
    assert offsets == sorted(offsets)
    tokens, text = whole["logprobs"]["tokens"], whole["text"]
    assert offsets[len(prompt.encode()) * echo] == len(prompt) * echo
    assert all(
        token in text[offset:end] or offset >= len(text)
        for token, offset, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True)
        if token.isascii()
    )


def test_echo_gives_the_prompt_back_and_its_log_probabilities(client: openai.OpenAI, offline_llm: LLM) -> None:
    silent = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert silent.usage is not None
    assert (silent.usage.prompt_tokens, silent.usage.completion_tokens) == (len(PROMPT), 0)
    [alone] = silent.choices
    assert (alone.text, alone.finish_reason) == (PROMPT, "length")
    expected = offline(offline_llm, PROMPT, max_tokens=1, prompt_logprobs=1).prompt_logprobs
    assert expected is not None
    assert alone.logprobs is not None
    assert alone.logprobs.tokens == list(PROMPT)
    values = [next(iter(entry.values())).logprob for entry in expected if entry]
    assert alone.logprobs.token_logprobs == [None, *[pytest.approx(value, abs=1e-4) for value in values]]
    wishes: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "echo": True}
    whole = client.completions.create(model="tiny", **wishes).choices[0].text
    assert whole == PROMPT + texts(offline(offline_llm, PROMPT, max_tokens=6, temperature=0))[0]
    streamed = client.completions.create(model="tiny", stream=True, **wishes)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole


def test_a_prompt_that_is_only_echoed_generates_nothing(client: openai.OpenAI, server: ServerProcess) -> None:
    growth = server.growth_of("generation_tokens_total")
    wishes: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0, "echo": True}
    assert client.completions.create(**wishes).choices[0].text == PROMPT
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **wishes)) == PROMPT
    assert growth() == [0]


def test_no_output_tokens_fill_the_cache_in_every_api(client: openai.OpenAI, server: ServerProcess) -> None:
    growth = server.growth_of("generation_tokens_total")
    silent = client.completions.create(model="tiny", prompt="warm me up", max_tokens=0, logprobs=1)
    assert (silent.choices[0].text, silent.choices[0].finish_reason) == ("", "length")
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "warm me"}]}
    cold = client.chat.completions.create(**asked, max_tokens=0, stream=True, stream_options={"include_usage": True})
    *_, last = cold
    assert last.usage is not None
    assert last.usage.completion_tokens == 0
    [whole] = client.chat.completions.create(**asked, max_completion_tokens=0).choices
    assert (whole.message.content, whole.finish_reason) == ("", "length")
    empty = client.responses.create(model="tiny", input="warm me", max_output_tokens=0)
    assert (empty.status, empty.output_text) == ("incomplete", "")
    assert growth() == [0]
    for prompt, hit in (("warm me up", 10), ("u:warm me|a:", 12)):
        warm = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
        assert warm.usage is not None
        assert warm.usage.prompt_tokens_details is not None
        assert warm.usage.prompt_tokens_details.cached_tokens == hit


def test_chat_renders_the_template_and_streams_what_it_answers(client: openai.OpenAI, offline_llm: LLM) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "who"}, {"type": "text", "text": "is it?"}]},
    ]
    expected = texts(offline(offline_llm, "s:be brief|u:who\nis it?|a:", max_tokens=20, seed=4))
    wishes: dict[str, Any] = {"model": "tiny", "messages": messages, "max_completion_tokens": 20, "seed": 4}
    whole = client.chat.completions.create(**wishes)
    assert [choice.message.content for choice in whole.choices] == expected
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **wishes))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected[0]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_chat_log_probabilities_name_the_chosen_and_the_likeliest(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    wishes |= {"temperature": 0, "logprobs": True, "top_logprobs": 3}
    found = client.chat.completions.create(**wishes).choices[0].logprobs
    assert found is not None
    content = found.content
    assert content is not None
    assert [len(entry.top_logprobs) for entry in content] == [3, 3, 3]
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)


def test_usage_has_cached_tokens_and_salts_isolate(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        body = {"include_cache_account": True, **more}
        answer = client.completions.create(
            model="tiny", prompt="a prompt of its own " * 9, max_tokens=2, extra_body=body
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens, answer.usage.cache  # type: ignore[attr-defined]

    for cached, account in (ask(), ask(), ask(cache_salt="mine"), ask(cache_salt="mine")):
        assert account["hit"] == cached
        assert account["queried"] == cached + sum(miss["tokens"] for miss in account["misses"]) == 180
    assert ask()[0] == ask(cache_salt="mine")[0] == 180
    assert [miss["reason"] for miss in ask(cache_salt="other")[1]["misses"]] == ["first_seen"]


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature must be a number between 0"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "strandline"


IDS: Any = {"return_token_ids": True}
USAGE: Any = {"include_usage": True, "continuous_usage_stats": True}


def test_completion_returns_token_ids_on_request(client: openai.OpenAI, offline_llm: LLM) -> None:
    wishes: dict[str, Any] = {"max_tokens": 12, "n": 2, "seed": 7, "temperature": 1.0, "logit_bias": MULTI_BYTE}
    bias = {int(token): value for token, value in MULTI_BYTE.items()}
    output = offline(offline_llm, PROMPT, **{**wishes, "logit_bias": bias})
    expected = [completion.token_ids for completion in output.outputs]
    whole: Any = client.completions.create(model="tiny", prompt=PROMPT, extra_body=IDS, **wishes)
    assert [choice.token_ids for choice in whole.choices] == expected
    prompt_ids = offline_llm.get_tokenizer().encode(PROMPT)
    assert [choice.prompt_token_ids for choice in whole.choices] == [prompt_ids] * 2
    found: list[list[int]] = [[], []]
    prompts: list[list[Any]] = [[], []]
    for chunk in client.completions.create(model="tiny", prompt=PROMPT, extra_body=IDS, stream=True, **wishes):
        [choice] = chunk.choices
        found[choice.index] += choice.token_ids  # type: ignore[attr-defined]
        prompts[choice.index].append(choice.prompt_token_ids)  # type: ignore[attr-defined]
    assert found == expected
    assert all(first == prompt_ids and not any(others) for first, *others in prompts)
    plain = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
    assert not hasattr(plain.choices[0], "token_ids")


def test_chat_returns_token_ids_on_request(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "seed": 4,
    }
    whole: Any = client.chat.completions.create(extra_body=IDS, **wishes)
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    assert len(whole.choices[0].token_ids) == whole.usage.completion_tokens == 9
    chunks: Any = list(client.chat.completions.create(extra_body=IDS, stream=True, **wishes))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    streamed = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", [])]
    assert streamed == whole.choices[0].token_ids


def test_every_chunk_has_usage_on_request(client: openai.OpenAI) -> None:
    # So long that a reader who is held up does not get all of it at once.
    wishes: dict[str, Any] = {"model": "tiny", "max_tokens": 150, "temperature": 0, "stream": True}
    wishes["extra_body"] = {"ignore_eos": True}
    completion: Any = list(client.completions.create(prompt=PROMPT, stream_options=USAGE, **wishes))
    conversation: Any = list(
        client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], stream_options=USAGE, **wishes)
    )
    for chunks in (completion, conversation):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == 150
        assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
    last_alone = list(client.completions.create(prompt=PROMPT, stream_options={"include_usage": True}, **wishes))
    assert [chunk.usage is None for chunk in last_alone] == [True] * (len(last_alone) - 1) + [False]
