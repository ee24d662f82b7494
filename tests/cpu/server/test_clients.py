"""Clients that we did not write: the examples of docs/clients.md run, and what other programs send is answered.

``test_client_tools.py`` runs these programs where they are installed. The bodies and headers here are those that the
programs sent, recorded on their way, with other prompts.
"""

import contextlib
import io
import json
import re
import shutil
import subprocess
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel

from strandline import LLM, SamplingParams
from strandline.records.outputs import Logprob
from strandline.server.requests.usage_and_logprobs import ScoredToken, completion_logprobs, text_name
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, http_stream

PAGE = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_python_examples_print_what_the_model_says(demo_server: ServerProcess) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for example in examples("py"):
            exec(compile(example.replace("http://127.0.0.1:8000", demo_server.url), "docs/clients.md", "exec"), {})
    assert said.getvalue().count("42") == 2
    assert "15" in said.getvalue()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_shell_examples_run(demo_server: ServerProcess) -> None:
    whole, streamed = [
        subprocess.run(
            ["bash", "-ec", example.replace("http://127.0.0.1:8000", demo_server.url)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for example in examples("sh")
        if example.startswith("curl ")
    ]
    assert json.loads(whole)["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert events[-1] == "[DONE]"
    pieces = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert "42" in "".join(piece["delta"].get("content") or "" for piece in pieces)
    assert json.loads(events[-2])["usage"]["prompt_tokens"] > 0


# Structured outputs


class Sum(BaseModel):
    answer: int
    is_even: bool


def test_typed_answers_of_clients_parse(demo_server: ServerProcess) -> None:
    question: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
    keys: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}
    asked: dict[str, Any] = {"model": "demo"}
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", **keys) as client:
        chat = client.chat.completions.parse(**asked, messages=question, response_format=Sum, max_tokens=200)
        assert isinstance(chat.choices[0].message.parsed, Sum)
        response = client.responses.parse(**asked, input=question, text_format=Sum, max_output_tokens=200)
        assert isinstance(response.output_parsed, Sum)
    with anthropic.Anthropic(base_url=demo_server.url, **keys) as other:
        message = other.messages.parse(**asked, messages=question, output_format=Sum, max_tokens=200)
        assert isinstance(message.parsed_output, Sum)


# Tools

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Ulm"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_agents_calls_with_tools_are_answered_by_the_demo(demo_server: ServerProcess) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked: dict[str, Any] = {"model": "demo", "tools": [WEATHER], "max_tokens": 60}
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        first = client.chat.completions.create(**asked, messages=messages)
        assert first.choices[0].message.content
        called = client.chat.completions.create(
            **asked, messages=messages, tool_choice="required", parallel_tool_calls=False
        )
        [call] = called.choices[0].message.tool_calls or []
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Ulm")
        messages.append(called.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny."})
        last = client.chat.completions.create(**asked, messages=messages)
        assert last.choices[0].finish_reason in ("stop", "length")


# lm-evaluation-harness 0.4.13

HARNESS = {"Authorization": "Bearer ", "User-Agent": "python-requests/2.34.2", "Content-Type": "application/json"}


def harness_asks(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """Return status and answer. Not through httpx, which refuses to send the empty key that the harness sends."""
    data = None if body is None else json.dumps(body).encode()
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET" if data is None else "POST", path, data, HARNESS)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_the_harness_reads_log_likelihoods_that_are_the_offline_ones(server: ServerProcess, offline_llm: LLM) -> None:
    """As its ``parse_logprobs``: what lies between the context and the one generated token, greedy if all are best."""
    contexts, ends = [b"What is it?", b"Who"], [b" A", b" is there"]
    prompts = [list(context + end) for context, end in zip(contexts, ends, strict=True)]
    # The second prompt goes on as the model would: only that one is greedy.
    params = SamplingParams(temperature=0, max_tokens=5)
    [output] = offline_llm.generate([list(contexts[1])], params, use_tqdm=False)
    prompts[1] = [*contexts[1], *output.outputs[0].token_ids]
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    status, answer = harness_asks(server, "/v1/completions", {**body, "echo": True})
    assert status == 200
    found = []
    for choice, context in zip(sorted(answer["choices"], key=lambda choice: choice["index"]), contexts, strict=True):
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), is_greedy))
    expected = []
    for prompt, context in zip(prompts, contexts, strict=True):
        [output] = offline_llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
        entries = [next(iter(entry.values())) for entry in (output.prompt_logprobs or [])[len(context) :] if entry]
        expected.append((sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)))
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected] == [False, True]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_most_likely_of_tokens_with_equal_text_is_reported() -> None:
    """Else the harness would take a part of a character for the greedy choice because another part hides behind it."""
    entry = {1: Logprob(-3.0, rank=2, decoded_token="\ufffd"), 2: Logprob(-0.5, rank=1, decoded_token="\ufffd")}
    body = completion_logprobs([ScoredToken("\ufffd", 0, entry)], name=text_name)
    assert (body["token_logprobs"], body["top_logprobs"]) == ([-3.0], [{"\ufffd": -0.5}])


def test_the_harness_generates_in_batches_up_to_a_stop(server: ServerProcess, offline_llm: LLM) -> None:
    prompts = [list(b"one"), list(b"another")]
    texts = [
        output.outputs[0].text
        for output in offline_llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    ]
    stop = [texts[0][5:8], "<|im_end|>"]
    body = {"prompt": prompts, "model": "tiny", "max_tokens": 32, "temperature": 0, "stop": stop, "seed": 1234}
    status, answer = harness_asks(server, "/v1/completions", body)
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["text"] for choice in answer["choices"]] == [text.split(stop[0])[0] for text in texts]


def test_the_harness_chats(demo_server: ServerProcess) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "model": "demo"}
    body["max_tokens"] = 32
    body |= {"temperature": 0, "stop": ["\n"], "seed": 1234}
    status, answer = harness_asks(demo_server, "/v1/chat/completions", body)
    assert status == 200
    assert "42" in answer["choices"][0]["message"]["content"]


def test_harness_is_told_at_once_that_tokenizer_is_missing(server: ServerProcess) -> None:
    assert harness_asks(server, "/tokenizer_info")[0] == 404


# guidellm 0.8.1

GUIDELLM: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "ignore_eos": True,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "max_completion_tokens": 4,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "1 0 m0"}]}],
            },
        ),
        ("/v1/completions", {"max_tokens": 4, "prompt": "1 0 m0"}),
    ],
    ids=["chat", "completion"],
)
def test_guidellm_counts_as_many_tokens_as_it_asked_for(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    assert server.get("/health").status_code == 200
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["tiny"]
    response = server.post(path, **GUIDELLM, **body)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    usages = [usage for event in events[:-1] if (usage := json.loads(event).get("usage"))]
    assert usages[-1]["completion_tokens"] == 4
    assert usages[-1]["prompt_tokens"] >= len("1 0 m0")


def test_chat_role_event_comes_with_first_token(server: ServerProcess) -> None:
    """vLLM's load generator takes it for the first token. A prompt of many steps would show the difference."""
    body = {**GUIDELLM, "max_completion_tokens": 1, "messages": [{"role": "user", "content": "x" * 4000}]}
    growth = server.growth_of("time_to_first_token_seconds_count")
    with http_stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        first = next(line for line in response.iter_lines() if line)
        assert '"role":"assistant"' in first
        assert growth() == [1]
