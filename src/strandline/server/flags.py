"""The flags of ``strandline serve`` that do not concern the engine: a field of ``ServerConfig`` each."""

import argparse
import json
from typing import Any

from strandline.flag_actions import Extend
from strandline.log_format import LOG_FORMATS, LOG_LEVELS
from strandline.server.requests.output_parser import REASONING_FIELDS, REASONING_PARSERS, TOOL_CALL_PARSERS


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    add = parser.add_argument_group("server").add_argument
    _add_access_flags(add)
    _add_tls_flags(add)
    _add_format_flags(add)
    _add_limit_flags(add)
    _add_observation_flags(add)
    add("--restart", action="store_true", help="restart the engine if its process dies")
    text = "content of /cache; auto: prompt text if the server listens on this machine only, else counts"
    add("--cache-page", choices=("auto", "text", "counts", "off"), default="auto", help=text)
    text = "number of engines, each with the whole model, a cache and GPUs of its own (default: %(default)s)"
    add("--data-parallel-size", "-dp", type=int, default=1, metavar="N", help=text)


def _add_access_flags(add: Any) -> None:
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free one (default: %(default)s)")
    text = "allowed Host names; '*': any (default: local names; any name if --host is not a loopback address)"
    add("--allowed-hosts", action=Extend, nargs="+", default=(), metavar="NAME", help=text)
    add(
        "--served-model-name",
        action=Extend,
        nargs="+",
        default=(),
        metavar="NAME",
        help="model names that requests may use",
    )
    add(
        "--api-key",
        action=Extend,
        nargs="+",
        default=(),
        metavar="KEY",
        help="API keys, one of them required in each request",
    )
    add("--api-keys-file", metavar="FILE", help="TOML file of API keys, with a name and limits of each (default: none)")
    add("--max-requests-per-minute", type=int, metavar="N", help="requests of each API key (default: no limit)")
    text = "tokens of each API key: of prompts without cached ones, and of outputs (default: no limit)"
    add("--max-tokens-per-minute", type=int, metavar="N", help=text)
    text = "unfinished requests of each API key (default: no limit)"
    add("--max-concurrent-requests", type=int, metavar="N", help=text)
    add("--salt-per-key", action="store_true", help="share cached prefixes only among requests with the same API key")
    text = "let requests load and unload LoRA adapters from below a directory, or from anywhere"
    add("--allow-runtime-lora", nargs="?", const="/", metavar="DIR", help=text)
    text = "serve endpoints that pause, put to sleep and change weights without an API key too, or with --salt-per-key"
    add("--enable-admin-endpoints", action="store_true", help=text)
    _add_cross_origin_flags(add)


def _add_tls_flags(add: Any) -> None:
    add("--ssl-certfile", metavar="FILE", help="certificate of the server, in PEM format (default: none, plain HTTP)")
    add("--ssl-keyfile", metavar="FILE", help="its key (default: in the same file)")
    text = "certificates of the authorities that sign those of clients"
    add("--ssl-ca-certs", metavar="FILE", help=text)
    text = "whether clients need a certificate: 0 no, 1 check one that is sent, 2 yes (default: %(default)s)"
    add("--ssl-cert-reqs", type=int, default=0, metavar="N", help=text)
    add("--enable-ssl-refresh", action="store_true", help="read these files again when they change")


def _add_format_flags(add: Any) -> None:
    add("--chat-template", metavar="FILE", help="Jinja template: a file, the text itself, or strict")
    text = "variables of the chat template for requests that do not set them, such as '{\"enable_thinking\": false}'"
    add("--default-chat-template-kwargs", type=_json_object, default={}, metavar="JSON", help=text)
    text = "defaults of sampling instead of the model's, such as '{\"temperature\": 0.7}'"
    add("--override-generation-config", type=_json_object, default={}, metavar="JSON", help=text)
    text = "parse control tokens in user and tool messages instead of treating them as plain text"
    add("--parse-special-tokens", action="store_true", help=text)
    text = "keep the telemetry that clients write into system prompts, such as x-anthropic-billing-header"
    add("--keep-client-telemetry", action="store_true", help=text)
    text = "format of tool calls; auto: detect it from the chat template (default: %(default)s)"
    add("--tool-call-parser", choices=TOOL_CALL_PARSERS, default="auto", metavar="NAME", help=text)
    text = "format of reasoning; auto: detect it from the chat template (default: %(default)s)"
    add("--reasoning-parser", choices=REASONING_PARSERS, default="auto", metavar="NAME", help=text)
    text = "field of the reasoning in chat completions (default: %(default)s)"
    add("--reasoning-field", choices=REASONING_FIELDS, default="both", help=text)
    add("--enable-auto-tool-choice", action="store_true", help="accepted for compatibility; not needed")


def _add_limit_flags(add: Any) -> None:
    add("--max-queue", type=int, default=1024, metavar="N", help="maximum queued outputs (default: %(default)s)")
    add(
        "--max-body-bytes",
        type=int,
        metavar="N",
        help="maximum size of a request body (default: 8 MiB, 64 MiB if the model reads pictures)",
    )
    text = "memory for responses that later requests continue; 0: none are stored (default: %(default)s)"
    add("--response-store", default="64MiB", metavar="SIZE", help=text)
    text = "time limit for a client to send or read a part of a message; 0: none (default: %(default)s)"
    add("--client-timeout-s", type=float, default=60.0, metavar="S", help=text)
    text = "tokens of an output that a stream sends together, after its first one (default: %(default)s)"
    add("--stream-interval", type=int, default=1, metavar="N", help=text)
    text = "silence after which a stream gets a comment, or Anthropic's event ping; 0: none (default: %(default)s)"
    add("--stream-ping-interval-s", type=float, default=5.0, metavar="S", help=text)
    add("--request-timeout-s", type=float, metavar="S", help="time limit of a request (default: none)")


def _add_observation_flags(add: Any) -> None:
    text = "format of the log, one line or JSON object each (default: %(default)s)"
    add("--log-format", choices=LOG_FORMATS, default="text", help=text)
    text = "least level of messages in the log (default: %(default)s)"
    add("--log-level", choices=LOG_LEVELS, default="info", help=text)
    text = "log lengths and times of each finished request, and none of its text"
    add("--enable-log-requests", action="store_true", help=text)
    text = "collector of OpenTelemetry traces, such as http://127.0.0.1:4317 (default: none)"
    add("--otlp-traces-endpoint", metavar="URL", help=text)


def _add_cross_origin_flags(add: Any) -> None:
    text = "origins whose web pages may use the server, as a JSON list; '[\"*\"]': all (default: none)"
    add("--allowed-origins", type=_json_strings, default=(), metavar="JSON", help=text)
    add("--allow-credentials", action="store_true", help="let pages of these origins send cookies")
    text = "%s that they may use, as a JSON list (default: all)"
    for name in ("methods", "headers"):
        add(f"--allowed-{name}", type=_json_strings, default=("*",), metavar="JSON", help=text % name)


def _json_object(text: str) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"""must be a JSON object, such as '{{"name": 1}}'; got {text!r:.200}""")
    return value


def _json_strings(text: str) -> list[str]:
    """Return the strings in a JSON list."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(f"""must be a JSON list of strings, such as '["*"]'; got {text!r:.200}""")
    return values
