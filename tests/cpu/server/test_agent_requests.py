"""Sessions in the shapes of coding agents' requests are served, and each request hits what the last one computed."""

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clients.calls import CALLS, WriteCall
from tests.clients.hits import shortfalls
from tests.clients.model import TEMPLATES, save_long_model, template_flags
from tests.clients.proxy import Exchange, force
from tests.clients.usage import usage_of
from tests.cpu.pictures.files import encoded, noise
from tests.cpu.server.agent_requests import AGENT_REQUESTS, STEPS, TOOL, AgentRequests, Answer, Call, Question, Step
from tests.cpu.server.process import ServerProcess, http_post, running_server
from tests.cpu.server.vision_model import SIDE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module", params=TEMPLATES)
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ServerProcess]]:
    """The name of a template, and a server with it."""
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(model, log, "--memory", "128MiB", *template_flags(request.param)) as server:
        yield request.param, server


def ask(client: AgentRequests, server: ServerProcess, steps: Sequence[Step], answer: str) -> Exchange:
    """Send the request that follows some steps, with its answer forced."""
    begins_turns = client.pictures == "in a user message" and bool(steps[0].picture)
    body = force(client.path.split("?")[0], {**client.body(steps), "cache_salt": client.headers["User-Agent"]}, answer)
    response = http_post(server.url + client.path, json=body, headers=dict(client.headers))
    turn = sum(isinstance(step, Question) or (begins_turns and isinstance(step, Call)) for step in steps)
    exchange = Exchange("POST", client.path, dict(client.headers), body, answer, turn, response.status_code)
    exchange.answer = response.text
    exchange.usage = usage_of(response.text)
    return exchange


def session(
    client: AgentRequests, server: ServerProcess, call: WriteCall, steps: Sequence[Step] = STEPS
) -> list[Exchange]:
    """Send the requests of a session, and return them with their answers."""
    has_tools = "tools" in client.body(steps[:1])
    steps = [step for step in steps if has_tools or not isinstance(step, Call)]
    exchanges = []
    for number, step in enumerate(steps):
        if not isinstance(step, Question):
            answer = call(TOOL, step.arguments) if isinstance(step, Call) else step.text
            exchanges.append(ask(client, server, steps[:number], answer))
    return exchanges


MAX_TAIL_TOKENS = 90
"""Upper bound of the tokens of a first question, of what a client adds to it, and of the template's after it."""


@pytest.mark.parametrize("name", AGENT_REQUESTS)
def test_sessions_of_agents_hit_what_they_computed(name: str, served: tuple[str, ServerProcess]) -> None:
    template, server = served
    client = AGENT_REQUESTS[name]
    exchanges = session(client, server, CALLS[template])
    assert [(each.status, each.answer[:300]) for each in exchanges if each.status != 200] == []
    assert shortfalls(exchanges, renders_turns_anew=template == "strict", edits_turns=client.edits) == []
    # A new session shares what precedes its first question.
    again = ask(client, server, [Question("How many files are there?")], "Two.").usage
    assert again is not None
    assert again.cached >= again.prompt - MAX_TAIL_TOKENS


@pytest.mark.parametrize("served", ["strict"], indirect=True)
@pytest.mark.parametrize("name", [name for name, client in AGENT_REQUESTS.items() if client.pictures])
def test_pictures_of_agents_are_hit_by_the_requests_that_follow(name: str, served: tuple[str, ServerProcess]) -> None:
    template, server = served
    client = AGENT_REQUESTS[name]
    steps: list[Step] = [
        Question("What is in a.png?", png(1)),
        Call("b.png", "Image read", png(2)),
        Answer("A picture."),
        Question("And in c.png?"),
        Call("c.png", "Image read", png(3)),
        Answer("A picture, too."),
    ]
    first, second, third, fourth = exchanges = session(client, server, CALLS[template], steps)
    assert [(each.status, each.answer[:300]) for each in exchanges if each.status != 200] == []
    assert shortfalls(exchanges, renders_turns_anew=True, edits_turns=client.edits) == []
    for before, after in ((first, second), (third, fourth)):
        assert before.usage is not None
        assert after.usage is not None
        assert after.usage.prompt > before.usage.prompt + before.usage.completion + PICTURE_TOKENS


@pytest.mark.parametrize("served", ["strict"], indirect=True)
def test_next_turn_hits_a_picture_after_few_words(served: tuple[str, ServerProcess]) -> None:
    client = AGENT_REQUESTS["open-webui"]
    steps: list[Step] = [Question("Hm?", png(4)), Answer("Noise."), Question("Is it?"), Answer("Yes.")]
    exchanges = session(client, served[1], CALLS[served[0]], steps)
    assert shortfalls(exchanges, renders_turns_anew=True, edits_turns=False) == []


PICTURE_TOKENS = 300


def png(seed: int) -> str:
    """Return a picture of ``PICTURE_TOKENS`` tokens, in base64."""
    return base64.b64encode(encoded(noise(20 * SIDE, 15 * SIDE, seed), "PNG")).decode()
