"""An engine's part in a pull by NIXL, in a process of its own: ``python -m tests.cpu.transfer.nixl_producer [SHIFT]``.

It prints its port, and ends with its standard input. It says that its memory lies ``SHIFT`` bytes from where it does.
"""

import select
import sys
from secrets import token_hex
from threading import Thread

import numpy as np

from strandline.transfer.engine_calls import EngineCalls
from strandline.transfer.layout import Items
from strandline.transfer.messages import Ask, Hello, Offer
from strandline.transfer.nixl_mover import NixlMover, Region
from strandline.transfer.server import PullServer
from tests.cpu.transfer.test_pull import LAYOUT, LONG_S, OFFER, SPEC, content_of

POSITIONS = tuple(position for position, _ in OFFER.snapshots)


class Arena:
    """Keeps the blocks of what is offered, then its snapshots."""

    def __init__(self, shift: int) -> None:
        self._bytes = np.frombuffer(bytearray(content_of(0, OFFER.num_blocks, POSITIONS)), np.uint8)
        self.region = Region(self._bytes.ctypes.data, self._bytes.nbytes, None)
        self._shift = shift

    def offer(self, ask: Ask) -> tuple[str, Offer]:
        return "hold", OFFER

    def read(self, hold: str, items: Items) -> memoryview:
        raise NotImplementedError("peers read it")

    def addresses(self, hold: str, items: Items) -> list[int]:
        blocks = [block * SPEC.raw_block_bytes for block in range(items.start_block, items.end_block)]
        first = OFFER.num_blocks * SPEC.raw_block_bytes
        slots = [first + POSITIONS.index(position) * SPEC.raw_slot_bytes for position in items.positions]
        return [self.region.address + self._shift + start for start in (*blocks, *slots)]

    def end(self, hold: str, is_done: bool) -> None:
        """Do nothing."""


def main() -> None:
    """Serve until standard input ends."""
    calls, arena = EngineCalls(), Arena(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    mover = NixlMover(token_hex(8), arena.region, ["UCX"])
    hello = Hello("producer", LAYOUT)
    server = PullServer(("127.0.0.1", 0), hello, calls, arena, SPEC, mover, timeout_s=LONG_S, patience_s=0)
    Thread(target=_run, args=[calls], daemon=True).start()
    sys.stdout.write(f"port {server.port}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _run(calls: EngineCalls) -> None:
    waiting = select.poll()
    waiting.register(calls.fileno(), select.POLLIN)
    while True:
        waiting.poll()
        calls.run()


if __name__ == "__main__":
    main()
