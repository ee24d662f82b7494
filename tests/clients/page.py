"""The set-up of each client, read from docs/clients.md: the only source of what is installed and typed."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
"""The server's address on the page."""
MODEL = "local"
"""The model's name on the page."""
PICTURE = "screenshot.png"
"""The name of the picture on the page."""


@dataclass(frozen=True)
class Section:
    """What the page says of a client.

    Attributes:
        installer: ``npm`` or ``pipx``.
        package: the package, with its version.
        setup: shell commands that set the client up.
        commands: shell commands that ask questions.
        picture_command: one that asks about a picture; None: the client sends none.
    """

    installer: str
    package: str
    setup: str
    commands: tuple[str, ...]
    picture_command: str | None

    @property
    def version(self) -> str:
        return re.split("==|(?<=.)@", self.package)[-1]


def section(title: str) -> Section:
    """Return what the page says under a heading."""
    found = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/clients.md has no section {title!r}"
    text = found[1]
    [(installer, package)] = re.findall(r"^```\n(npm|pipx) install (?:-g )?(\S+)\n```$", text, re.MULTILINE)
    setup, *commands = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    picture_command = next((command for command in commands if PICTURE in command), None)
    return Section(
        installer, package, setup, tuple(each for each in commands if each != picture_command), picture_command
    )
