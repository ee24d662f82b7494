"""Pictures of replays: every result is in them, where it belongs."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from strandline.bench.plot import LEFT, PANEL_WIDTH, RIGHT, draw
from strandline.bench.replay import Result
from strandline.cli import main

SVG = "{http://www.w3.org/2000/svg}"


def result(policy: str, gib: int, hit: int, recomputed: int = 0) -> Result:
    return Result(
        policy,
        gib * 2**30,
        num_requests=1,
        prompt_tokens=100,
        hit_tokens=hit,
        ideal_tokens=90,
        prefilled_tokens=10 + recomputed,
    )


def test_each_result_is_a_point_on_its_policy_line() -> None:
    rows = [
        ("a", result("auto", 10, 50, 40)),
        ("a", result("auto", 20, 80, 10)),
        ("a", result("<lru>", 10, 20, 70)),
        ("b", result("auto", 10, 50)),
    ]
    root = ElementTree.fromstring(draw(rows))
    panels = root.findall(f"{SVG}g")
    assert [len(panel.findall(f"{SVG}polyline")) for panel in panels] == [2, 2, 1, 1]
    hits, recomputed, *_ = [panel.findall(f"{SVG}circle") for panel in panels]
    low, high, lru = ((float(point.get("cx", 0)), float(point.get("cy", 0))) for point in hits)
    assert low[0] == lru[0] < high[0]
    assert high[1] < low[1] < lru[1], "the more is hit, the nearer to the top"
    assert [point.findtext(f"{SVG}title") for point in recomputed] == [
        "auto, 10 GiB: 40.0",
        "auto, 20 GiB: 10.0",
        "<lru>, 10 GiB: 70.0",
    ]


def test_a_replay_is_drawn_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("p.svg", "p.html"):
        assert main(["bench", "replay", "resend", "--memory", "1GiB,2GiB", "--plot", str(tmp_path / name)]) == 0
        assert "resend: recomputed" in (tmp_path / name).read_text()
    capsys.readouterr()
    ElementTree.parse(tmp_path / "p.svg")


@pytest.mark.parametrize("name", ["p.png", "nowhere/p.svg"])
def test_unwritable_plot_is_refused_before_the_replay(tmp_path: Path, name: str) -> None:
    assert main(["bench", "replay", "resend", "--memory", "1GiB", "--plot", str(tmp_path / name)]) == 2
    assert not list(tmp_path.iterdir())


def test_one_budget_lies_in_the_middle() -> None:
    root = ElementTree.fromstring(draw([("a", result("auto", 10, 50))]))
    (x,) = {float(point.get("cx", 0)) for point in root.iter(f"{SVG}circle")}
    assert LEFT < x < PANEL_WIDTH - RIGHT
