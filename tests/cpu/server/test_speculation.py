"""A server that speculates: the same answers, with what became of the drafts in their usage."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.server.process import ServerProcess, running_server

CONFIG = {"method": "mtp", "num_speculative_tokens": 2}
PREFIX = "strandline:spec_decode_num_"
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
    assert len(by_position) == CONFIG["num_speculative_tokens"]
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


def test_drafts_of_several_outputs_and_prompts_add_up(server: ServerProcess) -> None:
    asked = {"prompt": list(QUESTIONS[:2]), "max_tokens": 24, "temperature": 0.3}
    parts = [details(post(server, "/v1/completions", seed=seed, **asked)["usage"]) for seed in (5, 6, 7)]
    whole = details(post(server, "/v1/completions", seed=5, n=3, **asked)["usage"])
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        assert whole[name] == sum(part[name] for part in parts)


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
    assert details(last["usage"]) == details(whole["usage"])


def test_metrics_and_the_cache_page_count_what_usage_does(plain: ServerProcess, server: ServerProcess) -> None:
    def counted() -> tuple[list[int], list[int]]:
        text = server.get("/metrics").text
        totals = re.findall(rf"^{PREFIX}(?:draft|accepted)_tokens_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        by_position = re.findall(rf'^{PREFIX}accepted_tokens_per_pos_total{{.*position="\d".*}} (\S+)$', text, re.M)
        return [int(float(value)) for value in totals], [int(float(value)) for value in by_position]

    (drafted, accepted), by_position = counted()
    usage = details(post(server, "/v1/chat/completions", **body(QUESTIONS[0]))["usage"])
    (drafted_then, accepted_then), by_position_then = counted()
    assert accepted_then - accepted == usage["accepted_prediction_tokens"]
    assert drafted_then - drafted == usage["accepted_prediction_tokens"] + usage["rejected_prediction_tokens"]
    gains = [after - before for before, after in zip(by_position, by_position_then, strict=True)]
    assert gains == usage["accepted_prediction_tokens_by_position"]
    assert server.get("/cache/state").json()["stats"]["speculation"]["num_accepted_by_place"] == by_position_then
    assert plain.get("/cache/state").json()["stats"]["speculation"]["num_accepted_by_place"] == []
    assert f"\n{PREFIX}drafts_total{{" not in plain.get("/metrics").text
