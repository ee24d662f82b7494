"""A server that speculates: the same answers, with what became of the drafts in their usage."""

import json
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.server.process import ServerProcess, running_server

NUM_DRAFTS = 2
CONFIG = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
PREFIX = "strandline:spec_decode_num_"
PAGE = (Path(__file__).parents[3] / "docs" / "speculative-decoding.md").read_text()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTIONS = ("What is speculative decoding?", "Tell me about yourself.", "What is 7 times 8?")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """The demo model served without drafts, and with."""
    folder = tmp_path_factory.mktemp("speculation")
    flags = ("--dtype", "float32", "--memory", "128MiB", "--served-model-name", "tiny", "demo")
    speculating = (*flags, "--speculative-config", json.dumps(CONFIG))
    with (
        running_server(DEMO_DIRECTORY, folder / "plain", *flags) as plain,
        running_server(DEMO_DIRECTORY, folder / "speculating", *speculating) as with_drafts,
    ):
        yield plain, with_drafts


@pytest.fixture
def plain(servers: tuple[ServerProcess, ServerProcess]) -> ServerProcess:
    return servers[0]


@pytest.fixture
def server(servers: tuple[ServerProcess, ServerProcess]) -> ServerProcess:
    return servers[1]


def body(question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60, **fields}


def post(server: ServerProcess, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def details(usage: dict[str, Any]) -> dict[str, Any]:
    """Take the counts of drafts out of a usage; check that they add up."""
    name = "completion_tokens" if "completion_tokens" in usage else "output_tokens"
    found: dict[str, Any] = usage[f"{name}_details"]
    by_position = found["accepted_prediction_tokens_by_position"]
    assert sum(by_position) == found["accepted_prediction_tokens"] > 0
    assert sorted(by_position, reverse=True) == by_position
    assert len(by_position) == NUM_DRAFTS
    assert found["rejected_prediction_tokens"] >= 0
    assert usage["total_tokens"] == usage[name] + usage[name.replace("completion", "prompt").replace("output", "input")]
    return found


@pytest.mark.parametrize("question", QUESTIONS)
def test_chats_are_answered_as_without_drafts_and_count_them(
    plain: ServerProcess, server: ServerProcess, question: str
) -> None:
    expected, found = (post(x, "/v1/chat/completions", **body(question)) for x in (plain, server))
    assert found["choices"] == expected["choices"]
    assert "completion_tokens_details" not in expected["usage"]
    counts = details(found["usage"])
    del found["usage"]["completion_tokens_details"]
    assert found["usage"] == expected["usage"]
    assert counts["accepted_prediction_tokens"] < expected["usage"]["completion_tokens"]


def test_responses_count_drafts_too(server: ServerProcess) -> None:
    answer = post(server, "/v1/responses", input=QUESTIONS[0], temperature=0, max_output_tokens=40)
    assert "reasoning_tokens" in details(answer["usage"])


def test_streams_count_drafts_in_their_usage(server: ServerProcess) -> None:
    asked = {"prompt": QUESTIONS[0], "max_tokens": 24, "temperature": 0}
    whole = post(server, "/v1/completions", **asked)
    with server.stream(**asked, stream_options={"include_usage": True}) as events:
        *chunks, last, done = [event if event == "[DONE]" else json.loads(event) for event in events]
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert details(last["usage"])
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def stopped(server: ServerProcess, stop: list[str]) -> tuple[Any, ...]:
    """Return the streamed text before a stop string, how it ended, its tokens, and what the next turn hits."""
    asked = {"prompt": QUESTIONS[1], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with server.stream(**asked, stop=stop, stream_options={"include_usage": True}) as events:
        *chunks, last, _ = [event if event == "[DONE]" else json.loads(event) for event in events]
    choices = [chunk["choices"][0] for chunk in chunks]
    text, end = "".join(choice["text"] for choice in choices), choices[-1]
    turn = post(server, "/v1/completions", **{**asked, "prompt": f"{QUESTIONS[1]}{text}{end['stop_reason']} So"})
    cached_tokens = turn["usage"]["prompt_tokens_details"]["cached_tokens"]
    return text, end["finish_reason"], end["stop_reason"], last["usage"]["completion_tokens"], cached_tokens


def test_stop_strings_end_streams_as_without_drafts(plain: ServerProcess, server: ServerProcess) -> None:
    asked = {"prompt": QUESTIONS[1], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer, found = post(plain, "/v1/completions", **asked)["choices"][0]["text"], list[tuple[Any, ...]]()
    assert len(answer) > 50
    for start in (5, 21, 38):
        stop = [answer[start : start + 3], answer[start + 1 : start + 9]]
        found.append(stopped(server, stop))
        assert found[-1] == stopped(plain, stop)
        assert found[-1][1] == "stop"
    # Longer answers leave more for the next turn.
    assert found[0][-1] < found[-1][-1]


def counted(server: ServerProcess) -> tuple[list[int], list[int]]:
    """Return the server's counts of drafts, and of those accepted; and of these by position."""
    text = server.metrics()
    totals = re.findall(rf"^{PREFIX}(?:draft|accepted)_tokens_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    by_position = re.findall(rf'^{PREFIX}accepted_tokens_per_pos_total{{.*position="\d".*}} (\S+)$', text, re.M)
    return [int(float(value)) for value in totals], [int(float(value)) for value in by_position]


CHAT = ("/v1/chat/completions", body(QUESTIONS[0]))
SEVERAL = ("/v1/completions", {"prompt": list(QUESTIONS), "n": 3, "temperature": 0.3, "seed": 5, "max_tokens": 24})


@pytest.mark.parametrize(("path", "asked"), [CHAT, SEVERAL], ids=["one", "several"])
def test_metrics_and_the_cache_page_count_what_usage_does(
    server: ServerProcess, path: str, asked: dict[str, Any]
) -> None:
    (drafted, accepted), by_position = counted(server)
    usage = details(post(server, path, **asked)["usage"])
    (drafted_then, accepted_then), by_position_then = counted(server)
    assert accepted_then - accepted == usage["accepted_prediction_tokens"]
    assert drafted_then - drafted == usage["accepted_prediction_tokens"] + usage["rejected_prediction_tokens"]
    gains = [after - before for before, after in zip(by_position, by_position_then, strict=True)]
    assert gains == usage["accepted_prediction_tokens_by_position"]
    assert server.get("/cache/state").json()["stats"]["speculation"]["num_accepted_by_position"] == by_position_then


def test_without_drafts_nothing_counts_them(plain: ServerProcess) -> None:
    assert plain.get("/cache/state").json()["stats"]["speculation"]["num_accepted_by_position"] == []
    assert f"\n{PREFIX}drafts_total{{" not in plain.metrics()


@pytest.mark.parametrize("question", QUESTIONS)
def test_structured_outputs_are_valid_and_those_of_plain_decoding(
    plain: ServerProcess, server: ServerProcess, question: str
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    asked = body(question, response_format=wanted, max_tokens=200)
    expected, found = (post(x, "/v1/chat/completions", **asked) for x in (plain, server))
    assert found["choices"] == expected["choices"]
    assert found["choices"][0]["finish_reason"] == "stop"
    said = json.loads(found["choices"][0]["message"]["content"])
    assert isinstance(said["name"], str)
    assert isinstance(said["age"], int)
    assert details(found["usage"])


def test_streamed_chats_add_up_to_the_whole_answer(server: ServerProcess) -> None:
    asked = body(QUESTIONS[0], logprobs=True, top_logprobs=2)
    [whole] = post(server, "/v1/chat/completions", **asked)["choices"]
    data = server.post("/v1/chat/completions", **asked, stream=True).text
    events = [json.loads(line.removeprefix("data: ")) for line in data.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole["message"]["content"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    expected = whole["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in expected]
    logprobs = [entry["logprob"] for entry in entries]
    assert logprobs == pytest.approx([entry["logprob"] for entry in expected], abs=1e-3)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_every_token_has_its_log_probability(plain: ServerProcess, server: ServerProcess) -> None:
    asked = {"prompt": QUESTIONS[0], "max_tokens": 40, "temperature": 0, "logprobs": 2}
    expected, found = (post(x, "/v1/completions", **asked) for x in (plain, server))
    assert details(found["usage"])
    left, right = (answer["choices"][0]["logprobs"] for answer in (expected, found))
    assert left["tokens"] == right["tokens"]
    assert len(right["token_logprobs"]) == found["usage"]["completion_tokens"]
    assert right["token_logprobs"] == pytest.approx(left["token_logprobs"], abs=1e-3)


def test_stop_strings_end_answers_where_they_do_without_drafts(plain: ServerProcess, server: ServerProcess) -> None:
    asked = {"prompt": QUESTIONS[0], "max_tokens": 40, "temperature": 0}
    text = post(plain, "/v1/completions", **asked)["choices"][0]["text"]
    for start in range(5, len(text) - 3, 20):
        stop = text[start : start + 3]
        found = post(server, "/v1/completions", **asked, stop=[stop])
        assert found["choices"][0]["text"] == text.partition(stop)[0]
        assert (found["choices"][0]["finish_reason"], found["choices"][0]["stop_reason"]) == ("stop", stop)
        assert found["choices"] == post(plain, "/v1/completions", **asked, stop=[stop])["choices"]


FIRST, *OTHERS = re.findall(r"^(strandline serve .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", [FIRST, *(pytest.param(command, marks=pytest.mark.long) for command in OTHERS)])
def test_the_commands_of_the_page_serve_and_end_in_order(command: str, tmp_path: Path) -> None:
    _, _, model, *flags = shlex.split(command)
    assert model == "demo"
    with running_server(DEMO_DIRECTORY, tmp_path / "log", *flags, "--memory", "64MiB") as server:
        asked = {"prompt": "one two three one two three one two three", "max_tokens": 100, "ignore_eos": True}
        with server.stream(**asked, temperature=0, stream_options={"include_usage": True}) as events:
            next(events)
            server.signal(signal.SIGTERM)
            *_, last, done = events
        assert done == "[DONE]"
        assert json.loads(last)["usage"]["completion_tokens"] == 100
        assert server.exit_code() == 0
        assert "every request was answered" in server.log()
        assert "Traceback" not in server.log()
