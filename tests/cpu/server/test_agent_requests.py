"""Sessions in the shapes of coding agents' requests are served, and each request hits what the last one computed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.calls import CALLS, WriteCall
from tests.clients.hits import shortfalls
from tests.clients.model import TEMPLATES, save_long_model, template_flags
from tests.clients.proxy import Exchange, force
from tests.clients.usage import usage_of
from tests.cpu.server.agent_requests import AGENT_REQUESTS, STEPS, TOOL, AgentRequests, Call, Question
from tests.cpu.server.process import ServerProcess, http_post, running_server


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


def session(client: AgentRequests, server: ServerProcess, call: WriteCall) -> list[Exchange]:
    """Send the requests of a session, and return them with their answers."""
    exchanges = []
    has_tools = bool(client.body(STEPS[:1]).get("tools"))
    turn = 0
    for number, step in enumerate(STEPS):
        if isinstance(step, Question):
            turn += 1
            continue
        if isinstance(step, Call) and not has_tools:
            continue
        forced = call(TOOL, step.arguments) if isinstance(step, Call) else step.text
        before = [each for each in STEPS[:number] if has_tools or not isinstance(each, Call)]
        body = force(client.path.split("?")[0], client.body(before), forced)
        response = http_post(server.url + client.path, json=body, headers=dict(client.headers))
        exchange = Exchange("POST", client.path, dict(client.headers), body, forced, turn, response.status_code)
        exchange.answer = response.text
        exchange.usage = usage_of(response.text)
        exchanges.append(exchange)
    return exchanges


@pytest.mark.parametrize("name", AGENT_REQUESTS)
def test_sessions_of_agents_hit_what_they_computed(name: str, served: tuple[str, ServerProcess]) -> None:
    template, server = served
    client = AGENT_REQUESTS[name]
    exchanges = session(client, server, CALLS[template])
    assert [(each.status, each.answer[:300]) for each in exchanges if each.status != 200] == []
    assert shortfalls(exchanges, renders_turns_anew=template == "strict", edits_turns=client.edits) == []
