"""docs/clients.md has a section for each coding agent, with the commands and the version that its sessions run."""

import re

import pytest

from tests.clients.agents import AGENTS, CLIENTS
from tests.clients.page import ADDRESS, MODEL, PAGE
from tests.cpu.server.agent_requests import AGENT_REQUESTS

ROWS = re.findall(r"^\| \[(.+?)\]\(#.+?\) \| (\S+) \|", PAGE, re.MULTILINE)


def test_table_has_each_agent_with_its_installed_version() -> None:
    assert [(agent.title, agent.section.version) for agent in CLIENTS.values()] == ROWS


def test_page_names_what_selects_each_agent() -> None:
    [names] = re.findall(r"runs one client;\sthe\snames\sare\s(.*?)\.\s", PAGE, re.DOTALL)
    assert re.findall(r"`(\w[\w-]*)`", names) == list(CLIENTS)


@pytest.mark.parametrize("name", AGENTS)
def test_commands_name_the_server_and_the_model(name: str) -> None:
    section = AGENTS[name].section
    commands = section.setup + "".join(section.commands)
    assert ADDRESS in commands
    assert re.search(rf"\b{MODEL}\b", commands)
    assert 1 <= len(section.commands) <= 2


def test_requests_of_every_agent_are_imitated() -> None:
    assert set(CLIENTS) == set(AGENT_REQUESTS)
