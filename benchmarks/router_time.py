"""Time of the router per request, by number of replicas and length of prompts; no engine runs.

Each replica holds conversations that share a system prompt; four of five requests are a next turn of one, the others
have the system prompt alone in common with them. Printed are medians and 99th percentiles in microseconds of CPU time.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from statistics import median
from time import thread_time

from strandline.events.resumable import PromptHashes
from strandline.events.wire import to_wire
from strandline.records.cache_events import BlocksStored, CacheEvent, SnapshotStored
from strandline.records.path_hashes import block_hashes, num_blocks_before, root_hash, snapshot_hash
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES
from strandline.routing.snapshot_router import SnapshotRouter

SYSTEM_TOKENS = 1500
TURN_TOKENS = 200
CONVERSATIONS_PER_REPLICA = 2
NUM_REQUESTS = 2000
RUNNING_PER_REPLICA = 4


def events(data: bytes, positions: Sequence[int]) -> Iterator[CacheEvent]:
    """Yield what a cache announces that holds encoded tokens with snapshots at positions."""
    root = root_hash("")
    hashes = block_hashes(root, data)
    yield BlocksStored(tuple(hashes), None, data[: len(hashes) * BLOCK_KEY_BYTES])
    for position in positions:
        num_before = num_blocks_before(position)
        before = hashes[num_before - 1] if num_before else root
        rest = data[num_before * BLOCK_KEY_BYTES : position * TOKEN_BYTES]
        yield SnapshotStored(snapshot_hash(before, rest), position, before if num_before else None, rest)


def draw(choose: Random, num_tokens: int) -> bytes:
    """Return random encoded tokens."""
    return choose.randbytes(num_tokens * TOKEN_BYTES)


def measure(num_replicas: int, num_tokens: int) -> str:
    """Return the figures for one fleet as a line."""
    choose, router = Random(num_replicas), SnapshotRouter()
    system, conversations = draw(choose, SYSTEM_TOKENS), []
    for index in range(num_replicas):
        router.add(str(index))
        for _ in range(CONVERSATIONS_PER_REPLICA):
            conversations.append(system + draw(choose, num_tokens - SYSTEM_TOKENS))
            held = events(conversations[-1], (SYSTEM_TOKENS, num_tokens // 2, num_tokens))
            router.apply(str(index), [to_wire(event) for event in held])
    num_running = min(RUNNING_PER_REPLICA * num_replicas, NUM_REQUESTS // 2)
    times_s: tuple[list[float], ...] = ([], [], [], [])
    for number in range(NUM_REQUESTS):
        base = choose.choice(conversations) if choose.random() < 0.8 else system
        tokens = base + draw(choose, num_tokens + TURN_TOKENS - len(base) // TOKEN_BYTES)
        marks = [thread_time()]
        prompt = PromptHashes(tokens)
        marks.append(thread_time())
        router.route(str(number), prompt)
        marks.append(thread_time())
        router.begin(str(number))
        router.finish(str(number - num_running))
        router.forget(str(number - num_running))
        marks.append(thread_time())
        parts_s = [end_s - start_s for start_s, end_s in pairwise(marks)]
        for part, time_s in zip(times_s, (*parts_s, sum(parts_s)), strict=True):
            part.append(time_s)
    shown = (f"{median(part) * 1e6:.0f} / {sorted(part)[int(0.99 * len(part))] * 1e6:.0f}" for part in times_s)
    return f"{num_replicas:>8} {num_tokens:>7,} " + " ".join(f"{text:>14}" for text in shown)


def main() -> None:
    """Run from the command line."""
    print(f"{'replicas':>8} {'prompt':>7} {'hash us':>14} {'route':>14} {'begin + end':>14} {'all':>14}")
    for num_tokens in (2000, 30_000, 100_000):
        for num_replicas in (8, 64, 512):
            print(measure(num_replicas, num_tokens), flush=True)


if __name__ == "__main__":
    main()
