"""More clients than the server has file descriptors for."""

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.cpu.server.process import ServerProcess

NUM_SPARE = 16
NUM_CLIENTS = 40


@contextmanager
def few_files(server: ServerProcess) -> Iterator[None]:
    """Let a server open only a few more files."""
    pid = server.process.pid
    num_open = len(os.listdir(f"/proc/{pid}/fd"))
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open + NUM_SPARE, limits[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_server_without_free_files_logs_once_and_recovers(impatient_server: ServerProcess) -> None:
    with few_files(impatient_server), ExitStack() as clients:
        for _ in range(NUM_CLIENTS):
            clients.enter_context(impatient_server.connect()).sendall(b"GET /health HTTP/1.1\r\n")
        assert impatient_server.get("/health").status_code == 200
    log = impatient_server.log()
    assert log.count("no file descriptor is free") == 1
    assert "ulimit -n" in log
    assert "Traceback" not in log
