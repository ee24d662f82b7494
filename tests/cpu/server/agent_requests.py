"""Requests in the shapes that coding agents send: their headers, fields, order and forms of messages, with our texts.

A session is a list of steps. Each client writes them in its own form; between requests it only appends, but where its
entry says otherwise.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]

TOOL = "read"
PARAMETERS: Json = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "File to read"}},
    "required": ["path"],
}
SYSTEM = "You write code. Answer briefly, and read a file before you speak of it. " * 10
REMINDER = "<system-reminder>\nToday is Friday.\n</system-reminder>"


@dataclass(frozen=True)
class Question:
    """A user's question, which begins a turn, and a picture that the client attaches to it."""

    text: str
    picture: str | None = None
    """A PNG in base64."""


@dataclass(frozen=True)
class Call:
    """A call of the tool, and its result."""

    path: str
    result: str
    picture: str | None = None
    """A PNG in base64, which the client sends with the result."""

    @property
    def identity(self) -> str:
        return f"call_{self.path}"

    @property
    def arguments(self) -> Json:
        return {"path": self.path}


@dataclass(frozen=True)
class Answer:
    """The text that ends a turn."""

    text: str


Step = Question | Call | Answer
STEPS: Sequence[Step] = (
    Question("What is in a.py? Read the file, then say in a few words what it contains."),
    Call("a.py", "x = 1"),
    Answer("A number."),
    Question("And in b.py?"),
    Call("b.py", "y = 2"),
    Answer("A number, too."),
)


@dataclass(frozen=True)
class AgentRequests:
    """How a client asks.

    Attributes:
        headers: the headers that tell it from others.
        body: writes the request for the steps so far.
        path: where it is sent.
        edits: the client changes earlier messages when a turn begins.
        pictures: where the client sends the pictures that its tools read; None: nowhere.
    """

    headers: Mapping[str, str]
    body: Callable[[Sequence[Step]], Json]
    path: str = "/v1/chat/completions"
    edits: bool = False
    pictures: Literal["in the result", "in a user message"] | None = None


def text_part(text: str) -> list[Json]:
    return [{"type": "text", "text": text}]


def image_part(picture: str) -> Json:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}


def function_call(call: Call) -> Json:
    arguments = json.dumps(call.arguments, separators=(",", ":"))
    return {"id": call.identity, "type": "function", "function": {"name": TOOL, "arguments": arguments}}


@dataclass(frozen=True)
class Chat:
    """A client of chat completions: the fields of its requests, and the forms of its messages."""

    fields: Json
    first: Sequence[Json] = ({"role": "system", "content": SYSTEM},)
    question: Callable[[str], Any] = str
    called: Callable[[Call], Json] = lambda call: {
        "role": "assistant",
        "content": "",
        "tool_calls": [function_call(call)],
    }
    result: Callable[[Call], Json] = lambda call: {
        "role": "tool",
        "tool_call_id": call.identity,
        "content": call.result,
    }
    attach: Callable[[Question, Json], list[Json]] = lambda question, picture: [*text_part(question.text), picture]
    """Writes a question with a picture."""
    seen: Sequence[Json] = ()
    """Parts before a picture in the message that follows a tool's result."""
    tools: Sequence[Json] = field(
        default=(
            {"type": "function", "function": {"name": TOOL, "description": "Read a file.", "parameters": PARAMETERS}},
        )
    )

    def __call__(self, steps: Sequence[Step]) -> Json:
        messages = list(self.first)
        for step in steps:
            if isinstance(step, Question) and step.picture is not None:
                messages.append({"role": "user", "content": self.attach(step, image_part(step.picture))})
            elif isinstance(step, Question):
                messages.append({"role": "user", "content": self.question(step.text)})
            elif isinstance(step, Call):
                messages += [self.called(step), self.result(step)]
            else:
                messages.append({"role": "assistant", "content": step.text})
            if isinstance(step, Call) and step.picture is not None:
                messages.append({"role": "user", "content": [*self.seen, image_part(step.picture)]})
        return {**self.fields, "messages": messages, **({"tools": list(self.tools)} if self.tools else {})}


STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}


def null_content(call: Call) -> Json:
    return {"role": "assistant", "content": None, "tool_calls": [function_call(call)]}


def claude_code(steps: Sequence[Step]) -> Json:
    """Anthropic's form, with a system message after the first question, and a mark on the last message only."""
    messages: list[Json] = []
    for step in steps:
        if isinstance(step, Question) and messages:
            messages.append({"role": "user", "content": step.text})
        elif isinstance(step, Question):
            messages.append({"role": "user", "content": [*text_part(REMINDER), *text_part(step.text)]})
            messages.append({"role": "system", "content": "# Environment\nThe folder is /repository."})
        elif isinstance(step, Call):
            use = {"type": "tool_use", "id": step.identity, "name": TOOL, "input": step.arguments}
            result = {"tool_use_id": step.identity, "type": "tool_result", "content": step.result, "is_error": False}
            if step.picture is not None:
                source = {"type": "base64", "data": step.picture, "media_type": "image/png"}
                result = {**result, "content": [{"type": "image", "source": source}]}
            messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        else:
            messages.append({"role": "assistant", "content": text_part(step.text)})
    mark = {"cache_control": {"type": "ephemeral"}}
    last = messages[-1]
    content = text_part(last["content"]) if isinstance(last["content"], str) else last["content"]
    messages[-1] = {**last, "content": [*content[:-1], {**content[-1], **mark}]}
    first = next(step.text for step in steps if isinstance(step, Question))
    header = f"x-anthropic-billing-header: cc_version=2.1.332.{len(first):03}; cc_entrypoint=sdk-cli;"
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **PARAMETERS, "additionalProperties": False}
    return {
        "model": "tiny",
        "messages": messages,
        "system": [
            *text_part(header),
            {**text_part("You are an agent.")[0], **mark},
            {**text_part(SYSTEM)[0], **mark},
        ],
        "tools": [
            {"name": TOOL, "description": "Read a file.", "input_schema": schema},
            {"name": "ToolSearch", "description": "Find a tool.", "input_schema": schema},
            {"name": "Deferred", "description": "Left out.", "input_schema": schema, "defer_loading": True},
        ],
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def input_image(picture: str) -> Json:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{picture}", "detail": "high"}


def codex(steps: Sequence[Step]) -> Json:
    """OpenAI's items, with developers' messages first, a namespace of tools, and a tool that OpenAI would run."""

    def message(role: str, *texts: str, kind: str = "input_text") -> Json:
        content = [{"type": kind, "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{len(items)}", "role": role, "content": content}

    items: list[Json] = []
    items.append(message("developer", SYSTEM))
    items.append(message("developer", "<skills>\nThere are no skills.\n</skills>", "<permissions>all</permissions>"))
    items.append(message("user", "<environment_context>\n  <cwd>/repository</cwd>\n</environment_context>"))
    for step in steps:
        if isinstance(step, Question):
            items.append(message("user", step.text))
            if step.picture is not None:
                before, after = message("user", '<image name=[Image #1] path="a.png">', "</image>")["content"]
                items[-1]["content"][:0] = [before, input_image(step.picture), after]
        elif isinstance(step, Call):
            arguments = json.dumps(step.arguments)
            call = {"type": "function_call", "id": f"fc_{len(items)}", "call_id": step.identity, "name": TOOL}
            items.append({**call, "arguments": arguments})
            output = {"type": "function_call_output", "id": f"fco_{len(items)}", "call_id": step.identity}
            items.append({**output, "output": [input_image(step.picture)] if step.picture else step.result})
        else:
            items.append(message("assistant", step.text, kind="output_text"))
    function = {"type": "function", "name": TOOL, "description": "Read a file.", "strict": False}
    wait = {"type": "function", "name": "wait_agent", "description": "Wait for an agent.", "strict": False}
    wait["parameters"] = {"type": "object", "properties": {}, "additionalProperties": False}
    agents = {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [wait]}
    return {
        "model": "tiny",
        "stream": True,
        "input": items,
        "tools": [
            {**function, "parameters": PARAMETERS},
            agents,
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2",
        "client_metadata": {"session_id": "01a2", "turn_id": str(len(steps))},
    }


def qwen_code(steps: Sequence[Step]) -> Json:
    """Chat completions in parts; the date precedes the last question, and leaves the others."""
    last = [step for step in steps if isinstance(step, Question)][-1]
    reminder = "<system-reminder>\nThere are two skills.\n</system-reminder>"

    def attach(asked: Question, picture: Json) -> list[Json]:
        return [*question(asked.text), *text_part("\n--- Content from referenced files ---"), picture]

    def question(text: str) -> list[Json]:
        skills = text_part(reminder) if text == STEPS[0].text else []  # type: ignore[union-attr]
        return [*skills, *(text_part(REMINDER) if text == last.text else []), *text_part(text)]

    chat = Chat(
        {"model": "tiny", "max_tokens": 32000, **STREAMED},
        question=question,
        called=null_content,
        result=lambda call: {"role": "tool", "tool_call_id": call.identity, "content": text_part(call.result)},
        attach=attach,
        seen=text_part("(attached media from previous tool call)"),
    )
    return chat(steps)


def aider(steps: Sequence[Step]) -> Json:
    """Chat completions without tools: examples first, and the file's current text before the last question."""
    asked = [step for step in steps if not isinstance(step, Call)]
    file = f"I have added a.py to the chat. Its text is:\n\nx = {len(asked)}"
    examples = (
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Change the greeting"},
        {"role": "assistant", "content": "Ok, I will:\n\n1. Change it."},
        {"role": "user", "content": "I switched to a new code base."},
        {"role": "assistant", "content": "Ok."},
    )
    body = Chat({"model": "tiny", "stream": True, "temperature": 0}, first=examples, tools=())(asked)
    body["messages"][-1:-1] = [
        {"role": "user", "content": file},
        {"role": "assistant", "content": "Ok, any changes I propose will be to that file."},
    ]
    return body


STAINLESS = {"x-stainless-lang": "js", "x-stainless-runtime": "node", "x-stainless-retry-count": "0"}

AGENT_REQUESTS = {
    "claude": AgentRequests(
        {
            "User-Agent": "claude-cli/2.1.332 (external, sdk-cli)",
            "X-Claude-Code-Session-Id": "5cfd",
            "X-Stainless-Timeout": "600",
            "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
            "anthropic-dangerous-direct-browser-access": "true",
            "anthropic-version": "2023-06-01",
            "x-api-key": "none",
            "x-app": "cli",
        },
        claude_code,
        "/v1/messages?beta=true",
        pictures="in the result",
    ),
    "codex": AgentRequests(
        {
            "x-codex-window-id": "01a2:0",
            "x-codex-turn-metadata": '{"session_id":"01a2"}',
            "x-client-request-id": "01a2",
            "session-id": "01a2",
            "thread-id": "01a2",
            "accept": "text/event-stream",
            "originator": "codex_exec",
            "User-Agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) dumb (codex_exec; 0.171.0)",
        },
        codex,
        "/v1/responses",
        pictures="in the result",
    ),
    "opencode": AgentRequests(
        {
            "User-Agent": "opencode/1.18.33 ai-sdk/provider-utils/4",
            "x-session-affinity": "ses_1",
            "x-session-id": "ses_1",
        },
        Chat(
            {"model": "tiny", "max_tokens": 8192, "tool_choice": "auto", **STREAMED},
            attach=lambda question, picture: [
                *text_part("Image read successfully"),
                picture,
                *text_part(question.text),
            ],
            seen=text_part("Attached media from tool result:"),
        ),
        pictures="in a user message",
    ),
    "cline": AgentRequests(
        {"User-Agent": "ai-sdk/openai-compatible/3.0.37 ai-sdk/provider-utils/5"},
        Chat({"model": "tiny", "tool_choice": "auto", **STREAMED}),
        pictures="in a user message",
    ),
    "continue": AgentRequests(
        {"User-Agent": "ls/JS 5.23.2", "Authorization": "Bearer none", **STAINLESS},
        Chat(
            {"model": "tiny", **STREAMED},
            result=lambda call: {"role": "tool", "content": call.result, "tool_call_id": call.identity},
        ),
    ),
    "qwen": AgentRequests(
        {"User-Agent": "QwenCode/0.24.4 (linux; x64)", **STAINLESS},
        qwen_code,
        edits=True,
        pictures="in a user message",
    ),
    "pi": AgentRequests(
        {"User-Agent": "OpenAI/JS 6.26.0", "accept-language": "*", "sec-fetch-mode": "cors", **STAINLESS},
        Chat(
            {"model": "tiny", **STREAMED, "store": False, "max_completion_tokens": 8192},
            question=text_part,
            called=null_content,
            result=lambda call: {"role": "tool", "content": call.result, "tool_call_id": call.identity},
            seen=text_part("Attached image(s) from tool result:"),
        ),
        pictures="in a user message",
    ),
    "copilot": AgentRequests(
        {"User-Agent": "OpenAI/JS 5.20.1", "x-initiator": "agent", "x-stainless-helper-method": "stream", **STAINLESS},
        Chat(
            {
                "model": "tiny",
                "temperature": 0,
                "top_p": 0.95,
                "frequency_penalty": 0,
                "presence_penalty": 0,
                **STREAMED,
            },
            question=lambda text: f"<current_datetime>2026-11-29T09:53:10.394+00:00</current_datetime>\n\n{text}",
            called=lambda call: {**null_content(call), "refusal": None},
        ),
    ),
    "aider": AgentRequests({"User-Agent": "OpenAI/Python 2.20.0", "X-Stainless-Async": "false"}, aider, edits=True),
    "mini": AgentRequests(
        {"User-Agent": "OpenAI/Python 3.57.0", "x-stainless-read-timeout": "600.0"},
        Chat(
            {"model": "tiny"},
            called=lambda call: {"role": "assistant", "tool_calls": [function_call(call)]},
            result=lambda call: {
                "content": json.dumps({"returncode": 0, "output": call.result}, indent=2),
                "tool_call_id": call.identity,
                "role": "tool",
            },
        ),
    ),
    "gptme": AgentRequests(
        {"User-Agent": "OpenAI/Python 2.54.0", "x-stainless-read-timeout": "600"},
        Chat(
            {"model": "tiny", "temperature": 0.0, "top_p": 0.1, **STREAMED},
            first=[
                {"role": "system", "content": text_part(text)}
                for text in (SYSTEM, "# System Prompt Cache Boundary", "## Current Date\n\n**Local date:** 2026-11-29")
            ],
            question=text_part,
            called=lambda call: {"role": "assistant", "tool_calls": [function_call(call)]},
            result=lambda call: {"role": "tool", "content": text_part(call.result), "tool_call_id": call.identity},
        ),
    ),
    "open-webui": AgentRequests(
        {"User-Agent": "Python/3.11 aiohttp/3.13", "Authorization": "Bearer none"},
        Chat({"stream": True, "model": "tiny"}, first=(), tools=()),
    ),
}
