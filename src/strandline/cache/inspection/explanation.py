"""Explanations of lookups: which snapshots are on a prompt's path, where it diverges, and what would have helped.

An ``Account`` counts the missed tokens by reason. An ``Explanation`` adds the cached prompts from which this one
diverges, and whether it continues like one of them a little later. Changes nothing.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from strandline.cache.core import PrefixCache
from strandline.cache.inspection.lookups import Lookup
from strandline.cache.tiers.loads import Loads
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tree import Run, Snapshot, snapshot_above
from strandline.cache.walk import Walk, deepest_snapshot, walk
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import Account, Miss, Reason
from strandline.records.explanation import Advice, Explanation, Help, Parting, PathSnapshot
from strandline.records.offer import Offer
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, TokenBuffer, common_tokens, decode

MAX_SNAPSHOTS: Final = 64
CONTEXT_TOKENS: Final = 32
"""Tokens shown before and after the position where a prompt diverges from the cache."""
MAX_CONTINUATIONS: Final = 3
"""Cached continuations shown."""
MAX_CHILDREN: Final = 256
"""Children of one run that are examined, newest first."""
CONTINUATION_TOKENS: Final = 16_384
"""Tokens of a cached continuation that are searched for tokens of the prompt."""
MAX_SHIFT_TOKENS: Final = 256
"""Most tokens of the remaining prompt to skip in the search."""
STRIDE_TOKENS: Final = 4
WINDOW_TOKENS: Final = 16
"""Consecutive equal tokens that count as the same text."""
MIN_MOVED_TOKENS: Final = 64
"""Sharing fewer tokens than this is not worth changing a template for."""


def explain_prompt(cache: PrefixCache, tokens: TokenBuffer, salt: str = "", *, block_bytes: int) -> Explanation:
    """Explain what a request with these tokens would hit now.

    Args:
        block_bytes: size of a block, for the memory that evicted tokens took.
    """
    account = cache.lookup(tokens, salt)
    return _explain(cache, tokens, salt, account, block_bytes, _on_demoted(cache, tokens, salt))


def explain_lookup(cache: PrefixCache, lookup: Lookup, prompt: bytes, *, block_bytes: int) -> Explanation:
    """Explain what a request hit when it was admitted, from what is cached now.

    Args:
        prompt: its tokens, encoded.
    """
    tokens = TokenBuffer()
    tokens.data = bytearray(prompt)
    on_rested = _on_rested(cache, tokens, lookup.salt)
    return _explain(cache, tokens, lookup.salt, lookup.account, block_bytes, on_rested)


def explain_admission(cache: PrefixCache, lookup: Lookup, prompt: bytes, *, block_bytes: int) -> Explanation:
    """Explain what a request hit that was admitted just now, before it has computed anything.

    Args:
        prompt: its tokens, encoded.
    """
    tokens = TokenBuffer()
    tokens.data = bytearray(prompt)
    on_demoted = _on_demoted_now(cache, tokens, lookup)
    return _explain(cache, tokens, lookup.salt, lookup.account, block_bytes, on_demoted)


def tier_tokens(cache: PrefixCache, prompt: bytes, salt: str = "") -> dict[str, int]:
    """Return how many tokens of a prompt each tier has, by its store, where that is more than would be hit."""
    data, loads = bytearray(prompt), _loads(cache)
    match = cache.internals().index.match(salt, data)
    return {} if loads is None or match is None else loads.positions(data, match)


def _explain(
    cache: PrefixCache,
    tokens: TokenBuffer,
    salt: str,
    account: Account,
    block_bytes: int,
    on_demoted: tuple[Help, str],
) -> Explanation:
    root = cache.internals().index.roots.get(salt)
    if root is None:
        advice = tuple(_advice(account, (), None, cache, block_bytes, on_demoted))
        return Explanation(account, 0, (), 0, None, None, advice)
    data = tokens.data
    position = account.kv_tokens
    end = walk(root, data[: position * TOKEN_BYTES])
    deepest = deepest_snapshot(end, data[: position * TOKEN_BYTES])
    path = list(_snapshots_upwards(deepest))
    continuations = list(_continuations(end, data, position)) if end.kv_tokens == position else []
    shown = tuple(PathSnapshot(snapshot.position, snapshot.kind) for snapshot in path[:MAX_SNAPSHOTS])
    moved = _find_moved(continuations, data, position)
    return Explanation(
        account=account,
        kv_now=walk(root, data).kv_tokens,
        snapshots=shown,
        num_snapshots_left_out=len(path) - len(shown),
        next_snapshot=_next_snapshot(end, continuations, data, position) if position else None,
        parting=_parting(continuations, data, position),
        advice=tuple(_advice(account, shown, moved, cache, block_bytes, on_demoted)),
    )


def _snapshots_upwards(snapshot: Snapshot | None) -> Iterator[Snapshot]:
    while snapshot is not None:
        yield snapshot
        snapshot = snapshot_above(snapshot)


# Beside the prompt


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A cached continuation that differs from the prompt's."""

    run: Run
    offset: int
    """Bytes of the run's tokens before the position where it differs."""

    def tokens(self, num_tokens: int) -> bytes:
        """Return its tokens; at branches, those of the child used last."""
        run, data = self.run, bytes(self.run.tokens[self.offset : self.offset + num_tokens * TOKEN_BYTES])
        while run.children and len(data) < num_tokens * TOKEN_BYTES:
            run = max(_newest_children(run), key=lambda child: child.last_tick)
            data += bytes(run.tokens[: num_tokens * TOKEN_BYTES - len(data)])
        return data


def _continuations(end: Walk, data: bytearray, position: int) -> Iterator[_Continuation]:
    """Yield cached continuations of tokens ``[0, position)``, where the walk ends, that differ from the prompt."""
    inside = end.num_blocks - end.run.start_block
    skipped = (position - end.num_blocks * BLOCK_TOKENS) * TOKEN_BYTES
    shared = bytes(data[end.num_blocks * BLOCK_KEY_BYTES : position * TOKEN_BYTES])
    mine = bytes(data[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES])
    if end.num_blocks < end.run.end_block:
        found = [_Continuation(end.run, inside * BLOCK_KEY_BYTES + skipped)]
    else:
        children = [child for child in _newest_children(end.run) if child.tokens.startswith(shared)]
        if end.partial_run is not None and end.partial_run not in children:
            children.append(end.partial_run)
        children.sort(key=lambda child: -child.last_tick)
        found = [_Continuation(child, skipped) for child in children]
    others = (continuation for continuation in found if continuation.tokens(1) not in (b"", mine))
    yield from islice(others, MAX_CONTINUATIONS)


def _next_snapshot(end: Walk, continuations: list[_Continuation], data: bytearray, position: int) -> int | None:
    """Return the position of the first snapshot after ``position`` on the cached continuations, or None."""
    found = [
        run.snapshots[key].position
        for run in (continuation.run for continuation in continuations)
        for key in run.keys[: run.num_own_snapshots + MAX_CHILDREN]
    ]
    if end.num_blocks == end.run.end_block:
        run, shared = end.run, bytes(data[end.num_blocks * BLOCK_KEY_BYTES : position * TOKEN_BYTES])
        first = bisect_left(run.keys, (end.num_blocks, shared))
        keys = (key for key in run.keys[first : first + MAX_CHILDREN] if key[1].startswith(shared))
        found += [run.snapshots[key].position for key in keys]
    return min((each for each in found if each > position), default=None)


def _newest_children(run: Run) -> list[Run]:
    """Return a run's children; of many, the newest."""
    return list(islice(reversed(run.children.values()), MAX_CHILDREN))


def _parting(continuations: list[_Continuation], data: bytearray, position: int) -> Parting | None:
    prompt = bytes(data[position * TOKEN_BYTES : (position + CONTEXT_TOKENS) * TOKEN_BYTES])
    if not prompt or not continuations:
        return None
    before = bytes(data[max(position - CONTEXT_TOKENS, 0) * TOKEN_BYTES : position * TOKEN_BYTES])
    cached = tuple(tuple(decode(continuation.tokens(CONTEXT_TOKENS))) for continuation in continuations)
    return Parting(position, tuple(decode(before)), tuple(decode(prompt)), cached)


# What would help


@dataclass(frozen=True, slots=True)
class _Moved:
    """``num_tokens`` tokens from ``start`` on that are cached at another position."""

    start: int
    num_tokens: int


def _find_moved(continuations: list[_Continuation], data: bytearray, position: int) -> _Moved | None:
    """Find the longest part of the prompt that a cached continuation has at another position."""
    best: _Moved | None = None
    prompt = bytes(data[position * TOKEN_BYTES : (position + CONTINUATION_TOKENS) * TOKEN_BYTES])
    for continuation in continuations:
        moved = _common_later(prompt, continuation.tokens(CONTINUATION_TOKENS))
        if moved is not None and moved.num_tokens >= MIN_MOVED_TOKENS:
            moved = _Moved(position + moved.start, moved.num_tokens)
            best = moved if best is None or moved.num_tokens > best.num_tokens else best
    return best


def _common_later(prompt: bytes, cached: bytes) -> _Moved | None:
    """Return the first token sequence that two keys have in common, at whatever positions."""
    for start in range(0, min(MAX_SHIFT_TOKENS * TOKEN_BYTES, len(prompt)), STRIDE_TOKENS * TOKEN_BYTES):
        window = prompt[start : start + WINDOW_TOKENS * TOKEN_BYTES]
        offset = _find_aligned(cached, window) if len(window) == WINDOW_TOKENS * TOKEN_BYTES else None
        if offset is None:
            continue
        back = 0
        while back < min(start, offset) and prompt[start - back - 1] == cached[offset - back - 1]:
            back += 1
        back -= back % TOKEN_BYTES
        return _Moved((start - back) // TOKEN_BYTES, common_tokens(prompt[start - back :], cached[offset - back :]))
    return None


def _find_aligned(data: bytes, window: bytes) -> int | None:
    offset = data.find(window)
    while offset > 0 and offset % TOKEN_BYTES:
        offset = data.find(window, offset + 1)
    return offset if offset >= 0 else None


def _advice(
    account: Account,
    snapshots: tuple[PathSnapshot, ...],
    moved: _Moved | None,
    cache: PrefixCache,
    block_bytes: int,
    on_demoted: tuple[Help, str],
) -> Iterator[Advice]:
    for miss in account.misses:
        if miss.reason is Reason.DEMOTED:
            yield Advice(on_demoted[0], miss.end, miss.num_tokens, on_demoted[1])
            continue
        advice = _advice_on_miss(miss, account, snapshots, cache, block_bytes)
        if advice is not None:
            yield advice
    if moved is not None:
        position = account.kv_tokens
        what = (
            f"tokens [{position:,}, {moved.start:,}) differ"
            if moved.start > position
            else "some cached tokens are left out"
        )
        text = (
            f"move the changing part behind the constant part: {what}, and the {moved.num_tokens:,} tokens from "
            f"{moved.start:,} on match a cached prompt again"
        )
        yield Advice(Help.ORDER, position, moved.num_tokens, text)


def _advice_on_miss(
    miss: Miss, account: Account, snapshots: tuple[PathSnapshot, ...], cache: PrefixCache, block_bytes: int
) -> Advice | None:
    size = miss.num_tokens
    match miss.reason:
        case Reason.NO_SNAPSHOT:
            if any(snapshot.position == miss.end for snapshot in snapshots):
                text = f"nothing to do: a snapshot at {miss.end:,} now serves the next such prompt"
            else:
                text = f"a mark at {miss.end:,}: the first prompt that passes it leaves a snapshot there"
                if cache.internals().placement.takes_branches():
                    text += "; without one, the first prompt that diverges there takes the snapshot for later prompts"
            return Advice(Help.MARK, miss.end, size, text)
        case Reason.SNAPSHOT_EVICTED:
            snapshot_bytes = cache.snapshot_blocks * block_bytes
            text = f"more memory: the evicted snapshot took {_mib(snapshot_bytes)}; {_more_memory(cache)}"
            return Advice(Help.MEMORY, miss.end, size, text)
        case Reason.EVICTED:
            snapshot_bytes = cache.snapshot_blocks * block_bytes
            num_bytes = -(-size // BLOCK_TOKENS) * block_bytes + snapshot_bytes
            snapshot = ", including a snapshot" if snapshot_bytes else ""
            text = f"more memory: the evicted data took at least {_mib(num_bytes)}{snapshot}; {_more_memory(cache)}"
            return Advice(Help.MEMORY, miss.start, size, text)
        case Reason.NO_ROOM:
            text = f"more memory: what is cached up to {miss.end:,} found no room beside the request's own data"
            return Advice(Help.MEMORY, miss.end, size, text)
        case Reason.COMPUTING:
            text = f"a later arrival: request {miss.request_id} was computing these tokens"
            return Advice(Help.PATIENCE, miss.end, size, text)
        case Reason.LOADING:
            text = "a later arrival: these tokens were being loaded from a store"
            return Advice(Help.PATIENCE, miss.end, size, text)
        case Reason.LOAD_FAILED:
            text = (
                "these tokens were to be loaded, but that failed, for the reason in the server's log, or there was no "
                "memory for them; then raise --memory or lower --max-num-seqs"
            )
            return Advice(Help.STORE, miss.end, size, text)
        case Reason.NOT_ASKED:
            text = "reading the cache: it is off, or the request wanted its prompt's log-probabilities"
            return Advice(Help.ASK, 0, size, text)
        case _:
            return None


def _on_demoted(cache: PrefixCache, tokens: TokenBuffer, salt: str) -> tuple[Help, str]:
    """Return whether the tokens of a prompt that a tier has would be loaded or computed, if it is sent now."""
    if _tier_offer(cache, tokens, salt) is not None:
        return Help.LOAD, "nothing to do: the request waits until these tokens have been loaded, and hits them"
    return Help.LOAD, "nothing to do: computing these tokens takes less time than loading them"


def _on_demoted_now(cache: PrefixCache, tokens: TokenBuffer, lookup: Lookup) -> tuple[Help, str]:
    """Return what would have helped a request that was admitted just now; tiers may have evicted entries since."""
    misses = [miss for miss in cache.lookup(tokens, lookup.salt).misses if miss.reason is Reason.DEMOTED]
    if lookup.account.misses[:1] == tuple(misses) and _tier_offer(cache, tokens, lookup.salt) is None:
        return Help.LOAD, "nothing to do: computing these tokens takes less time than loading them"
    return _on_rested(cache, tokens, lookup.salt)


def _on_rested(cache: PrefixCache, tokens: TokenBuffer, salt: str) -> tuple[Help, str]:
    """Return what would have helped a request that computed what a tier had."""
    no_room = "there was no memory to load these tokens into; raise --memory or lower --max-num-seqs"
    if _tier_offer(cache, tokens, salt) is not None:
        return Help.MEMORY, f"more memory: {no_room}"
    return Help.LOAD, f"nothing to do if computing these tokens took less time than loading them; else {no_room}"


def _loads(cache: PrefixCache) -> Loads | None:
    below = cache.internals().below
    return below if isinstance(below, Loads) else None


def _tiers(cache: PrefixCache) -> tuple[LowerTier, ...]:
    loads = _loads(cache)
    return () if loads is None else loads.tiers


def _tier_offer(cache: PrefixCache, tokens: TokenBuffer, salt: str) -> Offer | None:
    loads = _loads(cache)
    return None if loads is None else loads.tier_offer(tokens, salt)


def _more_memory(cache: PrefixCache) -> str:
    """Return which flags raise what is cached."""
    persistent = [tier.store for tier in _tiers(cache) if tier.is_persistent]
    if persistent:
        size = "--object-store-size" if "objects" in persistent else "--disk-cache-size"
        return f"raise --memory, --host-memory or {size}"
    return "raise --memory or --host-memory" if _tiers(cache) else "raise --memory, or add --host-memory"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
