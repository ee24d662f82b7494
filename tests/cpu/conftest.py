"""A server of the demo model, which tests of the server and of its benchmark ask."""

from collections.abc import Iterator

import pytest

from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.server.process import ServerProcess, execute_server, running_server


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the demo model, named ``tiny`` and ``demo``, started by the command that users run."""
    log = tmp_path_factory.mktemp("demo-server") / "log"
    flags = ("--memory", "128MiB", "--served-model-name", "tiny", "demo")
    with running_server(DEMO_DIRECTORY, log, *flags, start=execute_server) as server:
        yield server
