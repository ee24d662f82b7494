"""Grammars of answers whose beginning, the model's reasoning, is free.

Reasoning ends exactly where its parser finds the end, so that an answer is never free after that.
"""

import json
import re
from collections.abc import Callable
from typing import Final

from strandline.reasoning_config import OPEN

ANYTHING: Final = "/(?s:.*)/"

Tag = Callable[[str], str]
"""Returns a tag in Lark's syntax."""


def after_reasoning(close: str, answer: str, tag: Tag, *, call_tag: str = "", opened: str = "") -> list[str]:
    """Return the rules of reasoning, in Lark's syntax, with the rule ``start``.

    Args:
        close: tag that ends the reasoning.
        answer: rule of what follows it.
        call_tag: tag that opens a call and ends the reasoning as well; empty: no tag does.
        opened: rule of what follows that tag.
    """
    ends, special_ends = [f"closed SPACE {answer}"], [f"{close} SPACE {answer}"] if tag(close) == close else []
    rules = [f"closed[suffix={json.dumps(close)}]: {ANYTHING}", "SPACE: /[ \\n]{0,4}/"]
    if call_tag:
        ends.append(f"called {opened}")
        special_ends += [f"{call_tag} {opened}"] if tag(call_tag) == call_tag else []
        line_start = rf"((?s:.*)\n|[ \t\n]*{OPEN})?[ \t]*"
        rules.append(f"called[lazy]: /{line_start}{re.escape(call_tag)}/")
    if special_ends:
        ends.append(f"free ({' | '.join(special_ends)})")
        rules.append(f"free: {ANYTHING}")
    return [f"start: {' | '.join(ends)}", *rules]
