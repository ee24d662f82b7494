"""Prompts that end inside the last message, so that the output continues it."""

from collections.abc import Mapping, Sequence
from typing import Any

from strandline.errors import RequestError
from strandline.reasoning_config import CLOSE, OPEN
from strandline.text.chat_messages import REASONING_FIELDS, SENTINEL, MarkedMessage
from strandline.text.marks import Messages, Render


def read_continued(messages: Sequence[MarkedMessage]) -> tuple[list[MarkedMessage], str]:
    """Return a conversation, and the content of its last message, which is to be continued.

    A message with reasoning alone is continued inside its reasoning. An empty last message is left out, and the content
    is empty: its continuation is an answer from the beginning.

    Raises:
        RequestError: the last message has tool calls.
    """
    if not messages:
        return [], ""
    *before, last = messages
    if last.message.get("tool_calls"):
        raise RequestError("a message with tool calls cannot be continued", param="continue_final_message")
    content = last.content
    thoughts = [text for name in REASONING_FIELDS if isinstance(text := last.message.get(name), str)]
    if not content.strip() and thoughts and thoughts[0]:
        content = f"{OPEN}\n{thoughts[0]}"
    elif not content.strip():
        return before, ""
    return [*before, MarkedMessage({**last.message, "content": content}, last.marks)], content


def continued_text(messages: Messages, content: str, render: Render) -> str:
    """Return a conversation as text up to the end of the last message's content.

    Args:
        content: content of the last message, without sentinels of marks.
    """
    *before, last = messages
    text: str = last["content"]
    if not content.lstrip().startswith(OPEN):
        # Templates strip contents, and write something before and after them: what follows a sentinel is cut off.
        rendered = render([*before, _with_content(last, text + SENTINEL)], False)
        end = rendered.rfind(SENTINEL)
        if end >= 0:
            return rendered[:end]
    # The answer as it was generated, after its opening, which may have opened the reasoning already.
    opening = render(before, True)
    text = text.lstrip() if content.lstrip().startswith(OPEN) else text
    if opening.rstrip().endswith(OPEN) and text.startswith(OPEN):
        text = text.removeprefix(OPEN).removeprefix(opening[len(opening.rstrip()) :])
    elif opening.rstrip().endswith(OPEN):
        text = f"\n{CLOSE}\n\n{text}"
    return opening + text


def _with_content(message: Mapping[str, Any], content: str) -> dict[str, Any]:
    return {**message, "content": content}
