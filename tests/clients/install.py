"""Install the clients of docs/clients.md, each into a folder of its own: ``python -m tests.clients.install [NAME]``."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.agents import CLIENTS, INSTALLED, Agent

MIN_NODE = 20


def missing_programs(agents: list[Agent]) -> str | None:
    """Return why some of the clients cannot be installed; None if they can."""
    names = [agent.name for agent in agents if agent.section.installer == "npm"]
    if not names:
        return None
    wanted = f"Node.js {MIN_NODE} or later and npm, which {', '.join(names)} need"
    absent = [name for name in ("node", "npm") if shutil.which(name) is None]
    if absent:
        return f"make clients needs {wanted}: there is no {' and no '.join(absent)} on the path"
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    found = re.match(r"v(\d+)", version)
    if found is None or int(found[1]) < MIN_NODE:
        return f"make clients needs {wanted}: node is {version}"
    return None


def install(agent: Agent) -> None:
    """Install a client, unless its folder has that version."""
    folder = INSTALLED / agent.name
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == agent.section.package:
        return
    sys.stderr.write(f"installing {agent.section.package}\n")
    shutil.rmtree(folder, ignore_errors=True)
    if agent.section.installer == "npm":
        folder.mkdir(parents=True)
        run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, agent.section.package])
    else:
        run([sys.executable, "-m", "venv", folder])
        run([folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", agent.section.package])
    stamp.write_text(agent.section.package)


def run(command: list[str | Path]) -> None:
    subprocess.run(command, check=True)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in CLIENTS]
    if unknown:
        sys.stderr.write(f"there is no client {unknown[0]!r}; the clients are {', '.join(CLIENTS)}\n")
        return 2
    agents = [CLIENTS[name] for name in names or CLIENTS]
    problem = missing_programs(agents)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
        return 1
    for agent in agents:
        install(agent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
