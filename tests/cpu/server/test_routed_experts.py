"""The experts that tokens are routed to: those of transformers, with hits, chunks, drafts, ranks and preemption."""

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from strandline import LLM
from strandline.errors import ConfigError
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tokenizers import TEMPLATE, byte_tokenizer
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.process import ServerProcess, running_server
from tests.cpu.server.test_admin import LONG, PROMPT, begin, generate, num_hit, tokens

FLAG = "--enable-return-routed-experts"
NGRAMS = '{"method": "ngram", "num_speculative_tokens": 3}'
SIZES: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


@pytest.fixture(scope="module")
def sparse_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model(tmp_path_factory.mktemp("sparse"), vocab_size=VOCAB_SIZE, **SIZES)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def recording(sparse_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that computes prompts in chunks and verifies drafts."""
    flags = (FLAG, "--enable-admin-endpoints", "--max-num-batched-tokens", "64", "--speculative-config", NGRAMS)
    with running_server(sparse_dir, tmp_path_factory.mktemp("recording") / "log", *flags) as server:
        yield server


def decoded(choice: dict[str, Any]) -> np.ndarray:
    experts: np.ndarray = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    return experts


def expected(directory: Path, ids: list[int]) -> np.ndarray:
    """Return what transformers' routers choose for all tokens but the last one."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    with torch.no_grad():
        model(torch.tensor([ids[:-1]]), use_cache=False)
    return torch.stack(chosen, dim=1).numpy()


def check(directory: Path, answer: dict[str, Any], index: int = 0) -> np.ndarray:
    """Compare an answer's experts with those of transformers; return them."""
    choice = answer["choices"][index]
    experts = decoded(choice)
    assert experts.dtype == np.uint8
    np.testing.assert_array_equal(experts, expected(directory, [*PROMPT, *choice["token_ids"]]))
    return experts


def test_experts_are_those_of_transformers_with_hits_and_without(recording: ServerProcess, sparse_dir: Path) -> None:
    first = generate(recording, 40, cache_salt="hits")
    assert num_hit(first) == 0
    experts = check(sparse_dir, first)
    second = generate(recording, 40, cache_salt="hits")
    assert num_hit(second) == len(PROMPT)
    np.testing.assert_array_equal(check(sparse_dir, second), experts)
    longer = [*PROMPT, *tokens(first), *PROMPT[:30]]
    params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    third = recording.post("/inference/v1/generate", token_ids=longer, sampling_params=params, cache_salt="hits").json()
    assert 0 < num_hit(third) < len(longer)
    np.testing.assert_array_equal(decoded(third["choices"][0]), expected(sparse_dir, [*longer, *tokens(third)]))


def test_outputs_of_one_prompt_have_their_own_experts(recording: ServerProcess, sparse_dir: Path) -> None:
    params = {"temperature": 1, "seed": 3, "max_tokens": 20, "ignore_eos": True, "n": 3}
    answer = recording.post("/inference/v1/generate", token_ids=PROMPT, sampling_params=params).json()
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    for index in range(3):
        check(sparse_dir, answer, index)


@pytest.mark.parametrize("first", [0, 7, len(PROMPT), len(PROMPT) + 5])
def test_tokens_of_the_prompt_are_left_out(recording: ServerProcess, first: int) -> None:
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    [whole], [part] = (
        recording.post("/inference/v1/generate", token_ids=PROMPT, sampling_params=params | changes).json()["choices"]
        for changes in ({}, {"routed_experts_prompt_start": first})
    )
    np.testing.assert_array_equal(decoded(part), decoded(whole)[min(first, len(PROMPT)) :])


def test_one_token_and_whole_hits_have_experts(recording: ServerProcess, sparse_dir: Path) -> None:
    for _ in range(2):
        assert len(check(sparse_dir, generate(recording, 1, cache_salt="one"))) == len(PROMPT)


def test_completions_and_chats_have_the_experts(recording: ServerProcess, sparse_dir: Path) -> None:
    fields = {"temperature": 1, "seed": 1, "ignore_eos": True, "return_token_ids": True, "n": 2}
    answer = recording.post("/v1/completions", prompt=[PROMPT, PROMPT[:9]], max_tokens=5, **fields).json()
    for choice in answer["choices"]:
        wanted = expected(sparse_dir, [*choice["prompt_token_ids"], *choice["token_ids"]])
        np.testing.assert_array_equal(decoded(choice), wanted)
    chat = {"messages": [{"role": "user", "content": "Who?"}], "max_completion_tokens": 5}
    answer = recording.post("/v1/chat/completions", **chat, **fields, routed_experts_prompt_start=2).json()
    for choice in answer["choices"]:
        wanted = expected(sparse_dir, [*answer["prompt_token_ids"], *choice["token_ids"]])[2:]
        np.testing.assert_array_equal(decoded(choice), wanted)
    streamed = recording.post("/v1/chat/completions", **chat, stream=True)
    assert streamed.status_code == 200
    assert "routed_experts" not in streamed.text


def test_last_chunk_of_a_stream_has_the_experts(recording: ServerProcess) -> None:
    whole = generate(recording, 8)
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": params, "stream": True}
    lines = recording.post("/inference/v1/generate", **body).text.splitlines()
    chunks = [json_of(line) for line in lines if line.startswith("data: {")]
    *others, last = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [choice["routed_experts"] for choice in others] == [None] * len(others)
    assert last["routed_experts"] == whole["choices"][0]["routed_experts"]


def json_of(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("clear_cache", [True, False])
def test_preempted_requests_have_all_their_experts(
    recording: ServerProcess, sparse_dir: Path, *, clear_cache: bool
) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = begin(recording, pool)
        recording.post(f"/pause?mode=keep&clear_cache={clear_cache}")
        recording.post("/resume")
        check(sparse_dir, first.result())


def test_aborted_requests_have_experts_of_what_was_computed(recording: ServerProcess, sparse_dir: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = begin(recording, pool)
        recording.post("/abort_requests")
        answer = first.result()
    if num := len(tokens(answer)):
        assert num < LONG
        check(sparse_dir, answer)


def test_ranks_record_alike(sparse_dir: Path, tmp_path: Path) -> None:
    flags = (FLAG, "--tensor-parallel-size", "2")
    with running_server(sparse_dir, tmp_path / "log", *flags) as server:
        for _ in range(2):
            check(sparse_dir, generate(server, 12))


def test_experts_survive_host_memory_and_changed_weights(sparse_dir: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=2, vocab_size=VOCAB_SIZE, **SIZES)
    flags = (FLAG, "--enable-admin-endpoints", "--host-memory", "64MiB")
    with running_server(sparse_dir, tmp_path / "log", *flags) as server:
        check(sparse_dir, generate(server, 12))
        server.post("/sleep")
        server.post("/wake_up")
        loaded = generate(server, 12)
        assert num_hit(loaded) > 0
        check(sparse_dir, loaded)
        assert server.post("/update_weights_from_disk", model_path=str(other)).json()["success"]
        check(other, generate(server, 12))


def test_models_without_experts_refuse_the_flag(bytes_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no experts"):
        LLM(str(bytes_dir), memory="16MiB", device="cpu", enable_return_routed_experts=True)


def test_without_the_flag_there_are_none(server: ServerProcess) -> None:
    assert generate(server)["choices"][0]["routed_experts"] is None
