"""Conversion of text to token ids, and of conversations to text by the chat template."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from jinja2 import TemplateSyntaxError

from strandline.errors import ConfigError, PromptTooLongError, RequestError

RESERVED_VARIABLES: Final = frozenset(
    {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs"}
)
"""Arguments of ``apply_chat_template`` that a request cannot set as variables of the template."""
CONTEXT_LENGTH_IS: Final = "this model's maximum context length is"
"""OpenAI's words, by which clients that see no error code recognize a prompt that is too long."""

NO_TEMPLATE: Final = "give one with --chat-template, or a prompt that is a text"


def encode_text(tokenizer: Any, text: object, *, add_special_tokens: bool = True) -> list[int]:
    """Return a text's token ids.

    Raises:
        RequestError: it is not a string, or not valid Unicode.
    """
    if not isinstance(text, str):
        raise RequestError(f"a prompt's text must be a string, got {text!r}")
    check_text(text)
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def check_length(text: str, max_characters: int | None) -> None:
    """Raise a PromptTooLongError if a text is longer than any prompt can be, before it is tokenized."""
    if max_characters is not None and len(text) > max_characters:
        raise PromptTooLongError(
            f"the prompt is too long: its text has {len(text)} characters, and {CONTEXT_LENGTH_IS} at most "
            f"{max_characters} characters; shorten it, or raise --max-model-len if it is below the model's limit"
        )


def check_text(text: str, field: str | None = None) -> None:
    """Raise a RequestError unless a text, or the request's field that has it, is valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        name = field or "the text"
        raise RequestError(
            f"{name} is not valid Unicode: {error.reason} at character {error.start}", param=field
        ) from error


def check_texts(**fields: Iterable[str]) -> None:
    """Raise a RequestError unless all texts of a request's fields are valid Unicode."""
    for field, texts in fields.items():
        for text in texts:
            check_text(text, field)


def template_text(tokenizer: Any, chat_template: str | None = None) -> str:
    """Return the text of a chat template: of the one given, else of all that the tokenizer has, which may be None."""
    template = chat_template or getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def render_chat(
    tokenizer: Any,
    messages: Iterable[Any],
    chat_template: str | None = None,
    *,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with the chat template.

    Args:
        template_options: additional variables of the template.

    Raises:
        RequestError: the messages are malformed, or there is no template.
    """
    checked = check_messages(messages)
    if not template_text(tokenizer, chat_template):
        raise RequestError(f"the model has no chat template: {NO_TEMPLATE}")
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
        # Templates are programs and may raise anything on the caller's input.
        raise RequestError(f"the chat template cannot render these messages: {error}") from error
    return text


def check_template_options(options: Mapping[str, Any]) -> None:
    """Raise a RequestError if a variable of the template has the name of an argument of its renderer."""
    for name in options:
        if name in RESERVED_VARIABLES:
            raise RequestError(
                f"chat_template_kwargs cannot set {name!r}: it is not a variable of the template",
                param="chat_template_kwargs",
            )


def check_template(template: str) -> None:
    """Raise a ConfigError if a chat template has a syntax error."""
    if (fault := template_fault(template)) is not None:
        raise ConfigError(f"--chat-template {fault}")


def template_fault(template: str) -> str | None:
    """Return what is wrong with a chat template's syntax; None: nothing."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=template)
    except TemplateSyntaxError as error:
        return f"has a syntax error in line {error.lineno}: {error.message}"
    return None


def why_no_chat(tokenizer: Any) -> str | None:
    """Return why no conversation can be rendered with a tokenizer's own template; None: nothing is known."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return f"the model has no chat template: {NO_TEMPLATE}"
    for text in template.values() if isinstance(template, dict) else [template]:
        if (fault := template_fault(str(text))) is not None:
            return f"the model's chat template {fault}; --chat-template names another one"
    return None


def check_messages(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return messages as dictionaries. Raises a RequestError if one is malformed or there are none."""
    checked = []
    for message in messages:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not ("content" in message or "tool_calls" in message):
            raise RequestError(
                f"a message must be a mapping with 'role' and 'content', got {message!r:.200}", param="messages"
            )
        checked.append(dict(message))
    if not checked:
        raise RequestError("the conversation is empty; at least one message is needed", param="messages")
    return checked
