"""The page that compares runs: complete, self-contained, true to the files, and safe from what they say."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from strandline.bench.serving.charts import Bar, bars, distribution, number, ticks
from strandline.bench.serving.figures import figures_of
from strandline.bench.serving.load import Run
from strandline.bench.serving.options import Wanted
from strandline.bench.serving.result import record
from strandline.bench.serving.session import Answer
from strandline.cli import main
from tests.cpu.bench.conftest import serve_options


def result(path: Path, *, slower: float = 1.0, flags: tuple[str, ...] = (), **more: Any) -> str:
    answers = [Answer(index, 0.1 * slower, 0.5, [0.2, 0.2], "x", [], 10, 3, 4, 6) for index in range(8)]
    data = record(serve_options(*flags), "model", None, figures_of(Run(answers, 2.0 * slower), Wanted()))
    path.write_text(json.dumps({**data, **more}))
    return str(path)


class Tags(HTMLParser):
    """Notes all tags; fails on one that is closed but not open."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(path: Path) -> tuple[str, Tags]:
    tags = Tags()
    tags.feed(path.read_text())
    assert tags.open == []
    return path.read_text(), tags


def test_runs_are_compared_and_the_better_one_is_marked(tmp_path: Path) -> None:
    files = [result(tmp_path / "fast.json"), result(tmp_path / "slow.json", slower=2.0)]
    assert main(["bench", "report", *files, "-o", str(tmp_path / "r.html"), "--title", "A & B"]) == 0
    text, _ = page(tmp_path / "r.html")
    assert "<title>A &amp; B</title>" in text
    assert re.search(r"Requests per second</td><td class=\"best\">4.00</td><td>2.00</td>", text)
    assert re.search(r"TTFT p50</td><td class=\"best\">100</td><td>200</td>", text)
    assert text.count("<svg") == 2 + 2 * 4, "the cache, the rates, and for each of four times bars and curves"
    assert "fast" in text
    assert "slow" in text


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    main(["bench", "report", result(tmp_path / "a.json"), "-o", str(tmp_path / "r.html")])
    text, tags = page(tmp_path / "r.html")
    assert {tag for tag, _ in tags.seen} & {"script", "link", "img", "iframe", "object", "image", "use"} == set()
    assert not [attrs for _, attrs in tags.seen if {"src", "href", "xlink:href", "onclick", "onload"} & set(attrs)]
    assert "url(" not in text
    assert "@import" not in text


def test_what_a_file_says_is_shown_as_text(tmp_path: Path) -> None:
    path = result(tmp_path / "a.json", label="<script>alert(1)</script>", model_id="<b>", dataset_name='"x"')
    main(["bench", "report", path, "-o", str(tmp_path / "r.html")])
    text, tags = page(tmp_path / "r.html")
    assert "&lt;script&gt;" in text
    assert "script" not in {tag for tag, _ in tags.seen}


def test_a_file_of_vllm_is_drawn_from_what_it_has(tmp_path: Path) -> None:
    ours = json.loads(Path(result(tmp_path / "a.json", flags=("--save-detailed",))).read_text())
    theirs = {key: value for key, value in ours.items() if "quantiles" not in key and "cache" not in key}
    (tmp_path / "detailed.json").write_text(json.dumps(theirs))
    plain = {key: value for key, value in theirs.items() if not isinstance(value, list)}
    (tmp_path / "plain.json").write_text(json.dumps(plain))
    files = [str(tmp_path / name) for name in ("a.json", "detailed.json", "plain.json")]
    command = ["bench", "report", *files, "-o", str(tmp_path / "r.html"), "--labels", "ours", "detailed", "plain"]
    assert main(command) == 0
    text, _ = page(tmp_path / "r.html")
    assert re.search(r"TTFT p50</td><td>100</td><td>100</td><td>100</td>", text)
    assert re.search(r"TPOT p90</td><td>200</td><td>200</td><td>–</td>", text)
    assert text.count('stroke-width="2" stroke="#0072b2"') == 4, "four curves of the first"
    assert text.count('stroke-width="2" stroke="#d55e00"') == 4
    assert text.count('stroke-width="2" stroke="#009e73"') == 0


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [("{}", [], "no 'request_throughput'"), ("[", [], "a.json"), (None, ["--labels", "x", "y"], "2 labels for 1 runs")],
    ids=["foreign", "torn", "labels"],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(
    content: str | None, flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result(tmp_path / "a.json")
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    assert main(["bench", "report", str(tmp_path / "a.json"), "-o", str(tmp_path / "r.html"), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_bar_is_as_long_as_its_value() -> None:
    text = bars([("p50", [Bar(50, 0), Bar(100, 1, mark=75)])], unit="")
    half, whole = (float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', text))
    assert half == pytest.approx(whole / 2)
    [mark] = re.findall(r'class="mark" d="M([\d.]+) ', text)
    [start] = set(re.findall(r'<rect x="([\d.]+)"', text))
    assert float(mark) - float(start) == pytest.approx(whole * 0.75)


def test_curve_passes_each_percentile_and_ends_at_the_axis() -> None:
    values = [*range(100), 5000]
    [path] = re.findall(r'd="M([^"]*L[^"]*)"', distribution([(0, values)], unit="ms"))
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    assert len(points) == 100, "the largest value lies beyond the axis"
    (x0, y0), (x50, y50), (x99, _) = points[0], points[50], points[99]
    assert (x50 - x0) / (x99 - x0) == pytest.approx(50 / 99, rel=1e-3)
    assert y0 - y50 == pytest.approx(100), "half of the height of 200"


def test_numbers_and_ticks_are_round() -> None:
    assert [number(value) for value in (0, 0.01234, 1.5, 12.34, 123.4, 12345)] == [
        *("0", "0.0123", "1.50", "12.3", "123", "12,345"),
    ]
    assert ticks(100) == [0, 20, 40, 60, 80, 100]
    assert ticks(101)[-1] >= 101
    assert ticks(0.03)[-1] == pytest.approx(0.03)
    assert ticks(0) == [0.0, 1.0]
