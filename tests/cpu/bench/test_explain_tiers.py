"""``strandline explain --trace`` with tiers below the device: what was loaded for a request, or why it was not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from strandline.bench.explain_queries import StartedRequest
from strandline.bench.explain_text import lines
from strandline.bench.load_notes import LoadNote
from strandline.bench.replay_setup import ReplaySetup
from strandline.cli import build_parser, main
from strandline.records.account import Account

PAGE = Path(__file__).parents[3] / "docs" / "cache.md"
EXAMPLE = re.compile(r"^\$ strandline (explain --trace .*)\n((?:.+\n)+?)```$", re.MULTILINE)
CHAT = ("--trace", "chat", "--memory", "600MiB")
TIERS = ("--host-memory", "600MiB", "--disk-cache-size", "4GiB")
MACHINE = (
    *("--geometry", "Qwen3.5-4B", "--max-num-seqs", "3", "--max-num-batched-tokens", "4096", "--host-memory", "2GiB"),
    *("--host-bandwidth", "20", "--disk-cache-size", "9GiB", "--disk-bandwidth", "2", "--snapshot-dtype", "int8"),
    *("--max-sessions", "7", "--session-gap", "5", "--speed", "2"),
)


def explained(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    assert main(["explain", *CHAT, *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_documented_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    [(command, shown)] = EXAMPLE.findall(PAGE.read_text())
    assert main(command.split()) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("flags", [(), MACHINE], ids=["defaults", "given"])
def test_explain_and_replay_simulate_the_same_machine(flags: tuple[str, ...]) -> None:
    explain, replay = (
        ReplaySetup.from_flags(build_parser().parse_args([*command, *flags]))
        for command in (("explain", "--trace", "chat"), ("bench", "replay", "chat"))
    )
    assert explain == replay
    assert (explain.host_memory, explain.snapshot_dtype) == (("2GiB", "int8") if flags else (None, "float32"))


@pytest.mark.parametrize(("number", "store"), [(9, "host"), (18, "disk")])
def test_loads_are_listed_with_their_tier_and_tokens(
    number: int, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = explained(capsys, *TIERS, "--request", str(number))
    [load] = data["loads"]
    assert load["store"] == store
    assert 0 <= load["start"] < load["end"] == data["account"]["hit"]
    assert load["tokens"] == load["end"] - load["start"]
    assert load["bytes"] > 0 < load["seconds"]
    assert data["resting"] == {}, "all that rested of the prompt was loaded"
    assert explained(capsys, "--request", str(number))["loads"] == []


def test_what_takes_too_long_to_load_is_said_to_rest(capsys: pytest.CaptureFixture[str]) -> None:
    slow = (*TIERS, "--host-bandwidth", "0.1", "--request", "9")
    data = explained(capsys, *slow)
    miss = data["account"]["misses"][0]
    assert (miss["reason"], data["loads"]) == ("demoted", [])
    assert data["resting"]["host"] == miss["end"]
    assert "takes less time than loading" in data["advice"][0]["text"]
    assert main(["explain", *CHAT, *slow]) == 0
    hit = data["account"]["hit"]
    assert f"not loaded from host memory: [{hit:,}, {miss['end']:,})" in capsys.readouterr().out


def test_loaded_tokens_are_listed_where_there_are_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, column in ((), "avoidable"), (TIERS, "loaded"):
        assert main(["explain", *CHAT, *flags]) == 0
        assert capsys.readouterr().out.splitlines()[0].split()[3] == column
    rows = explained(capsys, *TIERS)
    assert any(row["loads"] for row in rows)


def test_text_names_the_tier_and_what_was_evicted_again() -> None:
    account = {"queried": 900, "hit": 500, "kv_tokens": 500, "snapshot_kind": "branch", "misses": []}
    answer = {"request_id": None, "account": account, "snapshots": [], "num_snapshots_left_out": 0}
    loads = [
        {"store": "host", "start": 100, "end": 500, "tokens": 400, "bytes": 3 * 2**20, "seconds": 0.002},
        {"store": "disk", "start": 500, "end": 700, "tokens": 200, "bytes": 2**20, "seconds": 0.01},
    ]
    data = {**answer, "next_snapshot": None, "kv_now": 500, "parting": None, "advice": [], "now": None, "loads": loads}
    assert list(lines({**data, "resting": {"disk": 800}}, "it"))[2:5] == [
        "loaded before it started: [100, 500) from host memory, 3.0 MiB in 2.0 ms",
        "loaded before it started, but not hit: [500, 700) from the disk, 1.0 MiB in 10.0 ms",
        "not loaded from the disk: [500, 800)",
    ]


def test_tokens_loaded_twice_or_in_vain_count_once_or_not() -> None:
    loads = tuple(LoadNote("host", start, end, 1, 1.0) for start, end in ((0, 300), (0, 300), (200, 400), (400, 600)))
    assert StartedRequest(Account(900, 500, 500, None, ()), loads).loaded_tokens == 400


@pytest.mark.parametrize(
    "command", [("explain", "--trace", "chat"), ("bench", "replay", "chat")], ids=["explain", "replay"]
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--host-memory", "1MiB"), "--host-memory of 1,048,576 bytes has no room for a snapshot"),
        (("--disk-cache-size", "1MiB"), "--disk-cache-size of 1,048,576 bytes has no room for a snapshot"),
        (("--host-memory", "much"), "--host-memory must be a size"),
        (("--disk-bandwidth", "0"), "--disk-bandwidth must be above 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    command: tuple[str, ...], flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags]) == 2
    assert message in capsys.readouterr().err
