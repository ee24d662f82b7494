"""A process that has imported what a server's processes need, and forks them: ``python -m tests.cpu.server.template``.

Each of them then runs its module as ``python -m`` does, with the arguments, environment, directory and descriptors that
it was asked for; only its imports, three seconds of computing for a server, have been done. Operations take one thread:
OpenMP reads ``OMP_NUM_THREADS`` when it is loaded. A template has one thread itself and has computed nothing. It ends
when its standard input closes.
"""

import gc
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from fcntl import F_DUPFD, fcntl
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tests.cpu.server.forked import MAX_MESSAGE, ForkedProcess, Question, Wanted, fork_workers

MAX_DESCRIPTORS: Final = 16


class Child:
    """A process, and the connection to the one that asked for it."""

    def __init__(self, pid: int, asker: int, connection: socket.socket) -> None:
        self.pid = pid
        self.asker = asker
        self.connection = connection
        self.has_ended = False
        self.is_wanted = True
        self.ends = os.pidfd_open(pid)


class Template:
    """Forks what is asked for. The child returns from ``serve``; the template does not.

    An ended process stays a zombie until the one that asked for it closes the connection, as a child does until it is
    waited for.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._children: list[Child] = []

    def serve(self) -> tuple[Wanted, list[int]]:
        """Serve until standard input closes; return, in each child, what it should be and its descriptors."""
        while True:
            poller = select.poll()
            for fd in (sys.stdin.fileno(), self._listener.fileno()):
                poller.register(fd, select.POLLIN)
            for child in self._children:
                if not child.has_ended:
                    poller.register(child.ends, select.POLLIN)
                if child.is_wanted:
                    poller.register(child.connection, select.POLLIN)
            ready = {fd for fd, _ in poller.poll()}
            if sys.stdin.fileno() in ready:
                os._exit(0)
            for child in list(self._children):
                self._look_after(child, ready)
            if self._listener.fileno() in ready:
                found = self._answer(self._listener.accept()[0])
                if found is not None:
                    return found

    def _look_after(self, child: Child, ready: set[int]) -> None:
        if not child.has_ended and child.ends in ready:
            child.has_ended = True
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            if child.is_wanted:
                _send(child.connection, code)
        if child.is_wanted and child.connection.fileno() in ready:
            child.is_wanted = False
            if not child.has_ended:
                child.connection.close()
        if child.has_ended and not child.is_wanted:
            os.waitpid(child.pid, 0)
            os.close(child.ends)
            child.connection.close()
            self._children.remove(child)

    def _answer(self, connection: socket.socket) -> tuple[Wanted, list[int]] | None:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE, MAX_DESCRIPTORS)
        if not data:
            connection.close()
            return None
        message: Wanted | Question = pickle.loads(data)
        if isinstance(message, Question):
            running = [x.pid for x in self._children if x.asker == message.asker and not x.has_ended]
            _send(connection, running)
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._leave(connection)
            return message, descriptors
        for fd in descriptors:
            os.close(fd)
        self._children.append(Child(pid, message.asker, connection))
        _send(connection, pid)
        return None

    def _leave(self, connection: socket.socket) -> None:
        """Close, in a child, what belongs to the template."""
        connection.close()
        self._listener.close()
        for child in self._children:
            child.connection.close()
            os.close(child.ends)


def _send(connection: socket.socket, message: object) -> None:
    """Send a message, unless the process at the other end has ended."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(pickle.dumps(message))


def become(wanted: Wanted, descriptors: list[int]) -> None:
    """Run a module as ``python -m`` does, in a child."""
    moved = [fcntl(fd, F_DUPFD, max(wanted.numbers) + 1) for fd in descriptors]  # where none will be in the way
    for fd in descriptors:
        os.close(fd)
    for fd, number in zip(moved, wanted.numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(wanted.directory)
    os.environ.clear()
    os.environ.update(wanted.environment)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [wanted.module, *wanted.arguments]
    runpy.run_module(wanted.module, run_name="__main__", alter_sys=True)


def prepare_engine(address: str) -> None:
    """Import what an engine's process imports. It has its workers forked, by this template at its address."""
    from strandline.engine.processes import core_loop, core_process, worker
    from strandline.engine.workers import worker_link
    from strandline.kernels import runtime_numba

    package = Path(runtime_numba.__file__).parent
    for path in sorted(package.rglob("*_numba.py")):
        import_module(".".join(("strandline.kernels", *path.relative_to(package).with_suffix("").parts)))
    assert import_module("transformers").PreTrainedTokenizerFast
    assert core_loop.CoreLoop  # the engine's process imports it when workers have begun
    for module in (core_process, worker):  # they are run, not imported
        del sys.modules[module.__name__]
    patched: Any = worker_link
    patched.subprocess = fork_workers(address)


def prepare_front_end(engines: str) -> None:
    """Import what a server's HTTP process imports. It has its engines forked, by the template at an address."""
    from strandline.server import launch
    from strandline.server.engines import spawned_engine

    launch._keep_torch_out()
    assert import_module("transformers").PreTrainedTokenizerFast

    def fork(command: list[str], *, stdin: int, pass_fds: list[int]) -> ForkedProcess:
        assert (command[:2], stdin) == ([sys.executable, "-m"], subprocess.PIPE)
        descriptors = {fd: fd for fd in (1, 2, *pass_fds)}
        return ForkedProcess(engines, command[2], command[3:], descriptors, has_pipe=True)

    patched: Any = spawned_engine
    patched.subprocess = SimpleNamespace(Popen=fork, PIPE=subprocess.PIPE)


def main() -> None:
    """Run the template, then the module that a child is asked to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    address, *engines = sys.argv[1:]
    if engines:
        prepare_front_end(engines[0])
    else:
        prepare_engine(address)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with several threads cannot be forked"
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}-new")
        listener.listen()
        os.rename(f"{address}-new", address)
        wanted, descriptors = Template(listener).serve()
    become(wanted, descriptors)


if __name__ == "__main__":
    main()
