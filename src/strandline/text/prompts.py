"""From what users write to token ids: text, and conversations by way of the chat template."""

from collections.abc import Iterable, Mapping
from typing import Any

from strandline.errors import RequestError


def encode_text(tokenizer: Any, text: object, *, add_special_tokens: bool = True) -> list[int]:
    """Return a text's token ids.

    Raises:
        RequestError: it is no text, or not valid Unicode.
    """
    if not isinstance(text, str):
        raise RequestError(f"a prompt's text must be a string, got {text!r}")
    check_text(text)
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def check_length(text: str, max_characters: int | None) -> None:
    """Raise a RequestError if a text is longer than all tokens that a request may have: it need not be tokenized."""
    if max_characters is not None and len(text) > max_characters:
        raise RequestError(
            f"the text has {len(text)} characters; the longest prompts of this model have at most {max_characters}"
        )


def check_text(text: str) -> None:
    """Raise a RequestError unless a text is valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not valid Unicode: {error.reason} at character {error.start}") from error


def render_chat(
    tokenizer: Any,
    messages: Iterable[Any],
    chat_template: str | None = None,
    *,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> str:
    """Return the text that the chat template makes of a conversation.

    Args:
        template_options: further variables of the template.

    Raises:
        RequestError: the messages are malformed, or there is no template.
    """
    checked = _check_messages(messages)
    try:
        text: str = tokenizer.apply_chat_template(
            checked,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **(template_options or {}),
        )
    except Exception as error:
        # Templates are programs: they raise what they like, for the caller's input.
        raise RequestError(f"the chat template cannot render these messages: {error}") from error
    return text


def _check_messages(messages: Iterable[Any]) -> list[dict[str, Any]]:
    checked = []
    for message in messages:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not ("content" in message or "tool_calls" in message):
            raise RequestError(f"a message must be a mapping with 'role' and 'content', got {message!r}")
        checked.append(dict(message))
    if not checked:
        raise RequestError("the conversation is empty; at least one message is needed")
    return checked
