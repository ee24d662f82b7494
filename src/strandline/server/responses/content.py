"""Content of items of OpenAI's Responses API as text. What is no text is named where it was."""

import json
import re
from base64 import b64decode
from binascii import Error
from collections.abc import Mapping
from typing import Any, Final

from strandline.errors import RequestError
from strandline.server.http.request_log import warn_once
from strandline.text.chat_messages import MARKS

TEXT_PARTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MEDIA: Final[Mapping[str, str]] = {
    "input_image": "image",
    "output_image": "image",
    "image": "image",
    "image_url": "image",
    "computer_screenshot": "image",
    "input_audio": "audio",
    "output_audio": "audio",
    "input_video": "video",
    "encrypted_content": "encrypted content",
}
TEXT_FILE: Final = re.compile(
    r"data:(?:text/[^;,]+|application/(?:json|xml|yaml))(?:;charset=utf-8)?;base64,", re.ASCII
)
ENCODED: Final = re.compile(r"data:[^,]{1,200},.*|[A-Za-z0-9+/_=-]{512,}", re.ASCII | re.DOTALL)
"""Encoded files, in fields of any name."""
LEFT_OUT: Final = "[{} left out: this model reads text only]"


def text_of(content: Any, path: str) -> str:
    """Return a call's result as one text: a text, a list of parts, or any other JSON.

    Raises:
        RequestError: a part is malformed; its path is the error's parameter.
    """
    if isinstance(content, list):
        return "\n".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))
    return "" if content is None else _part_text(content, path)


def text_parts(content: Any, path: str) -> str | list[dict[str, Any]]:
    """Return a message's content as a text, or as text parts with their cache marks. Raises as ``text_of``."""
    if isinstance(content, str | None):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{path} must be a text or a list of parts, got {shown(content)}", param=path)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise RequestError(
                f"{path}[{index}] must be a part with a type, got {shown(part)}", param=f"{path}[{index}]"
            )
        text = _part_text(part, f"{path}[{index}]")
        marks = {name: part[name] for name in MARKS if name in part}
        parts.append({"type": "text", "text": text, **marks})
    return parts


def message_text(content: Any, path: str) -> str:
    """Return a message's content as one text. Raises as ``text_of``."""
    parts = text_parts(content, path)
    return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)


def without_media(value: Any) -> Any:
    """Return JSON with the encoded files in it left out."""
    if isinstance(value, str):
        return LEFT_OUT.format("data") if ENCODED.fullmatch(value) else value
    if isinstance(value, Mapping):
        kind = MEDIA.get(str(value.get("type")))
        return LEFT_OUT.format(kind) if kind else {name: without_media(inner) for name, inner in value.items()}
    return [without_media(inner) for inner in value] if isinstance(value, list) else value


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return json.dumps(without_media(part), ensure_ascii=False)
    if kind in MEDIA:
        warn_once("content of type %s is left out: this model reads text only", kind)
        return LEFT_OUT.format(MEDIA[kind])
    if kind == "input_file":
        return _file_text(part)
    field = "refusal" if kind == "refusal" else "text"
    text = part.get(field)
    if isinstance(text, str):
        return text
    if kind in (*TEXT_PARTS, "refusal"):
        raise RequestError(f"{path}.{field} must be a text, got {shown(text)}", param=f"{path}.{field}")
    return json.dumps(without_media(part), ensure_ascii=False)


def _file_text(part: Mapping[str, Any]) -> str:
    """Return a text file's name and text; another file is left out."""
    name, data = part.get("filename"), part.get("file_data")
    named = f"file {name}" if isinstance(name, str) else "file"
    if isinstance(data, str) and (head := TEXT_FILE.match(data)):
        try:
            return f"[{named}]\n{b64decode(data[head.end() :], validate=True).decode()}"
        except (Error, UnicodeDecodeError):
            pass
    warn_once("content of type %s is left out: this model reads text only", "input_file")
    return LEFT_OUT.format(named)


def shown(value: Any) -> str:
    """Return the beginning of a value as JSON, for messages of errors."""
    return json.dumps(value, default=str)[:200]
