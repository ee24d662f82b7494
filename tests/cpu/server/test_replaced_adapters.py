"""Requests of an adapter that is replaced while their prompts are prepared."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from strandline.records.adapters import LoadedAdapter, adapter_of
from strandline.server.completions.chat_api import chat
from strandline.server.completions.completions_api import complete
from strandline.server.generate.api import GenerateBody, generate
from strandline.server.messages.api import MessagesBody, create_message
from strandline.server.pooling.api import EmbeddingsBody, embed
from strandline.server.requests.adapters import Adapters, LoadBody
from strandline.server.requests.request_bodies import ChatBody, CompletionBody
from strandline.server.requests.service import Service
from strandline.server.responses.api import ResponsesBody, create_response
from strandline.text.frontend import Frontend, Limits
from tests.cpu.engine.tokenizers import byte_tokenizer

USER = [{"role": "user", "content": "x"}]
HANDLERS: list[tuple[Callable[..., Any], Any]] = [
    (complete, CompletionBody(model="a", prompt="x")),
    (chat, ChatBody(model="a", messages=USER)),
    (create_response, ResponsesBody(model="a", input="x")),
    (create_message, MessagesBody(model="a", messages=USER, max_tokens=1)),
    (embed, EmbeddingsBody(model="a", input="x")),
    (generate, GenerateBody(model="a", token_ids=[1])),
]


class Submitted(Exception):
    """Ends a request with the salt that it is submitted with."""


class Client:
    """The engines' client, as far as requests need it until they are submitted."""

    first_adapters = (LoadedAdapter("a", "", "old", 1),)

    def __init__(self) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = "{{ messages[0].content }}"
        self.frontend = Frontend(Limits(256, 64), tokenizer=tokenizer)

    def expect(self, _: int) -> AbstractContextManager[None]:
        return nullcontext()

    async def load_adapter(self, name: str, path: str) -> LoadedAdapter:
        return LoadedAdapter(name, path, "new", 1)

    def unload_adapter(self, _: LoadedAdapter) -> None:
        pass

    def submit(self, _name: str, _prompts: Sequence[Any], _params: Any, salt: str, *_: Any, **__: Any) -> Any:
        raise Submitted(salt)


@pytest.mark.parametrize(("handle", "body"), HANDLERS, ids=lambda value: getattr(value, "__name__", ""))
def test_request_is_submitted_with_the_adapter_of_that_moment(
    handle: Callable[..., Any], body: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = Client()
    service = Service(client, ["x"], adapters=Adapters(client, ["x"], tmp_path))
    check = Service.check

    async def check_after_load(self: Service, params: Any) -> Any:
        await self.adapters.load(LoadBody(lora_name="a", lora_path=str(tmp_path), load_inplace=True))
        return await check(self, params)

    monkeypatch.setattr(Service, "check", check_after_load)
    with pytest.raises(Submitted) as submitted:
        asyncio.run(handle(service, body, Request({"type": "http"})))
    assert adapter_of(str(submitted.value)) == "new"
