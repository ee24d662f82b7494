"""A request for which no token can be sampled, or one of whose outputs fails, gets an error; the engine goes on."""

import asyncio

import httpx
import pytest

from strandline.ids import NO_TOKEN
from strandline.records.events import FinishReason, StepEvents, TokenEvent
from strandline.records.messages import Stepped
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.process import ServerProcess, http_post
from tests.cpu.server.test_queue import held_server


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("temperature", [0, 1])
def test_request_without_a_possible_token_gets_an_error(
    server: ServerProcess, is_streamed: bool, temperature: int
) -> None:
    banned = list(range(VOCAB_SIZE))
    body = {"prompt": "Hello", "max_tokens": 4, "min_tokens": 2, "stop_token_ids": banned, "temperature": temperature}
    response = http_post(f"{server.url}/v1/completions", json={**body, "stream": is_streamed})
    assert response.status_code == (200 if is_streamed else 500)
    assert "no token could be sampled" in response.text
    plain = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    again = http_post(f"{server.url}/v1/completions", json=plain)
    assert again.json()["usage"]["completion_tokens"] == 4


def test_failed_output_is_answered_with_the_text_of_its_exception() -> None:
    async def ask() -> httpx.Response:
        async with held_server() as server:
            server.may_go.set()
            asked = asyncio.ensure_future(server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4}))
            [submission] = (await server.core.submitted.get()).submissions
            name, text = submission.new.request_id, "ValueError: planted"
            server.core.say(Stepped(StepEvents([TokenEvent(name, NO_TOKEN, None, FinishReason.ERROR, text, None)])))
            return await asked

    response = asyncio.run(ask())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "output_failed"
    assert response.json()["error"]["message"].endswith(": ValueError: planted")
