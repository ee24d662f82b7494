"""Label reads: questions whose answers are the probabilities of single tokens."""

import json
from math import exp
from typing import Any, Final

import pytest

from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.process import ServerProcess, http_post

STATE: Final = "The parcel weighs three kilograms and goes to Lisbon. " * 4
PREDICATE: Final = {"type": "predicate", "instructions": "Is it heavy?", "name": "heavy"}
CHOICE: Final = {
    "type": "choice",
    "instructions": "Where to?",
    "choices": [{"value": "Rome"}, {"value": True, "description": "Lisbon"}, {"value": "Oslo"}],
}
SCORE: Final = {"type": "score", "instructions": "How urgent?", "levels": [{"label": "low"}, {"label": "high"}]}


def encode(text: str) -> list[int]:
    return byte_tokenizer().encode(text)


def logprobs(server: ServerProcess, prompt: str, labels: str) -> list[float]:
    """Return the log-probabilities of one-byte labels after a prompt."""
    params = {"temperature": 0, "max_tokens": 1, "logprob_token_ids": encode(labels), "ignore_eos": True}
    answer = server.post("/inference/v1/generate", token_ids=encode(prompt), sampling_params=params).json()
    [entry] = answer["choices"][0]["logprobs"]["content"]
    by_id = {each["token_id"]: each["logprob"] for each in entry["top_logprobs"]}
    return [by_id[token] for token in encode(labels)]


def shares(found: list[float]) -> list[float]:
    """Return probabilities given that the token is one of these."""
    return [exp(logprob) / sum(map(exp, found)) for logprob in found]


def test_decisions_are_probabilities_of_labels(server: ServerProcess) -> None:
    body = {"model": "tiny", "input": STATE, "questions": [PREDICATE, CHOICE, SCORE]}
    answer = server.post("/v1/decisions", **body).json()
    predicate, choice, score = answer["answers"]
    found = logprobs(server, f"u:{STATE}\n\nQuestion: Is it heavy?\nReply with y or n only.|a:", "yn")
    assert predicate == {"type": "predicate", "name": "heavy", "probability": pytest.approx(shares(found)[0], abs=1e-5)}
    lines = "A: Rome\nB: true - Lisbon\nC: Oslo\nReply with the letter of one option only."
    found = logprobs(server, f"u:{STATE}\n\nQuestion: Where to?\n{lines}|a:", "ABC")
    assert [each["probability"] for each in choice["probabilities"]] == pytest.approx(shares(found), abs=1e-5)
    assert [each["value"] for each in choice["probabilities"]] == ["Rome", True, "Oslo"]
    assert choice["choice"] == ["Rome", True, "Oslo"][found.index(max(found))]
    assert choice["confidence"] == pytest.approx(exp(max(found)), abs=1e-5)
    assert score["score"] == pytest.approx(score["probabilities"][1]["probability"])
    assert [(each["value"], each["label"]) for each in score["probabilities"]] == [(0, "low"), (1, "high")]
    assert answer["usage"]["output_tokens"] == 3


def test_shared_text_is_computed_once(server: ServerProcess) -> None:
    questions = [{"type": "predicate", "instructions": f"{number:03} is it?"} for number in range(40)]
    text = "a text of this test alone: " + STATE
    body = {"input": text, "questions": questions, "include_cache_account": True}
    usage = server.post("/v1/decisions", **body).json()["usage"]
    num_shared = len(encode(f"u:{text}\n\nQuestion: "))
    assert [each["hit"] >= num_shared for each in usage["cache"]].count(False) == 1
    assert usage["input_tokens_details"]["cached_tokens"] == sum(each["hit"] for each in usage["cache"])


def test_input_may_be_messages(server: ServerProcess) -> None:
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    messages = [{"type": "message", "role": "user", "content": parts}]
    answers = [
        server.post("/v1/decisions", input=given, questions=[PREDICATE]).json()["answers"]
        for given in (messages, "one\ntwo")
    ]
    assert answers[0] == answers[1]


def test_systemone_answers_by_name(server: ServerProcess) -> None:
    state = {"parcel": {"kilograms": 3}}
    questions = {
        "where": {"type": "choice", "instructions": "Where to?", "criteria": {"Rome": None, "Oslo": "the capital"}},
        "heavy": {"type": "noul", "instructions": "Is it heavy?", "criteria": {"true": "over 2 kg"}},
        "urgent": {"type": "score", "instructions": "How urgent?", "criteria": ["low", "mid", "high"]},
    }
    body = {"state": state, "questions": questions, "instructions": "Be strict."}
    answer = server.post("/v1/systemone", **body).json()
    where, heavy, urgent = (answer["answers"][name] for name in questions)
    prompt = 's:Be strict.|u:{"parcel": {"kilograms": 3}}\n\nQuestion: '
    ending = "Is it heavy?\ny: yes - over 2 kg\nn: no\nReply with y or n only.|a:"
    found = logprobs(server, prompt + ending, "yn")
    assert heavy["noul"] == pytest.approx(shares(found)[0], abs=1e-5)
    assert heavy["probabilities"].keys() == {"yes", "no"}
    assert answer["diagnostics"]["heavy"]["label_mass"] == pytest.approx(sum(map(exp, found)), abs=1e-5)
    assert where["choice"] == max(where["probabilities"], key=where["probabilities"].get)
    assert urgent["legend"] == {"0": "low", "1": "mid", "2": "high"}
    assert urgent["score"] == pytest.approx(urgent["probabilities"]["1"] + 2 * urgent["probabilities"]["2"])
    assert (answer["object"], answer["joint"]) == ("structured_decision", False)


@pytest.mark.parametrize("item_first", [False, True])
def test_generative_scoring_joins_query_and_items(server: ServerProcess, *, item_first: bool) -> None:
    ids, body = encode("xyz"), {"query": "is it a city? ", "item_first": item_first}
    joined = [item + "is it a city? " if item_first else "is it a city? " + item for item in ("Paris", "a cup")]
    expected = [logprobs(server, prompt, "xyz") for prompt in joined]
    for items in (["Paris", "a cup"], [encode("Paris"), encode("a cup")]):
        fields = {**body, "items": items, "label_token_ids": ids}
        plain = server.post("/generative_scoring", **fields).json()["data"]
        assert [each["score"] for each in plain] == pytest.approx([exp(found[0]) for found in expected], abs=1e-5)
        soft = server.post("/generative_scoring", **fields, apply_softmax=True).json()["data"]
        assert [each["score"] for each in soft] == pytest.approx([shares(found)[0] for found in expected], abs=1e-5)
    assert [(each["index"], each["object"]) for each in plain] == [(0, "score"), (1, "score")]


@pytest.mark.parametrize(("first", "second"), [("queries", "documents"), ("text_1", "text_2"), ("queries", "items")])
def test_score_is_that_of_yes(server: ServerProcess, first: str, second: str) -> None:
    documents = ["a dog barks", "the sea is deep"]
    answer = server.post("/score", **{first: "animals", second: documents}, instruction="Match").json()
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "y" or "n".'
    )
    for each, document in zip(answer["data"], documents, strict=True):
        user = f"<Instruct>: Match\n\n<Query>: animals\n\n<Document>: {document}"
        found = logprobs(server, f"s:{system}|u:{user}|a:", "yn")
        assert each["score"] == pytest.approx(shares(found)[0], abs=1e-5)
    pairs = server.post("/v1/score", **{first: ["animals"] * 2, second: documents}, instruction="Match").json()
    assert [each["score"] for each in pairs["data"]] == pytest.approx([each["score"] for each in answer["data"]])


def test_rerank_sorts_and_cuts(server: ServerProcess) -> None:
    documents: list[Any] = ["one", {"text": "two"}, {"content": [{"type": "text", "text": "three"}]}]
    answers = [
        server.post(path, query="numbers", documents=documents, top_n=top_n).json()["results"]
        for path, top_n in (("/rerank", 0), ("/v1/rerank", 2), ("/v2/rerank", 9))
    ]
    whole = answers[0]
    assert sorted(each["index"] for each in whole) == [0, 1, 2]
    assert [each["document"]["text"] for each in whole] == [["one", "two", "three"][each["index"]] for each in whole]
    values = [each["relevance_score"] for each in whole]
    assert values == sorted(values, reverse=True)
    assert (answers[1], answers[2]) == (whole[:2], whole)
    raw = server.post("/rerank", query="numbers", documents=documents, use_activation=False).json()["results"]
    assert [1 / (1 + exp(-each["relevance_score"])) for each in raw] == pytest.approx(values)


DECISIONS: Final = ("/v1/decisions", {"input": "x", "questions": [PREDICATE]})
SYSTEMONE: Final = ("/v1/systemone", {"state": "x", "questions": {"a": {"type": "noul", "instructions": "?"}}})
GENERATIVE: Final = ("/generative_scoring", {"query": "q", "items": ["a"], "label_token_ids": [1]})
PAIRS: Final = ("/score", {"queries": "q", "documents": ["a"]})
RERANK: Final = ("/rerank", {"query": "q", "documents": ["a"]})


@pytest.mark.parametrize(
    ("request_of", "fields", "message"),
    [
        (DECISIONS, {"questions": []}, "questions"),
        (DECISIONS, {"questions": [PREDICATE] * 201}, "questions"),
        (DECISIONS, {"questions": [{"type": "maybe"}]}, "questions"),
        (DECISIONS, {"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "choices"),
        (DECISIONS, {"questions": [{**CHOICE, "choices": [{"value": str(n)} for n in range(27)]}]}, "27 options"),
        (DECISIONS, {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]}, "values that differ"),
        (DECISIONS, {"questions": [{**SCORE, "levels": [{"label": "a"}] * 11}]}, "levels"),
        (DECISIONS, {"questions": [{**PREDICATE, "instructions": "\ud800"}]}, "not valid Unicode"),
        (DECISIONS, {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        (DECISIONS, {"input": "x" * 100_000}, "100"),
        (DECISIONS, {"joint": True}, "joint is not supported"),
        (DECISIONS, {"temperature": 1}, "temperature"),
        (SYSTEMONE, {"questions": {}}, "questions"),
        (SYSTEMONE, {"questions": {"a": {"type": "score", "instructions": "?"}}}, "must be a list of levels"),
        (SYSTEMONE, {"questions": {"a": {"type": "choice", "instructions": "?"}}}, "0 options"),
        (SYSTEMONE, {"questions": {"a": {"type": "noul", "instructions": "?", "criteria": ["x", "y"]}}}, "an object"),
        (SYSTEMONE, {"questions": {"a": {"type": "noul", "instructions": "?", "criteria": {"x": "y"}}}}, "true and"),
        (SYSTEMONE, {"images": ["http://x"]}, "images is not supported"),
        (SYSTEMONE, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (GENERATIVE, {"items": []}, "items"),
        (GENERATIVE, {"items": [["a"]]}, "items"),
        (GENERATIVE, {"label_token_ids": []}, "label_token_ids"),
        (GENERATIVE, {"label_token_ids": [256]}, "label_token_ids"),
        (GENERATIVE, {"label_token_ids": list(range(129))}, "129 label tokens"),
        (GENERATIVE, {"items": [[256]]}, "256"),
        (GENERATIVE, {"items": ["a"] * 10_000}, "10000 outputs"),
        (PAIRS, {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "2 texts"),
        (PAIRS, {"queries": None}, "give two of these"),
        (PAIRS, {"text_1": "a"}, "give two of these"),
        (PAIRS, {"documents": []}, "documents is empty"),
        (PAIRS, {"documents": [{"image": "x"}]}, "reads text only"),
        (PAIRS, {"documents": 5}, "documents"),
        (PAIRS, {"max_tokens_per_doc": 5}, "max_tokens_per_doc is not supported"),
        (RERANK, {"max_tokens_per_query": -1}, "max_tokens_per_query is not supported"),
        (RERANK, {"top_n": -1}, "top_n"),
        (RERANK, {"query": ["a", "b"]}, "query"),
        (RERANK, {"query": {"content": [5]}}, "reads text only"),
        (RERANK, {"model": "none"}, "does not exist"),
        (RERANK, {"priority": 3}, "priority"),
    ],
)
def test_wrong_bodies_are_refused(
    server: ServerProcess, request_of: tuple[str, dict[str, Any]], fields: dict[str, Any], message: str
) -> None:
    path, body = request_of
    content, headers = json.dumps({**body, **fields}).encode(), {"Content-Type": "application/json"}
    answer = http_post(server.url + path, content=content, headers=headers)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert message in f"{error['param']} {error['message']}"
