"""Sessions of real clients: each is driven by the commands of docs/clients.md, with several turns and calls.

``make clients`` installs the clients and runs these tests; no other run does.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.agents import AGENTS, INSTALLED, WORDS, Agent
from tests.clients.calls import CALLS
from tests.clients.hits import shortfalls
from tests.clients.session import Session, run_session
from tests.cpu.server.process import ServerProcess

Record = Callable[[str, object], None]


@pytest.fixture(params=[name for name in AGENTS if name == os.environ.get("CLIENT", name)])
def agent(request: pytest.FixtureRequest) -> Agent:
    return AGENTS[request.param]


def test_session_is_served_and_hits_what_it_computed(
    agent: Agent,
    template: str,
    long_server: ServerProcess,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if not (INSTALLED / agent.name).exists():
        pytest.skip(f"not installed: make clients CLIENT={agent.name}")
    session = run_session(agent, long_server.url, tmp_path, CALLS[template])
    record_property("row", row(agent, template, session))
    faults = list(refusals(session))
    assert faults == [], "\n".join(faults + [turn.stdout for turn in session.ended])
    assert [turn.returncode for turn in session.ended] == [0] * len(agent.section.commands), session.ended
    words = WORDS[: agent.num_turns + 1]
    seen = str([exchange.body for exchange in session.conversation])
    if agent.tool is not None:
        assert [word for word in words if word not in seen] == [], "the client has not run a call"
    assert session.unused == [], "answers of the script that no request has asked for"
    anew = {"renders_turns_anew": template == "strict", "edits_turns": agent.edits is not None}
    assert shortfalls(session.conversation, **anew) == []


def refusals(session: Session) -> Iterator[str]:
    for exchange in session.exchanges:
        if exchange.status >= 400:
            yield f"{exchange.method} {exchange.path}: {exchange.status} {exchange.answer[:500]}"


def row(agent: Agent, template: str, session: Session) -> tuple[str, ...]:
    """Return the client's row in the table that ends a run."""
    usages = [exchange.usage for exchange in session.conversation if exchange.usage]
    hits = " ".join(f"{usage.cached}/{usage.prompt}" for usage in usages)
    return agent.title, agent.section.version, template, str(len(session.exchanges)), hits
