"""Suites of held-out tasks and their scoring, without an engine or a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from strandline.demo.facts import estimate_tokens
from strandline.demo.tasks import KINDS, MAX_RECALL_TOKENS, MIN_RECALL_TOKENS, Task, make_task

_NUMBER = re.compile(r"-?\d+")


def make_suite(seed: int, per_kind: int, count: Callable[[str], int] = estimate_tokens) -> list[Task]:
    """Draw ``per_kind`` held-out tasks of each kind, in the order of ``KINDS``.

    Prompts of ``recall`` tasks have lengths spread evenly over 100 to 4,096 tokens, as ``count`` counts them; with a
    tokenizer's own count no prompt is longer, with the estimate some are longer by a tenth.
    """
    suite: list[Task] = []
    for kind in KINDS:
        for index in range(per_kind):
            rng = Random(f"{seed}:{kind}:{index}")
            share = (index + rng.random()) / per_kind
            num_tokens = round(MIN_RECALL_TOKENS + share * (MAX_RECALL_TOKENS - MIN_RECALL_TOKENS))
            suite.append(make_task(kind, rng, num_tokens=num_tokens, count=count))
    return suite


def score(task: Task, reply: str) -> bool:
    """Return whether ``reply`` answers the task: the last number of a sum, the end of a recall, the words of a chat."""
    if task.kind == "arithmetic":
        return _NUMBER.findall(reply)[-1:] == [task.answer]
    answer = re.escape(task.answer.rstrip(".?!"))
    end = r"[.?!]?\s*$" if task.kind == "recall" else r"(?!\w)"
    return re.search(rf"(?<!\w){answer}{end}", reply) is not None
