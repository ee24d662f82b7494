"""Token counts of answers, whichever API they are of."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Token counts of an answer."""

    prompt: int
    cached: int
    completion: int
    avoidable: int = 0
    """Tokens that were computed again although their keys and values were cached."""


def usage_of(answer: str) -> Usage | None:
    """Return the last token counts in an answer, streamed or not; None if it has none."""
    found = [usage for data in _documents(answer) if (usage := _merged(data)) is not None]
    if not found:
        return None
    # Anthropic's streams report the prompt at the beginning and the answer at the end.
    values = {name: value for usage in found for name, value in usage.items() if value is not None}
    details = values.get("prompt_tokens_details") or values.get("input_tokens_details") or {}
    if "cache_read_input_tokens" in values:
        cached = values["cache_read_input_tokens"]
        prompt = values["input_tokens"] + values["cache_creation_input_tokens"] + cached
    else:
        prompt = values.get("prompt_tokens", values.get("input_tokens", 0))
        cached = details.get("cached_tokens", 0)
    misses = (values.get("cache") or {}).get("misses", ())
    avoidable = sum(miss["tokens"] for miss in misses if miss["reason"] not in ("first_seen", "diverged"))
    return Usage(prompt, cached, values.get("completion_tokens", values.get("output_tokens", 0)), avoidable)


def _documents(answer: str) -> Iterator[Any]:
    """Yield the JSON documents of an answer: itself, or the data of its events."""
    events = re.findall(r"^data: (\{.*\})$", answer, re.MULTILINE) or [answer]
    for event in events:
        try:
            yield json.loads(event)
        except ValueError:
            continue


def _merged(data: Any) -> Mapping[str, Any] | None:
    """Return the ``usage`` of a document, at its top or in what its event is about."""
    if not isinstance(data, dict):
        return None
    holders = (data, data.get("message"), data.get("response"))
    return next((holder["usage"] for holder in holders if isinstance(holder, dict) and holder.get("usage")), None)
