"""A run's result as a table and as a file, in the shape of vLLM's benchmark."""

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any, Final

from strandline.bench.serving.acceptance import acceptance_rows
from strandline.bench.serving.figures import DETAILS, Figures, metric_rows
from strandline.bench.serving.options import Pace, Wanted, key_values
from strandline.errors import ConfigError
from strandline.text_input import json_lines, read_text
from strandline.version import VERSION

WIDTH: Final = 50
LABEL_WIDTH: Final = 40
BUSY_SHARE: Final = 0.8
"""Above this share of a core, the load generator itself delays what it measures."""


def table(figures: Figures, pace: Pace, wanted: Wanted) -> list[str]:
    """Return the lines of the table."""
    counts: list[tuple[str, str | None]] = [
        ("Successful requests:", f"{figures['completed']}"),
        ("Failed requests:", f"{figures['failed']}"),
        ("Interrupted requests:", f"{figures['interrupted']}" if figures["interrupted"] else None),
        ("Maximum request concurrency:", None if pace.max_concurrency is None else f"{pace.max_concurrency}"),
        ("Request rate configured (RPS):", None if pace.request_rate == inf else f"{pace.request_rate:.2f}"),
        ("Benchmark duration (s):", f"{figures['duration']:.2f}"),
        ("Total input tokens:", f"{figures['total_input_tokens']}"),
        ("Total generated tokens:", f"{figures['total_output_tokens']}"),
        ("Request throughput (req/s):", f"{figures['request_throughput']:.2f}"),
        ("Request goodput (req/s):", _number(figures["request_goodput"])),
        ("Output token throughput (tok/s):", f"{figures['output_throughput']:.2f}"),
        ("Peak output token throughput (tok/s):", f"{figures['max_output_tokens_per_s']:.2f}"),
        ("Peak concurrent requests:", f"{figures['max_concurrent_requests']:.2f}"),
        ("Total token throughput (tok/s):", f"{figures['total_token_throughput']:.2f}"),
        ("Load generator's CPU (% of a core):", f"{100 * figures['client_cpu_share']:.1f}"),
    ]
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [_row(label, text) for label, text in counts if text is not None]
    lines.append("Prefix Cache".center(WIDTH, "-"))
    lines += [_row(label, text) for label, text in _cache_rows(figures)]
    if drafts := acceptance_rows(figures):
        lines.append("Speculative Decoding".center(WIDTH, "-"))
        lines += [_row(label, text) for label, text in drafts]
    for heading, rows in metric_rows(figures, wanted):
        lines.append(heading.center(WIDTH, "-"))
        lines += [_row(label, f"{value:.2f}") for label, value in rows]
    return [*lines, "=" * WIDTH]


def _row(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}} {text:<{WIDTH - LABEL_WIDTH - 1}}".rstrip()


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _cache_rows(figures: Figures) -> list[tuple[str, str]]:
    cached, ideal = figures["total_cached_tokens"], figures["total_ideal_cached_tokens"]
    rows = [
        ("Cached prompt tokens:", "not reported" if cached is None else f"{cached}"),
        ("Ideal cached prompt tokens:", "not known" if ideal is None else f"{ideal}"),
    ]
    if cached is not None:
        rows.append(("Cache hit rate (%):", f"{(figures['cache_hit_rate'] or 0) * 100:.2f}"))
    if ideal is not None:
        rows.append(("Ideal cache hit rate (%):", f"{(figures['ideal_cache_hit_rate'] or 0) * 100:.2f}"))
    return rows


def warnings(figures: Figures, num_skipped: int) -> list[str]:
    """Return warnings about the results."""
    lines = []
    failures = [error for error in figures["errors"] if error]
    if failures:
        lines.append(f"{len(failures)} requests failed; the first error: {failures[0]}")
    if num_skipped:
        lines.append(f"{num_skipped} requests of the trace were left out: longer than the server's max_model_len")
    if figures["client_cpu_share"] > BUSY_SHARE:
        lines.append(
            f"the load generator used {figures['client_cpu_share']:.0%} of its one core: it may have limited the "
            "throughput and lengthened the latencies; divide the load between several commands"
        )
    cached, ideal = figures["total_cached_tokens"], figures["total_ideal_cached_tokens"]
    if cached is not None and ideal is not None and cached > ideal:
        lines.append(
            "more came from the cache than this run had sent: an earlier run warmed it; --cache-salt random shuts "
            "that out"
        )
    return lines


def record(options: Namespace, model: str, tokenizer: str | None, figures: Figures) -> dict[str, Any]:
    """Return the content of a result file: the run's options and metrics.

    Raises:
        ConfigError: ``--metadata`` is malformed.
    """
    rate = options.request_rate
    head = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": options.num_prompts,
        **key_values("metadata", options.metadata),
        "dataset_name": options.dataset_name,
        "seed": options.seed,
        "bench_version": f"strandline {VERSION}",
        "request_rate": "inf" if rate == inf else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    return head | {key: value for key, value in figures.items() if options.save_detailed or key not in DETAILS}


def save(options: Namespace, data: Mapping[str, Any]) -> Path:
    """Write a result file and return its path.

    Raises:
        ConfigError: it cannot be written.
    """
    path = Path(options.result_dir or ".") / (options.result_filename or _file_name(data))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if options.append_result else "w") as file:
            if options.append_result and file.tell():
                file.write("\n")
            json.dump(data, file)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


def _file_name(data: Mapping[str, Any]) -> str:
    concurrency = data["max_concurrency"]
    parts = [
        data["label"] or data["backend"],
        f"{data['request_rate']}qps",
        *([] if concurrency is None else [f"concurrency{concurrency}"]),
        data["model_id"].split("/")[-1],
        data["date"],
    ]
    return re.sub(r"[^\w.-]+", "-", "-".join(parts)) + ".json"


def read_results(path: str) -> list[dict[str, Any]]:
    """Read a result file of ours or vLLM's; one that was appended to holds several.

    Raises:
        ConfigError: it is missing, or no such file.
    """
    try:
        text = read_text(path)
        rows = list(json_lines(text.split("\n"))) if "}\n{" in text else [json.loads(text)]
    except (OSError, ValueError) as error:
        raise ConfigError(f"result {path}: {error}") from error
    for row in rows:
        if not isinstance(row, dict) or "request_throughput" not in row:
            raise ConfigError(f"result {path} has no 'request_throughput': is it a result of 'bench serve'?")
    return rows
