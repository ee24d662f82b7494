"""``/inference/v1/generate``: tokens in, tokens out."""

import json
from typing import Any, Final

import pytest

from strandline import LLM, SamplingParams
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.process import ServerProcess, http_stream

GENERATE: Final = "/inference/v1/generate"
PROMPT: Final = byte_tokenizer().encode("tokens in, tokens out")


def generate(server: ServerProcess, **params: Any) -> dict[str, Any]:
    """Return the answer to the prompt."""
    answer = server.post(GENERATE, token_ids=PROMPT, sampling_params=params)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_tokens_and_log_probabilities_are_the_engines(server: ServerProcess, offline_llm: LLM) -> None:
    wanted: dict[str, Any] = {"temperature": 0.7, "seed": 3, "max_tokens": 9, "logprobs": 2, "ignore_eos": True}
    [expected] = offline_llm.generate([PROMPT], SamplingParams(**wanted), use_tqdm=False)
    answer = generate(server, **wanted, detokenize=False)
    [choice] = answer["choices"]
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert (choice["finish_reason"], choice["stop_reason"], answer["output_mode"]) == ("length", None, "tokens")
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["usage"]["completion_tokens"] == 9
    for found, entry in zip(choice["logprobs"]["content"], expected.outputs[0].logprobs or (), strict=True):
        (token, sampled), *_ = entry.items()
        assert (found["token_id"], found["rank"]) == (token, sampled.rank)
        assert found["logprob"] == pytest.approx(sampled.logprob, abs=1e-5)
        top = sorted((x["rank"], x["token_id"]) for x in found["top_logprobs"])
        assert top == sorted((x.rank, token) for token, x in entry.items() if x.rank <= 2)


def test_prompt_and_given_tokens_have_log_probabilities(server: ServerProcess) -> None:
    answer = generate(server, max_tokens=2, temperature=0, prompt_logprobs=0, logprob_token_ids=[65, 66])
    assert answer["prompt_logprobs"][0] is None
    assert [int(token) for entry in answer["prompt_logprobs"][1:] for token in entry] == PROMPT[1:]
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert {x["token_id"] for x in entry["top_logprobs"]} == {65, 66, entry["token_id"]}


def test_outputs_differ_and_number_as_asked(server: ServerProcess) -> None:
    choices = generate(server, n=3, seed=1, max_tokens=8, ignore_eos=True)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3


def test_stream_adds_up_to_the_answer(server: ServerProcess) -> None:
    params = {"temperature": 1, "seed": 5, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    whole = generate(server, **params)["choices"][0]
    body = {"token_ids": PROMPT, "sampling_params": params, "stream": True, "stream_options": {"include_usage": True}}
    with http_stream("POST", server.url + GENERATE, json=body) as response:
        *data, done = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    *parts, last = map(json.loads, data)
    assert done == "[DONE]"
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == whole["token_ids"]
    entries = [entry for part in parts for entry in part["choices"][0]["logprobs"]["content"]]
    assert [x["token_id"] for x in entries] == whole["token_ids"]
    assert [part["choices"][0]["finish_reason"] for part in parts][-1] == "length"
    assert last["usage"]["completion_tokens"] == 6


def test_defaults_are_those_of_sampling_parameters(server: ServerProcess) -> None:
    assert len(generate(server, ignore_eos=True)["choices"][0]["token_ids"]) == 16
    answer = server.post(GENERATE, token_ids=PROMPT, request_id="mine", model="tiny").json()
    assert (answer["request_id"], answer["model"]) == ("mine", "tiny")


def test_stop_strings_end_tokens(server: ServerProcess) -> None:
    letters = byte_tokenizer().encode("abcdefghijklmnopqrstuvwxyz")
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "allowed_token_ids": letters}
    ids = generate(server, **params)["choices"][0]["token_ids"]
    stop = byte_tokenizer().decode(ids[2:3])
    choice = generate(server, **params, stop=[stop])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == ids[: ids.index(ids[2]) + 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [256]}, "prompt"),
        ({"token_ids": [-1]}, "prompt"),
        ({"token_ids": [2**70]}, "prompt"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": [1.0]}, "token_ids"),
        ({"sampling_params": 5}, "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"n": 2, "temperature": 0}}, "n"),
        ({"sampling_params": {"max_tokens": -1}}, "max_tokens"),
        ({"sampling_params": {"repetition_detection": {"window": 1}}}, "repetition_detection"),
        ({"sampling_params": {"prompt_logprobs": 0}, "stream": True}, "prompt_logprobs"),
        ({"sampling_params": {"structured_outputs": {"choise": ["a"]}}}, "structured_outputs"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"output_mode": "derender"}, "output_mode"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"stream_options": {}}, "stream_options"),
        ({"priority": 2}, "priority"),
    ],
)
def test_wrong_values_are_refused_by_name(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    answer = server.post(GENERATE, **{"token_ids": PROMPT, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_every_api_returns_token_ids(server: ServerProcess) -> None:
    user = [{"role": "user", "content": "x"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "u:x|a:", "max_tokens": 3},
        "/v1/chat/completions": {"messages": user, "max_tokens": 3},
        "/v1/responses": {"input": "x", "max_output_tokens": 3},
        "/v1/messages": {"messages": user, "max_tokens": 3},
    }
    for path, body in bodies.items():
        plain = server.post(path, **body, temperature=0.0).json()
        answer = server.post(path, **body, temperature=0.0, return_token_ids=True).json()
        assert "token_ids" not in json.dumps(plain)
        choice = answer.get("choices", [answer])[0]
        assert len(choice["token_ids"]) == 3, path
        prompt_ids = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
        assert byte_tokenizer().decode(prompt_ids) == "u:x|a:", path


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    ],
)
def test_streams_return_token_ids_at_the_end(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    fields = {**body, "temperature": 0.0, "return_token_ids": True}
    whole = server.post(path, **fields).json()
    with http_stream("POST", server.url + path, json={**fields, "stream": True}) as response:
        data = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: {")]
    ends = [event.get("response", event).get("token_ids") for event in data]
    assert [ids for ids in ends if ids] == [whole["token_ids"]]
