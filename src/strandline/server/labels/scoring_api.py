"""``/generative_scoring``, ``/score`` and ``/rerank``: how likely given tokens follow pairs of texts, in vLLM's bodies.

A model that answers yes or no scores a pair by the two probabilities, as rerankers that generate do: it is that of yes,
given that the answer is one of them.
"""

import time
from collections.abc import Mapping, Sequence
from math import exp
from typing import Annotated, Any, Final

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strandline.errors import RequestError
from strandline.server.http.request_ids import unique_id
from strandline.server.http.sse import json_response
from strandline.server.labels.questions import Reading
from strandline.server.labels.reads import LabelReads
from strandline.server.requests.request_bodies import NOT_SERVED, Prompts, Tokens, Whole, check_extra, sent_as
from strandline.server.requests.service import Service
from strandline.server.requests.usage_and_logprobs import Json

SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "{}" or "{}".'
)
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""The wording that published rerankers of this kind were trained with."""
NOT_SERVED_OF_PAIRS: Final = {**NOT_SERVED, "max_tokens_per_query": (0,), "max_tokens_per_doc": (0,)}
"""Fields that are not supported, among them those that would cut texts, and values that change nothing."""
TEXT_NAMES: Final = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"))

Texts = str | dict[str, Any] | list[str | dict[str, Any]]


class ScoringFields(BaseModel):
    """Fields that all bodies share."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    cache_salt: str | None = None
    priority: Whole | None = None
    include_cache_account: bool = False


class GenerativeBody(ScoringFields):
    """Body of ``/generative_scoring``."""

    query: str | Tokens
    items: Prompts
    label_token_ids: Annotated[Tokens, Field(min_length=1)]
    apply_softmax: bool = False
    item_first: bool = False
    add_special_tokens: bool = True


class PairFields(ScoringFields):
    """Fields of pairs of a query and a document."""

    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    use_activation: bool | None = None

    def value(self, reading: Reading) -> float:
        """Return the score of a pair: the probability of yes, or what a sigmoid makes it of."""
        if self.use_activation is False:
            yes, no = reading.logprobs
            return yes - no
        return reading.probabilities[0]


class ScoreBody(PairFields):
    """Body of ``/score``."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs, of one query with all documents, or of each with its own.

        Raises:
            RequestError: there are no two texts under names that belong together, or their numbers do not match.
        """
        given = {name for pair in TEXT_NAMES for name in pair if getattr(self, name) is not None}
        names = next((pair for pair in TEXT_NAMES if set(pair) == given), None)
        if names is None:
            wanted = ", ".join(f"{first} and {second}" for first, second in TEXT_NAMES)
            raise RequestError(f"give two of these alone: {wanted}; got {', '.join(sorted(given)) or 'none'}")
        first, second = (_texts(getattr(self, name), name) for name in names)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise RequestError(
                f"{names[0]} has {len(first)} texts and {names[1]} has {len(second)}: one and several, or equally many",
                param=names[1],
            )
        return list(zip(first, second, strict=True))


class RerankBody(PairFields):
    """Body of ``/rerank``."""

    query: str | dict[str, Any]
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] = 0
    """Most results; 0: all."""


async def score_generatively(service: Service, body: GenerativeBody, request: Request) -> Response:
    """Handle a request to ``/generative_scoring``."""
    check_extra(body.model_extra)
    reads = LabelReads.of(service, request, body)
    items: Sequence[Any] = body.items if isinstance(body.items, list) else [body.items]
    if not items:
        raise RequestError("items is empty; at least one is needed", param="items")
    if isinstance(items[0], int):
        items = [items]
    with service.client.expect(len(items)):
        prompts = await _joined(service, body, items)
    with sent_as({"logprob_token_ids": "label_token_ids", "prompt": "items"}):
        entries = await reads.read(prompts, list(dict.fromkeys(body.label_token_ids)))
    scores = []
    for entry in entries:
        reading = Reading([entry[token].logprob for token in body.label_token_ids], is_label_likeliest=False)
        scores.append(reading.probabilities[0] if body.apply_softmax else exp(reading.logprobs[0]))
    return json_response(_score_list("generative-scoring", service, body, reads, scores))


async def score(service: Service, body: ScoreBody, request: Request) -> Response:
    """Handle a request to ``/score``."""
    check_extra(body.model_extra, NOT_SERVED_OF_PAIRS)
    reads = LabelReads.of(service, request, body)
    readings = await _judge(reads, body, body.pairs())
    return json_response(_score_list("score", service, body, reads, [body.value(reading) for reading in readings]))


async def rerank(service: Service, body: RerankBody, request: Request) -> Response:
    """Handle a request to ``/rerank``."""
    check_extra(body.model_extra, NOT_SERVED_OF_PAIRS)
    reads = LabelReads.of(service, request, body)
    [query], documents = _texts(body.query, "query"), _texts(body.documents, "documents")
    readings = await _judge(reads, body, [(query, document) for document in documents])
    results = [
        {"index": index, "document": {"text": document}, "relevance_score": body.value(reading)}
        for index, (document, reading) in enumerate(zip(documents, readings, strict=True))
    ]
    results.sort(key=lambda result: -float(result["relevance_score"]))  # type: ignore[arg-type]
    return json_response(
        {
            "id": f"rerank-{unique_id()}",
            "model": service.name_of(body.model),
            "usage": reads.usage(with_account=body.include_cache_account),
            "results": results[: body.top_n or None],
        }
    )


async def _joined(service: Service, body: GenerativeBody, items: Sequence[Any]) -> list[list[int]]:
    """Return the prompts: the query's tokens, and each item's after or before them."""

    async def tokens(given: str | list[int], is_first: bool) -> list[int]:
        if not isinstance(given, str):
            return given
        special = body.add_special_tokens and is_first
        return (await service.encode(given, add_special_tokens=special)).token_ids

    query = await tokens(body.query, not body.item_first)
    found = [await tokens(item, body.item_first) for item in items]
    return [item + query if body.item_first else query + item for item in found]


async def _judge(reads: LabelReads, body: PairFields, pairs: Sequence[tuple[str, str]]) -> list[Reading]:
    """Ask for each pair whether the document meets what the query asks for."""
    instruction = body.instruction or INSTRUCTION
    queries = list(dict.fromkeys(query for query, _ in pairs))
    head = f"<Instruct>: {instruction}\n\n<Query>:" + (f" {queries[0]}\n\n<Document>:" if len(queries) == 1 else "")
    yes_or_no = await reads.yes_or_no()
    messages = [{"role": "system", "content": SYSTEM.format(*yes_or_no)}, {"role": "user", "content": head}]
    endings = [
        f" {document}" if len(queries) == 1 else f" {query}\n\n<Document>: {document}" for query, document in pairs
    ]
    return await reads.judge(messages, endings, [yes_or_no] * len(endings), body.chat_template_kwargs)


def _score_list(kind: str, service: Service, body: ScoringFields, reads: LabelReads, scores: Sequence[float]) -> Json:
    return {
        "id": f"{kind}-{unique_id()}",
        "object": "list",
        "created": int(time.time()),
        "model": service.name_of(body.model),
        "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
        "usage": reads.usage(with_account=body.include_cache_account),
    }


def _texts(given: Any, param: str) -> list[str]:
    """Return texts that are given as such, as objects with a text, or with a content of text parts.

    Raises:
        RequestError: one is none of these, or there are none.
    """
    found = [_text(each, param) for each in (given if isinstance(given, list) else [given])]
    if not found:
        raise RequestError(f"{param} is empty; at least one text is needed", param=param)
    return found


def _text(given: Any, param: str) -> str:
    if isinstance(given, Mapping):
        parts = given.get("content") if isinstance(given.get("content"), list) else [given]
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts or ()]
        given = "".join(texts) if texts and all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]
    if not isinstance(given, str):
        raise RequestError(f"{param} must hold texts, or objects with a text; this model reads text only", param=param)
    return given
