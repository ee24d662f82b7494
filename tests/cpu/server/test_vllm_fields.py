"""Fields of vLLM that concern prompts and log-probabilities."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from strandline import LLM, SamplingParams
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.process import ServerProcess, running_server

PROMPT: Final = "1 0 m0"
CHAT: Final = "/v1/chat/completions"
EMOJI: Final = "é€😀"


def chosen_bytes(content: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in content)


def test_bytes_of_parts_of_characters_are_exact(server: ServerProcess) -> None:
    fields = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 30}
    answer = server.post(CHAT, **fields, structured_outputs={"choice": [EMOJI]}, stop_token_ids=[0]).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert chosen_bytes(content)[: len(EMOJI.encode())] == EMOJI.encode()
    assert content[0] | {"logprob": 0, "top_logprobs": []} == {
        "token": "\ufffd", "logprob": 0, "bytes": [0xC3], "top_logprobs": []
    }  # fmt: skip


def test_tokens_are_shown_as_ids_on_request(server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 2, "return_tokens_as_token_ids": True}
    choice = server.post("/v1/completions", **body, temperature=0, return_token_ids=True).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    answer = server.post(CHAT, **body, return_tokens_as_token_ids=True, return_token_ids=True).json()["choices"][0]
    assert [entry["token"] for entry in answer["logprobs"]["content"]] == [
        f"token_id:{token}" for token in answer["token_ids"]
    ]


@pytest.mark.parametrize("count", [0, 3])
def test_prompt_log_probabilities_are_those_of_the_engine(server: ServerProcess, offline_llm: LLM, count: int) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=count)
    [output] = offline_llm.generate([PROMPT], params, use_tqdm=False)
    expected = [
        entry and {
            str(token): {"rank": found.rank, "decoded_token": found.decoded_token} for token, found in entry.items()
        }
        for entry in output.prompt_logprobs or ()
    ]  # fmt: skip
    for echo in (False, True):
        body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": count, "echo": echo}
        for extra in ({}, {"logprobs": 1}, {"logprobs": 4}):
            choice = server.post("/v1/completions", **body, **extra).json()["choices"][0]
            found = choice["prompt_logprobs"]
            assert found[0] is None
            assert all(value["logprob"] <= 0 for entry in found[1:] for value in entry.values())
            shown = [entry and {t: {k: v for k, v in e.items() if k != "logprob"} for t, e in entry.items()}
                     for entry in found]  # fmt: skip
            assert shown == expected
            for top in (choice["logprobs"] or {}).get("top_logprobs", [])[1:]:
                assert len(top) <= extra["logprobs"] + 1


def test_chat_has_prompt_log_probabilities_beside_choices(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 1}
    for _ in range(2):  # the second one could hit the first one's prompt
        answer = server.post(CHAT, **body).json()
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert answer["prompt_logprobs"][0] is None
        assert None not in answer["prompt_logprobs"][1:]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 10**9}, "truncate_prompt_tokens"),
        ({"truncation_side": "top"}, "truncation_side"),
        ({"priority": 1}, "priority"),
        ({"priority": 2**63}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [256]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "logprobs": None}, "logprob_token_ids"),
        ({"logprob_token_ids": [], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [256], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [-1], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [1.0], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [1] * 129, "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": 1, "logprobs": True}, "logprob_token_ids"),
    ],
)
def test_wrong_values_are_refused_by_name(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    for path, body in (("/v1/completions", {"prompt": "x"}), (CHAT, {"messages": messages})):
        wishes = fields | ({"logprobs": 2} if fields.get("logprobs") and path != CHAT else {})
        answer = server.post(path, **body, **wishes, max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_log_probabilities_of_given_tokens(server: ServerProcess, offline_llm: LLM, path: str, *, stream: bool) -> None:
    ids = byte_tokenizer().encode("zA0")
    prompt = byte_tokenizer().encode("u:x|a:")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprob_token_ids=ids)
    [output] = offline_llm.generate([prompt], params, use_tqdm=False)
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprob_token_ids": ids}
    body |= {"return_tokens_as_token_ids": True}
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    else:
        body |= {"prompt": prompt, "logprobs": 2}
    answer = server.post(path, **body, stream=stream)
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    else:
        choices = answer.json()["choices"]
    found: list[dict[str, float]] = []
    for part in (choice["logprobs"] for choice in choices if choice["logprobs"]):
        found += (
            part["top_logprobs"] if path != CHAT else
            [{each["token"]: each["logprob"] for each in entry["top_logprobs"]} for entry in part["content"]]
        )  # fmt: skip
    expected = [
        {f"token_id:{token}": each.logprob for token, each in entry.items()}
        for entry in output.outputs[0].logprobs or ()
    ]
    assert [set(entry) for entry in expected] == [
        {f"token_id:{token}" for token in (sampled, *ids)} for sampled in output.outputs[0].token_ids
    ]
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_echoed_prompts_have_their_likeliest_tokens_next_to_given_ones(server: ServerProcess) -> None:
    body = {"prompt": "xyz", "echo": True, "max_tokens": 2, "ignore_eos": True, "return_tokens_as_token_ids": True}
    answer = server.post("/v1/completions", **body, logprobs=0, logprob_token_ids=[5, 6]).json()
    [_, second, third, *outputs] = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert [len(second), len(third)] == [1, 1]
    assert all({"token_id:5", "token_id:6"} <= entry.keys() for entry in outputs)


@pytest.mark.parametrize("prompt", ["abcdefgh", byte_tokenizer().encode("abcdefgh")])
def test_prompt_is_truncated_at_the_wanted_side(server: ServerProcess, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "return_token_ids": True}
    for fields, expected in (
        ({"truncate_prompt_tokens": 3}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": -1}, "abcdefgh"),
        ({"truncate_prompt_tokens": 100}, "abcdefgh"),
    ):
        choice = server.post("/v1/completions", **body, **fields).json()["choices"][0]
        assert byte_tokenizer().decode(choice["prompt_token_ids"]) == expected
        assert choice["text"].startswith(expected)


def test_too_long_prompts_are_truncated_to_the_context(server: ServerProcess) -> None:
    limit = server.get("/v1/models").json()["data"][0]["max_model_len"]
    long = "x" * 3 * limit
    assert server.post("/v1/completions", prompt=long, max_tokens=1).status_code == 400
    answer = server.post("/v1/completions", prompt=long, max_tokens=1, truncate_prompt_tokens=-1).json()
    assert answer["usage"]["prompt_tokens"] == limit - 1
    messages = [{"role": "user", "content": long}]
    answer = server.post(CHAT, messages=messages, max_tokens=1, truncate_prompt_tokens=20).json()
    assert answer["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/v1/responses"])
def test_allowed_tokens_bind_all_apis(server: ServerProcess, path: str) -> None:
    body: dict[str, Any] = {
        "/v1/completions": {"prompt": "x", "max_tokens": 8},
        CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8},
        "/v1/responses": {"input": "x", "max_output_tokens": 8},
    }[path]
    answer = server.post(path, **body, allowed_token_ids=byte_tokenizer().encode("AB"), ignore_eos=True).json()
    text = (
        answer["output"][0]["content"][0]["text"] if path == "/v1/responses"
        else answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
    )  # fmt: skip
    assert len(text) == 8
    assert set(text) <= {"A", "B"}


def test_urgent_requests_end_first(bytes_dir: Path, tmp_path: Path) -> None:
    ended: list[int] = []
    flags = ("--scheduling-policy", "priority", "--max-num-seqs", "1")
    with ExitStack() as stack:
        server = stack.enter_context(running_server(bytes_dir, tmp_path / "log", *flags))
        pool = stack.enter_context(ThreadPoolExecutor())
        running = stack.enter_context(ExitStack())
        events = running.enter_context(server.stream(prompt="x", max_tokens=4000, ignore_eos=True))
        next(events)

        def ask(priority: int) -> None:
            body = {"prompt": f"{priority}", "max_tokens": 40, "ignore_eos": True, "priority": priority}
            assert server.post("/v1/completions", **body).status_code == 200
            ended.append(priority)

        asked = [pool.submit(ask, priority) for priority in (5, 3, -4)]
        server.wait_until(lambda: server.metric("num_requests_waiting") == 3)
        running.close()
        for each in asked:
            each.result()
    assert ended == [-4, 3, 5]
