"""Renders the explanation of a server or a replay as plain text."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

MEANINGS: Final[Mapping[str, str]] = {
    "first_seen": "no cached prompt shares a prefix with this one",
    "diverged": "the prompt diverges from every cached one here",
    "no_snapshot": "keys and values are cached, but no snapshot was taken at or after this position",
    "snapshot_evicted": "keys and values are cached, but the snapshot was evicted",
    "evicted": "the tokens were cached and have been evicted",
    "repeated": "keys and values are cached, but computed again for what follows the prompt's last token",
    "computing": "another request was computing the tokens",
    "loading": "the tokens were being loaded from a store",
    "demoted": "the tokens are in a tier below the device; computing them is faster, or no device memory was free",
    "load_failed": "a store had the tokens, but loading them failed, or there was no room for them",
    "other_salt": "the tokens are cached under another salt",
    "no_room": "the prefix was cached, but there was not enough memory to keep it beside the request's own data",
    "not_asked": "the cache is off, or the request wanted its prompt's log-probabilities",
}
RESTS: Final = "the tokens are in a tier below the device"
"""What is said of these before the prompt has been sent; whether they would be loaded is in the advice."""
TIERS: Final[Mapping[str, str]] = {"host": "host memory", "disk": "the disk", "objects": "the object store"}
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
    is_unsent = data["request_id"] is None and "loads" not in data
    resting = _resting_tokens(account) if is_unsent else 0
    below = f"{resting:,} in a tier below the device, " if resting else ""
    others = f"{below}{queried - hit - resting:,} to compute"
    yield f"{subject}: {queried:,} prompt tokens, {hit:,} hit ({share:.1%}), {others}"
    yield from _ranges(account, {**MEANINGS, "demoted": RESTS} if is_unsent else MEANINGS)
    if remembered := account.get("remembered", 0):
        yield f"tokens of earlier answers, encoded as they were generated: {remembered:,}"
    yield from _tiers(data)
    yield from _path(data)
    if data["parting"] is not None:
        yield from _parting(data["parting"])
    if data["advice"]:
        yield "what would help:" if data["request_id"] is None else "what would have helped:"
        for advice in data["advice"]:
            yield f"  - {advice['text']} ({advice['tokens']:,} token{'s' if advice['tokens'] != 1 else ''})"
    if data["now"] is not None:
        now = data["now"]
        resting = _resting_tokens(now)
        more = f"; {resting:,} more are in a tier below the device, and loaded where that is faster" if resting else ""
        yield f"sent again now, it would hit {now['hit']:,} of {now['queried']:,} tokens{more}"


def _resting_tokens(account: Data) -> int:
    return sum(miss["end"] - miss["start"] for miss in account["misses"] if miss["reason"] == "demoted")


def _ranges(account: Data, meanings: Mapping[str, str]) -> Iterator[str]:
    rows = []
    if account["hit"]:
        rows.append((0, account["hit"], "hit", _source(account["snapshot_kind"])))
    for miss in account["misses"]:
        who = f": {miss['request_id']}" if miss.get("request_id") else ""
        rows.append((miss["start"], miss["end"], miss["reason"], meanings.get(miss["reason"], "") + who))
    names = [f"[{start:,}, {end:,})" for start, end, _, _ in rows]
    for name, (_, _, what, text) in zip(names, rows, strict=True):
        yield f"  {name:<{max(map(len, names))}}  {what:<{max(len(row[2]) for row in rows)}}  {text}"


def _tiers(data: Data) -> Iterator[str]:
    """Yield what was loaded from below the device for a request of a replay, and what rests there still."""
    for load in data.get("loads", ()):
        outcome = "" if load["end"] <= data["account"]["hit"] else ", but not hit"
        yield (
            f"loaded before it started{outcome}: [{load['start']:,}, {load['end']:,}) from {TIERS[load['store']]}, "
            f"{load['bytes'] / 2**20:,.1f} MiB in {load['seconds'] * 1e3:,.1f} ms"
        )
    for store, position in data.get("resting", {}).items():
        yield f"not loaded from {TIERS[store]}: [{data['account']['hit']:,}, {position:,})"


def _source(snapshot_kind: str | None) -> str:
    """Return what a hit was resumed from."""
    if snapshot_kind is None:
        return "resumed from cached keys and values alone: the model keeps no state"
    return f"resumed from a snapshot ({snapshot_kind.replace('_', ' ')})"


def _path(data: Data) -> Iterator[str]:
    found = [f"{item['position']:,} ({item['kind'].replace('_', ' ')})" for item in data["snapshots"]]
    more = len(found) - MAX_SHOWN + data["num_snapshots_left_out"] if len(found) > MAX_SHOWN else 0
    shown = ", ".join(found[:MAX_SHOWN]) + (f" and {more:,} more" if more else "")
    yield f"snapshots on its path: {shown if found else 'none'}"
    if data["next_snapshot"] is not None:
        yield f"next snapshot on the cached path: {data['next_snapshot']:,}"
    yield f"keys and values cached: {data['kv_now']:,} tokens"


def _parting(parting: Data) -> Iterator[str]:
    position = parting["position"]
    yield (
        f"the prompt diverges from the cache at token {position:,}:"
        if position
        else "the prompt diverges from the cache at its first token:"
    )
    if parting["prompt"] is None:
        yield "  (the server is configured not to show prompt text)"
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
