"""The flags of an engine: a field of ``EngineConfig`` each. Importing this file loads no torch."""

import argparse
import re
from dataclasses import fields
from decimal import Decimal
from typing import Any, Final

from strandline.config import (
    CACHE_MODES,
    DEVICES,
    DTYPES,
    EXECUTORS,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    REMEMBERED_ANSWERS,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from strandline.file_tiers import DISK, OBJECTS
from strandline.flag_actions import Extend
from strandline.specs import SNAPSHOT_DTYPES

UNITS: Final = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}
"""Suffixes of numbers of tokens and their factors, as in vLLM."""


def token_count(text: str) -> int:
    """Parse a number of tokens, such as ``32768``, ``32K`` or ``25.6k``.

    Raises:
        argparse.ArgumentTypeError: it is not a whole number.
    """
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmKM]?)", text.strip(), re.ASCII)
    count = Decimal(match[1]) * UNITS[match[2]] if match else None
    if count is None or count != int(count):
        raise argparse.ArgumentTypeError(f"must be a whole number of tokens, such as 32768, 32K or 25.6k; got {text!r}")
    return int(count)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--tokenizer", metavar="PATH", help="path of the tokenizer (default: the model's directory)")
    text = "dtype of weights and activations; auto: the model's, or float32 on a CPU where that is faster"
    add("--dtype", choices=DTYPES, default="auto", help=text)
    text = "dtype of keys and values; auto: as activations; fp8: e4m3, in half the memory (default: %(default)s)"
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help=text)
    add("--device", choices=DEVICES, default="auto", help="auto: a GPU if there is one (default: %(default)s)")
    text = "where steps run: in the engine's process, or in a worker process (default: %(default)s)"
    add("--distributed-executor-backend", choices=EXECUTORS, default="uni", help=text)
    text = "number of ranks to divide the model among, one GPU each (default: %(default)s)"
    add("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help=text)
    text = "auto: safetensors; dummy: random weights (default: %(default)s)"
    add("--load-format", choices=LOAD_FORMATS, default="auto", help=text)
    text = "maximum length of a request, prompt and output together (default: the model's, as memory allows)"
    add("--max-model-len", type=token_count, metavar="TOKENS", help=text)
    text = "maximum number of running requests (default: %(default)s)"
    add("--max-num-seqs", type=int, default=256, metavar="N", help=text)
    text = "maximum number of tokens per step (default: 2048, on GPUs 8192)"
    add("--max-num-batched-tokens", type=token_count, metavar="TOKENS", help=text)
    text = "order of requests; fcfs: by arrival; priority: by their field priority first (default: %(default)s)"
    add("--scheduling-policy", choices=SCHEDULING_POLICIES, default="fcfs", help=text)
    text = "tokens per step of each long prefill while others decode; 0: no limit (default: a quarter of a step)"
    add("--long-prefill-token-threshold", type=int, metavar="TOKENS", help=text)
    text = (
        "memory of the cache and running requests, such as 4GiB, of each engine (default: on GPUs, what "
        "--gpu-memory-utilization leaves; on CPUs 4GiB, at most half of the free memory)"
    )
    add("--memory", metavar="SIZE", help=text)
    text = "host memory for evicted entries, such as 64GiB, of each engine (default: none)"
    add("--host-memory", metavar="SIZE", help=text)
    add("--disk-cache", metavar="DIR", help="directory for evicted entries, kept across restarts (default: none)")
    add("--disk-cache-size", metavar="SIZE", help=f"size of each engine's disk cache (default: {DISK.default_size})")
    add(
        "--object-store",
        metavar="s3://BUCKET/PREFIX",
        help="bucket, or file:///DIR, for evicted entries, which engines share",
    )
    text = f"how much of it each engine uses (default: {OBJECTS.default_size})"
    add("--object-store-size", metavar="SIZE", help=text)
    text = "dtype of snapshots below the device; only float32 is exact (default: %(default)s)"
    add("--snapshot-dtype", choices=SNAPSHOT_DTYPES, default="float32", help=text)
    add(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="fraction of GPU memory to use without --memory (default: %(default)s)",
    )
    add("--dequantize", action="store_true", help="convert quantised weights to --dtype as they load")
    text = "load weights with NaN or infinity; requests that read these numbers fail"
    add("--allow-non-finite-weights", action="store_true", help=text)
    _add_lora_flags(add)
    add("--enforce-eager", action="store_true", help="disable CUDA graphs")
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan each step while the previous one runs (default: on GPUs)",
    )
    text = "reuse what was computed for earlier prompts with the same beginning (default: on)"
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "where snapshots are taken; modes other than auto are for comparison (default: %(default)s)"
    add("--mamba-cache-mode", choices=CACHE_MODES, default="auto", help=text)
    text = "distance between snapshots in the modes align and all (default: %(default)s)"
    add("--mamba-block-size", type=int, default=1024, metavar="TOKENS", help=text)
    add("--deterministic", action="store_true", help="bit-identical results, cached or not and in any batch; slower")
    text = (
        "memory for the tokens of answers, which are encoded as they were generated when they come back; 0: off "
        f"(default: {REMEMBERED_ANSWERS}, with --deterministic off)"
    )
    add("--remembered-answers", metavar="SIZE", help=text)
    text = "fraction of hits to replay without the cache, to measure the difference (default: %(default)s)"
    add("--audit-rate", type=float, default=0.0, metavar="SHARE", help=text)
    _add_json_flags(add)
    text = "record the experts that tokens are routed to; /inference/v1/generate returns them"
    add("--enable-return-routed-experts", action="store_true", help=text)
    _add_picture_flags(add)
    add("--seed", type=int, default=0, help="default seed of requests and of dummy weights (default: %(default)s)")


def _add_json_flags(add: Any) -> None:
    text = 'speculative decoding, such as {"method": "ngram", "num_speculative_tokens": 3} (default: none)'
    add("--speculative-config", metavar="JSON", help=text)
    text = 'what ends reasoning at its budget, such as {"reasoning_end_str": "So.</think>"} (default: the closing tag)'
    add("--reasoning-config", metavar="JSON", help=text)
    text = 'publication of cache events, such as {"enable_kv_cache_events": true} (default: none)'
    add("--kv-events-config", metavar="JSON", help=text)
    text = (
        'transfers between engines, such as {"kv_connector": "SocketConnector", "kv_role": "kv_both"} (default: none)'
    )
    add("--kv-transfer-config", metavar="JSON", help=text)
    text = 'weights that trainers send, such as {"backend": "nccl"} (default: none)'
    add("--weight-transfer-config", metavar="JSON", help=text)


def _add_picture_flags(add: Any) -> None:
    add("--language-model-only", action="store_true", help="load no vision tower; pictures are not read")
    text = "maximum tokens of a picture; larger ones are scaled down (default: %(default)s)"
    add("--max-image-tokens", type=int, default=4096, metavar="N", help=text)
    add("--limit-mm-per-prompt", metavar="JSON", help='pictures per prompt, such as {"image": 4} (default: any number)')
    text = "hosts from which pictures may be fetched (default: none)"
    add("--allowed-media-domains", action=Extend, nargs="+", default=(), metavar="HOST", help=text)
    text = "directory whose files requests may name as pictures (default: none)"
    add("--allowed-local-media-path", metavar="DIR", help=text)


def _add_lora_flags(add: Any) -> None:
    add("--enable-lora", action="store_true", help="compute requests with the LoRA adapters that they name")
    text = "LoRA adapters to load at the start, each NAME=PATH or JSON with name and path"
    add("--lora-modules", action=Extend, nargs="+", default=(), metavar="NAME=PATH", help=text)
    text = "LoRA adapters that a step can use; others stay in host memory (default: %(default)s)"
    add("--max-loras", type=int, default=1, metavar="N", help=text)
    text = "maximum rank of LoRA adapters (default: 16, or the largest of --lora-modules)"
    add("--max-lora-rank", type=int, metavar="N", help=text)
    text = "linear layers that LoRA adapters may change (default: those that --lora-modules change, or all)"
    add("--lora-target-modules", action=Extend, nargs="+", default=(), metavar="NAME", help=text)
    add("--merge-lora", metavar="NAME=PATH", help="add a LoRA adapter to the weights as they load (default: none)")


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``EngineConfig`` that flags give, and the model."""
    names = {field.name for field in fields(EngineConfig)}
    return {name: value for name, value in vars(options).items() if name in names}
