"""SVG plots of replays: hits and recomputed tokens over the memory budget, one line per policy, for every trace."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log2
from pathlib import Path
from typing import Final

from strandline.bench.replay import Result
from strandline.errors import ConfigError

PANEL_WIDTH: Final = 420
PANEL_HEIGHT: Final = 260
LEFT: Final = 64
RIGHT: Final = 16
TOP: Final = 30
BOTTOM: Final = 40
LINE_HEIGHT: Final = 16
NUM_TICKS: Final = 5
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""A palette that remains distinguishable with colour blindness (Okabe and Ito)."""
SUFFIXES: Final = (".svg", ".html")

Measure = Callable[[Result], float]

MEASURES: Final[Mapping[str, Measure]] = {
    "prompt tokens hit, %": lambda result: 100 * result.hit_share,
    "recomputed tokens per request": lambda result: result.recomputed_per_request,
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One measure of one trace."""

    title: str
    lines: dict[str, list[tuple[float, float]]]
    """Policy -> (GiB, value), by memory."""
    ideal: float | None
    """An upper bound for all policies, drawn as a horizontal line."""

    def x(self, gib: float) -> float:
        """Return the x coordinate of a budget, on a logarithmic scale."""
        all_gib = [point[0] for points in self.lines.values() for point in points]
        low, high = log2(min(all_gib)), log2(max(all_gib))
        share = (log2(gib) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (PANEL_WIDTH - LEFT - RIGHT)

    @property
    def top_value(self) -> float:
        values = [point[1] for points in self.lines.values() for point in points]
        return max([*values, self.ideal or 0.0, 1e-9]) * 1.05

    def y(self, value: float) -> float:
        """Return the y coordinate of a value; zero is at the bottom."""
        return TOP + (1 - value / self.top_value) * (PANEL_HEIGHT - TOP - BOTTOM)


def check_plot_path(path: str) -> None:
    """Raise ConfigError unless the name ends in .svg or .html and its folder exists."""
    if not path.endswith(SUFFIXES):
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {Path(path).parent}")


def write_plot(path: str, rows: Sequence[tuple[str, Result]]) -> None:
    """Plot (trace, result) rows to an SVG file, or to an HTML page that contains it."""
    svg = draw(rows)
    page = f"<!doctype html><meta charset=utf-8><title>Replays</title><body>{svg}</body>\n"
    Path(path).write_text(page if path.endswith(".html") else svg + "\n", encoding="utf-8")


def draw(rows: Sequence[tuple[str, Result]]) -> str:
    """Return the SVG: a row of panels per trace, the policies' names below."""
    traces = list(dict.fromkeys(trace for trace, _ in rows))
    policies = list(dict.fromkeys(result.policy for _, result in rows))
    colours = {policy: COLOURS[index % len(COLOURS)] for index, policy in enumerate(policies)}
    width = PANEL_WIDTH * len(MEASURES)
    height = PANEL_HEIGHT * len(traces) + LINE_HEIGHT * (len(policies) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, trace in enumerate(traces):
        results = [result for name, result in rows if name == trace]
        for column, panel in enumerate(_panels(trace, results)):
            parts.append(f'<g transform="translate({column * PANEL_WIDTH},{row * PANEL_HEIGHT})">')
            parts += [*_frame(panel), *_lines(panel, colours), "</g>"]
    for index, policy in enumerate(policies):
        y = PANEL_HEIGHT * len(traces) + LINE_HEIGHT * (index + 1)
        parts.append(f'<rect x="{LEFT}" y="{y - 8}" width="16" height="4" fill="{colours[policy]}"/>')
        parts.append(f'<text x="{LEFT + 24}" y="{y - 2}">{escape(policy)}</text>')
    return "\n".join([*parts, "</svg>"])


def _panels(trace: str, results: Sequence[Result]) -> Iterator[Panel]:
    for name, measure in MEASURES.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for result in results:
            lines.setdefault(result.policy, []).append((result.memory_bytes / 2**30, measure(result)))
        is_share = name.endswith("%")
        ideal = 100 * max(result.ideal_share for result in results) if is_share else None
        yield Panel(f"{trace}: {name}", {policy: sorted(points) for policy, points in lines.items()}, ideal)


def _frame(panel: Panel) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="18" font-weight="bold">{escape(panel.title)}</text>'
    for tick in range(NUM_TICKS):
        value = panel.top_value * tick / (NUM_TICKS - 1) / 1.05
        y = panel.y(value)
        yield f'<line x1="{LEFT}" x2="{PANEL_WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.{0 if value >= 10 else 1}f}</text>'
    for gib in sorted({point[0] for points in panel.lines.values() for point in points}):
        yield f'<text x="{panel.x(gib):.1f}" y="{PANEL_HEIGHT - 20}" text-anchor="middle">{gib:.4g} GiB</text>'
    if panel.ideal is not None:
        level = f'y1="{panel.y(panel.ideal):.1f}" y2="{panel.y(panel.ideal):.1f}"'
        yield f'<line x1="{LEFT}" x2="{PANEL_WIDTH - RIGHT}" {level} stroke="#888" stroke-dasharray="4"/>'


def _lines(panel: Panel, colours: Mapping[str, str]) -> Iterator[str]:
    for policy, points in panel.lines.items():
        points_on_page = [(panel.x(gib), panel.y(value)) for gib, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points_on_page)
        yield f'<polyline points="{path}" fill="none" stroke="{colours[policy]}" stroke-width="2"/>'
        for (x, y), (gib, value) in zip(points_on_page, points, strict=True):
            caption = f"{escape(policy)}, {gib:.4g} GiB: {value:,.1f}"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[policy]}"><title>{caption}</title></circle>'
