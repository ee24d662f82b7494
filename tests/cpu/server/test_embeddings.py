"""``/v1/embeddings`` and ``/pooling``: final hidden states as vectors."""

import base64
from array import array
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModel

from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.process import ServerProcess

TEXTS = ["a text about whales", "another one, about bread", "x"]


@pytest.fixture(scope="module")
def expected(bytes_dir: Path) -> list[torch.Tensor]:
    """What transformers computes: the final hidden states of the texts' last tokens."""
    model = AutoModel.from_pretrained(bytes_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = [torch.tensor([byte_tokenizer().encode(text)]) for text in TEXTS]
        return [model(each).last_hidden_state[0, -1] for each in ids]


def vectors(server: ServerProcess, **fields: Any) -> torch.Tensor:
    answer = server.post("/v1/embeddings", **{"model": "tiny", "input": TEXTS, **fields})
    assert answer.status_code == 200, answer.text
    return torch.tensor([each["embedding"] for each in answer.json()["data"]])


def test_vectors_are_normalised_final_hidden_states(server: ServerProcess, expected: list[torch.Tensor]) -> None:
    wanted = torch.stack(expected)
    unit = wanted / wanted.norm(dim=-1, keepdim=True)
    for _ in range(2):  # the second time, prompts are hit as a whole
        torch.testing.assert_close(vectors(server), unit, rtol=1e-4, atol=1e-5)
    for name in ("normalize", "use_activation"):
        torch.testing.assert_close(vectors(server, **{name: False}), wanted, rtol=1e-4, atol=1e-4)
    short = wanted[:, :5] / wanted[:, :5].norm(dim=-1, keepdim=True)
    torch.testing.assert_close(vectors(server, dimensions=5), short, rtol=1e-4, atol=1e-5)
    ids = [byte_tokenizer().encode(text) for text in TEXTS]
    assert vectors(server, input=ids).equal(vectors(server))
    assert vectors(server, input=ids[0]).equal(vectors(server, input=TEXTS[0]))


def test_openais_client_reads_them(client: openai.OpenAI, server: ServerProcess) -> None:
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    found = torch.tensor([each.embedding for each in answer.data])
    torch.testing.assert_close(found, vectors(server))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))


def test_base64_is_of_little_endian_floats(server: ServerProcess) -> None:
    [data] = server.post("/v1/embeddings", input="x", encoding_format="base64").json()["data"]
    found = torch.tensor(array("f", base64.b64decode(data["embedding"])))
    assert found.equal(vectors(server, input="x")[0])


def test_pooling_answers_with_data(server: ServerProcess) -> None:
    for task in ({}, {"task": "embed"}):
        answer = server.post("/pooling", input=TEXTS[0], **task).json()
        assert torch.tensor(answer["data"][0]["data"]).equal(vectors(server, input=TEXTS[0])[0])


def test_conversations_are_rendered(server: ServerProcess) -> None:
    found = vectors(server, input=None, messages=[{"role": "user", "content": "hi"}])
    assert found.equal(vectors(server, input="u:hi|"))


def test_inputs_are_truncated(server: ServerProcess) -> None:
    found = vectors(server, input="abcdef", truncate_prompt_tokens=3)
    assert found.equal(vectors(server, input="def"))
    found = vectors(server, input=byte_tokenizer().encode("abcdef"), truncate_prompt_tokens=3, truncation_side="right")
    assert found.equal(vectors(server, input="abc"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[256]]}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 33}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"features": {"x": 1}}, "features"),
        ({"priority": 1}, "priority"),
        ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"endianness": "big"}, "endianness"),
    ],
)
def test_wrong_values_are_refused_by_name(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        answer = server.post(path, **{"input": "x", **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_unknown_tasks_are_refused(server: ServerProcess) -> None:
    assert server.post("/pooling", input="x", task="classify").json()["error"]["param"] == "task"
