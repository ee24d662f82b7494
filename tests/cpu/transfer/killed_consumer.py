"""A consumer in a process of its own that pulls up to a stage, and is killed there."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import Final

from strandline.specs import ModelSpec
from strandline.transfer.client import Peer, Pull
from strandline.transfer.layout import Items
from strandline.transfer.messages import Ask, Hello, Want
from strandline.transfer.movers import Sink, SocketMover

TIMEOUT_S: Final = 120.0
STAGES: Final = ("offered", "between pieces", "done")


def consume(stage: str, port: int, layout: dict[str, str], spec: ModelSpec, ask: Ask, want: Want, pipe: Pipe) -> None:
    """Pull up to a stage, report it, and wait for the end."""

    def stop() -> None:
        pipe.send(stage)
        pipe.recv()

    def write(items: Items, data: memoryview) -> None:
        if stage == "between pieces":
            stop()

    pull = Pull(Peer("127.0.0.1", port, ""), Hello("killed", layout), spec, SocketMover(), timeout_s=TIMEOUT_S)
    pull.ask(ask)
    if stage != "offered":
        pull.fetch(want, Sink(lambda num_bytes: memoryview(bytearray(num_bytes)), write))
    stop()


@contextmanager
def consumer_at(
    stage: str,
    port: int,
    layout: dict[str, str],
    spec: ModelSpec,
    ask: Ask,
    want: Want,
    wait_until: Callable[[Callable[[], bool]], None],
) -> Iterator[BaseProcess]:
    """Yield a consumer that has come to a stage; kill it at the end, if that has not been done.

    Args:
        wait_until: waits until something is so, and lets the producer go on meanwhile.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=consume, args=[stage, port, layout, spec, ask, want, theirs])
    process.start()
    try:
        wait_until(lambda: ours.poll(0.001) or not process.is_alive())
        assert ours.recv() == stage
        yield process
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()
