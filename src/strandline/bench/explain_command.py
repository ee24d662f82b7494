"""``strandline explain``: turns its flags into a question and prints the answer."""

import json
from argparse import Namespace
from typing import Any

from strandline.bench.explain_queries import ServerQuestion, TraceQuestion, explain_in_trace, explain_on_server
from strandline.bench.replay_setup import ReplaySetup
from strandline.env import read_api_key
from strandline.errors import ConfigError
from strandline.text_input import read_stdin, read_text


def run_explain(options: Namespace) -> int:
    """Ask the question that the flags describe; return the exit code.

    Raises:
        ConfigError: they contradict each other, or a file cannot be read.
    """
    if options.trace is not None:
        named = ("request_id", "prompt", "prompt_file", "tokens", "messages")
        wrong = [name for name in named if getattr(options, name) is not None]
        if wrong:
            raise ConfigError(f"--trace explains its own requests; it cannot be combined with {_flag(wrong[0])}")
        question = TraceQuestion(
            trace=options.trace,
            request=options.request,
            memory=options.memory,
            policy=options.policy,
            setup=ReplaySetup.from_flags(options),
        )
        return explain_in_trace(question, as_json=options.json)
    if options.request is not None:
        raise ConfigError("--request counts the requests of a --trace; name a server's request by its id")
    if options.prompt is not None and options.prompt_file is not None:
        raise ConfigError("give --prompt or --prompt-file, not both")
    prompt = options.prompt if options.prompt_file is None else _read(options.prompt_file)
    return explain_on_server(
        ServerQuestion(
            request_id=options.request_id,
            prompt=prompt,
            tokens=None if options.tokens is None else _tokens(options.tokens),
            conversation=None if options.messages is None else _conversation(options.messages),
            salt=options.salt,
            url=options.url,
            api_key=options.api_key or read_api_key(),
        ),
        as_json=options.json,
    )


def _flag(name: str) -> str:
    return "a request's id" if name == "request_id" else f"--{name.replace('_', '-')}"


def _read(name: str) -> str:
    try:
        return read_stdin() if name == "-" else read_text(name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error


def _tokens(given: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",")]
    except ValueError as error:
        raise ConfigError(f"--tokens must be numbers separated by commas, got {given[:60]!r}") from error


def _conversation(name: str) -> dict[str, Any]:
    """Return the contents of a JSON file: a list of messages, or a body of the chat API."""
    try:
        data = json.loads(_read(name))
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from error
    return data if isinstance(data, dict) else {"messages": data}
