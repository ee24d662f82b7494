"""Cache accounts and explanations as JSON data, for the API, the cache page and ``strandline explain``."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from strandline.records.account import Account
from strandline.records.cache_questions import CacheAnswer
from strandline.records.excerpts import Excerpt
from strandline.records.pictures import is_virtual

Json = dict[str, Any]
TextOf = Callable[[Sequence[int]], str | None]
"""Detokenizes; returns None if prompts' text must not be shown."""


def account_data(account: Account) -> Json:
    """Return an account as JSON data. ``queried`` is ``hit`` plus the tokens of the misses.

    ``remembered``, where it is not 0, counts the tokens that are encoded as earlier answers were generated.
    """
    return {
        "queried": account.queried,
        "hit": account.hit,
        "kv_tokens": account.kv_tokens,
        "snapshot_kind": account.snapshot_kind,
        "misses": [
            {"reason": miss.reason, "start": miss.start, "end": miss.end, "tokens": miss.num_tokens}
            | ({} if miss.request_id is None else {"request_id": miss.request_id})
            for miss in account.misses
        ],
        **({"remembered": account.num_remembered} if account.num_remembered else {}),
    }


def answer_data(answer: CacheAnswer, text_of: TextOf) -> Json:
    """Return an answer with an explanation as JSON data."""
    explanation = answer.explanation
    if explanation is None:
        raise ValueError(f"there is no explanation: {answer.problem}")
    parting = explanation.parting

    def span(tokens: Sequence[int]) -> Json:
        return {"tokens": list(tokens), "text": text_of(tokens)}

    return {
        "request_id": answer.request_id,
        "age_s": answer.age_s,
        "account": account_data(explanation.account),
        "now": None if answer.now is None else account_data(answer.now),
        "kv_now": explanation.kv_now,
        "snapshots": [{"position": found.position, "kind": found.kind} for found in explanation.snapshots],
        "num_snapshots_left_out": explanation.num_snapshots_left_out,
        "next_snapshot": explanation.next_snapshot,
        "parting": None
        if parting is None
        else {
            "position": parting.position,
            "before": span(parting.before),
            "prompt": span(parting.prompt),
            "cached": [span(tokens) for tokens in parting.cached],
        },
        "advice": [
            {"help": advice.help, "position": advice.position, "tokens": advice.num_tokens, "text": advice.text}
            for advice in explanation.advice
        ],
    }


def excerpt_text(excerpt: Excerpt | None, text_of: TextOf) -> str | None:
    """Return the text of an excerpt from the beginning of its first word; None if it must not be shown.

    A character whose last bytes are not in the excerpt is left out.
    """
    if excerpt is None:
        return None
    shown = list(excerpt.before)
    while any(map(is_virtual, shown)):
        shown.pop(0)  # a picture is no part of a word
    before, text = text_of(shown), text_of([*shown, *excerpt.tokens])
    if before is None or text is None:
        return None
    start = len(before.rstrip("\ufffd"))  # U+FFFD: a character whose last bytes follow
    if start and re.match(r"\w\w", text[start - 1 : start + 1]):
        start -= len(text[:start].split()[-1])
    return text[start:].rstrip("\ufffd")
