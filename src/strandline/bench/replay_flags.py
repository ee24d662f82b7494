"""The flags of ``strandline bench replay`` and ``strandline explain``, which share those of the simulated machine.

Imports only light modules, since every command builds all parsers.
"""

import argparse

from strandline.bench.known_models import DEFAULT_GEOMETRY
from strandline.specs import SNAPSHOT_DTYPES
from strandline.text_input import argument_text


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``bench replay``."""
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="a trace file, a workload, or 'synthetic' for all workloads")
    add("--memory", default="40GiB", metavar="SIZES", help="memory budgets, separated by commas (default: %(default)s)")
    add("--policy", default="auto", metavar="NAMES", help="cache policies, separated by commas (default: %(default)s)")
    _add_machine(parser)
    add("--replicas", type=int, default=1, metavar="N", help="engines, each with that memory (default: %(default)s)")
    text = "router of requests to replicas: strandline, prefix-tree, power-of-two, round-robin or random"
    add("--router", default="strandline", metavar="NAMES", help=f"{text}; separated by commas (default: %(default)s)")
    add("--plot", metavar="FILE", help="plot hits and recomputed tokens by memory size to FILE.svg or FILE.html")
    add("--json", action="store_true", help="print JSON instead of a table")


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``explain``."""
    parser.add_argument("request_id", nargs="?", metavar="REQUEST_ID", help="id of one of the server's last requests")
    add = parser.add_argument_group("on a running server").add_argument
    add("--prompt", type=argument_text, metavar="TEXT", help="a prompt, as text")
    add("--prompt-file", metavar="FILE", help="a prompt, as a text file; - is standard input")
    add("--tokens", metavar="IDS", help="a prompt, as token ids separated by commas")
    add("--messages", metavar="FILE", help="a conversation, as a JSON file; - is standard input")
    add("--salt", type=argument_text, metavar="TEXT", help="the cache_salt of the request")
    add("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    add("--api-key", metavar="KEY", help="default: the environment variable STRANDLINE_API_KEY")
    group = parser.add_argument_group("in a replayed trace")
    add = group.add_argument
    add("--trace", metavar="TRACE", help="a file or the name of a workload, as in 'bench replay'")
    text = "N-th request to start (default: list those with most misses)"
    add("--request", type=int, metavar="N", help=text)
    add("--memory", default="40GiB", metavar="SIZE", help="memory budget (default: %(default)s)")
    add("--policy", default="auto", metavar="NAME", help="cache policy (default: %(default)s)")
    _add_machine(group)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_machine(group: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add the flags of the simulated machine and of when sessions start (``ReplaySetup``)."""
    add = group.add_argument
    add(
        "--geometry",
        default=DEFAULT_GEOMETRY,
        metavar="MODEL",
        help="a model's name or config.json (default: %(default)s)",
    )
    add("--max-num-seqs", type=int, default=256, help="maximum number of running requests (default: %(default)s)")
    add("--max-num-batched-tokens", type=int, default=8192, help="maximum tokens per step (default: %(default)s)")
    add("--host-memory", metavar="SIZE", help="size of the simulated host memory (default: none)")
    text = "names of LoRA adapters, which the conversations use in turn (default: none)"
    add("--lora-modules", nargs="+", default=[], metavar="NAME", help=text)
    add("--max-loras", type=int, default=1, help="adapters that a step can use (default: %(default)s)")
    text = "bandwidth of loads from it in GB/s (default: %(default)s)"
    add("--host-bandwidth", type=float, default=55.0, metavar="RATE", help=text)
    add("--disk-cache-size", metavar="SIZE", help="size of the simulated disk cache (default: none)")
    text = "read and write bandwidth of the disk in GB/s (default: %(default)s)"
    add("--disk-bandwidth", type=float, default=6.0, metavar="RATE", help=text)
    text = "dtype of snapshots in lower tiers (default: float32)"
    add("--snapshot-dtype", choices=SNAPSHOT_DTYPES, default="float32", help=text)
    add("--max-sessions", type=int, metavar="N", help="replay only the first N sessions")
    add("--session-gap", type=float, default=10.0, help="seconds between sessions' starts (default: %(default)s)")
    add("--speed", type=float, default=1.0, help="speed of the device relative to an H200 (default: %(default)s)")
