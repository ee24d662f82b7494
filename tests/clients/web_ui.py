"""Open WebUI: its server started as on the page, and a conversation through its API."""

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.clients.agents import Agent
from tests.clients.calls import WriteCall
from tests.clients.page import ADDRESS, MODEL
from tests.clients.proxy import Script
from tests.clients.session import environment_of

PORT = "8080"
"""The port on the page."""
START_TIMEOUT_S = 300
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@contextmanager
def running_web_ui(client: Agent, server: str, folder: Path) -> Iterator[httpx.Client]:
    """Run the commands of the page, and yield a client that is signed in."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    [command] = client.section.commands
    command = client.section.setup.replace(ADDRESS, server) + "exec " + command.replace(PORT, port)
    environment = {**environment_of(client, folder), "DATA_DIR": str(folder / "data")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-ec", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as web_ui:
            wait_until_healthy(web_ui, process, folder / "log")
            signed_in = web_ui.post("/api/v1/auths/signin", json={"email": "", "password": ""})
            web_ui.headers["Authorization"] = f"Bearer {signed_in.json()['token']}"
            yield web_ui
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def wait_until_healthy(web_ui: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            if web_ui.get("/health").is_success:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    raise TimeoutError(log.read_text())


def chat(web_ui: httpx.Client, script: Script, write: WriteCall) -> list[dict[str, Any]]:
    """Ask two questions, which a call and then a text answer; return the messages."""
    messages: list[dict[str, Any]] = []
    for turn, name in enumerate(("notes-1.txt", "notes-2.txt")):
        script.answers += [(turn, write("bash", {"command": f"cat {name}"})), (turn, f"That was {name}.")]
        messages.append({"role": "user", "content": f"What is the word in the file {name}? Answer in a few words."})
        for _ in range(2):
            body = {"model": MODEL, "messages": messages, "tools": [TOOL], "stream": False}
            answer = web_ui.post("/api/chat/completions", json=body).json()["choices"][0]["message"]
            messages.append(answer)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"The word in {name} is marzipan."}
                for call in answer.get("tool_calls") or ()
            ]
            messages += results
    return messages
