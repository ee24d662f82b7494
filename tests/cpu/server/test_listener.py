"""More clients than the server has file descriptors for."""

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cpu.server.process import ServerProcess, running_server

NUM_SPARE = 16
NUM_CLIENTS = 100


@contextmanager
def few_files(server: ServerProcess) -> Iterator[None]:
    """Let a server open only a few more files."""
    pid = server.process.pid
    num_open = len(os.listdir(f"/proc/{pid}/fd"))
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open + NUM_SPARE, limits[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_server_without_free_files_logs_once_and_recovers(bytes_dir: Path, tmp_path: Path) -> None:
    with running_server(bytes_dir, tmp_path / "log", "--client-timeout-s", "2") as server, few_files(server):
        with ExitStack() as clients:
            for _ in range(NUM_CLIENTS):
                clients.enter_context(server.connect()).sendall(b"GET /health HTTP/1.1\r\n")
            assert server.get("/health").status_code == 200
        log = server.log()
        assert log.count("no file descriptor is free") == 1
        assert "ulimit -n" in log
        assert "Traceback" not in log
