"""``strandline explain``: of a running server's requests, of prompts, and of requests in a replayed trace."""

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from strandline.bench.cost import H200
from strandline.bench.explain_queries import ExplainedReplay
from strandline.bench.explain_text import MEANINGS, lines
from strandline.bench.known_models import geometry
from strandline.bench.replay import Replay, Result
from strandline.bench.replica import Machine
from strandline.bench.synthetic import synthetic_lanes
from strandline.bench.traces import random_tokens, read_trace
from strandline.cli import main
from strandline.records.account import Reason
from strandline.records.tokens import decode

MODEL = "Qwen3.5-35B-A3B"
MIB = 2**20

ANSWER: dict[str, Any] = {
    "request_id": "cmpl-1-0",
    "age_s": 3.0,
    "account": {
        "queried": 2000,
        "hit": 1000,
        "kv_tokens": 1024,
        "snapshot_kind": "prompt_end",
        "misses": [
            {"reason": "no_snapshot", "start": 1000, "end": 1024, "tokens": 24},
            {"reason": "computing", "start": 1024, "end": 1900, "tokens": 876, "request_id": "cmpl-0-0"},
            {"reason": "diverged", "start": 1900, "end": 2000, "tokens": 100},
        ],
    },
    "now": {"queried": 2000, "hit": 2000, "kv_tokens": 2000, "snapshot_kind": "prompt_end", "misses": []},
    "kv_now": 2000,
    "snapshots": [{"position": 1000, "kind": "prompt_end"}, {"position": 512, "kind": "ladder"}],
    "num_snapshots_left_out": 0,
    "next_snapshot": 1500,
    "parting": {
        "position": 1024,
        "before": {"tokens": [1, 2], "text": "Today is\n"},
        "prompt": {"tokens": [3], "text": "Monday"},
        "cached": [{"tokens": [4], "text": "Sunday\x1b[31m"}],
    },
    "advice": [{"help": "mark", "position": 1024, "tokens": 24, "text": "a mark at 1,024"}],
}

TEXT = """\
request cmpl-1-0: 2,000 prompt tokens, 1,000 hit (50.0%), 1,000 to compute
  [0, 1,000)      hit          resumed from a snapshot (prompt end)
  [1,000, 1,024)  no_snapshot  keys and values are cached, but no snapshot was taken at or after this position
  [1,024, 1,900)  computing    another request was computing the tokens: cmpl-0-0
  [1,900, 2,000)  diverged     the prompt diverges from every cached one here
snapshots on its path: 1,000 (prompt end), 512 (ladder)
next snapshot on the cached path: 1,500
keys and values cached: 2,000 tokens
the prompt diverges from the cache at token 1,024:
  shared  …Today is⏎
  prompt  Monday
  cached  Sunday\ufffd[31m
what would have helped:
  - a mark at 1,024 (24 tokens)
sent again now, it would hit 2,000 of 2,000 tokens
"""


class Answers(BaseHTTPRequestHandler):
    """Plays the server: records what is asked, and gives one answer or a refusal."""

    asked: list[tuple[str, str | None, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], body))
        is_known = body.get("request_id") != "unknown"
        data = json.dumps(ANSWER if is_known else {"error": {"message": "there is no such request"}}).encode()
        self.send_response(200 if is_known else 400)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def asked() -> Iterator[tuple[str, list[tuple[str, str | None, dict[str, Any]]]]]:
    """A server's address, and what it has been asked."""
    Answers.asked = []
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", Answers.asked
        server.shutdown()
        thread.join()


def test_every_reason_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Reason)


def test_people_get_text(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = asked
    assert main(["explain", "cmpl-1", "--url", url]) == 0
    assert capsys.readouterr().out == TEXT


def test_people_are_told_of_remembered_answers() -> None:
    account = {**ANSWER["account"], "remembered": 1200}
    shown = list(lines({**ANSWER, "account": account}, "request 1"))
    assert shown[shown.index("snapshots on its path: 1,000 (prompt end), 512 (ladder)") - 1] == (
        "tokens of earlier answers, encoded as they were generated: 1,200"
    )


def test_machines_get_json(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = asked
    assert main(["explain", "cmpl-1", "--url", f"{url}/v1/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ANSWER


def test_the_server_is_asked_what_the_flags_say(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, questions = asked
    messages = [{"role": "user", "content": "x"}]
    (tmp_path / "prompt").write_text("a\nb")
    (tmp_path / "list.json").write_text(json.dumps(messages))
    (tmp_path / "body.json").write_text(json.dumps({"messages": messages, "tools": [{}], "max_tokens": 5}))
    monkeypatch.setenv("STRANDLINE_API_KEY", "from-env")
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    for flags in (
        ["--prompt", "x", "--salt", "s"],
        ["--prompt-file", str(tmp_path / "prompt"), "--api-key", "given"],
        ["--prompt-file", "-"],
        ["--tokens", "1,2, 3"],
        ["--messages", str(tmp_path / "list.json")],
        ["--messages", str(tmp_path / "body.json")],
    ):
        assert main(["explain", *flags, "--url", url]) == 0
    assert [body for _, _, body in questions] == [
        {"prompt": "x", "cache_salt": "s"},
        {"prompt": "a\nb"},
        {"prompt": "piped"},
        {"prompt": [1, 2, 3]},
        {"messages": messages},
        {"messages": messages, "tools": [{}]},
    ]
    assert {path for path, _, _ in questions} == {"/cache/explain"}
    assert [key for _, key, _ in questions][:2] == ["Bearer from-env", "Bearer given"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name one thing to explain"),
        (["x", "--prompt", "y"], "name one thing to explain"),
        (["--prompt", "y", "--tokens", "1"], "name one thing to explain"),
        (["--prompt", "y", "--prompt-file", "z"], "not both"),
        (["--tokens", "1,a"], "--tokens must be numbers"),
        (["--prompt-file", "/nowhere/at/all"], "cannot be read"),
        (["--messages", "pyproject.toml"], "is not valid JSON"),
        (["x", "--url", "localhost"], "--url must begin with"),
        (["x", "--url", "http://127.0.0.1:1"], "is the server running?"),
        (["x", "--request", "3"], "--request counts the requests of a --trace"),
        (["x", "--trace", "chat"], "it cannot be combined with a request's id"),
        (["--trace", "nothing"], "no workload or file named"),
        (["--trace", "forks", "--memory", "1MiB"], "give 6 or more"),
        (["--trace", "forks", "--request", "100000"], "the trace has requests 1 to"),
    ],
)
def test_wrong_questions_are_one_line_and_exit_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *flags]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert message in line


def test_what_the_server_refuses_is_told(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = asked
    assert main(["explain", "unknown", "--url", url]) == 2
    assert "there is no such request" in capsys.readouterr().err


def test_hit_without_a_snapshot_is_told_as_such() -> None:
    account = {**ANSWER["account"], "snapshot_kind": None}
    text = list(lines({**ANSWER, "account": account}, "request cmpl-1-0"))
    assert "resumed from cached keys and values alone: the model keeps no state" in text[1]


def test_without_texts_tokens_are_shown() -> None:
    parting = {
        "position": 7,
        "before": {"tokens": [1, 2], "text": None},
        "prompt": {"tokens": [3], "text": None},
        "cached": [],
    }
    assert "  shared  …1 2" in list(lines({**ANSWER, "parting": parting}, "it"))
    hidden = {"position": 7, "before": None, "prompt": None, "cached": []}
    assert "  (the server is configured not to show prompt text)" in list(lines({**ANSWER, "parting": hidden}, "it"))


# In a replay


def replayed(kind: type[Replay], machine: Machine, *more: Any) -> tuple[Replay, Result]:
    replay = kind(machine, "auto", *more)
    return replay, replay.run(synthetic_lanes("chat"))


def machine(num_bytes: int, **below: int) -> Machine:
    return Machine(geometry(MODEL), H200[MODEL], num_bytes, **below)


@pytest.mark.parametrize("wanted", [None, 3])
@pytest.mark.parametrize("tiers", [{}, {"host_bytes": 600 * MIB, "disk_bytes": 4096 * MIB}], ids=["alone", "tiers"])
def test_to_explain_a_request_changes_no_figure_of_the_replay(wanted: int | None, tiers: dict[str, int]) -> None:
    explained, result = replayed(ExplainedReplay, machine(600 * MIB, **tiers), wanted)
    assert result == replayed(Replay, machine(600 * MIB, **tiers))[1]
    assert isinstance(explained, ExplainedReplay)
    assert sum(request.account.hit for request in explained.started) == result.hit_tokens
    assert len(explained.started) == result.num_requests
    assert {load.store for request in explained.started for load in request.loads} == (
        {"host", "disk"} if tiers else set()
    )
    assert all(0 <= request.loaded_tokens <= request.account.hit for request in explained.started)


def trace(path: Path) -> str:
    """Write a trace whose second prompt differs from the first in tokens [300, 303) alone."""
    first = decode(random_tokens("first", 1000))
    second = [*first[:300], 1, 2, 3, *first[303:]]
    path.write_text("\n".join(json.dumps({"prompt": p, "t": 100.0 * t}) for t, p in enumerate((first, second))))
    assert len(read_trace(path)) == 2
    return str(path)


def test_trace_request_is_explained_as_of_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = trace(tmp_path / "trace.jsonl")
    assert main(["explain", "--trace", name, "--request", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["account"]["kv_tokens"] == data["kv_now"] == 300, "nothing of its own is there yet"
    assert data["parting"]["prompt"]["tokens"][:3] == [1, 2, 3]
    advice = {item["help"]: item["tokens"] for item in data["advice"]}
    assert advice["order"] == 697
    assert main(["explain", "--trace", name, "--request", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("request 2 of 2: 1,000 prompt tokens")
    assert "move the changing part behind the constant part: tokens [300, 303) differ" in out


def test_largest_avoidable_misses_are_listed_without_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = trace(tmp_path / "trace.jsonl")
    assert main(["explain", "--trace", name, "--policy", "none"]) == 0
    head, worst, other = capsys.readouterr().out.splitlines()
    assert "avoidable" in head
    assert worst.split()[:5] == ["2", "1,000", "0", "300", "no_snapshot:"]
    assert other.split()[:4] == ["1", "1,000", "0", "0"]
    assert main(["explain", "--trace", name, "--json"]) == 0
    assert [row["request"] for row in json.loads(capsys.readouterr().out)] == [2, 1]


def test_text_tells_what_rests_below_the_device() -> None:
    misses = [{"reason": "demoted", "start": 500, "end": 1900, "tokens": 1400}, ANSWER["account"]["misses"][2]]
    now = {"queried": 2000, "hit": 500, "kv_tokens": 500, "snapshot_kind": "branch", "misses": misses}
    *_, last = lines({**ANSWER, "now": now}, "it")
    assert last == (
        "sent again now, it would hit 500 of 2,000 tokens; "
        "1,400 more are in a tier below the device, and loaded where that is faster"
    )


def test_prompt_that_rests_is_not_said_to_be_computed() -> None:
    account = {**ANSWER["account"], "hit": 0, "misses": [{"reason": "demoted", "start": 0, "end": 1900}]}
    first, second, *_ = lines({**ANSWER, "request_id": None, "account": account, "now": None}, "the prompt")
    assert first == "the prompt: 2,000 prompt tokens, 0 hit (0.0%), 1,900 in a tier below the device, 100 to compute"
    assert second == "  [0, 1,900)  demoted  the tokens are in a tier below the device"
    first, second, *_ = lines({**ANSWER, "account": account}, "request 1")
    assert first.endswith("0 hit (0.0%), 2,000 to compute"), "a request that has started computes them"
    assert second.endswith("computing them is faster, or no device memory was free")
