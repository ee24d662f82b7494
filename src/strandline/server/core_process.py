"""The process that computes: ``python -m strandline.server.core_process ADDRESS``, started by the front end.

It ends when its standard input closes, which happens when the front end ends, whatever the reason.
Signals are the front end's business, so that Ctrl-C in a terminal does not end what a drain still needs.
"""

import signal
import sys

import zmq

from strandline.engine.core import EngineCore
from strandline.engine.loading import load_core
from strandline.errors import ConfigError
from strandline.server.messages import (
    ENCODER,
    TO_CORE,
    AskCache,
    AskStats,
    AskWhy,
    CacheShown,
    Died,
    Explained,
    Finish,
    FromCore,
    Ready,
    Refused,
    Start,
    Stats,
    Stepped,
    Submit,
    ToCore,
)

Socket = zmq.Socket[bytes]
LINGER_MS = 2000


class CoreLoop:
    """Steps while there is work; takes in messages before every step, so that an abort waits for one at most."""

    def __init__(self, core: EngineCore, socket: Socket, lifeline: int) -> None:
        """
        Args:
            lifeline: a file descriptor; when it closes, the loop ends.
        """
        self._core = core
        self._socket = socket
        self._lifeline = lifeline
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(lifeline, zmq.POLLIN)
        self._is_stopped = False

    def run(self) -> None:
        """Serve until the lifeline closes."""
        self._take_messages()
        while not self._is_stopped:
            if self._core.has_unfinished:
                self._send(Stepped(self._core.step()))
            self._take_messages()

    def _take_messages(self) -> None:
        """Obey what has come; wait for something when there is no work."""
        ready = dict(self._poller.poll(0 if self._core.has_unfinished else None))
        if self._lifeline in ready:
            self._is_stopped = True
        while self._socket in ready and not self._is_stopped:
            try:
                self._obey(TO_CORE.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return

    def _obey(self, message: ToCore) -> None:
        match message:
            case Submit(submissions):
                for submission in submissions:
                    self._core.add(submission)
            case Finish(request_ids):
                for request_id in request_ids:
                    self._core.finish(request_id)
            case AskStats():
                self._send(Stats(self._core.stats()))
            case AskCache(number, salt):
                self._send(CacheShown(number, self._core.watch.state(salt, self._core.stats())))
            case AskWhy(number, question):
                self._send(Explained(number, self._core.watch.answer(question)))

    def _send(self, message: FromCore) -> None:
        self._socket.send(ENCODER.encode(message))


def serve_core(socket: Socket, lifeline: int) -> int:
    """Load what the first message names, and serve it; return the exit code."""
    start = TO_CORE.decode(socket.recv())
    if not isinstance(start, Start):
        return 2
    try:
        core = load_core(start.config)
    except ConfigError as error:
        socket.send(ENCODER.encode(Refused(str(error))))
        return 2
    socket.send(ENCODER.encode(Ready(core.limits, core.describe())))
    try:
        CoreLoop(core, socket, lifeline).run()
    except Exception as error:
        # The process's edge: whatever it was, it is ours, and a doubtful state is never served.
        socket.send(ENCODER.encode(Died(f"{type(error).__name__}: {error}")))
        raise
    return 0


def main() -> int:
    """Run the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.linger = LINGER_MS
        socket.connect(sys.argv[1])
        return serve_core(socket, sys.stdin.fileno())


if __name__ == "__main__":
    sys.exit(main())
