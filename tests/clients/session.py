"""One session of a client with a server: its turns run, its answers forced, its requests checked."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.agents import INSTALLED, WORDS, Agent
from tests.clients.calls import WriteCall
from tests.clients.page import ADDRESS
from tests.clients.proxy import Exchange, Script, running_proxy

TURN_TIMEOUT_S = 300


def answers(agent: Agent, turn: int, folder: Path, call: WriteCall) -> list[str]:
    """Return the answers of a turn: two calls and a text in the first, one call and a text in the second."""
    if agent.tool is None:
        return [f"notes-1.txt\n```\nThe word is {WORDS[turn]}.\n```\n"]
    numbers = [1, 2] if turn == 0 else [turn + 2]
    calls = [call(agent.tool, agent.read(number, str(folder))) for number in numbers]
    end = (
        f"The last word is {WORDS[numbers[-1] - 1]}." if agent.last_call is None else call(agent.tool, agent.last_call)
    )
    return [*calls, end]


def end_processes(home: Path) -> None:
    """End what a client left running, such as a daemon: processes whose home folder is the session's."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


@dataclass(frozen=True)
class Session:
    """What a client sent and got, and how its commands ended."""

    exchanges: Sequence[Exchange]
    ended: Sequence["subprocess.CompletedProcess[str]"]
    unused: Sequence[tuple[int, str]]
    """The script's answers that no request took."""

    @property
    def conversation(self) -> list[Exchange]:
        """The requests of the conversation itself, which the script answered."""
        return [exchange for exchange in self.exchanges if exchange.forced is not None]


def run(command: str, folder: Path, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a command line of the page."""
    return subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TURN_TIMEOUT_S,
    )


def environment_of(client: Agent, home: Path) -> dict[str, str]:
    """Return the variables of a client's processes: nothing of the user's own but the path."""
    binaries = INSTALLED / client.name
    return {
        "PATH": os.pathsep.join([f"{binaries}/node_modules/.bin", f"{binaries}/bin", os.environ["PATH"]]),
        "HOME": str(home),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        **client.environment,
    }


def run_session(agent: Agent, server: str, folder: Path, call: WriteCall) -> Session:
    """Run the commands of a client's section of the page in a folder of its own."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    for number, word in enumerate(WORDS, 1):
        (work / f"notes-{number}.txt").write_text(f"The word is {word}.\n")
    subprocess.run(["git", "init", "-q", "."], cwd=work, check=True)
    environment = environment_of(agent, home)
    script = Script(agent.tool)
    commands = agent.section.commands
    ended, unused = [], []
    with running_proxy(server, script) as proxy:
        setup = agent.section.setup.replace(ADDRESS, proxy.url)
        try:
            for number, command in enumerate(commands):
                # The last command may ask further questions.
                end = number + 1 if number + 1 < len(commands) else agent.num_turns
                for turn in range(number, end):
                    script.answers += [(turn, text) for text in answers(agent, turn, work, call)]
                ended.append(run(setup + command, work, environment))
                unused += script.answers
                script.answers.clear()
        finally:
            end_processes(home)
        return Session(list(proxy.exchanges), ended, unused)
