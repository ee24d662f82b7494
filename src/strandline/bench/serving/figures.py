"""Figures of a run, under the names that vLLM's benchmark gives them, and what the cache did."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Final

import numpy as np

from strandline.bench.serving.load import Run
from strandline.bench.serving.options import METRICS, Wanted
from strandline.bench.serving.session import Answer

QUANTILE_PERCENTS: Final = tuple(range(101))
DETAILS: Final = (
    *("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"),
    *("cached_lens", "ideal_lens"),
)
"""What there is of every request; kept in files only on demand."""

Figures = dict[str, Any]


def figures_of(run: Run, wanted: Wanted) -> Figures:
    """Return all figures; times are milliseconds where the name says so, else seconds.

    ``NAME_ms_quantiles`` are the 0th, 1st, … 100th percentile, enough to draw a distribution from.
    """
    good = [answer for answer in run.answers if not answer.error]
    duration_s = max(run.duration_s, 1e-9)
    num_input = sum(answer.prompt_tokens for answer in good)
    num_output = sum(answer.output_tokens for answer in good)
    figures: Figures = {
        "duration": run.duration_s,
        "completed": len(good),
        "failed": len(run.answers) - len(good),
        "interrupted": run.num_interrupted,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": _goodput(good, wanted.goodput_ms, duration_s),
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _peak_rate(good),
        "max_concurrent_requests": _peak_concurrency(good),
        "client_cpu_share": run.client_cpu_s / duration_s,
        **cache_figures(good),
    }
    for name, values_s in times_of(good).items():
        figures |= _time_figures(name, values_s, wanted)
    return figures | _details(run.answers)


def times_of(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Return what each metric is the distribution of, in seconds."""
    return {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [answer.tpot_s for answer in answers if answer.output_tokens > 1],
        "itl": [gap for answer in answers for gap in answer.gaps_s],
        "e2el": [answer.latency_s for answer in answers],
    }


def cache_figures(answers: Sequence[Answer]) -> Figures:
    """Return prompt tokens that came from the cache, and that could have; None where they are not known."""
    reported = [answer for answer in answers if answer.cached_tokens is not None]
    known = [answer for answer in answers if answer.ideal_tokens is not None]
    cached = sum(answer.cached_tokens or 0 for answer in reported) if reported else None
    ideal = sum(answer.ideal_tokens or 0 for answer in known) if known else None
    return {
        "total_cached_tokens": cached,
        "total_ideal_cached_tokens": ideal,
        "cache_hit_rate": _share(cached, reported),
        "ideal_cache_hit_rate": _share(ideal, known),
    }


def _share(num_tokens: int | None, answers: Sequence[Answer]) -> float | None:
    total = sum(answer.prompt_tokens for answer in answers)
    return num_tokens / total if num_tokens is not None and total else None


def _goodput(answers: Iterable[Answer], limits_ms: Mapping[str, float] | None, duration_s: float) -> float | None:
    """Return the requests per second that kept to all limits; an output of one token keeps to any for its rest."""
    if limits_ms is None:
        return None
    num_good = 0
    for answer in answers:
        times_s = {"ttft": answer.ttft_s, "tpot": answer.tpot_s, "e2el": answer.latency_s}
        num_good += all(times_s[name] * 1e3 <= limit for name, limit in limits_ms.items())
    return num_good / duration_s


def _time_figures(name: str, values_s: Sequence[float], wanted: Wanted) -> Figures:
    values_ms = np.asarray(values_s or [0.0]) * 1e3
    quantiles = [float(value) for value in np.percentile(values_ms, QUANTILE_PERCENTS)] if values_s else []
    figures: Figures = {f"{name}_ms_quantiles": [round(value, 4) for value in quantiles]}
    if name in wanted.metrics:
        figures |= {
            f"mean_{name}_ms": float(np.mean(values_ms)),
            f"median_{name}_ms": float(np.median(values_ms)),
            f"std_{name}_ms": float(np.std(values_ms)),
        }
        for percent in wanted.percentiles:
            figures[f"p{percent:g}_{name}_ms"] = float(np.percentile(values_ms, percent))
    return figures


def _peak_rate(answers: Sequence[Answer]) -> float:
    """Return the most output tokens within one second, counted in seconds from the first request's start."""
    if not answers:
        return 0.0
    begin_s = min(answer.start_s for answer in answers)
    end_s = max(answer.start_s + answer.latency_s for answer in answers)
    buckets = np.zeros(ceil(end_s - begin_s) + 1)
    for answer in answers:
        times_s = answer.start_s - begin_s + answer.ttft_s + np.cumsum([0.0, *answer.gaps_s])
        np.add.at(buckets, times_s.astype(int), answer.output_tokens / len(times_s))
    return float(buckets.max())


def _peak_concurrency(answers: Sequence[Answer]) -> int:
    """Return the most requests that were under way at once."""
    edges = [(answer.start_s, 1) for answer in answers] + [(a.start_s + a.latency_s, -1) for a in answers]
    running = most = 0
    for _, change in sorted(edges):
        running += change
        most = max(most, running)
    return most


def _details(answers: Sequence[Answer]) -> Figures:
    ordered = sorted(answers, key=lambda answer: answer.start_s)
    return {
        "input_lens": [answer.prompt_tokens for answer in ordered],
        "output_lens": [answer.output_tokens for answer in ordered],
        "start_times": [answer.start_s for answer in ordered],
        "ttfts": [answer.ttft_s for answer in ordered],
        "itls": [answer.gaps_s for answer in ordered],
        "generated_texts": [answer.text for answer in ordered],
        "errors": [answer.error for answer in ordered],
        "cached_lens": [answer.cached_tokens for answer in ordered],
        "ideal_lens": [answer.ideal_tokens for answer in ordered],
    }


def metric_rows(figures: Figures, wanted: Wanted) -> Iterable[tuple[str, list[tuple[str, float]]]]:
    """Yield each wanted metric's heading, and its rows: label and milliseconds."""
    for name, (short, heading) in METRICS.items():
        if name in wanted.metrics:
            rows = [(f"Mean {short} (ms):", figures[f"mean_{name}_ms"])]
            rows.append((f"Median {short} (ms):", figures[f"median_{name}_ms"]))
            rows += [(f"P{p:g} {short} (ms):", figures[f"p{p:g}_{name}_ms"]) for p in wanted.percentiles]
            yield heading, rows
