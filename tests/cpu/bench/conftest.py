"""What the serving benchmark's tests share: a server of the demo model, and flags as a user gives them."""

from argparse import Namespace
from collections.abc import Iterator

import pytest

from strandline.cli import build_parser
from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.server.process import ServerProcess, running_server


def serve_options(*flags: str) -> Namespace:
    """Return what ``strandline bench serve`` makes of flags."""
    options: Namespace = build_parser().parse_args(["bench", "serve", *flags])
    return options


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the demo model, named ``tiny`` and ``demo``."""
    log = tmp_path_factory.mktemp("demo-server") / "log"
    with running_server(DEMO_DIRECTORY, log, "--memory", "128MiB", "--served-model-name", "tiny", "demo") as server:
        yield server
