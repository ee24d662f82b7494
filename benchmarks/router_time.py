"""Time of the router per request, by number of replicas and length of prompts; no engine runs.

Each replica holds conversations that share a system prompt; four of five requests are a next turn of one, the others
have the system prompt alone in common with them. Printed are medians and 99th percentiles in microseconds.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from statistics import median
from time import perf_counter

from strandline.cache.events import BlocksStored, CacheEvent, SnapshotStored
from strandline.cache.path_hashes import block_hashes, num_blocks_before, root_hash, snapshot_hash
from strandline.cache.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, encode
from strandline.events.resumable import PromptHashes
from strandline.events.wire import to_wire
from strandline.routing.snapshot_router import SnapshotRouter

SYSTEM_TOKENS = 1500
TURN_TOKENS = 200
CONVERSATIONS_PER_REPLICA = 2
NUM_REQUESTS = 2000
RUNNING_PER_REPLICA = 4


def events(tokens: Sequence[int], positions: Sequence[int]) -> Iterator[CacheEvent]:
    """Yield what a cache announces that holds tokens with snapshots at positions."""
    data, root = encode(tokens), root_hash("")
    hashes = block_hashes(root, data)
    yield BlocksStored(tuple(hashes), None, data[: len(hashes) * BLOCK_KEY_BYTES])
    for position in positions:
        num_before = num_blocks_before(position)
        before = hashes[num_before - 1] if num_before else root
        rest = data[num_before * BLOCK_KEY_BYTES : position * TOKEN_BYTES]
        yield SnapshotStored(snapshot_hash(before, rest), position, before if num_before else None, rest)


def draw(choose: Random, num_tokens: int) -> list[int]:
    """Return random tokens."""
    return choose.choices(range(100_000), k=num_tokens)


def measure(num_replicas: int, num_tokens: int) -> str:
    """Return the figures for one fleet as a line."""
    choose, router = Random(num_replicas), SnapshotRouter()
    system, conversations = draw(choose, SYSTEM_TOKENS), []
    for index in range(num_replicas):
        router.add(str(index))
        for _ in range(CONVERSATIONS_PER_REPLICA):
            conversations.append([*system, *draw(choose, num_tokens - SYSTEM_TOKENS)])
            held = events(conversations[-1], (SYSTEM_TOKENS, num_tokens // 2, num_tokens))
            router.apply(str(index), [to_wire(event) for event in held])
    times_s: tuple[list[float], ...] = ([], [], [])
    for number in range(NUM_REQUESTS):
        base = choose.choice(conversations) if choose.random() < 0.8 else system
        tokens = [*base, *draw(choose, TURN_TOKENS)]
        marks = [perf_counter()]
        prompt = PromptHashes(tokens)
        marks.append(perf_counter())
        router.route(str(number), prompt)
        marks.append(perf_counter())
        router.begin(str(number))
        router.finish(str(number - RUNNING_PER_REPLICA * num_replicas))
        marks.append(perf_counter())
        for part, (start_s, end_s) in zip(times_s, pairwise(marks), strict=True):
            part.append(end_s - start_s)
    shown = (f"{median(part) * 1e6:.0f} / {sorted(part)[int(0.99 * len(part))] * 1e6:.0f}" for part in times_s)
    return f"{num_replicas:>8} {num_tokens:>7,} " + " ".join(f"{text:>14}" for text in shown)


def main() -> None:
    """Run from the command line."""
    print(f"{'replicas':>8} {'prompt':>7} {'hash us':>14} {'route':>14} {'begin + finish':>14}")
    for num_tokens in (2000, 30_000):
        for num_replicas in (8, 64, 512):
            print(measure(num_replicas, num_tokens), flush=True)


if __name__ == "__main__":
    main()
