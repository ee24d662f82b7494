"""One session of a client with a server: its turns run, its answers forced, its requests checked."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tests.clients.agents import INSTALLED, WORDS, Agent
from tests.clients.calls import WriteCall
from tests.clients.page import ADDRESS, PICTURE
from tests.clients.proxy import Exchange, Script, running_proxy
from tests.cpu.pictures.files import noise

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
    work = make_work(folder)
    for number, word in enumerate(WORDS, 1):
        (work / f"notes-{number}.txt").write_text(f"The word is {word}.\n")
    commands = agent.section.commands
    turns: list[tuple[str, list[tuple[int, str]]]] = []
    for number, command in enumerate(commands):
        # The last command may ask further questions.
        end = number + 1 if number + 1 < len(commands) else agent.num_turns
        due = [(turn, text) for turn in range(number, end) for text in answers(agent, turn, work, call)]
        turns.append((command, due))
    return run_turns(agent, server, folder, turns, Script(agent.tool))


def run_picture_session(agent: Agent, server: str, folder: Path, call: WriteCall) -> Session:
    """Ask about a picture, which the first answer has the client read with its tool, too; then ask another question."""
    assert agent.section.picture_command is not None
    assert agent.picture_tool is not None
    work = make_work(folder)
    # As a screenshot's, its file is small: Cline takes the file's size for tokens, and compacts what gets too long.
    noise(64, 48).resize((640, 480), Image.Resampling.NEAREST).save(work / PICTURE)
    read = call(agent.picture_tool, agent.read_picture(str(work)))
    turns = [(agent.section.picture_command, [(0, read), (int(agent.picture_begins_turn), "It shows noise.")])]
    turns += [(command, [(2, "There is none.")]) for command in agent.section.commands[1:]]
    return run_turns(agent, server, folder, turns, Script(agent.picture_tool))


def make_work(folder: Path) -> Path:
    """Make the folder in which a session runs."""
    work = folder / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q", "."], cwd=work, check=True)
    return work


def run_turns(
    agent: Agent, server: str, folder: Path, turns: Sequence[tuple[str, list[tuple[int, str]]]], script: Script
) -> Session:
    """Run commands one after the other, each with the answers that it gets."""
    home = folder / "home"
    home.mkdir()
    environment = environment_of(agent, home)
    ended, unused = [], []
    with running_proxy(server, script) as proxy:
        setup = agent.section.setup.replace(ADDRESS, proxy.url)
        try:
            for command, due in turns:
                script.answers += due
                ended.append(run(setup + command, folder / "work", environment))
                unused += script.answers
                script.answers.clear()
        finally:
            end_processes(home)
        return Session(list(proxy.exchanges), ended, unused)
