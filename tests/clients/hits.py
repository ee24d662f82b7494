"""What each request of a conversation must hit: all that the request before it computed, but what is rendered anew."""

from collections.abc import Sequence
from itertools import pairwise

from tests.clients.proxy import Exchange


def shortfalls(conversation: Sequence[Exchange], *, renders_turns_anew: bool, edits_turns: bool) -> list[str]:
    """Return the requests that hit too little.

    Within a turn, a request hits the prompt and the answer of the one before it. So does the first one of a later turn
    if the template renders earlier turns as before; otherwise it hits what precedes the earlier turn's first answer.

    Args:
        renders_turns_anew: the template leaves out reasoning of earlier turns, and thereby changes all their answers.
        edits_turns: the client itself changes its earlier messages when a turn begins.
    """
    found = []
    first = conversation[0]
    for before, now in pairwise(conversation):
        assert first.usage is not None
        assert before.usage is not None
        assert now.usage is not None
        # The last token of an answer ends it, and is not computed before the answer comes back.
        expected = before.usage.prompt + before.usage.completion - 1
        if now.turn != before.turn:
            if edits_turns:
                expected = 0
            elif renders_turns_anew:
                expected = first.usage.prompt - MAX_OPENING_TOKENS
            first = now
        if now.usage.cached < expected:
            found.append(f"turn {now.turn} hit {now.usage.cached} of {now.usage.prompt} tokens, not {expected}")
    return found


MAX_OPENING_TOKENS = 8
"""Upper bound of the tokens of ``<think>\\n\\n</think>\\n\\n``, which the strict template's prompts end in."""
