"""The clients that ``make clients`` drives: a record for each."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.clients.page import ROOT, Section, section

INSTALLED = ROOT / ".clients"
"""Holds a folder for each client that ``make clients`` has installed."""

WORDS = ("marzipan", "quince", "walnut")
"""The words in the files ``notes-1.txt`` and so on, which sessions read."""


@dataclass(frozen=True)
class Agent:
    """A client, and what differs in its sessions.

    Attributes:
        name: the name in ``make clients CLIENT=name``.
        title: the heading of its section in docs/clients.md.
        tool: the tool that its sessions call; None: it has no tools, and writes files from its answers' text.
        arguments: the arguments of a call that reads ``notes-{}.txt``.
        environment: variables that stop a client from using the network for something else.
        last_call: the arguments of the call that ends a session; None: a text ends each turn.
        num_turns: the number of questions that its commands ask.
        picture_tool: the tool that reads a picture; None: there is none that returns pictures.
        picture_arguments: the arguments of a call that reads ``screenshot.png``.
        num_pictures: how often a session about a picture sends it: attached to the question, and read by the tool.
        picture_begins_turn: the picture that the tool has read comes in a message of the user, which begins a turn.
        edits: what the client itself changes in its earlier messages when a turn begins; None: nothing.
    """

    name: str
    title: str
    tool: str | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    last_call: Mapping[str, Any] | None = None
    edits: str | None = None
    num_turns: int = 2
    picture_tool: str | None = None
    picture_arguments: Mapping[str, Any] = field(default_factory=dict)
    num_pictures: int = 0
    picture_begins_turn: bool = False

    @property
    def section(self) -> Section:
        return section(self.title)

    def read(self, number: int, folder: str) -> dict[str, Any]:
        """Return the arguments of a call that reads a file of notes in a folder."""
        text = json.dumps(self.arguments)
        read: dict[str, Any] = json.loads(text.replace("{}", str(number)).replace("{folder}", folder))
        return read

    def read_picture(self, folder: str) -> dict[str, Any]:
        """Return the arguments of a call that reads the picture in a folder."""
        read: dict[str, Any] = json.loads(json.dumps(self.picture_arguments).replace("{folder}", folder))
        return read


CAT = {"command": "cat notes-{}.txt"}
NO_COSTS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "claude",
            "Claude Code",
            "Bash",
            {**CAT, "description": "Read notes"},
            {"DISABLE_TELEMETRY": "1"},
            picture_tool="Read",
            picture_arguments={"file_path": "{folder}/screenshot.png"},
            num_pictures=1,
        ),
        Agent(
            "codex",
            "Codex CLI",
            "exec_command",
            {"cmd": "cat notes-{}.txt"},
            picture_tool="view_image",
            picture_arguments={"path": "{folder}/screenshot.png"},
            num_pictures=2,
        ),
        Agent(
            "opencode",
            "OpenCode",
            "bash",
            {**CAT, "description": "Read notes"},
            {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
            picture_tool="read",
            picture_arguments={"filePath": "{folder}/screenshot.png"},
            num_pictures=2,
            picture_begins_turn=True,
        ),
        Agent(
            "cline",
            "Cline",
            "run_commands",
            {"commands": ["cat notes-{}.txt"]},
            {"DO_NOT_TRACK": "1"},
            num_turns=1,
            picture_tool="read_files",
            picture_arguments={"files": [{"path": "{folder}/screenshot.png"}]},
            num_pictures=1,
            picture_begins_turn=True,
        ),
        Agent("continue", "Continue", "Bash", CAT, {"CONTINUE_TELEMETRY_ENABLED": "0"}),
        Agent(
            "qwen",
            "Qwen Code",
            "read_file",
            {"file_path": "{folder}/notes-{}.txt"},
            edits="leaves out the date",
            picture_tool="read_file",
            picture_arguments={"file_path": "{folder}/screenshot.png"},
            num_pictures=2,
            picture_begins_turn=True,
        ),
        Agent(
            "pi",
            "pi",
            "bash",
            CAT,
            {"PI_OFFLINE": "1"},
            picture_tool="read",
            picture_arguments={"path": "screenshot.png"},
            num_pictures=2,
            picture_begins_turn=True,
        ),
        Agent("copilot", "Copilot CLI", "bash", {**CAT, "description": "Read notes"}),
        Agent("aider", "aider", None, {}, NO_COSTS, edits="sends files with their current text"),
        Agent(
            "mini",
            "mini-swe-agent",
            "bash",
            CAT,
            NO_COSTS,
            last_call={"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"},
        ),
        Agent("gptme", "gptme", "shell", CAT),
    )
}

OPEN_WEBUI = Agent("open-webui", "Open WebUI", "bash", CAT, {"WEBUI_AUTH": "False", "OFFLINE_MODE": "True"})
"""A server of web pages, whose sessions are driven through its own API."""

CLIENTS = {**AGENTS, OPEN_WEBUI.name: OPEN_WEBUI}


def is_selected(client: Agent) -> bool:
    """Return whether ``make clients`` is to drive a client: the one that the variable CLIENT names, or each."""
    return os.environ.get("CLIENT", client.name) == client.name
