"""``--salt-per-key``: requests with another key have another cache."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline.env import API_KEY
from strandline.errors import ConfigError
from strandline.server.config import ServerConfig, salt_of_key
from tests.cpu.server.process import ServerProcess, http_get, http_post, running_server

ADA, BOB = {"Authorization": "Bearer adas"}, {"Authorization": "Bearer bobs"}


@pytest.fixture(scope="module")
def shared(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--api-key", "adas", "bobs", "--salt-per-key"]
    with running_server(bytes_dir, tmp_path_factory.mktemp("shared") / "log", *flags) as server:
        yield server


def post(server: ServerProcess, path: str, headers: dict[str, str], **fields: Any) -> Any:
    answer = http_post(server.url + path, json=fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def body_of(path: str, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/completions": {"prompt": text, "max_tokens": 2},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 2},
        "/v1/messages": {"messages": messages, "max_tokens": 2},
        "/v1/responses": {"input": text, "max_output_tokens": 2},
    }[path]


def cached_tokens(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(details["cached_tokens"] if details else usage["cache_read_input_tokens"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_key_hits_only_its_own_prompts(shared: ServerProcess, path: str) -> None:
    body = body_of(path, f"{path.removeprefix('/v1/')} is asked " * 8)

    def hits(who: dict[str, str]) -> bool:
        # What the paths' prompts have in common, a role or less, is no hit.
        return cached_tokens(post(shared, path, who, **body)["usage"]) > 20

    assert [hits(who) for who in (ADA, BOB, ADA, BOB)] == [False, False, True, True]
    assert hits({"x-api-key": "adas"})


def test_no_cache_salt_reaches_what_another_key_has_cached(shared: ServerProcess) -> None:
    def hits(who: dict[str, str], **salt: str) -> bool:
        body = {"prompt": "below a salt " * 8, "max_tokens": 2, **salt}
        return cached_tokens(post(shared, "/v1/completions", who, **body)["usage"]) > 0

    assert not hits(ADA)
    assert not hits(ADA, cache_salt="ours")
    for guess in ("", "ours", salt_of_key("adas"), salt_of_key("adas") + "ours"):
        assert not hits(BOB, cache_salt=guess)
    assert hits(ADA)
    assert hits(ADA, cache_salt="ours")


def test_cache_page_shows_a_key_its_own_entries(shared: ServerProcess) -> None:
    body = {"prompt": "only for Ada's eyes " * 8, "max_tokens": 2}
    asked = post(shared, "/v1/completions", ADA, **body)

    def shown(who: dict[str, str]) -> bool:
        state = http_get(f"{shared.url}/cache/state", headers=who).json()
        return any("only for Ada" in run["text"] for run in state["tree"]["runs"])

    assert [shown(ADA), shown(BOB)] == [True, False]
    question = {"request_id": asked["id"]}
    assert post(shared, "/cache/explain", ADA, **question)["now"]["hit"] > 0
    refused = http_post(f"{shared.url}/cache/explain", json=question, headers=BOB)
    assert refused.status_code == 400
    for who, is_hit in ((ADA, True), (BOB, False)):
        assert (post(shared, "/cache/explain", who, prompt=body["prompt"])["account"]["hit"] > 0) is is_hit


def test_key_drafts_nothing_from_answers_to_another(bytes_dir: Path, tmp_path: Path) -> None:
    config = {"method": "suffix", "num_speculative_tokens": 8, "adaptive": False}
    flags = ["--api-key", "adas", "bobs", "--salt-per-key", "--speculative-config", json.dumps(config)]
    body = {"prompt": "draft for one key", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with running_server(bytes_dir, tmp_path / "log", *flags) as server:
        first, again, others = (post(server, "/v1/completions", who, **body) for who in (ADA, ADA, BOB))
    assert first["choices"] == again["choices"] == others["choices"]

    def accepted(answer: Any) -> int:
        return int(answer["usage"].get("completion_tokens_details", {}).get("accepted_prediction_tokens", 0))

    assert accepted(again) > 40
    assert accepted(others) == accepted(first) < accepted(again)


def test_keys_share_unless_told_otherwise_and_each_keeps_its_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "c")
    assert ServerConfig(api_key=("a", "b")).key_salts() == {"a": "", "b": "", "c": ""}
    salts = ServerConfig(api_key=("a", "b"), salt_per_key=True).key_salts()
    assert salts == {key: salt_of_key(key) for key in "abc"}
    assert len({len(salt) for salt in salts.values()}) == 1  # else one might be the beginning of another
    assert len(set(salts.values())) == 3


def test_a_salt_per_key_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    with pytest.raises(ConfigError, match="add --api-key or STRANDLINE_API_KEY"):
        ServerConfig(salt_per_key=True).key_salts()


@pytest.mark.parametrize("keys", [("",), ("  ",), ("a", ""), ["\t"]])
@pytest.mark.parametrize("salt_per_key", [False, True])
def test_blank_key_is_refused_at_start(keys: list[str], salt_per_key: bool) -> None:
    with pytest.raises(ConfigError, match="--api-key must not be empty or blank"):
        ServerConfig(api_key=keys, salt_per_key=salt_per_key)


def test_blank_key_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, " ")
    with pytest.raises(ConfigError, match="STRANDLINE_API_KEY must not be empty or blank"):
        ServerConfig().key_salts()


def test_one_string_is_no_list_of_keys() -> None:
    with pytest.raises(ConfigError, match="--api-key must be a list of strings, got str"):
        ServerConfig(api_key="secret")  # else each of its letters would be a key
