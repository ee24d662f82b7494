"""The flags of ``strandline bench serve`` and ``bench report``, with vLLM's names where vLLM has them.

Imports only light modules, since every command builds all parsers.
"""

import argparse
import json
from typing import Final

BACKENDS: Final = ("openai", "vllm", "openai-chat")
DATASETS: Final = ("random", "prefix_repetition", "sharegpt", "multi-turn", "trace", "custom", "screenshots")
MAX_SIDE_PIXELS: Final = 16384
RAMPS: Final = ("linear", "exponential")

SAMPLING_FLAGS: Final[tuple[tuple[str, type], ...]] = (
    ("temperature", float),
    ("top-p", float),
    ("top-k", int),
    ("min-p", float),
    ("frequency-penalty", float),
    ("presence-penalty", float),
    ("repetition-penalty", float),
)


def seconds_range(text: str) -> tuple[float, float]:
    """Read seconds, or the ends of a range: ``4`` or ``0:6``.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    first, colon, last = text.partition(":")
    try:
        least, most = float(first), float(last if colon else first)
    except ValueError:
        least, most = -1.0, -1.0
    if not 0 <= least <= most < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of seconds nor a range such as 0:6")
    return least, most


def picture_size(text: str) -> tuple[int, int]:
    """Read width and height: ``1280x720``.

    Raises:
        argparse.ArgumentTypeError: it is no such pair, or a number is not from 1 to ``MAX_SIDE_PIXELS``.
    """
    numbers = [int(number) for number in text.split("x") if number.isdecimal()]
    if len(numbers) != 2 or not all(1 <= number <= MAX_SIDE_PIXELS for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a width and a height such as 1280x720")
    return numbers[0], numbers[1]


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``bench serve``."""
    _add_server(parser)
    _add_load(parser)
    _add_datasets(parser)
    _add_lengths(parser)
    _add_request(parser)
    _add_result(parser)


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``bench report``."""
    parser.add_argument("results", nargs="+", metavar="RESULT", help="files of 'bench serve --save-result', or vLLM's")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="output page")
    parser.add_argument("--title", default="Serving benchmark", help="title of the page (default: %(default)s)")
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="labels of the runs, one per file")


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--base-url", metavar="URL", help="the server's base URL, instead of --host and --port")
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add("--endpoint", metavar="PATH", help="default: /v1/completions, or /v1/chat/completions with openai-chat")
    add("--backend", choices=BACKENDS, default="openai", help="openai-chat: chat completions; others: completions")
    add("--header", nargs="*", default=(), metavar="KEY=VALUE", help="header to send with each request")
    add("--model", metavar="NAME", help="tokenizer, and model name in requests (default: the server's first)")
    add("--served-model-name", metavar="NAME", help="model name in requests (default: --model)")
    add("--tokenizer", metavar="PATH", help="a directory or hub name (default: --model)")
    add("--vocab-size", type=int, metavar="N", help="without a tokenizer: draw token ids below N")
    add("--ready-check-timeout-sec", type=float, default=0, metavar="S", help="time to wait for the server to be ready")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--num-prompts", type=int, default=1000, metavar="N", help="number of requests (default: %(default)s)")
    add(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="arrivals per second (default: all at once)",
    )
    add("--burstiness", type=float, default=1.0, metavar="K", help="1: Poisson arrivals; less: burstier")
    add("--max-concurrency", type=int, metavar="N", help="maximum number of requests in flight")
    add("--ramp-up-strategy", choices=RAMPS, help="increase of the rate; instead of --request-rate")
    add("--ramp-up-start-rps", type=float, metavar="R")
    add("--ramp-up-end-rps", type=float, metavar="R")
    add("--seed", type=int, default=0, help="seed of prompts and arrivals (default: %(default)s)")
    add("--num-warmups", type=int, default=0, metavar="N", help="warm-up requests with separate tokens, not measured")
    add("--disable-tqdm", action="store_true", help="hide the progress bar")


def _add_datasets(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("dataset").add_argument
    add("--dataset-name", choices=DATASETS, default="random", help="default: %(default)s")
    add("--dataset-path", metavar="FILE", help="for sharegpt, trace and custom; optional for multi-turn (sharegpt)")
    add("--disable-shuffle", action="store_true", help="keep the file's order")
    add("--no-oversample", action="store_true", help="do not repeat prompts if the file has too few")
    add("--skip-chat-template", action="store_true", help="send custom prompts without the chat template")
    text = "of screenshots, in pixels (default: 1280x720)"
    add("--screenshot-size", type=picture_size, default=(1280, 720), metavar="WxH", help=text)
    add("--trace-speed", type=float, default=1.0, metavar="X", help="speed-up factor of a trace")
    add("--session-gap", type=float, default=10.0, metavar="S", help="between sessions without start times")
    add("--max-sessions", type=int, metavar="N", help="read the first N sessions of a trace")


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("lengths, in tokens").add_argument
    add("--random-input-len", type=int, default=1024, metavar="N", help="default: %(default)s")
    add("--random-output-len", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--random-prefix-len", type=int, default=0, metavar="N", help="shared prefix before each prompt")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="relative variation of lengths, in [0, 1)")
    add("--prefix-repetition-prefix-len", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--prefix-repetition-suffix-len", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N", help="default: %(default)s")
    add("--prefix-repetition-output-len", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--sharegpt-output-len", type=int, metavar="N", help="instead of the recorded answer's length")
    add("--custom-output-len", type=int, default=256, metavar="N", help="output length; -1: each line's output_tokens")
    add("--multi-turn-num-turns", type=int, default=6, metavar="N", help="per conversation (default: %(default)s)")
    add("--multi-turn-system-len", type=int, default=512, metavar="N", help="shared by all (default: %(default)s)")
    add("--multi-turn-user-len", type=int, default=128, metavar="N", help="per user message (default: %(default)s)")
    add("--multi-turn-output-len", type=int, default=128, metavar="N", help="per answer (default: %(default)s)")
    text = "pause before the next message in seconds, or its range; not counted by --max-concurrency"
    add("--multi-turn-think-time", type=seconds_range, default=(0.0, 0.0), metavar="S[:MAX]", help=text)
    text = "--max-concurrency counts conversations in progress, also while they pause"
    add("--multi-turn-keep-place", action="store_true", help=text)


def _add_request(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests (without --temperature they are greedy)")
    group.add_argument("--ignore-eos", action="store_true", help="generate outputs of full length")
    group.add_argument("--logprobs", type=int, metavar="N", help="number of log probabilities per token")
    text = "cache_salt of all requests; 'random': a new one, so that earlier runs cannot be hit"
    group.add_argument("--cache-salt", metavar="TEXT", help=text)
    text = "LoRA adapters of the server, one for each request or conversation (default: none)"
    group.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME", help=text)
    choices = ("random", "round-robin")
    group.add_argument("--lora-assignment", choices=choices, default="random", help="default: %(default)s")
    for name, kind in SAMPLING_FLAGS:
        group.add_argument(f"--{name}", type=kind)
    group.add_argument("--extra-body", type=json.loads, metavar="JSON", help="fields to add to each request")


def _add_result(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("result").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES", help="metrics to show: ttft, tpot, itl, e2el")
    add("--metric-percentiles", default="99", metavar="LIST", help="such as 50,90,99 (default: %(default)s)")
    add("--goodput", nargs="+", default=(), metavar="NAME:MS", help="count requests within these limits: ttft:200 …")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="include every request's times and text")
    add("--append-result", action="store_true", help="append to the file, one JSON object per line")
    add("--result-dir", metavar="DIR", help="default: the current one")
    add("--result-filename", metavar="FILE", help="default: composed of label, rate, model and time")
    add("--label", help="label of the run (default: the backend)")
    add("--metadata", nargs="*", default=(), metavar="KEY=VALUE", help="metadata to store in the result")
    add("--html", metavar="FILE", help="also write a page with charts")
