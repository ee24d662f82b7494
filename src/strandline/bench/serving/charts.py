"""Bars and lines as inline SVG: plain text, no script, no font or file from elsewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Final

WIDTH: Final = 560
LEFT: Final = 64
RIGHT: Final = 86
BAR: Final = 15
COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7a5195", "#7f7f7f")
"""A palette that remains distinguishable with most kinds of colour blindness."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; ``mark`` is a line across it, such as a bound."""

    value: float
    run: int
    mark: float | None = None


def color(run: int) -> str:
    """Return a run's colour; after eight they repeat."""
    return COLORS[run % len(COLORS)]


def number(value: float) -> str:
    """Return a value with about three digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - floor(log10(abs(value))))
    return f"{value:,.{digits}f}"


def tick_text(value: float) -> str:
    """Return a round number without needless zeros."""
    return f"{value:,.10g}"


def ticks(most: float) -> list[float]:
    """Return four to seven round numbers from 0 up to ``most`` or a little more."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / 5
    size = 10.0 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    return [step * index for index in range(ceil(most / step - 1e-9) + 1)]


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], *, unit: str) -> str:
    """Draw horizontal bars, group by group.

    Args:
        groups: a label and its bars each.
        unit: follows each value.
    """
    values = [value for _, group in groups for bar in group for value in (bar.value, bar.mark or 0.0)]
    scale = ticks(max(values, default=0.0))
    width = WIDTH - LEFT - RIGHT
    lines: list[str] = []
    y = 4.0
    for label, group in groups:
        height = len(group) * (BAR + 3)
        lines.append(_text(LEFT - 8, y + height / 2 + 4, label, "end"))
        for bar in group:
            length = width * bar.value / scale[-1]
            lines.append(
                f'<rect x="{LEFT}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" rx="2" fill="{color(bar.run)}"/>'
            )
            reach = max(length, 0 if bar.mark is None else width * bar.mark / scale[-1])
            if bar.mark is not None:
                x = LEFT + width * bar.mark / scale[-1]
                lines.append(f'<path class="mark" d="M{x:.1f} {y - 2:.1f}v{BAR + 4}"/>')
            lines.append(_text(LEFT + reach + 5, y + BAR - 3, number(bar.value) + unit, "start", "value"))
            y += BAR + 3
        y += 9
    grid = [f'<path class="grid" d="M{LEFT + width * tick / scale[-1]:.1f} 0V{y:.1f}"/>' for tick in scale]
    axis = [_text(LEFT + width * tick / scale[-1], y + 13, tick_text(tick), "middle", "tick") for tick in scale]
    return _svg(y + 20, [*grid, *lines, *axis])


def distribution(curves: Iterable[tuple[int, Sequence[float]]], *, unit: str) -> str:
    """Draw for each run which share of its values is at most x.

    The axis ends at the largest 99th percentile: a single outlier would squeeze everything else.

    Args:
        curves: a run, and its 0th, 1st, … 100th percentile.
    """
    curves = list(curves)
    scale = ticks(max((values[99] for _, values in curves), default=0.0))
    width, height, top = WIDTH - LEFT - RIGHT, 200, 8
    lines = []
    for percent in (0, 25, 50, 75, 100):
        y = top + height * (1 - percent / 100)
        lines.append(
            f'<path class="grid" d="M{LEFT} {y:.1f}h{width}"/>' + _text(LEFT - 8, y + 4, f"{percent} %", "end")
        )
    for tick in scale:
        x = LEFT + width * tick / scale[-1]
        lines.append(f'<path class="grid" d="M{x:.1f} {top}v{height}"/>')
        lines.append(_text(x, top + height + 15, tick_text(tick), "middle", "tick"))
    for run, values in curves:
        points = [
            (LEFT + width * min(value / scale[-1], 1), top + height * (1 - percent / 100))
            for percent, value in enumerate(values)
            if value <= scale[-1]
        ]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        lines.append(f'<path fill="none" stroke-width="2" stroke="{color(run)}" d="{path}"/>')
    lines.append(_text(LEFT + width + 30, top + height + 15, unit, "start", "tick"))
    return _svg(top + height + 22, lines)


def _svg(height: float, lines: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(lines)}</svg>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
