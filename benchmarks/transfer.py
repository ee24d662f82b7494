"""Bytes per second of ``SocketConnector`` between two processes of this machine, without engines.

    python benchmarks/transfer.py --block-mib 2 --slot-mib 49 --blocks 250 --slots 2

Both sides copy between memory and the bytes that travel, as engines on a CPU do. The default sizes are about those of
Qwen3.5-4B and a prompt of 16,000 tokens. A run uses three to four cores if it can.
"""

import argparse
import multiprocessing
import os
import platform
import socket
import time
from datetime import date
from multiprocessing.connection import Connection as Pipe
from statistics import median

import numpy as np

from strandline.transfer.connection import Connection
from strandline.transfer.layout import PIECE_BYTES, Items
from strandline.transfer.movers import Content, Sink, SocketMover

TIMEOUT_S = 60.0


class Memory:
    """Blocks and slots of one engine, all alike."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.block_BX = np.ones((options.blocks, int(options.block_mib * 2**20)), np.uint8)
        self.slot_SX = np.ones((options.slots, int(options.slot_mib * 2**20)), np.uint8)

    def pieces(self) -> list[Items]:
        """Return the pieces in which all of it travels."""
        (num_blocks, block_bytes), (num_slots, slot_bytes) = self.block_BX.shape, self.slot_SX.shape
        per_piece = max(PIECE_BYTES // block_bytes, 1)
        ends = [(start, min(start + per_piece, num_blocks)) for start in range(0, num_blocks, per_piece)]
        blocks = [Items(start, end, (), (end - start) * block_bytes) for start, end in ends]
        return blocks + [Items(num_blocks, num_blocks, (slot,), slot_bytes) for slot in range(num_slots)]

    def read(self, items: Items) -> memoryview:
        """Copy a piece out."""
        if items.positions:
            return self.slot_SX[list(items.positions)].reshape(-1).data
        return self.block_BX[list(range(items.start_block, items.end_block))].reshape(-1).data

    def write(self, items: Items, data: memoryview) -> None:
        """Copy a piece in."""
        data_X = np.frombuffer(data, np.uint8)
        if items.positions:
            self.slot_SX[list(items.positions)] = data_X.reshape(1, -1)
        else:
            blocks = list(range(items.start_block, items.end_block))
            self.block_BX[blocks] = data_X.reshape(len(blocks), -1)


def give(options: argparse.Namespace, pipe: Pipe) -> None:
    """Give everything, ``--rounds`` times, to whoever connects; in a process of its own."""
    memory = Memory(options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        accepted, _ = listener.accept()
        with Connection(accepted, TIMEOUT_S) as connection:
            for _ in range(options.rounds + 1):
                SocketMover().give(connection, memory.pieces(), Content(memory.read, lambda items: []))


def main() -> None:
    options = parse()
    print(
        f"{date.today()} · Python {platform.python_version()} · {platform.machine()}, {os.cpu_count()} cores · "
        f"{options.blocks} blocks of {options.block_mib:g} MiB, {options.slots} slots of {options.slot_mib:g} MiB"
    )
    memory, rates = Memory(options), []
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    giving = context.Process(target=give, args=[options, theirs])
    giving.start()
    try:
        with Connection.to("127.0.0.1", ours.recv(), TIMEOUT_S) as connection:
            for index in range(options.rounds + 1):
                start_s = time.perf_counter()
                room = lambda num_bytes: np.empty(num_bytes, np.uint8).data  # noqa: E731
                num_bytes = SocketMover().take(connection, memory.pieces(), Sink(room, memory.write))
                if index:  # the first one is a warm-up
                    rates.append(num_bytes / (time.perf_counter() - start_s))
        giving.join()
    finally:
        giving.kill()
        giving.join()
    print(f"{median(rates) / 1e9:.2f} GB/s (median of {options.rounds}; best {max(rates) / 1e9:.2f})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-mib", type=float, default=2)
    parser.add_argument("--slot-mib", type=float, default=49)
    parser.add_argument("--blocks", type=int, default=250)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
