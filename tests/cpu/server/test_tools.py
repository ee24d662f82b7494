"""Tools, reasoning and structured outputs by OpenAI's own client, from random models with grammars."""

import asyncio
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from strandline import LLM, SamplingParams, StructuredOutputsParams
from strandline.records.events import Limits
from strandline.server.config import ServerConfig
from strandline.server.engines.prompt import Prompt
from strandline.server.launch import make_service
from strandline.server.requests.output_parser import OutputFormat
from strandline.server.requests.service import Service
from strandline.server.requests.tools import toolbox
from strandline.text.frontend import Frontend
from strandline.text.structured import Grammars
from tests.cpu.engine.tokenizers import CALLS_IN_JSON, CHAT_SPECIALS, byte_tokenizer, chat_template
from tests.cpu.server.process import TIMEOUT_S, ServerProcess
from tests.cpu.text.calls_grammar import calls_grammar
from tests.cpu.text.templates import FAMILIES

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says what the weather will be.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Ulm", "Bonn"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
QUESTION: list[Any] = [{"role": "user", "content": "What will the weather be in Ulm?"}]
END_THINKING = {str(256 + CHAT_SPECIALS.index("</think>")): 3}
"""A bias that makes a random model stop reasoning some time."""
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
TAG_CALL = "\n<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture
def client(json_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{json_server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture
def tag_client(tag_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tag_server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def saying(text: str, **more: Any) -> dict[str, Any]:
    """Return wishes that bind the answer to a text."""
    wishes = {"model": "tiny", "messages": QUESTION, "max_tokens": 400, "seed": 1, "tools": [WEATHER]}
    return {**wishes, "extra_body": {"structured_outputs": {"choice": [text]}}, **more}


def streamed(client: openai.OpenAI, **wishes: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the message that the deltas add up to, and the chunks."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    chunks = list(client.chat.completions.create(stream=True, **wishes))
    for chunk in chunks:
        [choice] = chunk.choices
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(message["tool_calls"])
                message["tool_calls"].append([call.function.name, ""])
            message["tool_calls"][call.index][1] += call.function.arguments or ""
        message["finish_reason"] = message["finish_reason"] or choice.finish_reason
    return message, chunks


def calls_of(message: Any) -> list[list[str]]:
    return [[call.function.name, call.function.arguments] for call in message.tool_calls or []]


def test_json_call_is_parsed_whole_and_streamed(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**saying(CALL)).choices[0]
    assert choice.message.content == "Let me see."
    assert calls_of(choice.message) == [["weather", '{"city": "Ulm", "days": 2}']]
    assert choice.finish_reason == "tool_calls"
    message, chunks = streamed(client, **saying(CALL))
    assert (message["content"], message["finish_reason"]) == ("Let me see.", "tool_calls")
    assert message["tool_calls"] == calls_of(choice.message)
    pieces = [call.function.arguments for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert pieces[0] == ""
    assert len(pieces) > 5


def test_tokenize_counts_tools_and_template_options_as_chats_do(json_server: ServerProcess) -> None:
    counts = []
    for more in ({}, {"tools": [WEATHER]}, {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": False}}):
        answer = json_server.post("/tokenize", messages=QUESTION, **more).json()
        chat = json_server.post("/v1/chat/completions", messages=QUESTION, max_tokens=1, return_token_ids=True, **more)
        assert answer["tokens"] == chat.json()["prompt_token_ids"]
        assert answer["token_strs"] is None
        counts.append(answer["count"])
    assert counts[0] < counts[1]
    named = json_server.post("/tokenize", prompt="ab", return_token_strs=True).json()
    assert named["token_strs"] == ["a", "b"]
    refused = json_server.post("/tokenize", messages=QUESTION, tools=[{}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


def test_reasoning_effort_sets_variables_of_the_template(tag_server: ServerProcess) -> None:
    def prompt_of(**more: Any) -> str:
        options = {"messages": QUESTION, "max_tokens": 1, "return_token_ids": True, **more}
        answer = tag_server.post("/v1/chat/completions", **options).json()
        return str(tag_server.post("/detokenize", tokens=answer["prompt_token_ids"]).json()["prompt"])

    turn = "<|im_start|>assistant\n"
    assert prompt_of().endswith(f"{turn}<think>\n")
    assert prompt_of(reasoning_effort="low").endswith(f"{turn}[low]<think>\n")
    without = prompt_of(reasoning_effort="none")
    assert without.endswith(f"{turn}[none]<think>\n\n</think>\n\n")
    # What the client sets for the template itself counts more.
    thinking = prompt_of(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert thinking.endswith(f"{turn}[none]<think>\n")
    question, counts = QUESTION[-1]["content"], []
    for more in ({}, {"reasoning": {}}, {"reasoning": {"effort": "none", "summary": "auto"}}):
        response = tag_server.post("/v1/responses", input=question, max_output_tokens=1, **more).json()
        assert response["reasoning"]["effort"] == more.get("reasoning", {}).get("effort")
        counts.append(response["usage"]["input_tokens"])
    assert counts[0] == counts[1] < counts[2]
    updated = [{"type": "configuration_update", "reasoning": {"effort": "none"}}, {"role": "user", "content": question}]
    response = tag_server.post("/v1/responses", input=updated, max_output_tokens=1).json()
    counted = tag_server.post("/v1/responses/input_tokens", input=updated).json()["input_tokens"]
    assert response["usage"]["input_tokens"] == counted == counts[2]


def test_logprobs_with_tools_are_those_of_every_token(client: openai.OpenAI) -> None:
    wishes = saying(CALL, logprobs=True, top_logprobs=1)
    whole = client.chat.completions.create(**wishes)
    assert whole.choices[0].message.tool_calls
    chunks = list(client.chat.completions.create(**wishes, stream=True))
    found = [choice.logprobs for choice in (whole.choices[0], *(chunk.choices[0] for chunk in chunks))]
    first, *others = [each.content or [] for each in found if each is not None]
    assert whole.usage is not None
    assert len(first) == whole.usage.completion_tokens
    assert "".join(entry.token for entry in first).startswith(CALL)
    assert [entry.token for entries in others for entry in entries] == [entry.token for entry in first]


def test_without_tools_or_with_none_allowed_the_text_is_content(client: openai.OpenAI) -> None:
    for more in ({"tools": openai.omit}, {"tool_choice": "none"}):
        choice = client.chat.completions.create(**saying(CALL, **more)).choices[0]
        assert choice.message.content == CALL
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_reasoning_is_told_from_the_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    wishes = saying("<think>\nhm,\nwell\n</think>\n\nSun.")
    message: Any = client.chat.completions.create(**wishes).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm,\nwell", "Sun.")
    found, _ = streamed(client, **wishes)
    assert (found["reasoning_content"], found["content"]) == ("hm,\nwell", "Sun.")


def test_reasoning_opened_by_prompt_precedes_structured_output(tag_client: openai.OpenAI) -> None:
    lengths = []
    for seed in range(4):
        wishes = saying("Rain" + TAG_CALL, logit_bias=END_THINKING, seed=seed)
        choice: Any = tag_client.chat.completions.create(**wishes).choices[0]
        assert choice.message.content == "Rain"
        assert calls_of(choice.message) == [["weather", '{"city": "Ulm"}']]
        found, _ = streamed(tag_client, **wishes)
        assert found["tool_calls"] == calls_of(choice.message)
        assert found["reasoning_content"] == getattr(choice.message, "reasoning_content", "")
        lengths.append(len(found["reasoning_content"]))
    assert max(lengths) > 1


@pytest.mark.parametrize("server_name", ["json_server", "tag_server"])
def test_required_call_is_made_and_follows_its_schema(server_name: str, request: pytest.FixtureRequest) -> None:
    server: ServerProcess = request.getfixturevalue(server_name)
    wishes: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": [CLOCK, WEATHER], "max_tokens": 600}
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        for seed in range(3):
            for choice in ("required", named, allowed):
                answer = client.chat.completions.create(
                    **wishes, tool_choice=choice, seed=seed, logit_bias=END_THINKING, parallel_tool_calls=False
                )
                [(name, written)] = calls_of(answer.choices[0].message)
                assert answer.choices[0].finish_reason == "tool_calls"
                arguments = json.loads(written)
                assert name == "weather" or choice == "required"
                assert set(arguments) == ({"city", "days"} if name == "weather" else set())
                assert name == "clock" or 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("server_name", ["json_server", "tag_server"])
def test_response_format_beside_tools_leaves_the_choice(server_name: str, request: pytest.FixtureRequest) -> None:
    server: ServerProcess = request.getfixturevalue(server_name)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    wishes: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": [CLOCK], "max_tokens": 200}
    wishes["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    seen = set()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        for choice, seed in [*(("auto", seed) for seed in range(8)), ("required", 0)]:
            answer = client.chat.completions.create(
                **wishes, tool_choice=choice, seed=seed, logit_bias=END_THINKING, parallel_tool_calls=False
            )
            message = answer.choices[0].message
            is_call = bool(message.tool_calls)
            seen.add((choice, is_call))
            if is_call:
                assert calls_of(message) == [["clock", "{}"]]
            else:
                assert json.loads(message.content or "") in ({"n": 1}, {"n": 2})
            found, _ = streamed(client, **wishes, tool_choice=choice, seed=seed, logit_bias=END_THINKING)
            assert bool(found["tool_calls"]) == is_call
            assert found["content"] == (message.content or "")
    assert seen == {("auto", True), ("auto", False), ("required", True)}


def test_tagged_arguments_have_the_white_space_of_templates() -> None:
    """Else a random model could write white space without end, and the next turn would not hit all of this one."""
    values = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    parameters = {"properties": {"values": values}, "required": ["values"]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    grammar = calls_grammar(tools, "required", "qwen3_coder", json.dumps)
    grammars = Grammars(lambda: (byte_tokenizer(), frozenset({0})), 256)
    start = grammars.compile(StructuredOutputsParams(grammar=grammar)).start
    for values_text, is_allowed in ((json.dumps({"a": 1, "b": 2}), True), ('{"a":  1, "b": 2}', False)):
        call = f"<function=add>\n<parameter=values>\n{values_text}\n</parameter>\n</function>"
        tokens = byte_tokenizer().encode(f"<tool_call>\n{call}\n</tool_call>")
        assert (start.deep_copy().validate_tokens(tokens) == len(tokens)) is is_allowed


def test_required_values_in_tags_are_written_without_quotes() -> None:
    unit = {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}
    properties = {"name": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "unit": unit, "days": {"type": "integer"}}
    parameters = {"properties": properties, "$defs": {"unit": {"enum": ["c", "1"]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = calls_grammar(tools, "required", "qwen3_coder", json.dumps)
    grammars = Grammars(lambda: (byte_tokenizer(), frozenset({0})), 256)
    start = grammars.compile(StructuredOutputsParams(grammar=grammar)).start
    allowed = [("name", "Ulm"), ("name", "null"), ("unit", "c"), ("unit", "1"), ("unit", "null"), ("days", "2")]
    for key, text in [*allowed, ("unit", "k"), ("unit", '"c"'), ("days", "two")]:
        call = f"<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
        tokens = byte_tokenizer().encode(f"<tool_call>\n{call}\n</tool_call>")
        assert (start.deep_copy().validate_tokens(tokens) == len(tokens)) is ((key, text) in allowed)


@pytest.mark.parametrize("is_single", [False, True])
def test_required_calls_are_as_many_as_the_template_takes(is_single: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template(CALLS_IN_JSON, thinks=False)
    if is_single:
        tokenizer.chat_template += "{% for m in messages if (m.tool_calls or []) | length > 1 %}{{ 1 / 0 }}{% endfor %}"
    frontend = Frontend(Limits(256, 64), tokenizer=tokenizer, eos_ids=frozenset({0}))
    client: Any = SimpleNamespace(frontend=frontend)
    service = Service(client, ["x"], output_format=OutputFormat("hermes"))
    checked = asyncio.run(service.bind(SamplingParams(), toolbox([WEATHER], "required"), Prompt([], "")))
    assert checked.params.structured_outputs is not None
    start = Grammars(lambda: (byte_tokenizer(), frozenset({0})), 256).compile(checked.params.structured_outputs).start
    tokens = byte_tokenizer().encode("\n".join([CALL[CALL.index("<tool_call>") :]] * 2))
    assert (start.validate_tokens(tokens) < len(tokens)) is is_single


def test_calls_and_their_results_are_rendered_for_the_next_turn(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**saying(CALL))
    history = [*QUESTION, answer.choices[0].message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": history[1]["tool_calls"][0]["id"], "content": "Sun."})
    again = client.chat.completions.create(**saying("It will shine.", messages=history))
    assert again.choices[0].message.content == "It will shine."
    assert answer.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= answer.usage.prompt_tokens


LISTS_TOOLS = FAMILIES["lfm2"].template.replace("tools: [", "tools: <|tool_list_start|>[")


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (LISTS_TOOLS, '<|tool_call_start|>[weather(city="Ulm", days=2)]<|tool_call_end|>'),
        (chat_template(CALLS_IN_JSON, thinks=False), CALL[CALL.index("<tool_call>") :]),
    ],
    ids=["left out", "rendered"],
)
def test_offline_chat_renders_the_prompt_of_the_server(offline_llm: LLM, template: str, written: str) -> None:
    function = {"name": "weather", "arguments": '{"city": "Ulm", "days": 2}'}
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    messages = [*QUESTION, answer, {"role": "tool", "tool_call_id": "1", "content": "Sun."}]
    client: Any = SimpleNamespace(frontend=offline_llm.engine.frontend, first_adapters=())
    service = make_service(client, offline_llm.config, ServerConfig(), template, {})
    expected = asyncio.run(service.render(messages, tools=[WEATHER]))
    found: Any = offline_llm.render(messages, template, tools=[WEATHER])
    assert Prompt(found["prompt_token_ids"], found["prompt"], found["marks"]) == expected
    assert written in found["prompt"]


def test_answer_follows_json_schema(client: openai.OpenAI) -> None:
    schema = WEATHER["function"]["parameters"]
    formats = [
        {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}},
        {"type": "json_object", "schema": schema},
    ]
    bodies = [{"guided_json": schema}, {"structured_outputs": {"json": schema}}]
    wishes = saying("", tools=openai.omit)
    for more in [
        *({"response_format": each, "extra_body": {}} for each in formats),
        *({"extra_body": b} for b in bodies),
    ]:
        text = client.chat.completions.create(**{**wishes, **more}).choices[0].message.content
        assert set(json.loads(text or "")) == {"city", "days"}


def test_completions_are_bound_too(client: openai.OpenAI) -> None:
    for body in ({"guided_regex": "[ab]{3}"}, {"structured_outputs": {"regex": "[ab]{3}"}}):
        answer = client.completions.create(model="tiny", prompt="x", max_tokens=20, extra_body=body)
        assert re.fullmatch("[ab]{3}", answer.choices[0].text)


def test_what_is_wrong_is_refused_and_says_why(client: openai.OpenAI, json_server: ServerProcess) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "function"}]}, "a tool must be"),
        ({"tools": openai.omit, "tool_choice": "required"}, "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "not among the tools weather"),
        ({"tool_choice": "sometimes"}, "tool_choice must be"),
        ({"tool_choice": "required"}, "cannot be combined"),
        ({"extra_body": {"guided_json": {"type": "strin"}}}, "Invalid type: strin"),
        ({"extra_body": {"guided_json": {}, "guided_regex": "a"}}, "cannot be combined"),
        ({"extra_body": {"structured_outputs": {"jsn": {}}}}, "did you mean 'json'"),
        ({"response_format": {"type": "xml"}, "extra_body": {}}, "of type text, json_object or json_schema"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "tool_calls must be a list"),
        (
            {"messages": [*QUESTION, {"role": "user", "content": 5}]},
            "messages[1]: a message's content must be",
        ),
    ]
    for more, message in wrong:
        with pytest.raises(openai.BadRequestError, match=re.escape(message)):
            client.chat.completions.create(**saying("x", **more))
    assert json_server.get("/health").status_code == 200


def test_a_template_that_knows_no_tools_refuses_them(server: ServerProcess) -> None:
    answer = server.post("/v1/chat/completions", messages=QUESTION, tools=[WEATHER], max_tokens=3)
    assert answer.status_code == 400
    assert "does not support tools" in answer.json()["error"]["message"]


def test_a_marked_part_is_hit_by_another_end(client: openai.OpenAI) -> None:
    part = {"type": "text", "text": "A long text about ships. " * 9, "cache_control": {"type": "ephemeral"}}

    def ask(text: str) -> int:
        messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": text}]}]
        body = {"cache_salt": "marks"}
        usage = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, extra_body=body).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert ask("Who?") == 0
    assert ask("Is it long?") == len("*user\n" + part["text"])


def test_only_tags_that_parsers_need_are_shown_among_special_tokens() -> None:
    tokenizer = byte_tokenizer()
    specials = ["<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    client: Any = SimpleNamespace(frontend=SimpleNamespace(tokenizer=tokenizer))

    def shown(output_format: OutputFormat, params: SamplingParams, *, with_tools: bool) -> set[str] | None:
        hidden = Service(client, ["x"], output_format=output_format).hidden_ids(params, with_tools=with_tools)
        return None if hidden is None else set(specials) - set(tokenizer.convert_ids_to_tokens(sorted(hidden)))

    lfm2, params = OutputFormat("lfm2", "qwen3"), SamplingParams()
    assert shown(lfm2, params, with_tools=True) == set(specials) - {"<|im_end|>"}
    assert shown(lfm2, params, with_tools=False) == {"<think>", "</think>"}
    assert shown(OutputFormat("hermes"), params, with_tools=True) is None
    assert shown(lfm2, SamplingParams(skip_special_tokens=False), with_tools=True) is None
