"""Calls in channels that come back in another spelling than the model's.

A model writes ``<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>``, and a
template ``to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>``: the same message. What
the model says before a call may come back as one thought.
"""

import contextlib
import json
from typing import Any, Final, NamedTuple

from strandline.text.channels import CALL, CHANNEL, START, ChannelParser
from strandline.text.segments import SegmentKind

OPENING: Final = START + "assistant"
"""What a prompt ends with, and each message of an answer but the first begins with."""


class Said(NamedTuple):
    """What an answer says, however it is spelled."""

    words: str
    """Thoughts, and then what is said to the user."""
    calls: tuple[tuple[str, str], ...]
    """Functions, and their arguments in one spelling."""


def uses_channels(tokenizer: Any) -> bool:
    """Return whether a tokenizer has the tokens of channels."""
    return all(tag in tokenizer.get_added_vocab() for tag in (CHANNEL, CALL))


def end_of_call(answer: bytes, data: bytes, start: int) -> int | None:
    """Return where the messages of a rendered text end that say what an answer does, which ends with a call.

    Args:
        answer: answer that follows ``OPENING``.
        data: the rendered text.
        start: where the messages begin, after ``OPENING``.

    Returns:
        None: the text has other messages there.
    """
    call = CALL.encode()
    end = data.find(call, start) + len(call)
    if not answer.endswith(call) or end < len(call):
        return None
    with contextlib.suppress(UnicodeDecodeError):
        generated, rendered = answer.decode(), data[start:end].decode()
        is_answer = rendered.count(START) == rendered.count(OPENING)
        if is_answer and _said(generated) == _said(rendered):
            return end
    return None


def _said(answer: str) -> Said:
    parser = ChannelParser(takes_calls=True)
    texts = dict.fromkeys((SegmentKind.REASONING, SegmentKind.CONTENT), "")
    calls: list[tuple[str, str]] = []
    for segment in (*parser.feed(answer), *parser.finish()):
        if segment.kind is SegmentKind.CALL:
            calls.append((segment.text, ""))
        elif segment.kind is SegmentKind.ARGUMENTS:
            calls[-1] = (calls[-1][0], calls[-1][1] + segment.text)
        else:
            texts[segment.kind] += segment.text
    words = "\n".join(filter(None, texts.values()))
    return Said(words, tuple((name, _in_one_spelling(arguments)) for name, arguments in calls))


def _in_one_spelling(arguments: str) -> str:
    with contextlib.suppress(ValueError, RecursionError):
        return json.dumps(json.loads(arguments))
    return arguments
