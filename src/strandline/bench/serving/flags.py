"""The flags of ``strandline bench serve`` and ``bench report``: vLLM's names where it has them.

Imports nothing heavy: every command of the program builds all parsers.
"""

import argparse
import json
from typing import Final

BACKENDS: Final = ("openai", "vllm", "openai-chat")
DATASETS: Final = ("random", "prefix_repetition", "sharegpt", "multi-turn", "trace", "custom")
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
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the page to write")
    parser.add_argument("--title", default="Serving benchmark", help="of the page (default: %(default)s)")
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="what to call the runs, one label for each file")


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--base-url", metavar="URL", help="where the server is, instead of host and port")
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add("--endpoint", metavar="PATH", help="default: /v1/completions, or /v1/chat/completions with openai-chat")
    add("--backend", choices=BACKENDS, default="openai", help="openai and vllm complete, openai-chat chats")
    add("--header", nargs="*", default=(), metavar="KEY=VALUE", help="sent with each request")
    add(
        "--model", metavar="NAME", help="where the tokenizer is, and the name in requests (default: the server's first)"
    )
    add("--served-model-name", metavar="NAME", help="the name in requests, if not --model")
    add("--tokenizer", metavar="PATH", help="a directory or hub name, if not --model")
    add("--vocab-size", type=int, metavar="N", help="draw tokens below N, without a tokenizer")
    add("--ready-check-timeout-sec", type=float, default=0, metavar="S", help="wait so long for the server to be there")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--num-prompts", type=int, default=1000, metavar="N", help="requests to send (default: %(default)s)")
    add("--request-rate", type=float, default=float("inf"), metavar="R", help="arrivals per second (default: all at 0)")
    add("--burstiness", type=float, default=1.0, metavar="K", help="of arrivals: 1 is Poisson, less is burstier")
    add("--max-concurrency", type=int, metavar="N", help="most requests at once; the others wait here")
    add("--ramp-up-strategy", choices=RAMPS, help="how the rate grows; instead of --request-rate")
    add("--ramp-up-start-rps", type=float, metavar="R")
    add("--ramp-up-end-rps", type=float, metavar="R")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    add("--num-warmups", type=int, default=0, metavar="N", help="requests before the clock starts, of their own tokens")
    add("--disable-tqdm", action="store_true", help="show no progress bar")


def _add_datasets(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("dataset").add_argument
    add("--dataset-name", choices=DATASETS, default="random", help="default: %(default)s")
    add("--dataset-path", metavar="FILE", help="of sharegpt, trace and custom; multi-turn takes a sharegpt file too")
    add("--disable-shuffle", action="store_true", help="keep the file's order")
    add("--no-oversample", action="store_true", help="do not repeat a file that has too few prompts")
    add("--skip-chat-template", action="store_true", help="send custom prompts as they are")
    add("--trace-speed", type=float, default=1.0, metavar="X", help="factor by which a trace is replayed faster")
    add("--session-gap", type=float, default=10.0, metavar="S", help="between sessions that record no time of day")
    add("--max-sessions", type=int, metavar="N", help="read the first N sessions of a trace")


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("lengths, in tokens").add_argument
    add("--random-input-len", type=int, default=1024, metavar="N", help="default: %(default)s")
    add("--random-output-len", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--random-prefix-len", type=int, default=0, metavar="N", help="before these, the same for all")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by this share, in [0, 1)")
    add("--prefix-repetition-prefix-len", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--prefix-repetition-suffix-len", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N", help="default: %(default)s")
    add("--prefix-repetition-output-len", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--sharegpt-output-len", type=int, metavar="N", help="instead of the recorded answer's length")
    add("--custom-output-len", type=int, default=256, metavar="N", help="-1: each line's output_tokens")
    add("--multi-turn-num-turns", type=int, default=6, metavar="N", help="per conversation (default: %(default)s)")
    add("--multi-turn-system-len", type=int, default=512, metavar="N", help="the same for all (default: %(default)s)")
    add("--multi-turn-user-len", type=int, default=128, metavar="N", help="of a message (default: %(default)s)")
    add("--multi-turn-output-len", type=int, default=128, metavar="N", help="of an answer (default: %(default)s)")
    add("--multi-turn-think-time", type=float, default=0.0, metavar="S", help="between answer and next message")


def _add_request(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests (without --temperature they are greedy)")
    group.add_argument("--ignore-eos", action="store_true", help="outputs have their full length")
    group.add_argument("--logprobs", type=int, metavar="N", help="number of log probabilities per token")
    text = "shared by this run's requests alone; 'random': a new one, so that no earlier run can be hit"
    group.add_argument("--cache-salt", metavar="TEXT", help=text)
    for name, kind in SAMPLING_FLAGS:
        group.add_argument(f"--{name}", type=kind)
    group.add_argument("--extra-body", type=json.loads, metavar="JSON", help="fields to add to each request")


def _add_result(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("result").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES", help="of ttft, tpot, itl, e2el")
    add("--metric-percentiles", default="99", metavar="LIST", help="such as 50,90,99 (default: %(default)s)")
    add("--goodput", nargs="+", default=(), metavar="NAME:MS", help="count requests within these limits: ttft:200 …")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="with every request's times and text in it")
    add("--append-result", action="store_true", help="add to the file, one JSON object a line")
    add("--result-dir", metavar="DIR", help="default: the current one")
    add("--result-filename", metavar="FILE", help="default: made of label, rate, model and time")
    add("--label", help="what to call the run (default: the backend)")
    add("--metadata", nargs="*", default=(), metavar="KEY=VALUE", help="to keep in the result")
    add("--html", metavar="FILE", help="write a page of charts as well")
