"""Sessions of real clients: each is driven by the commands of docs/clients.md, with several turns and calls.

``make clients`` installs the clients and runs these tests; no other run does.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.clients.agents import AGENTS, INSTALLED, OPEN_WEBUI, WORDS, Agent, is_selected
from tests.clients.calls import CALLS
from tests.clients.hits import shortfalls
from tests.clients.page import MODEL
from tests.clients.proxy import Exchange, Script, running_proxy
from tests.clients.session import run_picture_session, run_session
from tests.clients.web_ui import chat, running_web_ui
from tests.cpu.server.process import ServerProcess

Record = Callable[[str, object], None]
PICTURE_DATA = re.compile(r'"(?:data:image/\w+;base64,|data": "(?:iVBOR|/9j/))')
"""Where a picture begins in a request."""


@pytest.fixture(params=[name for name, agent in AGENTS.items() if is_selected(agent)])
def agent(request: pytest.FixtureRequest) -> Agent:
    return AGENTS[request.param]


def test_session_is_served_and_hits_what_it_computed(
    agent: Agent,
    template: str,
    long_server: ServerProcess,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    require(agent)
    session = run_session(agent, long_server.url, tmp_path, CALLS[template])
    record_property("row", row(agent, template, session.exchanges))
    faults = list(refusals(session.exchanges))
    assert faults == [], "\n".join(faults + [turn.stdout for turn in session.ended])
    assert [turn.returncode for turn in session.ended] == [0] * len(agent.section.commands), session.ended
    words = WORDS[: agent.num_turns + 1]
    seen = str([exchange.body for exchange in session.conversation])
    if agent.tool is not None:
        assert [word for word in words if word not in seen] == [], "the client has not run a call"
    assert session.unused == [], "answers of the script that no request has asked for"
    anew = {"renders_turns_anew": template == "strict", "edits_turns": agent.edits is not None}
    assert shortfalls(session.conversation, **anew) == []


@pytest.mark.parametrize("template", ["strict"], indirect=True)
def test_pictures_are_sent_and_hit_by_the_requests_that_follow(
    agent: Agent,
    template: str,
    long_server: ServerProcess,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    require(agent)
    if not agent.num_pictures:
        pytest.skip("the client sends no pictures")
    session = run_picture_session(agent, long_server.url, tmp_path, CALLS[template])
    record_property("row", row(agent, template, session.exchanges))
    faults = list(refusals(session.exchanges))
    assert faults == [], "\n".join(faults + [turn.stdout for turn in session.ended])
    assert [turn.returncode for turn in session.ended] == [0] * len(session.ended), session.ended
    assert session.unused == [], "answers of the script that no request has asked for"
    assert len(PICTURE_DATA.findall(json.dumps(session.conversation[-1].body))) == agent.num_pictures
    assert shortfalls(session.conversation, renders_turns_anew=True, edits_turns=agent.edits is not None) == []


@pytest.mark.skipif(not is_selected(OPEN_WEBUI), reason="another client is selected")
def test_open_webui_lists_models_chats_and_makes_titles(
    template: str, long_server: ServerProcess, tmp_path: Path, record_property: Record
) -> None:
    require(OPEN_WEBUI)
    script = Script(OPEN_WEBUI.tool)
    with running_proxy(long_server.url, script) as proxy, running_web_ui(OPEN_WEBUI, proxy.url, tmp_path) as web_ui:
        assert MODEL in [model["id"] for model in web_ui.get("/api/models").json()["data"]]
        messages = chat(web_ui, script, CALLS[template])
        web_ui.post("/api/v1/tasks/title/completions", json={"model": MODEL, "messages": messages})
    record_property("row", row(OPEN_WEBUI, template, proxy.exchanges))
    assert list(refusals(proxy.exchanges)) == []
    assert script.answers == []
    conversation = [exchange for exchange in proxy.exchanges if exchange.forced is not None]
    assert len(conversation) < len([exchange for exchange in proxy.exchanges if exchange.usage])
    assert shortfalls(conversation, renders_turns_anew=template == "strict", edits_turns=False) == []


def require(client: Agent) -> None:
    if not (INSTALLED / client.name).exists():
        pytest.skip(f"not installed: make clients CLIENT={client.name}")


def refusals(exchanges: Sequence[Exchange]) -> Iterator[str]:
    for exchange in exchanges:
        if exchange.status >= 400:
            yield f"{exchange.method} {exchange.path}: {exchange.status} {exchange.answer[:500]}"


def row(client: Agent, template: str, exchanges: Sequence[Exchange]) -> tuple[str, ...]:
    """Return the client's row in the table that ends a run."""
    usages = [exchange.usage for exchange in exchanges if exchange.forced is not None and exchange.usage]
    hits = " ".join(f"{usage.cached}/{usage.prompt}" for usage in usages)
    return client.title, client.section.version, template, str(len(exchanges)), hits
