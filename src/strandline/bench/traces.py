"""Recorded traffic as lanes of calls: conversations in which each request follows the end of the previous one.

Formats, one JSON object a line, plain or gzipped, distinguished by their keys:

- *sessions* of 64-token block ids, delta-coded (``requests`` with ``lcp`` and ``new``), sub-agents nested;
- *blocks*: single requests as 512-token block ids (``hash_ids``);
- *text*: calls with ``input``, ``output`` and ``session_id``; split into pieces of about a token, without a tokenizer.
  Where paragraphs begin with a role (``user: ``), marks lie where an engine that knows the chat template has them;
- *tokens*: ``prompt`` and ``output`` as token ids (``output`` may be a count), perhaps ``t`` (seconds) and ``session``.

A block id becomes pseudo-random tokens, always the same. Where a trace does not say what was generated, a call whose
successor repeats its whole prompt is taken to have generated what follows it there.
"""

import gzip
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import shake_128
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

from strandline.errors import ConfigError
from strandline.records.tokens import TOKEN_BYTES, encode
from strandline.text_input import ENCODING, json_lines

SESSION_BLOCK_TOKENS: Final = 64
HASH_BLOCK_TOKENS: Final = 512
PIECE: Final = re.compile(r"\w{1,6}|\s+|[^\w\s]")

TURN: Final = re.compile(r"(?:\A|(?<=\n\n))(?:system|user|assistant|tool): ")
MIN_TURN_TOKENS: Final = 16
"""Minimum distance of marks from one another and from the beginning, as in the engine."""

FIRST_BIT_CLEARED: Final = bytes(byte & 0x7F for byte in range(256))

Row = dict[str, Any]
Encoded = tuple[bytes, bytes, tuple[int, ...]]
"""A prompt, the generated tokens, and the prompt's marks."""


class Call(NamedTuple):
    """One request and the tokens that it will generate."""

    at_s: float
    """Earliest arrival, relative to its lane's start."""
    think_s: float
    """Minimum delay after the end of the previous call."""
    prompt: bytearray
    """Token ids, encoded."""
    output: bytes
    marks: tuple[int, ...] = ()
    """Ends of its tools, its system prompt, and all messages but the last."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A sequence of calls, each after the end of the previous one. ``calls`` starts a new lazy iteration each time."""

    start_s: float
    calls: Callable[[], Iterator[Call]]
    adapter: str = ""
    """LoRA adapter that its calls use; "": none."""


def read_trace(path: str | Path, *, max_sessions: int | None = None, session_gap_s: float = 10.0) -> list[Lane]:
    """Return the lanes of a trace.

    Args:
        max_sessions: number of sessions (of a trace of single requests: requests) taken from the beginning.
        session_gap_s: interval between the starts of sessions that record no time of day.

    Raises:
        ConfigError: the file cannot be read, or a row is of no known format.
    """
    try:
        rows = _rows(Path(path), max_sessions)
    except (OSError, ValueError) as error:
        raise ConfigError(f"trace {path}: {error}") from error
    if not rows:
        raise ConfigError(f"trace {path} is empty")
    for key, reader in READERS.items():
        if key in rows[0]:
            return list(reader(rows, session_gap_s))[: max_sessions if key in GROUPED else None]
    raise ConfigError(f"trace {path}: a row has keys {sorted(rows[0])}; one of {', '.join(READERS)} is needed")


def _rows(path: Path, max_rows: int | None) -> list[Row]:
    rows: list[Row] = []
    with gzip.open(path, "rt", encoding=ENCODING) if path.suffix == ".gz" else path.open(encoding=ENCODING) as lines:
        for row in json_lines(lines):
            rows.append(row)
            if len(rows) == max_rows and not GROUPED & rows[0].keys():
                break
    return rows


def random_tokens(name: str, num_tokens: int) -> bytes:
    """Return encoded tokens drawn by name; a longer draw begins like a shorter one of the same name."""
    return _as_tokens(shake_128(name.encode()).digest(num_tokens * TOKEN_BYTES))


def _as_tokens(drawn: bytes) -> bytes:
    """Clear the first bit of each token: ids are below 2**31."""
    data = bytearray(drawn)
    data[::TOKEN_BYTES] = data[::TOKEN_BYTES].translate(FIRST_BIT_CLEARED)
    return bytes(data)


# Sessions of block ids


def _session_lanes(rows: Iterable[Row], gap_s: float) -> Iterator[Lane]:
    for index, session in enumerate(rows):
        yield from _lanes_of_session(session, str(session["id"]), index * gap_s)


def _lanes_of_session(session: Row, scope: str, start_s: float) -> Iterator[Lane]:
    """Yield the session's lane, and one for each sub-agent in it."""
    own = [request for request in session["requests"] if "requests" not in request]
    shared = _shared_head(session)
    tools = session.get("tool_tokens", 0)
    marks = tuple(sorted({tools, len(shared) // TOKEN_BYTES} - {0}))
    if own:
        yield Lane(start_s, lambda: _session_calls(own, scope, shared, marks))
    for request in session["requests"]:
        if "requests" in request:
            yield from _lanes_of_session(request, scope, start_s + request["t"])


def _shared_head(session: Row) -> bytes:
    """Return the tools' and the system prompt's tokens: sessions with equal numbers of both share them."""
    tools, system = session.get("tool_tokens", 0), session.get("system_tokens", 0)
    return random_tokens(f"head {tools} {system}", tools + system)


def _session_calls(requests: list[Row], scope: str, head: bytes, marks: tuple[int, ...]) -> Iterator[Call]:
    size = SESSION_BLOCK_TOKENS * TOKEN_BYTES
    blocks = _next_blocks(bytearray(), requests[0], scope, head)
    for index, request in enumerate(requests):
        following = requests[index + 1] if index + 1 < len(requests) else None
        num_blocks = len(blocks) // size
        num_tail = request["in"] - num_blocks * SESSION_BLOCK_TOKENS
        rest = b""
        next_blocks = blocks
        if following is not None:
            next_blocks = _next_blocks(blocks, following, scope, head)
            if following["lcp"] >= num_blocks:
                rest = bytes(next_blocks[len(blocks) :])
        num_rest = num_tail + request["out"]
        have = min(len(rest) // TOKEN_BYTES, num_rest)
        rest = rest[: have * TOKEN_BYTES] + random_tokens(f"{scope} {request['t']} {index} own", num_rest - have)
        tail = num_tail * TOKEN_BYTES
        yield Call(request["t"], request.get("think_time", 0.0), blocks + rest[:tail], rest[tail:], marks)
        blocks = next_blocks


def _next_blocks(before: bytearray, request: Row, scope: str, head: bytes) -> bytearray:
    """Return the whole blocks of a request's prompt, encoded."""
    size = SESSION_BLOCK_TOKENS * TOKEN_BYTES
    kept = request.get("lcp", 0) * size
    blocks = before[:kept]
    for start, count in request["new"]:
        names = (f"{scope} {block}".encode() for block in range(start, start + count))
        blocks += _as_tokens(b"".join([shake_128(name).digest(size) for name in names]))
    if kept < len(head) <= len(blocks):
        blocks[: len(head)] = head
    return blocks


# Single requests of block ids


def _block_lanes(rows: Iterable[Row], gap_s: float) -> Iterator[Lane]:
    for index, row in enumerate(rows):
        yield Lane(row["timestamp"] / 1e3, lambda row=row, index=index: iter([_block_call(row, index)]))  # type: ignore[misc]


def _block_call(row: Row, index: int) -> Call:
    data = b"".join(random_tokens(f"block {block}", HASH_BLOCK_TOKENS) for block in row["hash_ids"])
    missing = max(row["input_length"] - len(data) // TOKEN_BYTES, 0)
    data += random_tokens(f"tail {index}", missing)
    prompt = bytearray(data[: row["input_length"] * TOKEN_BYTES])
    return Call(0.0, 0.0, prompt, random_tokens(f"output {index}", row["output_length"]))


# Text, and token ids


def _text_lanes(rows: Iterable[Row], gap_s: float) -> Iterator[Lane]:
    return _grouped(
        rows,
        session=lambda row, _: str(row["session_id"]),
        at_s=lambda row: row["timestamp"] / 1e6,
        encoded=lambda row, _: (_encode_text(row["input"]), _encode_text(row["output"]), _turn_marks(row["input"])),
    )


def _turn_marks(text: str) -> tuple[int, ...]:
    """Return the ends, in tokens, of a first turn of the system and of all that comes before the last turn."""
    turns = [match.start() for match in TURN.finditer(text)]
    ends = [*(turns[1:2] if text.startswith("system: ") else ()), *turns[-1:]]
    marks = [0]
    for end in ends:
        mark = sum(1 for _ in PIECE.finditer(text, 0, end))
        if mark >= marks[-1] + MIN_TURN_TOKENS:
            marks.append(mark)
    return tuple(marks[1:])


def _encode_text(text: str) -> bytes:
    return encode(map(_token, PIECE.findall(text)))


@cache
def _token(piece: str) -> int:
    return crc32(piece.encode()) & 0x7FFFFFFF


def _token_lanes(rows: Iterable[Row], gap_s: float) -> Iterator[Lane]:
    return _grouped(
        rows,
        session=lambda row, index: str(row.get("session", index)),
        at_s=lambda row: float(row.get("t", 0.0)),
        encoded=_encode_tokens,
    )


def _encode_tokens(row: Row, index: int) -> Encoded:
    output = row.get("output", 1)
    generated = random_tokens(f"output {index}", output) if isinstance(output, int) else encode(output)
    return encode(row["prompt"]), generated, ()


def _grouped(
    rows: Iterable[Row],
    *,
    session: Callable[[Row, int], str],
    at_s: Callable[[Row], float],
    encoded: Callable[[Row, int], Encoded],
) -> Iterator[Lane]:
    """Yield a lane per session, its calls in the order of their times; the trace begins at its earliest time."""
    groups: dict[str, list[tuple[float, int, Row]]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(session(row, index), []).append((at_s(row), index, row))
    begin_s = min((call[0] for calls in groups.values() for call in calls), default=0.0)
    for calls in groups.values():
        ordered = sorted(calls, key=lambda call: call[:2])
        start_s = ordered[0][0]

        def make(ordered: list[tuple[float, int, Row]] = ordered, start_s: float = start_s) -> Iterator[Call]:
            for when_s, index, row in ordered:
                prompt, output, marks = encoded(row, index)
                yield Call(when_s - start_s, 0.0, bytearray(prompt), output, marks)

        yield Lane(start_s - begin_s, make)


READERS: Final[dict[str, Callable[[Iterable[Row], float], Iterator[Lane]]]] = {
    "requests": _session_lanes,
    "hash_ids": _block_lanes,
    "input": _text_lanes,
    "prompt": _token_lanes,
}
"""By a key that only rows of the format have."""

GROUPED: Final = frozenset({"input", "prompt"})
"""Formats whose sessions are spread over rows."""
