"""Endpoints that pause the engine, put it to sleep, and change its weights."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM

from strandline.events.subscriber import Subscriber
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.events.outside_router import OutsideRouter
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.process import ServerProcess, http_post, http_stream, running_server

GENERATE: Final = "/inference/v1/generate"
PROMPT: Final = byte_tokenizer().encode("weights change, and nothing of the old ones is hit. " * 3)
LONG: Final = 500
"""Tokens of an answer that is still generated when it is paused."""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the server publishes its events."""
    directory = tmp_path_factory.mktemp("events")
    return {name: f"ipc://{directory}/{name}" for name in ("endpoint", "replay_endpoint")}


@pytest.fixture(scope="module")
def admin(bytes_dir: Path, events: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("admin") / "log"
    config = json.dumps({"enable_kv_cache_events": True, **events})
    with running_server(bytes_dir, log, "--enable-admin-endpoints", "--kv-events-config", config) as server:
        yield server


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=2, vocab_size=VOCAB_SIZE)


def generate(server: ServerProcess, num_tokens: int = 6, **fields: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
    answer = server.post(GENERATE, token_ids=PROMPT, sampling_params=params, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def tokens(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def num_hit(answer: dict[str, Any]) -> int:
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def begin(server: ServerProcess, pool: ThreadPoolExecutor, **fields: Any) -> Any:
    """Begin a long answer; return its future when the first token is there."""
    running = server.metric("num_requests_running")
    future = pool.submit(generate, server, LONG, **fields)
    server.wait_until(lambda: server.metric("num_requests_running") > running)
    return future


@pytest.fixture(scope="module")
def long_answer(admin: ServerProcess) -> list[int]:
    """The tokens of a long answer, of the weights that the server has started with."""
    return tokens(generate(admin, LONG))


@pytest.mark.parametrize("clear_cache", [True, False])
def test_kept_requests_go_on_where_they_were(
    admin: ServerProcess, long_answer: list[int], *, clear_cache: bool
) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = begin(admin, pool)
        paused = admin.post(f"/pause?mode=keep&clear_cache={clear_cache}")
        assert (paused.json(), admin.get("/is_paused").json()) == ({"status": "paused"}, {"is_paused": True})
        second = pool.submit(generate, admin)
        admin.wait_until(lambda: admin.metric("num_requests_waiting") > 0)
        assert not first.done()
        assert not second.done()
        assert admin.post("/resume").json() == {"status": "resumed"}
        assert tokens(first.result()) == long_answer
        assert tokens(second.result()) == long_answer[:6]
    assert admin.get("/is_paused").json() == {"is_paused": False}


def test_pause_aborts_and_refuses_by_default(admin: ServerProcess, long_answer: list[int]) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = begin(admin, pool)
        admin.post("/pause")
        ended = first.result()
    assert ended["choices"][0]["finish_reason"] == "abort"
    assert tokens(ended) == long_answer[: len(tokens(ended))]
    refused = admin.post(GENERATE, token_ids=PROMPT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "paused")
    admin.post("/resume")
    assert num_hit(generate(admin)) == 0


def test_pause_waits_for_requests(admin: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = begin(admin, pool)
        admin.post("/pause?mode=wait")
        assert len(tokens(first.result())) == LONG
    admin.post("/resume")


@pytest.mark.parametrize("path", ["/abort_requests", "/inference/v1/abort_requests"])
def test_requests_are_aborted_by_id(admin: ServerProcess, path: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = begin(admin, pool, request_id="one"), begin(admin, pool, request_id="two")
        admin.post(path, request_ids=["one", "none"])
        assert first.result()["choices"][0]["finish_reason"] == "abort"
        assert second.result()["choices"][0]["finish_reason"] == "length"
        third = begin(admin, pool)
        assert admin.post("/abort_requests", request_ids=[]).json() == {"status": "aborted", "aborted": 1}
        assert third.result()["choices"][0]["finish_reason"] == "abort"
    assert admin.post("/abort_requests").json() == {"status": "aborted", "aborted": 0}


def test_stream_ends_with_its_abort(admin: ServerProcess) -> None:
    body = {"prompt": "x", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with http_stream("POST", f"{admin.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        admin.post("/abort_requests")
        *_, last, done = [line.removeprefix("data: ") for line in lines if line]
    assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")


def test_cache_is_reset_while_nothing_runs(admin: ServerProcess, long_answer: list[int]) -> None:
    generate(admin)
    assert num_hit(generate(admin)) > 0
    assert admin.post("/reset_prefix_cache").json() == {"success": True}
    assert num_hit(generate(admin)) == 0
    with ThreadPoolExecutor(1) as pool:
        first = begin(admin, pool)
        assert admin.post("/reset_prefix_cache").json() == {"success": False}
        assert admin.post("/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}
        assert tokens(first.result()) == long_answer


@pytest.mark.parametrize("change", ["reset", "pause", "weights"])
def test_routers_outside_find_prompts_after_changes(
    admin: ServerProcess, events: dict[str, str], bytes_dir: Path, other_dir: Path, change: str
) -> None:
    router, prompt = OutsideRouter(), PROMPT[:-1]
    with Subscriber(*events.values(), sink=router) as subscriber:
        for weights in (other_dir, bytes_dir):
            generate(admin)
            assert subscriber.catch_up()
            assert router.num_blocks(prompt) == len(prompt) // 64 > 1
            if change == "reset":
                assert admin.post("/reset_prefix_cache").json() == {"success": True}
            elif change == "pause":
                admin.post("/pause?clear_cache=true")
                admin.post("/resume")
            else:
                update = admin.post("/update_weights_from_disk", model_path=str(weights), weight_version="default")
                assert update.json()["success"]
            assert subscriber.catch_up()
            assert router.num_blocks(prompt) == 0
            assert num_hit(generate(admin)) == 0
        assert subscriber.catch_up()
        assert router.num_blocks(prompt) == len(prompt) // 64


@pytest.mark.parametrize("level", [0, 1, 2])
def test_server_sleeps_and_wakes(admin: ServerProcess, level: int) -> None:
    expected = tokens(generate(admin))
    assert admin.post(f"/sleep?level={level}").json() == {"status": "sleeping", "level": level}
    assert admin.get("/is_sleeping").json() == {"is_sleeping": level > 0}
    assert admin.post(GENERATE, token_ids=PROMPT).status_code == 503
    assert admin.get("/health").status_code == 200
    if level > 0:
        assert admin.post("/wake_up?tags=weights").json() == {"status": "sleeping", "tags": ["weights"]}
        assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    assert admin.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}
    assert tokens(generate(admin)) == expected


def test_weights_change_while_a_request_runs(
    admin: ServerProcess, long_answer: list[int], bytes_dir: Path, other_dir: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = begin(admin, pool)
        update = admin.post("/update_weights_from_disk", model_path=str(other_dir), weight_version="step-1")
        assert (update.status_code, update.json()["success"]) == (200, True)
        assert update.json()["num_paused_requests"] == 1
        assert admin.get("/weight_info").json() == {"weight_version": "step-1"}
        assert 'weight_version="step-1"} 1.0' in admin.metrics()
        mixed = tokens(first.result())
    changed = next(index for index, (ours, theirs) in enumerate(zip(mixed, long_answer, strict=True)) if ours != theirs)
    answer = generate(admin)
    assert (num_hit(answer), answer["weight_version"]) == (0, "step-1")
    # What follows is what the new weights answer to the prompt and the old ones' tokens.
    params = {"temperature": 0, "max_tokens": LONG - changed, "ignore_eos": True}
    known = [*PROMPT, *mixed[:changed]]
    assert tokens(admin.post(GENERATE, token_ids=known, sampling_params=params).json()) == mixed[changed:]
    back = admin.post("/update_weights_from_disk", model_path=str(bytes_dir), abort_all_requests=True)
    assert back.json()["success"]
    assert tokens(generate(admin, LONG)) == long_answer
    assert admin.post("/update_weight_version", new_version="default").json()["success"]


def test_grpo_through_the_server_raises_the_reward(admin: ServerProcess, bytes_dir: Path, tmp_path: Path) -> None:
    """Train on what TRL's client for vLLM's server asks for, with weights that change on disk."""
    model = AutoModelForCausalLM.from_pretrained(bytes_dir, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    prompt, rewards = PROMPT[:8], []
    for step in range(5):
        body = {
            "model": "tiny",
            "prompt": [prompt],
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "n": 32,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": 12,
            "logprobs": 0,
            "seed": step,
            "ignore_eos": True,
        }
        choices = admin.post("/v1/completions", **body).json()["choices"]
        ids_NT = torch.tensor([choice["token_ids"] for choice in choices])
        reward_N = (ids_NT < VOCAB_SIZE // 2).float().mean(dim=1)
        rewards.append(float(reward_N.mean()))
        whole_NT = torch.cat((torch.tensor([prompt] * len(choices)), ids_NT), dim=1)
        logprobs_NTV = model(whole_NT, use_cache=False).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        logprobs_NT = logprobs_NTV.gather(-1, ids_NT.unsqueeze(-1)).squeeze(-1)
        sampled_NT = torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices])
        torch.testing.assert_close(sampled_NT, logprobs_NT.detach(), rtol=1e-3, atol=1e-3)  # of the same weights
        advantage_N = (reward_N - reward_N.mean()) / (reward_N.std() + 1e-4)
        loss = -((logprobs_NT - logprobs_NT.detach()).exp() * advantage_N.unsqueeze(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.save_pretrained(tmp_path / str(step))
        update = admin.post("/update_weights_from_disk", model_path=str(tmp_path / str(step)))
        assert update.json()["success"], update.text
    assert rewards[-1] > rewards[0] + 0.1, rewards
    assert admin.post("/update_weights_from_disk", model_path=str(bytes_dir)).json()["success"]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_sglangs_pauses_do_the_same(admin: ServerProcess, mode: str) -> None:
    expected = tokens(generate(admin, LONG))
    with ThreadPoolExecutor(1) as pool:
        first = begin(admin, pool)
        assert admin.post("/pause_generation", mode=mode).json()["status"] == "ok"
        flushed = admin.get("/flush_cache").status_code
        assert admin.post("/continue_generation").json()["status"] == "ok"
        found = first.result()
    assert flushed == (400 if mode == "in_place" else 200)
    assert found["choices"][0]["finish_reason"] == ("abort" if mode == "abort" else "length")
    assert tokens(found) == expected[: len(tokens(found))]


def test_sglangs_names_abort_and_give_memory_back(admin: ServerProcess) -> None:
    expected = tokens(generate(admin))
    with ThreadPoolExecutor(1) as pool:
        first = begin(admin, pool, request_id="mine")
        assert admin.post("/abort_request", rid="mine").status_code == 200
        assert first.result()["choices"][0]["finish_reason"] == "abort"
    assert admin.post("/abort_request", abort_all=True).status_code == 200
    tags = ["kv_cache", "weights", "cuda_graph"]
    assert admin.post("/release_memory_occupation", tags=tags).json() is None
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    for tag in tags:
        assert admin.post("/resume_memory_occupation", tags=[tag]).status_code == 200
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}
    assert tokens(generate(admin)) == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause", {"mode": "keep", "clear_cache": False}),
        ("/pause?mode=keep&clear_cache=false", {"mode": "abort", "clear_cache": True}),
        ("/pause?clear_cache=false&wait_for_inflight_requests=true", {}),
        ("/sleep?level=1&mode=keep&tags=weights", {"wait_for_inflight_request": False}),
        ("/sleep", {"level": 0, "mode": "keep"}),
    ],
)
def test_parameters_count_where_trainers_send_them(admin: ServerProcess, path: str, body: dict[str, Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = begin(admin, pool)
        assert admin.post(path, **body).status_code == 200
        assert admin.post("/wake_up", tags=["weights", "kv_cache"]).json()["status"] == "awake"
        assert len(tokens(first.result())) == LONG


def test_caches_are_dropped_as_bodies_and_timeouts_say(admin: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = begin(admin, pool)
        assert admin.post("/reset_prefix_cache", reset_running_requests=False).json() == {"success": False}
        assert admin.post("/reset_prefix_cache", reset_running_requests=True).json() == {"success": True}
        assert admin.post("/flush_cache").status_code == 400
        assert admin.post("/flush_cache?timeout=60").status_code == 200
        assert len(tokens(first.result())) == LONG
    assert http_post(f"{admin.url}/wake_up", content=b"[1]").status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause?mode=never", {}, "mode"),
        ("/pause?clear_cach=false", {}, "clear_cach"),
        ("/pause", {"mode": "never"}, "mode"),
        ("/pause_generation?mode=in_place", {}, "mode"),
        ("/flush_cache?timeout=-1", {}, "timeout"),
        ("/sleep?level=3", {}, "level"),
        ("/sleep?mode=never", {}, "mode"),
        ("/wake_up?tags=cuda_graph", {}, "tags"),
        ("/abort_requests", {"request_ids": "one"}, "request_ids"),
        ("/inference/v1/abort_requests", {}, "request_ids"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/none"}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "\0"}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/", "flush_cache": False}, "flush_cache"),
        ("/update_weights_from_disk", {"model_path": "/", "weight_version": ""}, "weight_version"),
        ("/update_weight_version", {}, "new_version"),
        ("/pause_generation", {"mode": "never"}, "mode"),
        ("/abort_request", {}, "rid"),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, "tags"),
        ("/release_memory_occupation", {"tags": ["disk"]}, "tags"),
        ("/resume_memory_occupation", {"tags": ["disk"]}, "tags"),
    ],
)
def test_wrong_requests_are_refused(admin: ServerProcess, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = admin.post(path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert admin.get("/is_paused").json() == {"is_paused": False}


def test_weights_that_cannot_be_read_change_nothing(admin: ServerProcess, tmp_path: Path) -> None:
    expected = tokens(generate(admin))
    answer = admin.post("/update_weights_from_disk", model_path=str(tmp_path), weight_version="broken")
    assert answer.status_code == 400
    assert "no weights" in answer.json()["error"]["message"] or "safetensors" in answer.json()["error"]["message"]
    assert admin.get("/weight_info").json() == {"weight_version": "default"}
    assert tokens(generate(admin)) == expected


def test_web_pages_are_refused(admin: ServerProcess) -> None:
    for path in ("/pause", "/sleep", "/reset_prefix_cache"):
        assert http_post(admin.url + path, headers={"Origin": "https://app.example"}).status_code == 403
    assert admin.get("/is_paused").json() == {"is_paused": False}


def test_without_the_flag_there_are_none(server: ServerProcess) -> None:
    for path in ("/pause", "/resume", "/abort_requests", "/reset_prefix_cache", "/sleep", "/wake_up"):
        answer = server.post(path)
        assert answer.status_code == 404
        advice = "--enable-admin-endpoints, or with --api-key and without --salt-per-key"
        assert answer.json()["error"]["message"] == f"{path} is served only with {advice}"
    message = server.post("/v1/load_lora_adapter").json()["error"]["message"]
    assert message == "/v1/load_lora_adapter is served only with --enable-lora and --allow-runtime-lora"
