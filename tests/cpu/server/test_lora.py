"""LoRA adapters as models of the server: served, listed, loaded, replaced and unloaded, alone and under load."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from strandline.errors import ConfigError
from strandline.server.config import ServerConfig
from tests.cpu.models import adapters, fp8
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, running_server

HEADERS = {"Authorization": "Bearer key"}
PROMPT = {"prompt": "What is it? " * 8, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
NEVER_FOUND = "no such adapter"


class Client:
    """A server with an adapter ``one``, and the folder that further ones may be loaded from."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.server, self.folder = server, folder

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return httpx.post(self.server.url + path, json=fields, headers=HEADERS, timeout=TIMEOUT_S)

    def load(self, name: str, path: Path | str, **fields: Any) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **fields)

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", lora_name=name)

    def complete(self, model: str, **fields: Any) -> tuple[str, int]:
        """Return the text of an answer, and how many tokens of its prompt were cached."""
        response = self.post("/v1/completions", model=model, **PROMPT, **fields)
        assert response.status_code == 200, response.text
        body = response.json()
        assert body["model"] == model
        return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

    def models(self) -> dict[str, dict[str, Any]]:
        response = httpx.get(f"{self.server.url}/v1/models", headers=HEADERS, timeout=TIMEOUT_S)
        return {card["id"]: card for card in response.json()["data"]}


@pytest.fixture(scope="module")
def folder(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three adapters of the server's model."""
    directory = tmp_path_factory.mktemp("adapters")
    tensors = load_file(bytes_dir / "model.safetensors")
    names = [name.removesuffix(".weight") for name, x in tensors.items() if x.ndim == 2 and "layers" in name]
    shapes = {name: tuple(tensors[f"{name}.weight"].shape) for name in names}
    for seed, name in enumerate(("one", "two", "three")):
        adapters.write(directory / name, adapters.draw(shapes, seed=seed))
    return directory


def flags(folder: Path) -> list[str]:
    first = f"one={folder / 'one'}"
    return ["--enable-lora", "--lora-modules", first, "--api-key", "key", "--allow-runtime-lora", str(folder)]


@pytest.fixture(scope="module")
def client(bytes_dir: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(bytes_dir, log, *flags(folder), "--max-loras", "2") as server:
        yield Client(server, folder)


def test_adapters_are_models_with_a_parent(client: Client) -> None:
    cards = client.models()
    assert cards["one"]["parent"] == "tiny"
    assert cards["one"]["root"] == str(client.folder / "one")
    assert cards["tiny"]["parent"] is None
    texts = {client.complete(model)[0] for model in ("tiny", "one")}
    assert len(texts) == 2


def test_every_api_takes_the_name_of_an_adapter(client: Client) -> None:
    messages = [{"role": "user", "content": "What is it?"}]
    for path, fields in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/messages", {"messages": messages}),
        ("/v1/responses", {"input": "What is it?"}),
    ):
        limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
        answers = [client.post(path, model=model, temperature=0, **fields, **{limit: 8}) for model in ("tiny", "one")]
        assert [answer.status_code for answer in answers] == [200, 200], answers
        assert [answer.json()["model"] for answer in answers] == ["tiny", "one"]
        contents = [
            answer.json().get("choices") or answer.json().get("content") or answer.json()["output"]
            for answer in answers
        ]
        assert contents[0] != contents[1]


def test_responses_of_other_adapters_are_of_other_models(client: Client) -> None:
    asked = {"input": "What is it?", "max_output_tokens": 1}
    first = client.post("/v1/responses", model="tiny", **asked).json()
    options = {"comparison_response_id": first["id"]}
    answers = [
        client.post("/v1/responses", model=name, **asked, prompt_cache_options=options) for name in ("tiny", "one")
    ]
    same, other = (answer.json()["prompt_cache_diagnostics"] for answer in answers)
    assert (same["type"], other["reason"]) == ("cache_hit", "model_changed")


def test_refused_sleep_leaves_the_server_running(client: Client) -> None:
    before = client.complete("one", cache_salt="sleep")
    refusal = client.post("/sleep?level=2")
    assert refusal.status_code == 400
    assert "--enable-lora" in refusal.json()["error"]["message"]
    text, num_hit = client.complete("one", cache_salt="sleep")
    assert text == before[0]
    assert num_hit > before[1]


def test_prefixes_are_cached_per_adapter(client: Client) -> None:
    salt = {"cache_salt": "prefixes"}
    assert client.load("two", client.folder / "two").status_code == 200
    for model in ("tiny", "one", "two"):
        assert client.complete(model, **salt)[1] == 0
    for model in ("tiny", "one", "two"):
        assert client.complete(model, **salt)[1] > 50
    assert client.complete("tiny", cache_salt="\0lora x/")[1] == 0
    assert client.unload("two").status_code == 200


def test_adapters_are_loaded_replaced_and_unloaded(client: Client) -> None:
    response = client.load("new", client.folder / "two")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    first, _ = client.complete("new")
    assert client.load("new", client.folder / "three").status_code == 400
    assert client.load("new", client.folder / "three", load_inplace=True).status_code == 200
    second, num_cached = client.complete("new", cache_salt="replaced")
    assert (second != first, num_cached) == (True, 0)
    response = client.unload("new")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert client.post("/v1/completions", model="new", **PROMPT).status_code == 404
    assert "new" not in client.models()


def test_two_names_of_one_adapter_share_prefixes(client: Client) -> None:
    assert client.load("copy", client.folder / "one").status_code == 200
    client.complete("one", cache_salt="shared")
    assert client.complete("copy", cache_salt="shared")[1] > 50
    assert client.unload("copy").status_code == 200
    assert client.complete("one", cache_salt="shared")[1] > 50


@pytest.mark.parametrize(
    ("name", "path", "status", "message"),
    [
        ("one", "two", 400, "is loaded already"),
        ("tiny", "two", 400, "own name"),
        ("", "two", 400, "lora_name"),
        ("a=b" * 100, "two", 400, "lora_name"),
        ("x", NEVER_FOUND, 404, "there is no directory"),
        ("x", ".", 400, "holds no adapter"),
        ("x", "..", 400, "adapters are loaded from"),
        ("x", "/etc", 400, "adapters are loaded from"),
        ("x", "two/../../..", 400, "adapters are loaded from"),
        ("x", "two\0", 400, "adapters are loaded from"),
    ],
)
def test_what_cannot_be_loaded_is_refused(client: Client, name: str, path: str, status: int, message: str) -> None:
    response = client.load(name, client.folder / path)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]
    assert client.models().keys() == {"tiny", "one"}


def test_paths_that_no_file_can_have_are_refused(client: Client) -> None:
    link = client.folder / "loop"
    link.symlink_to("loop")
    for path in (link, client.folder / ("x" * 5000), f"{client.folder}/\0"):
        answer = client.load("odd", path)
        assert answer.status_code == 400, answer.text
    link.unlink()


def test_a_link_out_of_the_folder_is_not_followed(client: Client, tmp_path: Path) -> None:
    link = client.folder / "link"
    link.symlink_to(tmp_path)
    assert "adapters are loaded from" in client.load("x", link).text
    link.unlink()


@pytest.mark.parametrize("fields", [{}, {"lora_name": 1}, {"lora_name": "x", "lora_path": None}, {"other": 1}])
def test_malformed_bodies_are_refused(client: Client, fields: dict[str, Any]) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert client.post(path, **fields).status_code == 400
    assert client.unload("unknown").status_code == 404


def test_adapters_are_swapped_while_requests_run(client: Client) -> None:
    assert client.load("swapped", client.folder / "two").status_code == 200
    expected = [client.complete(model)[0] for model in ("tiny", "one", "swapped")]
    assert client.load("swapped", client.folder / "three", load_inplace=True).status_code == 200
    expected.append(client.complete("swapped")[0])

    def ask(number: int) -> bool:
        index = number % 3
        text, _ = client.complete(("tiny", "one", "swapped")[index], cache_salt=str(number % 7))
        return text in (expected[2:] if index == 2 else expected[index : index + 1])

    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(ask, number) for number in range(36)]
        for turn in range(6):
            path = client.folder / ("two", "three")[turn % 2]
            assert client.load("swapped", path, load_inplace=True).status_code == 200
        assert all(each.result() for each in asked)
    assert client.unload("swapped").status_code == 200


def test_requests_of_unloaded_adapter_never_fall_back_to_model(client: Client) -> None:
    text = "What is it? " * 250

    def ask(number: int) -> list[tuple[int, str | None]]:
        answers = [client.post("/v1/completions", model="brief", prompt=f"{text}{number}", max_tokens=1)]
        answers.append(client.post("/v1/embeddings", model="brief", input=f"{text}{number}"))
        return [(answer.status_code, answer.json().get("model")) for answer in answers]

    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(ask, number) for number in range(60)]
        while not all(each.done() for each in asked):
            assert client.load("brief", client.folder / "two").status_code == 200
            assert client.unload("brief").status_code == 200
        answers = {answer for each in asked for answer in each.result()}
    assert answers <= {(200, "brief"), (404, None)}


def test_a_name_is_loaded_once_at_the_same_time(client: Client) -> None:
    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(client.load, "twice", client.folder / "two") for _ in range(4)]
        statuses = sorted(each.result().status_code for each in loads)
    assert statuses == [200, 400, 400, 400]
    assert client.unload("twice").status_code == 200


def test_a_restarted_engine_has_all_adapters(bytes_dir: Path, folder: Path, tmp_path: Path) -> None:
    with running_server(bytes_dir, tmp_path / "log", *flags(folder), "--restart") as server:
        client = Client(server, folder)
        assert client.load("two", folder / "two").status_code == 200
        before = [client.complete(model)[0] for model in ("one", "two")]
        (pid,) = server.core_pids(1)
        os.kill(pid, signal.SIGKILL)
        server.wait_until(lambda: server.core_pids(1) != [pid])
        server.wait_until(lambda: server.get("/health").status_code == 200)
        assert [client.complete(model)[0] for model in ("one", "two")] == before


def test_loading_at_runtime_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRANDLINE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="--allow-runtime-lora lets requests name paths; add --api-key"):
        ServerConfig(allow_runtime_lora="/adapters").key_salts()


def test_nothing_is_loaded_unless_allowed(bytes_dir: Path, folder: Path, tmp_path: Path) -> None:
    with running_server(bytes_dir, tmp_path / "log", *flags(folder)[:-2]) as server:
        client = Client(server, folder)
        assert client.load("two", folder / "two").status_code == 404
        assert client.complete("one")[0] != client.complete("tiny")[0]


def test_a_rewritten_directory_hits_nothing_old(client: Client) -> None:
    three = client.folder / "three"
    assert client.load("mine", three).status_code == 200
    old, _ = client.complete("mine", cache_salt="mine")
    fp8.change_json(three / adapters.CONFIG, lora_alpha=-adapters.ALPHA)
    assert client.load("mine", three, load_inplace=True).status_code == 200
    new, num_cached = client.complete("mine", cache_salt="mine")
    fp8.change_json(three / adapters.CONFIG, lora_alpha=adapters.ALPHA)
    assert (num_cached, new != old) == (0, True)
    assert client.unload("mine").status_code == 200
