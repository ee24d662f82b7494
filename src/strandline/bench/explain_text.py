"""Renders the explanation of a server or a replay as plain text."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

MEANINGS: Final[Mapping[str, str]] = {
    "first_seen": "no cached prompt begins like this one",
    "diverged": "the prompt leaves every cached one here",
    "no_snapshot": "keys and values are cached, but no state was kept at or after this position",
    "snapshot_evicted": "keys and values are cached; the state was, and has been evicted",
    "evicted": "it was cached and has been evicted",
    "computing": "another request was computing it",
    "other_salt": "it is cached under another salt",
    "no_room": "there was a snapshot, but no memory to hold it beside the request's own state",
    "not_asked": "the cache is off, or the request wanted its prompt's log-probabilities",
}
MAX_SHOWN: Final = 8
MAX_CHARACTERS: Final = 120

Data = Mapping[str, Any]


def lines(data: Data, subject: str) -> Iterator[str]:
    """Yield the lines of an explanation.

    Args:
        subject: what is explained, to begin with.
    """
    account = data["account"]
    queried, hit = account["queried"], account["hit"]
    share = hit / max(queried, 1)
    yield f"{subject}: {queried:,} prompt tokens, {hit:,} hit ({share:.1%}), {queried - hit:,} to compute"
    yield from _ranges(account)
    yield from _path(data)
    if data["parting"] is not None:
        yield from _parting(data["parting"])
    if data["advice"]:
        yield "what would help:" if data["request_id"] is None else "what would have helped:"
        for advice in data["advice"]:
            yield f"  - {advice['text']} ({advice['tokens']:,} token{'s' if advice['tokens'] != 1 else ''})"
    if data["now"] is not None:
        yield f"asked again now, it would hit {data['now']['hit']:,} of {data['now']['queried']:,}"


def _ranges(account: Data) -> Iterator[str]:
    rows = []
    if account["hit"]:
        kind = str(account["snapshot_kind"] or "").replace("_", " ")
        rows.append((0, account["hit"], "hit", f"resumed from a snapshot ({kind})"))
    for miss in account["misses"]:
        who = f": {miss['request_id']}" if miss.get("request_id") else ""
        rows.append((miss["start"], miss["end"], miss["reason"], MEANINGS.get(miss["reason"], "") + who))
    names = [f"[{start:,}, {end:,})" for start, end, _, _ in rows]
    for name, (_, _, what, text) in zip(names, rows, strict=True):
        yield f"  {name:<{max(map(len, names))}}  {what:<{max(len(row[2]) for row in rows)}}  {text}"


def _path(data: Data) -> Iterator[str]:
    found = [f"{item['position']:,} ({item['kind'].replace('_', ' ')})" for item in data["snapshots"]]
    more = len(found) - MAX_SHOWN + data["num_snapshots_left_out"] if len(found) > MAX_SHOWN else 0
    shown = ", ".join(found[:MAX_SHOWN]) + (f" and {more:,} more" if more else "")
    yield f"on its path: snapshots at {shown}" if found else "on its path: no snapshot"
    if data["next_snapshot"] is not None:
        yield f"the cached path that goes on from there has its next snapshot at {data['next_snapshot']:,}"
    yield f"keys and values cached: {data['kv_now']:,} tokens"


def _parting(parting: Data) -> Iterator[str]:
    position = parting["position"]
    yield (
        f"the prompt leaves what is cached at token {position:,}:"
        if position
        else "it begins unlike all that is cached:"
    )
    if parting["prompt"] is None:
        yield "  (the server shows no text of prompts)"
        return
    if position:
        yield f"  shared  …{_shown(parting['before'])[-MAX_CHARACTERS:]}"
    yield f"  prompt  {_shown(parting['prompt'])[:MAX_CHARACTERS]}"
    for cached in parting["cached"]:
        yield f"  cached  {_shown(cached)[:MAX_CHARACTERS]}"


def _shown(stretch: Data) -> str:
    """Return a stretch's text on one line; without a text, its tokens."""
    text = stretch["text"]
    if text is None:
        return " ".join(map(str, stretch["tokens"]))
    return "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, "\ufffd") for c in text)
