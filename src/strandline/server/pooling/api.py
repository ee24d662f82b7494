"""``/v1/embeddings`` and ``/pooling``: the final hidden state of a text's last token, as a vector.

That is how embedding models with a causal decoder are read. A generative model's vectors are less useful, but they cost
no more than a prompt, and a prefix that is cached is hit.
"""

import sys
import time
from array import array
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Any, Final, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from strandline.errors import EngineError, RequestError
from strandline.records.sampling_params import SamplingParams
from strandline.server.engines.prompt import Prompt
from strandline.server.http.request_ids import unique_id
from strandline.server.http.sse import json_response
from strandline.server.requests.request_bodies import Objects, Prompts, Whole, check_extra, truncation_of
from strandline.server.requests.service import Service, truncated_ids
from strandline.server.requests.usage_and_logprobs import Json, usage

TASKS: Final = ("embed",)
NOT_SERVED: Final = {"features": (), "embed_dtype": ("float32",), "endianness": ("native", "little")}
WITHOUT_EFFECT: Final = frozenset({"request_id", "user"})


class EmbeddingsBody(BaseModel):
    """Body of ``/v1/embeddings``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    input: Prompts | None = None
    messages: Objects | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Whole | None = None
    normalize: bool | None = None
    """Scale vectors to length 1; None: do so."""
    use_activation: bool | None = None
    """What vLLM calls ``normalize``."""
    add_special_tokens: bool = True
    add_generation_prompt: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: Whole | None = None
    truncation_side: str | None = None
    priority: Whole | None = None
    cache_salt: str | None = None
    include_cache_account: bool = False


class PoolingBody(EmbeddingsBody):
    """Body of ``/pooling``."""

    task: str | None = None


async def embed(service: Service, body: EmbeddingsBody, request: Request) -> Response:
    """Handle a request to ``/v1/embeddings``."""
    vectors, counts = await _read(service, body, request)
    shown = [_shown(vector, body) for vector in vectors]
    data = [{"index": index, "object": "embedding", "embedding": each} for index, each in enumerate(shown)]
    return json_response(_list("embd", service, body, data, counts))


async def pool(service: Service, body: PoolingBody, request: Request) -> Response:
    """Handle a request to ``/pooling``."""
    if body.task not in (None, *TASKS):
        raise RequestError(f"task must be one of {', '.join(TASKS)}; got {body.task!r:.100}", param="task")
    vectors, counts = await _read(service, body, request)
    shown = [_shown(vector, body) for vector in vectors]
    data = [{"index": index, "object": "pooling", "data": each} for index, each in enumerate(shown)]
    return json_response(_list("pool", service, body, data, counts))


async def _read(service: Service, body: EmbeddingsBody, request: Request) -> tuple[list[Sequence[float]], Json]:
    """Return a vector for each input, and the numbers of tokens."""
    service.require_model(body.model)
    check_extra(body.model_extra, NOT_SERVED, WITHOUT_EFFECT)
    if (body.input is None) == (body.messages is None):
        raise RequestError("give either input or messages", param="input")
    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, priority=body.priority or 0,
        returns_hidden_state=True,
    )  # fmt: skip
    given = _given(body)
    with service.client.expect(len(given)):
        prompts = [await _prompt(service, body, each) for each in given]
        checked = await service.check(params)
    salt = partial(service.salt_of, request, body.cache_salt, body.model)
    with service.submit(f"embed-{unique_id()}", prompts, checked, salt) as job:
        await job.whole()
    counts = usage(job.streams, is_batch=True, with_account=body.include_cache_account)
    return [_vector(stream.hidden_state, body) for stream in job.streams], counts


def _given(body: EmbeddingsBody) -> list[Any]:
    """Return the inputs, a text or token ids each; a conversation is one."""
    given: Any = body.input
    if body.messages is not None:
        return [body.messages]
    if not given:
        raise RequestError("the input is empty; at least one token is needed", param="input")
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


async def _prompt(service: Service, body: EmbeddingsBody, given: Any) -> Prompt:
    limit = service.client.frontend.limits.max_model_len
    truncation = truncation_of(body.truncate_prompt_tokens, body.truncation_side, limit)
    if body.messages is not None:
        return await service.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            template_options=body.chat_template_kwargs,
            salt=None,
            truncation=truncation,
        )
    if isinstance(given, str):
        return await service.encode(given, add_special_tokens=body.add_special_tokens, truncation=truncation)
    return Prompt(given if truncation is None else truncated_ids(given, truncation))


def _vector(state: bytes | None, body: EmbeddingsBody) -> Sequence[float]:
    """Return a hidden state, float32 of the machine, as the request wants it.

    Raises:
        RequestError: it has fewer dimensions.
    """
    if state is None:
        raise EngineError("the engine returned no hidden state")
    vector = array("f", state)
    if body.dimensions is not None and not 1 <= body.dimensions <= len(vector):
        raise RequestError(
            f"dimensions must be between 1 and the {len(vector)} of the model, got {body.dimensions}",
            param="dimensions",
        )
    vector = vector[: body.dimensions]
    is_scaled = body.normalize is not False and body.use_activation is not False
    length = sqrt(sum(value * value for value in vector)) if is_scaled else 1.0
    return array("f", (value / (length or 1.0) for value in vector))


def _shown(vector: Sequence[float], body: EmbeddingsBody) -> list[float] | str:
    """Return a vector as numbers, or as base64 of little-endian float32."""
    if body.encoding_format == "float":
        return list(vector)
    data = array("f", vector)
    if sys.byteorder == "big":
        data.byteswap()
    return b64encode(data.tobytes()).decode()


def _list(kind: str, service: Service, body: EmbeddingsBody, data: list[Json], counts: Json) -> Json:
    """Return vectors as the APIs do. Only prompts count as tokens."""
    shown = {"prompt_tokens": counts["prompt_tokens"], "total_tokens": counts["prompt_tokens"]}
    more = {name: counts[name] for name in ("prompt_tokens_details", "cache") if name in counts}
    return {
        "id": f"{kind}-{unique_id()}",
        "object": "list",
        "created": int(time.time()),
        "model": service.name_of(body.model),
        "data": data,
        "usage": {**shown, **more},
    }
