"""``strandline serve --data-parallel-size 2``: two engines behind one address."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from strandline.events.resumable import PromptHashes
from strandline.events.subscriber import Subscriber
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, fork_server_with_held_restarts, running_server
from tests.cpu.server.test_lifecycle import ENDLESS, lives, refuse

ROUTING = Path(__file__).parents[3] / "docs" / "routing.md"
TWO = ("--data-parallel-size", "2")
GREEDY = {"temperature": 0, "ignore_eos": True}
NAMES = ("Ada", "Bob")


@pytest.fixture(scope="module")
def pair(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of two engines, which lets tests drop what is cached."""
    log = tmp_path_factory.mktemp("pair") / "log"
    with running_server(bytes_dir, log, *TWO, "--enable-admin-endpoints") as server:
        yield server


@pytest.fixture
def empty_pair(pair: ServerProcess) -> ServerProcess:
    """The same server with empty caches: of equally loaded engines, the emptier one gets a prompt."""
    assert pair.post("/reset_prefix_cache").json() == {"success": True}
    return pair


def by_engine(server: ServerProcess, name: str) -> list[float]:
    """Return a metric's value of each engine, summed over other labels."""
    return values_by_engine(server.metrics(), name)


def values_by_engine(metrics: str, name: str) -> list[float]:
    """Return a metric's value of each engine that has answered, and 0 of others."""
    found = [0.0, 0.0]
    pattern = rf'^strandline:{name}\{{[^}}]*engine="(\d)"[^}}]*\}} (\S+)$'
    for engine, value in re.findall(pattern, metrics, re.MULTILINE):
        found[int(engine)] += float(value)
    return found


def growth(server: ServerProcess, name: str, before: list[float]) -> list[float]:
    """Return by how much each engine's metric has grown."""
    return [new - old for new, old in zip(by_engine(server, name), before, strict=True)]


def complete(server: ServerProcess, prompt: Any, **fields: Any) -> Any:
    answer = server.post("/v1/completions", prompt=prompt, **{"max_tokens": 8, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def say(server: ServerProcess, turns: list[str], text: str) -> tuple[str, int]:
    """Continue a conversation; return the answer and the number of cached tokens."""
    turns.append(text)
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    body = {"messages": messages, "max_tokens": 12, "cache_salt": "talks", **GREEDY}  # other tests share no prefix
    answer = server.post("/v1/chat/completions", **body).json()
    turns.append(answer["choices"][0]["message"]["content"])
    return turns[-1], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_documented_example_uses_both_engines(empty_pair: ServerProcess) -> None:
    [example] = re.findall(r"^```sh\n(.*?)^```$", ROUTING.read_text(), re.MULTILINE | re.DOTALL)
    before = by_engine(empty_pair, "prefix_cache_queries_total")
    command = example.replace("http://127.0.0.1:8000", empty_pair.url)
    said = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=True).stdout
    assert re.findall(r'engine="(\d)"', said) == ["0", "1"]
    assert min(growth(empty_pair, "prefix_cache_queries_total", before)) > 0


def test_conversations_stay_with_their_snapshots_on_both_engines(
    empty_pair: ServerProcess, server: ServerProcess
) -> None:
    told: dict[ServerProcess, list[tuple[str, int]]] = {}
    before = by_engine(empty_pair, "request_success_total")
    for each in (empty_pair, server):
        turns: dict[str, list[str]] = {name: [] for name in NAMES}
        told[each] = [
            say(each, turns[name], f"{name} asks question {number} of a long talk")
            for number in range(4)
            for name in NAMES
        ]
    assert told[empty_pair] == told[server]
    assert all(cached > 0 for _, cached in told[empty_pair][2:])
    assert growth(empty_pair, "request_success_total", before) == [4, 4]
    assert all(by_engine(empty_pair, "prefix_cache_hits_total"))


def test_prompts_and_choices_equal_those_of_one_engine(pair: ServerProcess, server: ServerProcess) -> None:
    prompts = [f"{number} is a number that begins this prompt" for number in range(6)]
    for fields in ({}, {"temperature": 0.8, "seed": 5, "n": 2}):
        answers = [complete(each, prompts, **fields) for each in (pair, server)]
        assert answers[0]["choices"] == answers[1]["choices"]


def test_prompts_of_one_request_are_spread(pair: ServerProcess) -> None:
    before = by_engine(pair, "request_success_total")
    complete(pair, [f"{number}: a burst of prompts that share nothing" for number in range(8)])
    assert growth(pair, "request_success_total", before) == [4, 4]


def test_choices_of_one_prompt_share_an_engine(pair: ServerProcess) -> None:
    before = by_engine(pair, "prefix_cache_queries_total")
    complete(pair, "a prompt with several choices", n=4, temperature=1.0)
    least, most = sorted(growth(pair, "prefix_cache_queries_total", before))
    assert least == 0
    assert most > 0


def test_metrics_have_samples_of_both_engines(pair: ServerProcess, server: ServerProcess) -> None:
    assert by_engine(pair, "engine_up") == [1, 1]
    assert pair.metric("cache_memory_bytes") == 2 * server.metric("cache_memory_bytes")
    text = pair.metrics()
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types))
    assert len(re.findall(r"^strandline:num_requests_waiting\{", text, re.MULTILINE)) == 2


def test_the_cache_page_shows_one_engine(pair: ServerProcess) -> None:
    ids = [complete(pair, f"{name} wants to be on the page")["id"] for name in NAMES]
    shown = [pair.get(f"/cache/state?engine={engine}").json() for engine in range(2)]
    assert [(data["engine"], data["num_engines"]) for data in shown] == [(0, 2), (1, 2)]
    on_page = [{row["request_id"] for row in data["lookups"]} for data in shown]
    for request_id in (f"{each}-0" for each in ids):
        [engine] = [number for number, rows in enumerate(on_page) if request_id in rows]
        told = pair.post("/cache/explain", request_id=request_id).json()
        assert (told["engine"], told["now"]["hit"]) == (engine, told["account"]["queried"])
        refused = pair.post("/cache/explain", request_id=request_id, engine=1 - engine)
        assert refused.status_code == 400
    assert pair.get("/cache/state").json()["engine"] == 0
    for wrong in (pair.get("/cache/state?engine=2"), pair.post("/cache/explain", prompt="x", engine=-1)):
        assert wrong.status_code == 400
        assert "engines are numbered from 0 to 1" in wrong.json()["error"]["message"]


def test_each_engine_publishes_its_events(bytes_dir: Path, tmp_path: Path) -> None:
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    config = json.dumps({"enable_kv_cache_events": True, "endpoint": live, "replay_endpoint": replay})
    prompt = "a prompt that an outside router looks for, on the engine that has it"
    with running_server(bytes_dir, tmp_path / "log", *TWO, "--kv-events-config", config) as server:
        complete(server, prompt)
        tokens = server.post("/tokenize", prompt=prompt).json()["tokens"]
        hits = []
        for suffix in ("", "_dp1"):
            with Subscriber(live + suffix, replay + suffix) as subscriber:
                assert subscriber.catch_up(TIMEOUT_S)
                hits.append(subscriber.index.hit_tokens(PromptHashes(tokens)))
        assert sorted(hits)[-1] == len(tokens)
        assert sorted(hits)[0] < len(tokens)
        assert f"engine 1: cache events: published on {live}_dp1" in server.log()


def test_sigterm_drains_both_and_a_restart_finds_both_disks(
    bytes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    flags = (*TWO, "--disk-cache", str(tmp_path / "cache"))
    prompts = [f"{name} talks for so long that much is kept. " * 8 for name in NAMES]
    with running_server(bytes_dir, tmp_path / "log", *flags) as server:
        cores = server.core_pids(2)
        answers = [complete(server, prompt) for prompt in prompts]
        assert by_engine(server, "request_success_total") == [1, 1]
        before = by_engine(server, "prefix_cache_queries_total")
        with ExitStack() as stack:
            streams = [stack.enter_context(server.stream(prompt=x, max_tokens=300, **GREEDY)) for x in "xy"]
            for events in streams:
                next(events)
            assert growth(server, "prefix_cache_queries_total", before) == [1, 1]
            server.signal(signal.SIGTERM)
            assert [list(events)[-1] for events in streams] == ["[DONE]", "[DONE]"]
        assert server.exit_code() == 0
        assert "every request was answered" in server.log()
        assert "Traceback" not in server.log()
    assert not any(map(lives, cores))
    assert list(temporary.iterdir()) == []
    with running_server(bytes_dir, tmp_path / "again", *flags) as server:
        again = [complete(server, prompt) for prompt in reversed(prompts)][::-1]  # in order, they would go there anyway
        assert by_engine(server, "request_success_total") == [1, 1]
    assert [x["choices"] for x in again] == [x["choices"] for x in answers]
    cached = [x["usage"]["prompt_tokens_details"]["cached_tokens"] for x in again]
    assert cached == [x["usage"]["prompt_tokens"] for x in again]


def test_a_killed_engine_ends_its_requests_alone(bytes_dir: Path, tmp_path: Path) -> None:
    may_restart = tmp_path / "may-restart"
    start = fork_server_with_held_restarts(may_restart)
    with running_server(bytes_dir, tmp_path / "log", *TWO, "--restart", start=start) as server, ExitStack() as stack:
        first, second = (stack.enter_context(server.stream(**{**ENDLESS, "prompt": x})) for x in "xy")
        for events in (first, second):
            next(events)
        old = server.core_pids(2)
        os.kill(old[1], signal.SIGKILL)
        *_, error, done = second
        assert "engine 1 has stopped: its process ended with code -9" in json.loads(error)["error"]["message"]
        assert done == "[DONE]"
        assert "engine 1 has stopped" in server.get("/health").json()["error"]["message"]
        for _ in range(2):
            complete(server, "what comes now goes to the other engine")
        server.wait_until(lambda: values_by_engine(server.get("/metrics").text, "engine_up") == [1, 0])
        next(first)
        may_restart.touch()
        server.wait_until(lambda: server.get("/health").status_code == 200)
        assert by_engine(server, "num_requests_running") == [1, 0]
        complete(server, "an engine that has restarted is the least loaded")
        assert by_engine(server, "prefix_cache_queries_total")[1] > 0
        assert server.core_pids(2)[0] == old[0]


def test_a_refused_start_names_an_engine_and_ends_all(
    bytes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    said = refuse(bytes_dir, tmp_path / "log", *TWO, "--memory", "1KiB")
    assert re.fullmatch(r"strandline: error: engine [01]: --memory of 1,024 bytes .*\n", said)
    assert list(temporary.iterdir()) == []
