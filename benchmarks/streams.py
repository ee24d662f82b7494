"""CPU time that the HTTP process takes per streamed token, with an engine that computes nothing.

    PYTHONPATH=src python benchmarks/streams.py --streams 1024 --endpoint completions chat --step-ms 200

``strandline serve demo`` runs with a stub in place of the engine's process: once as many requests have come as there
are streams, each step gives every stream a random token, as the engine would say it. Steps begin at least
``--step-ms`` after each other: a process that has time for them writes one event per token. With 0, they come as fast
as the stub can encode them, and the events hold several tokens. The client reads bytes and looks into none, so that it
takes little of the machine. CPU times are of the kernel's scheduler, of all threads, from the first token of the last
stream to the end; other processes lengthen them by what they displace from caches alone.

With ``--load-generator`` the client is ``strandline bench serve``, and the CPU time is its own: what a run of all
tokens takes more than a run of one token per stream.
"""

import argparse
import json
import os
import platform
import re
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import zmq

from strandline.ids import RequestId
from strandline.records.events import FinishReason, Limits, StepEvents, Submission, TokenEvent
from strandline.records.heartbeat import Heartbeat
from strandline.records.messages import ENCODER, TO_CORE, Finish, Ready, Stepped, Submit
from strandline.version import VERSION

LISTENING = re.compile(r"serving \S+ on http://\S+:(\d+)")
FIRST_ID, LAST_ID = 300, 2900
"""Ordinary tokens of the demo model."""
MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [300, 301]}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "messages": ("/v1/messages", {"messages": MESSAGES}),
    "responses": ("/v1/responses", {"input": "Hello", "store": False}),
    "generate": ("/inference/v1/generate", {"token_ids": [300, 301]}),
}
START_S = 120.0


class StubEngine:
    """An engine's process that gives each sequence a random token per step."""

    def __init__(self, address: str, fd: int, num_streams: int, step_s: float) -> None:
        self._socket = zmq.Context().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._heartbeat = Heartbeat(fd)
        self._heartbeat.beat()
        self._num_streams, self._step_s = num_streams, step_s
        self._left: dict[RequestId, int] = {}
        self._tokens = Random(0).choices(range(FIRST_ID, LAST_ID), k=1 << 16)
        self._num_tokens = 0

    def run(self) -> None:
        """Serve until the HTTP process ends."""
        self._socket.recv()
        self._socket.send(ENCODER.encode(Ready(Limits(3000, 1 << 20), [])))
        begun_s = 0.0
        while os.getppid() != 1:
            self._heartbeat.beat()
            while self._socket.poll(20 if not self._left or len(self._left) < self._num_streams else 0):
                self._receive()
            if self._left:
                time.sleep(max(begun_s + self._step_s - time.monotonic(), 0))
                begun_s = time.monotonic()
                self._step()

    def _receive(self) -> None:
        match TO_CORE.decode(self._socket.recv()):
            case Submit(submissions):
                self._left |= {each.new.request_id: _num_tokens(each) for each in submissions}
            case Finish(names):
                for name in names:
                    self._left.pop(name, None)
        if len(self._left) == self._num_streams:
            print(f"engine: {time.process_time():.3f} s {self._num_tokens}", flush=True)

    def _step(self) -> None:
        events = []
        for name, left in list(self._left.items()):
            self._num_tokens += 1
            token = self._tokens[self._num_tokens % len(self._tokens)]
            reason = None if left > 1 else FinishReason.LENGTH
            events.append(TokenEvent(name, token, None, reason, None, None))
            if left > 1:
                self._left[name] = left - 1
            else:
                del self._left[name]
        self._socket.send(ENCODER.encode(Stepped(StepEvents(events))))
        if not self._left:
            print(f"engine: {time.process_time():.3f} s {self._num_tokens}", flush=True)


def _num_tokens(submission: Submission) -> int:
    return submission.new.params.max_tokens or 1


def serve_with_stub(num_streams: int, step_s: float) -> int:
    """Run ``strandline serve`` with the stub in place of its engine's process."""
    from strandline.cli import main as strandline
    from strandline.server.engines import spawned_engine

    spawned_engine.COMMAND[:] = [sys.executable, __file__, "--engine", str(num_streams), str(step_s)]
    return strandline(["serve", "demo", "--port", "0", "--max-num-seqs", str(num_streams)])


@contextmanager
def serving(num_streams: int, step_s: float) -> Iterator[tuple[int, int, Callable[[], str]]]:
    """Give the server's process, its port, and what has been logged."""
    command = [sys.executable, __file__, "--serve", str(num_streams), str(step_s)]
    with tempfile.NamedTemporaryFile("r") as log:
        process = subprocess.Popen(command, stdout=open(log.name, "w"), stderr=subprocess.STDOUT)  # noqa: SIM115
        try:
            ends_s = time.monotonic() + START_S
            while (found := LISTENING.search(Path(log.name).read_text())) is None:
                if process.poll() is not None or time.monotonic() > ends_s:
                    raise RuntimeError(Path(log.name).read_text())
                time.sleep(0.1)
            yield process.pid, int(found[1]), Path(log.name).read_text
        finally:
            process.terminate()
            process.wait(60)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process's threads."""
    times = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in times) / 1e9


def connect(port: int, endpoint: str, num_tokens: int) -> socket.socket:
    """Send a request; return its connection."""
    path, given = BODIES[endpoint]
    params = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 1}
    body: dict[str, Any] = {**given, "stream": True}
    if endpoint == "generate":
        body |= {"sampling_params": params}
    elif endpoint == "responses":
        body |= {"max_output_tokens": num_tokens}
    else:
        body |= {"max_tokens": num_tokens}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def load(pid: int, port: int, endpoint: str, num_streams: int, num_tokens: int) -> tuple[float, int, int]:
    """Run all streams; return the server's CPU time after all have begun, and the bytes and events of that time."""
    selector = selectors.EpollSelector()
    for _ in range(num_streams):
        connection = connect(port, endpoint, num_tokens)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    silent = {key.fd for key in selector.get_map().values()}
    begun_s, num_bytes, num_events = 0.0, 0, 0
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
            elif silent:
                if key.fd in silent and not data.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(data.decode())
                silent.discard(key.fd)
                if not silent:
                    begun_s = cpu_s(pid)
            else:
                num_bytes += len(data)
                num_events += data.count(b"data: ")
    return cpu_s(pid) - begun_s, num_bytes, num_events


def stub_s(log: Callable[[], str]) -> float:
    """Return the stub's CPU time in the last run, which it logs at the beginning and at the end."""
    ends: list[float] = []
    while len(ends) < 2 or len(ends) % 2:
        time.sleep(0.01)  # the clients may have all before the stub has written its last line
        ends = [float(line.split()[1]) for line in log().splitlines() if line.startswith("engine: ")]
    return ends[-1] - ends[-2]


def load_generator_s(port: int, num_streams: int, num_tokens: int) -> float:
    """Return the CPU time of ``strandline bench serve`` that asks for all streams at once."""
    command = [sys.executable, "-m", "strandline", "bench", "serve", "--port", str(port), "--disable-tqdm"]
    command += ["--dataset-name", "random", "--random-input-len", "2", "--random-output-len", str(num_tokens)]
    command += ["--num-prompts", str(num_streams), "--num-warmups", "0", "--vocab-size", "3000", "--ignore-eos"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--endpoint", nargs="+", choices=BODIES, default=["completions", "chat"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--load-generator", action="store_true")
    return parser.parse_args()


def measure() -> None:
    options = parse()
    print(
        f"{date.today()} · strandline {VERSION} · {platform.machine()}, {os.cpu_count()} cores · Python "
        f"{platform.python_version()} · {options.streams} streams of {options.tokens} tokens, a step each "
        f"{options.step_ms:g} ms"
    )
    with serving(options.streams, options.step_ms / 1e3) as (pid, port, log):
        for _ in range(options.rounds if options.load_generator else 0):
            most_s, least_s = (load_generator_s(port, options.streams, num) for num in (options.tokens, 1))
            num_tokens = options.streams * (options.tokens - 1)
            print(f"bench serve: {1e6 * (most_s - least_s) / num_tokens:.1f} us per token", flush=True)
        for _ in range(0 if options.load_generator else options.rounds):
            for endpoint in options.endpoint:
                used_s, num_bytes, num_events = load(pid, port, endpoint, options.streams, options.tokens)
                num_tokens = options.streams * (options.tokens - 1)
                engine_us = 1e6 * stub_s(log) / (options.streams * options.tokens)
                print(
                    f"{endpoint}: {1e6 * used_s / num_tokens:.1f} us per token, {1e6 * used_s / num_events:.1f} us per "
                    f"event, {num_bytes / num_tokens:.0f} bytes per token; the stub {engine_us:.1f} us",
                    flush=True,
                )


def main() -> None:
    match sys.argv[1:]:
        case ["--engine", num_streams, step_s, address, fd, _]:
            StubEngine(address, int(fd), int(num_streams), float(step_s)).run()
        case ["--serve", num_streams, step_s]:
            sys.exit(serve_with_stub(int(num_streams), float(step_s)))
        case _:
            measure()


if __name__ == "__main__":
    main()
