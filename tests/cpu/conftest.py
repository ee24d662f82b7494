"""A server of the demo model, which tests of the server and of its benchmark ask, and a server of objects."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import trustme

from strandline.device import uni_executor
from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.server.process import ServerProcess, execute_server, running_server
from tests.cpu.transfer.object_server import BUCKET, environment, object_server


@pytest.fixture(scope="session", autouse=True)
def _memory_is_not_prefaulted() -> Iterator[None]:
    """Engines in the tests' process write zeros to no memory in advance: tests use a small part of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uni_executor, "PREFAULTED_BYTES", 0)
        yield


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the demo model, named ``tiny`` and ``demo``, started by the command that users run."""
    log = tmp_path_factory.mktemp("demo-server") / "log"
    flags = ("--memory", "128MiB", "--served-model-name", "tiny", "demo")
    with running_server(DEMO_DIRECTORY, log, *flags, start=execute_server) as server:
        yield server


@pytest.fixture(scope="session")
def object_server_url() -> Iterator[str]:
    with object_server() as url:
        yield url


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certificates") / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    return path


@pytest.fixture
def store_url(object_server_url: str, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where an empty object store is; environment variables lead to its server."""
    for name, value in environment(object_server_url, certificates).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid4().hex}"
