"""``/cache``: a page that shows the content of the cache and why requests missed, and the JSON behind it.

The page itself is static and public. Its data need the API key, if there is one. Entries under a salt are shown only to
requests with that salt, and prompts' text only if the server is configured to show it.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import unquote

import msgspec
from fastapi import FastAPI, Header, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from strandline.errors import RequestError
from strandline.records.cache_questions import CacheQuestion, CacheState
from strandline.records.pictures import with_virtual_ids
from strandline.server.engines.prompt import Prompt
from strandline.server.http.host_check import host_of
from strandline.server.http.host_names import is_local
from strandline.server.http.sse import json_response
from strandline.server.messages.api import CountBody, render
from strandline.server.requests.request_bodies import Objects, Tokens, chat_options
from strandline.server.requests.service import Service
from strandline.text.cache_report import Json, TextOf, account_data, answer_data, excerpt_text

PAGE: Final = Path(__file__).parent / "static" / "cache.html"
MAX_TEXTS: Final = 8192


class ExplainBody(BaseModel):
    """Body of ``/cache/explain``: a request's id, or a prompt as text, token ids or conversation.

    A conversation with ``system``, ``thinking`` or Anthropic's form of tools is read as Anthropic's, others as
    OpenAI's.
    """

    model_config = ConfigDict(strict=True)

    model: str | None = None
    request_id: str | None = None
    prompt: str | Tokens | None = None
    messages: Annotated[Objects, Field(min_length=1)] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    system: str | Objects | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    engine: int | None = None
    """The engine to ask; None: the one that knows the request, or would hit most of the prompt."""

    def as_anthropics(self) -> CountBody | None:
        """Return the conversation as a body of Anthropic's API, or None if it is OpenAI's."""
        is_theirs = any(given is not None for given in (self.system, self.thinking, self.output_config))
        is_theirs = is_theirs or any("function" not in tool for tool in self.tools or ())
        if self.messages is None or not is_theirs:
            return None
        return CountBody(
            messages=self.messages,
            system=self.system,
            tools=self.tools,
            thinking=self.thinking,
            output_config=self.output_config,
        )


class CachePage:
    """The page's data. If texts are hidden, the caller's own prompt is still shown."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._texts: dict[tuple[int, ...], str] = {}

    async def state(self, salt: str, text_of: TextOf, engine: int | None = None) -> Json:
        """Return the tree, recent lookups, and memory over time of an engine; None: of the first that runs.

        Raises:
            RequestError: there is no such engine.
        """
        engines = self._service.client.engines
        if engine is None:
            engine = next((each.number for each in engines if each.failure is None), 0)
        self._require_engine(engine)
        state = await engines[engine].show_cache(salt)
        data = await self._service.in_thread(lambda: self._state_data(state, text_of))
        return {**data, "engine": engine, "num_engines": len(engines)}

    def _require_engine(self, number: int) -> None:
        num_engines = len(self._service.client.engines)
        if not 0 <= number < num_engines:
            raise RequestError(f"there is no engine {number}: engines are numbered from 0 to {num_engines - 1}")

    def _state_data(self, state: CacheState, text_of: TextOf) -> Json:
        data: Json = msgspec.to_builtins(state)
        for run, shown in zip(data["tree"]["runs"], state.tree.runs, strict=True):
            del run["head"]
            run["text"] = excerpt_text(shown.head, text_of)
        data["lookups"] = [
            {
                "request_id": row.request_id,
                "salt_label": row.salt_label,
                "age_s": row.age_s,
                "account": account_data(row.account),
                "text": excerpt_text(row.head, text_of),
            }
            for row in state.lookups
        ]
        data["model"] = self._service.model_names[0]
        data["control_tokens"] = self._control_tokens()
        data["shows_text"] = text_of(()) is not None
        return data

    def _control_tokens(self) -> list[str]:
        """Return the control tokens' names, which the page leaves out of one-line texts."""
        added = getattr(self._service.client.frontend.tokenizer, "added_tokens_decoder", {})
        return [token.content for token in added.values() if token.special]

    async def explain(self, body: ExplainBody, salt: str, text_of: TextOf) -> Json:
        """Explain a request or a prompt under a salt.

        Raises:
            RequestError: the request is no longer known, the prompt cannot be served, or there is no such engine.
        """
        self._service.require_model(body.model)
        if body.engine is not None:
            self._require_engine(body.engine)
        tokens, num_remembered = await self._tokens(body, salt)
        question = CacheQuestion(salt, body.request_id, tokens, num_remembered)
        engine, answer = await self._service.client.explain(question, body.engine)
        if answer.problem is not None:
            raise RequestError(answer.problem)
        data = await self._service.in_thread(lambda: answer_data(answer, self.text_of))
        parting = data["parting"]
        if parting is not None and text_of(()) is None:
            parting["cached"] = []
            if tokens is None:
                parting["before"] = parting["prompt"] = None
        return {**data, "engine": engine}

    async def _tokens(self, body: ExplainBody, salt: str) -> tuple[list[int] | None, int]:
        """Return the tokens of a prompt, and how many of them are encoded as earlier answers were generated."""
        given = [body.request_id, body.prompt, body.messages]
        if sum(value is not None for value in given) != 1:
            raise RequestError("give one of request_id, prompt and messages")
        if body.request_id is not None:
            return None, 0
        theirs = body.as_anthropics()
        if theirs is not None:
            prompt = await render(
                self._service, theirs, theirs.conversation(self._service.picture_placeholders()), salt
            )
        elif body.messages is not None:
            prompt = await self._service.render(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                tools=body.tools or (),
                template_options=chat_options(body.reasoning_effort, body.chat_template_kwargs),
                salt=salt,
            )
        elif isinstance(body.prompt, str):
            prompt = await self._service.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            prompt = Prompt(body.prompt or [])
        self._check(prompt.token_ids)
        self._service.client.frontend.picture_names.note(prompt.pictures)
        tokens = with_virtual_ids(prompt.token_ids, [span for span, _ in prompt.pictures])
        return tokens, prompt.recollection.num_tokens if prompt.recollection is not None else 0

    def _check(self, tokens: Sequence[int]) -> None:
        limits = self._service.client.frontend.limits
        if not 0 < len(tokens) <= limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; it must have at least 1 and at most max_model_len "
                f"{limits.max_model_len}"
            )
        wrong = [token for token in tokens if not 0 <= token < limits.vocab_size]
        if wrong:
            raise RequestError(f"prompt token {wrong[0]} is not in the vocabulary [0, {limits.vocab_size})")

    def text_of(self, tokens: Sequence[int]) -> str | None:
        """Return the text of tokens, cached because pages request the same texts repeatedly."""
        tokenizer = self._service.client.frontend.tokenizer
        if tokenizer is None:
            return " ".join(map(str, tokens))
        key = tuple(tokens)
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= MAX_TEXTS:
                self._texts.clear()
            names = self._service.client.frontend.picture_names
            text = self._texts[key] = names.text_of(key, lambda ids: str(tokenizer.decode(ids)))
        return text


def add_cache_page(app: FastAPI, service: Service, mode: str) -> None:
    """Add the page and its data, unless the mode is ``off``.

    Args:
        mode: ``text``, ``local`` (text if requested by a local host name), ``counts`` or ``off``.
    """
    if mode == "off":
        return
    page = CachePage(service)
    html = PAGE.read_bytes()
    headers = {"Content-Security-Policy": _policy(html), "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}

    def text_of(request: Request) -> TextOf:
        # A foreign page whose host name resolves to this machine (DNS rebinding) sends that name.
        name = host_of(request.scope)
        shows_text = mode == "text" or (mode == "local" and name is not None and is_local(name))
        return page.text_of if shows_text else _no_text

    @app.get("/cache", response_class=HTMLResponse)
    async def show_page() -> Response:
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    @app.get("/cache/state")
    async def show_state(
        request: Request, x_cache_salt: Annotated[str, Header()] = "", engine: int | None = None
    ) -> Response:
        return _fresh(await page.state(service.salt_of(request, unquote(x_cache_salt), None), text_of(request), engine))

    @app.post("/cache/explain")
    async def explain(request: Request, body: ExplainBody) -> Response:
        return _fresh(await page.explain(body, service.salt_of(request, body.cache_salt, body.model), text_of(request)))


def _no_text(_: Sequence[int]) -> None:
    return None


def _fresh(data: Json) -> Response:
    response = json_response(data)
    response.headers["Cache-Control"] = "no-store"
    return response


def _policy(html: bytes) -> str:
    """Return a policy that allows only the page's own script and style, and connections to this server."""

    def hashes(tag: bytes) -> str:
        found = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)

    return (
        f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
