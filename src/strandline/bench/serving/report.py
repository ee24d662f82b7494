"""``strandline bench report``: one page that compares runs. It loads nothing and runs nothing."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from strandline.bench.serving.charts import Bar, bars, color, distribution, number
from strandline.bench.serving.figures import QUANTILE_PERCENTS
from strandline.bench.serving.options import METRICS
from strandline.bench.serving.result import read_results
from strandline.errors import ConfigError

PERCENTS: Final = (50, 90, 99)

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2126; --dim: #66707a; --line: #dfe3e7; --card: #fff; --page: #f5f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --dim: #9aa4ae; --line: #363c43; --card: #1f2429; --page: #15181b; } }
body { margin: 0 auto; padding: 28px 24px; max-width: 1220px; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 14px; } h2 { font-size: 16px; margin: 28px 0 10px; }
h3 { font-size: 14px; margin: 0 0 4px; }
p { margin: 2px 0 8px; color: var(--dim); max-width: 80ch; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }
.card p { font-size: 12.5px; }
.runs { display: flex; flex-wrap: wrap; gap: 8px 22px; margin: 0 0 10px; padding: 0; list-style: none; }
.chip { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px; vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } td.best { font-weight: 700; } tr.head td { color: var(--dim);
  font-weight: 600; padding-top: 12px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .tick { fill: var(--dim); font-size: 11px; } path.grid { stroke: var(--line); fill: none; }
path.mark { stroke: var(--ink); stroke-width: 2.5; fill: none; }
.scroll { overflow-x: auto; }
"""


@dataclass(frozen=True, slots=True)
class Column:
    """One run on the page."""

    label: str
    data: Mapping[str, Any]
    quantiles: Mapping[str, Sequence[float]]
    """101 percentiles in milliseconds by metric; metrics that the file lacks are absent."""

    def percentile(self, metric: str, percent: int) -> float | None:
        """Return a percentile in milliseconds, or None if it is not in the file."""
        if metric in self.quantiles:
            return self.quantiles[metric][percent]
        value: float | None = self.data.get(f"p{percent}_{metric}_ms")
        return self.data.get(f"median_{metric}_ms") if value is None and percent == 50 else value


def compare_files(results: Sequence[str], output: str, title: str, labels: Sequence[str] | None) -> int:
    """Write the page of some result files; return 0.

    Raises:
        ConfigError: a file is no result, or there are not as many labels as runs.
    """
    named = [(Path(path).stem, row) for path in results for row in read_results(path)]
    if labels is not None and len(labels) != len(named):
        raise ConfigError(f"--labels: {len(labels)} labels for {len(named)} runs")
    texts = labels or [row.get("label") or stem for stem, row in named]
    write_report(Path(output), [{**row, "label": text} for text, (_, row) in zip(texts, named, strict=True)], title)
    print(f"report: {output}", file=sys.stderr)
    return 0


def write_report(path: Path, runs: Sequence[Mapping[str, Any]], title: str) -> None:
    """Write the page.

    Raises:
        ConfigError: it cannot be written.
    """
    columns = [Column(_label(run, index), run, _quantiles(run)) for index, run in enumerate(runs)]
    try:
        path.write_text(_page(columns, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _label(run: Mapping[str, Any], index: int) -> str:
    return str(run.get("label") or run.get("model_id") or f"run {index + 1}")


def _quantiles(run: Mapping[str, Any]) -> dict[str, list[float]]:
    found = {name: run[f"{name}_ms_quantiles"] for name in METRICS if run.get(f"{name}_ms_quantiles")}
    return found or _quantiles_of_details(run)


def _quantiles_of_details(run: Mapping[str, Any]) -> dict[str, list[float]]:
    """Compute from vLLM's detailed lists what our files hold anyway. Failed requests are left out."""
    if not all(run.get(name) for name in ("ttfts", "itls", "output_lens")):
        return {}
    rows = [
        (ttft, gaps, num_output)
        for ttft, gaps, num_output in zip(run["ttfts"], run["itls"], run["output_lens"], strict=True)
        if num_output
    ]
    values_s: dict[str, list[float]] = {
        "ttft": [ttft for ttft, _, _ in rows],
        "tpot": [sum(gaps) / (num_output - 1) for _, gaps, num_output in rows if num_output > 1],
        "itl": [gap for _, gaps, _ in rows for gap in gaps],
        "e2el": [ttft + sum(gaps) for ttft, gaps, _ in rows],
    }
    return {
        name: [float(value) * 1e3 for value in np.percentile(values, QUANTILE_PERCENTS)]
        for name, values in values_s.items()
        if values
    }


# The page


def _page(columns: Sequence[Column], title: str) -> str:
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f'<ul class="runs">{"".join(_run(index, column) for index, column in enumerate(columns))}</ul>',
        "<h2>At a glance</h2>",
        f'<div class="card scroll">{_table(columns)}</div>',
        f'<h2>Prefix cache and throughput</h2><div class="grid2">{_cache(columns)}{_throughput(columns)}</div>',
        "<h2>Times</h2><p>Bars: half, 90 % and 99 % of all values are at most this. Shorter is better. Curves: which "
        "share of the values is at most x; further left is better. The axis ends at the largest 99th percentile.</p>",
        '<div class="grid2">',
        *(_time(columns, metric) for metric in METRICS),
        "</div></body></html>\n",
    ]
    return "".join(parts)


def _run(index: int, column: Column) -> str:
    data = column.data
    facts = [
        data.get("model_id"),
        data.get("dataset_name"),
        f"{data['num_prompts']:,} requests" if "num_prompts" in data else None,
        f"at most {data['max_concurrency']} at once" if data.get("max_concurrency") else None,
        None if data.get("request_rate") in (None, "inf") else f"{data['request_rate']:g} per second",
        data.get("date"),
    ]
    described = " · ".join(escape(str(fact)) for fact in facts if fact)
    return f"<li>{_chip(index)}<b>{escape(column.label)}</b> <small>{described}</small></li>"


def _chip(index: int) -> str:
    return f'<span class="chip" style="background:{color(index)}"></span>'


def _card(heading: str, text: str, chart: str) -> str:
    note = f"<p>{escape(text)}</p>" if text else ""
    return f'<div class="card"><h3>{escape(heading)}</h3>{note}{chart}</div>'


Pick = Callable[[Column], float | None]


def _rows() -> list[tuple[str, Pick | None, int]]:
    """Return the table's rows: label, value, and 1 when more is better, -1 when less is; without value a heading."""

    def field(name: str, factor: int = 1) -> Pick:
        return lambda column: None if column.data.get(name) is None else column.data[name] * factor

    def percentile(metric: str, percent: int) -> Pick:
        return lambda column: column.percentile(metric, percent)

    rows: list[tuple[str, Pick | None, int]] = [
        ("Successful requests", field("completed"), 0),
        ("Failed requests", field("failed"), 0),
        ("Duration, s", field("duration"), 0),
        ("Requests per second", field("request_throughput"), 1),
        ("Requests per second within the limits", field("request_goodput"), 1),
        ("Output tokens per second", field("output_throughput"), 1),
        ("Input and output tokens per second", field("total_token_throughput"), 1),
        ("Prompt tokens from the cache, %", field("cache_hit_rate", 100), 1),
        ("… that could have been, %", field("ideal_cache_hit_rate", 100), 0),
        ("Accepted drafts, %", field("spec_decode_acceptance_rate"), 1),
        ("Tokens per step with drafts", field("spec_decode_acceptance_length"), 1),
    ]
    for metric, (short, heading) in METRICS.items():
        rows.append((f"{heading}, ms", None, 0))
        rows += [(f"{short} p{percent}", percentile(metric, percent), -1) for percent in PERCENTS]
    return rows


def _table(columns: Sequence[Column]) -> str:
    head = "".join(f"<th>{_chip(index)}{escape(column.label)}</th>" for index, column in enumerate(columns))
    lines = [f"<table><tr><th></th>{head}</tr>"]
    for label, pick, better in _rows():
        if pick is None:
            lines.append(f'<tr class="head"><td colspan="{len(columns) + 1}">{escape(label)}</td></tr>')
            continue
        values = [pick(column) for column in columns]
        known = [value for value in values if value is not None]
        if known:
            best = max(known, key=lambda value: value * better) if better and len(set(known)) > 1 else None
            cells = "".join(_cell(value, is_best=value is not None and value == best) for value in values)
            lines.append(f"<tr><td>{escape(label)}</td>{cells}</tr>")
    return "".join([*lines, "</table>"])


def _cell(value: float | None, *, is_best: bool) -> str:
    text = "–" if value is None else f"{value:,}" if isinstance(value, int) else number(value)
    return f'<td class="best">{text}</td>' if is_best else f"<td>{text}</td>"


def _cache(columns: Sequence[Column]) -> str:
    drawn = [
        Bar(column.data["cache_hit_rate"] * 100, index, _percent(column.data.get("ideal_cache_hit_rate")))
        for index, column in enumerate(columns)
        if column.data.get("cache_hit_rate") is not None
    ]
    if not drawn:
        return _card("Prompt tokens from the cache", "No server said how many there were.", "")
    text = "The line is the ideal: every prefix that the run had sent or been answered before."
    return _card("Prompt tokens from the cache, %", text, bars([("", drawn)], unit=" %"))


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def _throughput(columns: Sequence[Column]) -> str:
    groups = [
        (label, [Bar(float(column.data.get(name) or 0.0), index) for index, column in enumerate(columns)])
        for label, name in (("output", "output_throughput"), ("total", "total_token_throughput"))
    ]
    return _card("Tokens per second", "Output alone, and with the prompts.", bars(groups, unit=""))


def _time(columns: Sequence[Column], metric: str) -> str:
    heading = METRICS[metric][1]
    groups = []
    for percent in PERCENTS:
        values = [(index, column.percentile(metric, percent)) for index, column in enumerate(columns)]
        groups.append((f"p{percent}", [Bar(value, index) for index, value in values if value is not None]))
    groups = [group for group in groups if group[1]]
    if not groups:
        return ""
    curves = [(index, column.quantiles[metric]) for index, column in enumerate(columns) if metric in column.quantiles]
    chart = bars(groups, unit="") + (distribution(curves, unit="ms") if curves else "")
    return _card(f"{heading}, ms", "", chart)
