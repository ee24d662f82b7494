"""Time the Python that the prefix cache adds to a request: the next turn of a conversation, over a full cache.

A turn is lookup, admit, extend, the commit of its prefill, leave_snapshot and release; ``decode`` is the commit of
one generated token. Nothing runs on a device. Prints the fastest, the median and the 95th percentile of ``--turns``
turns, in microseconds: on a machine that does other things besides, the fastest says most about the code.
"""

import argparse
import gc
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter_ns as now

from strandline.cache import Lease, LogUse, PrefixCache
from strandline.cache.announcing.announcer import Announcer, take_events
from strandline.cache.policy import new_cache
from strandline.cache.size import CacheSize
from strandline.cache.tiers import LoadCosts, Loads, LowerMemory
from strandline.ids import RequestId
from strandline.records.account import SnapshotKind
from strandline.records.tokens import TokenBuffer
from strandline.specs import SnapshotSize

BLOCKS_PER_SLAB = 50
CHAT_TOKENS = 6400
VOCABULARY = 150_000
DECODED_TOKENS = 128
STRETCHES = ("lookup", "admit", "prefill", "leave_snapshot", "release")


class Clock:
    """Collects how long the stretches of a turn take, and the turn."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = defaultdict(list)

    def note(self, stretches: tuple[str, ...], times_ns: tuple[int, ...]) -> None:
        """Note stretches that follow each other; there is one time more than there are stretches."""
        for name, (start, end) in zip(stretches, pairwise(times_ns), strict=True):
            self.us[name].append((end - start) / 1000)
        if len(stretches) > 1:
            self.us["turn"].append((times_ns[-1] - times_ns[0]) / 1000)


def new_tokens(choose: random.Random, num_tokens: int) -> list[int]:
    return choose.choices(range(VOCABULARY), k=num_tokens)


def granted(lease: Lease | None) -> Lease:
    if lease is None:
        raise SystemExit("the cache is too small for this benchmark: raise --blocks")
    return lease


def fill(cache: PrefixCache, num_blocks: int, choose: random.Random) -> None:
    """Cache many conversations until ``num_blocks`` blocks are in use."""
    system_prompts = [new_tokens(choose, 1000) for _ in range(8)]
    index = 0
    while cache.memory_use().num_blocks < num_blocks and cache.stats().num_blocks_evicted == 0:
        index += 1
        tokens = [*choose.choice(system_prompts), *new_tokens(choose, CHAT_TOKENS)]
        serve(cache, f"fill-{index}", TokenBuffer(tokens), Clock())


def serve(cache: PrefixCache, request_id: str, tokens: TokenBuffer, clock: Clock, chunk: int = 8192) -> int:
    """Serve one request and return how many tokens it hit."""
    began = now()
    cache.lookup(tokens)
    looked_up = now()
    lease = granted(cache.admit(RequestId(request_id), tokens, step_tokens=chunk))
    admitted = now()
    prefill(cache, lease, chunk)
    prefilled = now()
    cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
    left = now()
    cache.release(lease, SnapshotKind.GENERATION_END)
    clock.note(STRETCHES, (began, looked_up, admitted, prefilled, left, now()))
    cache.take_actions()
    take_events(cache)
    return lease.account.hit


def prefill(cache: PrefixCache, lease: Lease, chunk: int) -> None:
    while lease.computed < len(lease.tokens):
        end = min(len(lease.tokens), lease.computed + chunk)
        cache.extend(lease, end)
        grant = cache.reserve_step(lease, end, LogUse.NONE)
        cache.commit(lease, end, grant.num_folded)


def converse(cache: PrefixCache, prompt_tokens: int, turn_tokens: int, num_turns: int, choose: random.Random) -> Clock:
    """Grow conversations by a turn at a time; measure the turns that come near ``prompt_tokens``."""
    clock = Clock()
    conversation = 0
    while len(clock.us["turn"]) < num_turns:
        conversation += 1
        tokens = list[int]()
        while len(tokens) + turn_tokens <= prompt_tokens:
            seen = len(tokens)
            tokens += new_tokens(choose, turn_tokens)
            is_measured = len(tokens) > 0.95 * prompt_tokens
            name = f"{prompt_tokens}-{conversation}-{seen}"
            hit = serve(cache, name, TokenBuffer(tokens), clock if is_measured else Clock())
            if hit != seen:
                raise SystemExit(f"a turn hit {hit} tokens, expected {seen}")
    return clock


def diverge(cache: PrefixCache, prompt_tokens: int, num_turns: int, choose: random.Random) -> Clock:
    """Edit a long cached prompt near its end, over and over."""
    tokens = new_tokens(choose, prompt_tokens)
    serve(cache, f"edit-{prompt_tokens}", TokenBuffer(tokens), Clock())
    clock = Clock()
    for turn in range(num_turns):
        index = choose.randrange(prompt_tokens * 19 // 20, prompt_tokens)
        edited = [*tokens[:index], *new_tokens(choose, prompt_tokens - index)]
        serve(cache, f"edit-{prompt_tokens}-{turn}", TokenBuffer(edited), clock)
    return clock


def decode(cache: PrefixCache, prompt_tokens: int, choose: random.Random) -> Clock:
    """Time the commit of single tokens at the end of a long prompt."""
    tokens = TokenBuffer(new_tokens(choose, prompt_tokens))
    lease = granted(cache.admit(RequestId(f"decode-{prompt_tokens}"), tokens))
    prefill(cache, lease, prompt_tokens)
    clock = Clock()
    for token in new_tokens(choose, DECODED_TOKENS):
        tokens.append(token)
        began = now()
        cache.extend(lease, len(tokens))
        cache.commit(lease, len(tokens))
        clock.note(("decode",), (began, now()))
    cache.release(lease, SnapshotKind.GENERATION_END)
    return clock


def percentile_95(us: list[float]) -> float:
    return statistics.quantiles(us, n=20)[-1]


def table(title: str, clock: Clock, report: Callable[[list[float]], float]) -> str:
    cells = "  ".join(f"{name} {report(us):8.1f}" for name, us in clock.us.items())
    return f"{title:<26} {cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks cached before the clock starts")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[19_000, 100_000], help="prompt lengths")
    parser.add_argument("--turn-tokens", type=int, default=500, help="new tokens of a turn")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--events", action="store_true", help="emit events of what can be resumed")
    parser.add_argument("--host-blocks", type=int, default=0, help="blocks of a tier in host memory; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    choose = random.Random(args.seed)
    num_chats = args.blocks * 64 // CHAT_TOKENS
    num_full = args.blocks // BLOCKS_PER_SLAB + num_chats
    # Each measured turn ends a conversation of 20 turns, each of which leaves a snapshot.
    num_spare = num_full + 8 * num_chats + 100 * args.turns * len(args.prompt_tokens)
    for title, num_slabs in [("memory to spare", num_spare), ("memory full", num_full)]:
        announcer = Announcer() if args.events else None
        cache = new_cache(CacheSize(num_slabs, BLOCKS_PER_SLAB), announcer=announcer)
        if args.host_blocks:
            host = LowerMemory("host", args.host_blocks, 1, SnapshotSize(BLOCKS_PER_SLAB, 1), LoadCosts())
            Loads(cache, [host], announcer=announcer)
        fill(cache, args.blocks, choose)
        gc.freeze()
        stats = cache.stats()
        print(f"{title}: {stats.memory.num_blocks} blocks and {stats.num_snapshots} snapshots; microseconds")
        for prompt_tokens in args.prompt_tokens:
            report(cache, prompt_tokens, args.turn_tokens, args.turns, choose)
        stats = cache.stats()
        print(f"  {stats.num_snapshots_evicted} snapshots and {stats.num_blocks_evicted} blocks evicted")


def report(cache: PrefixCache, prompt_tokens: int, turn_tokens: int, num_turns: int, choose: random.Random) -> None:
    for name, clock in [
        ("turn", converse(cache, prompt_tokens, turn_tokens, num_turns, choose)),
        ("edit", diverge(cache, prompt_tokens, num_turns, choose)),
        ("decode", decode(cache, prompt_tokens, choose)),
    ]:
        print(table(f"  {name} at {prompt_tokens}, fastest", clock, min))
        print(table(f"  {name} at {prompt_tokens}, median", clock, statistics.median))
        print(table(f"  {name} at {prompt_tokens}, 95 %", clock, percentile_95))


if __name__ == "__main__":
    main()
