"""The formats of tool calls: how they are detected, parsed and constrained. To add one, add a row to the table.

The names are those of vLLM's parsers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import RequestError
from strandline.text import headed_calls
from strandline.text.headed_calls import HeadedCalls
from strandline.text.json_calls import JsonCalls
from strandline.text.python_calls import PythonCalls
from strandline.text.tag_calls import TagCalls, Tags
from strandline.text.tool_calls import Calls, Schemas, ToolCallParser
from strandline.text.tool_grammars import CallRules, Frame, headed_call, json_call, python_call, tag_call
from strandline.text.written_calls import WriteCall, write_headed, write_json, write_python, write_tags


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of tool calls."""

    signs: tuple[str, ...]
    """Strings that identify the format, in a chat template or among a tokenizer's added tokens."""
    openers: tuple[str, ...]
    """Tags that begin calls."""
    other_tags: tuple[str, ...]
    """Further tags that the detokenizer must keep."""
    make_calls: Callable[[str, Schemas], Calls]
    """Returns a parser of the calls that an opener begins."""
    frame: Frame
    rules: CallRules
    write_call: WriteCall
    bare: str = ""
    """How calls without a tag, at the beginning of the output, start; empty: there are none."""

    def parser(self, schemas: Schemas) -> ToolCallParser:
        """Return a parser of one output.

        Args:
            schemas: schemas of the functions that may be called.
        """
        return ToolCallParser(self.openers, lambda opener: self.make_calls(opener, schemas), self.bare)

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return calls, in OpenAI's form with parsed arguments, as the model writes them.

        Raises:
            RequestError: the arguments of one are not an object.
        """
        written = []
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if not isinstance(arguments, Mapping):
                raise RequestError(f"the arguments of a call of {name:.100} are not a JSON object")
            written.append(self.write_call(name, arguments, str(call.get("id"))))
        return self.frame.text(written)

    @property
    def tags(self) -> tuple[str, ...]:
        return *self.openers, *self.other_tags


_JSON_RULES: Final = json_call("arguments")
_WRITE_JSON: Final = write_json("arguments")


def _json_format(sign: str, name: str, frame: Frame) -> ToolFormat:
    """Return a format of JSON objects between two tags."""
    opener, close = f"<{name}>", f"</{name}>"
    return ToolFormat(
        (sign,), (opener,), (close,), lambda tag, _: JsonCalls(tag, close), frame, _JSON_RULES, _WRITE_JSON
    )


def _tag_format(tags: Tags, frame: Frame, signs: tuple[str, ...]) -> ToolFormat:
    return ToolFormat(
        signs,
        (tags.open, tags.function),
        (tags.close, tags.end_function, tags.end_parameter),
        lambda tag, schemas: TagCalls(tags, tag, schemas),
        frame,
        tag_call(tags),
        write_tags(tags),
    )


def _python_format(signs: tuple[str, ...], opener: str, close: str, frame: Frame) -> ToolFormat:
    def make_calls(tag: str, schemas: Schemas) -> Calls:
        return PythonCalls(tag, close, schemas)

    return ToolFormat(signs, (opener,), (close,), make_calls, frame, python_call, write_python)


_QWEN: Final = Tags("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
_MINIMAX: Final = Tags(
    *("<minimax:tool_call>", "</minimax:tool_call>"),
    *("<invoke name=", "</invoke>", "<parameter name=", "</parameter>"),
    quote='"',
    around_value="",
)
_EACH: Final = Frame(begin_call=("<tool_call>", "\n"), end_call=("\n", "</tool_call>"), separator="\n")

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "minimax_m2": _tag_format(
        _MINIMAX,
        Frame(begin=(_MINIMAX.open, "\n"), end=("\n", _MINIMAX.close), separator="\n"),
        (_MINIMAX.open,),
    ),
    "kimi_k2": ToolFormat(
        (headed_calls.OPEN,),
        (headed_calls.OPEN, headed_calls.CALL),
        (headed_calls.CLOSE, headed_calls.END_CALL, headed_calls.ARGUMENTS),
        lambda tag, _: HeadedCalls(tag),
        Frame((headed_calls.OPEN,), (headed_calls.CLOSE,), (headed_calls.CALL,), (headed_calls.END_CALL,)),
        headed_call,
        write_headed,
    ),
    "lfm2": _python_format(
        ("<|tool_call_start|>", "<|tool_list_start|>"),
        *("<|tool_call_start|>", "<|tool_call_end|>"),
        Frame(("<|tool_call_start|>", "["), ("]", "<|tool_call_end|>"), separator=", "),
    ),
    "nemotron_json": _json_format(
        "<TOOLCALL>", "TOOLCALL", Frame(("<TOOLCALL>", "["), ("]", "</TOOLCALL>"), separator=", ")
    ),
    "qwen3_coder": _tag_format(_QWEN, _EACH, (_QWEN.function,)),
    "olmo3": _python_format(
        ("<function_calls>",),
        *("<function_calls>", "</function_calls>"),
        Frame(("<function_calls>",), ("</function_calls>",), separator="\n"),
    ),
    "llama3_json": ToolFormat(
        ('{"name": function name, "parameters": ', "<|python_tag|>"),
        ("<|python_tag|>",),
        (),
        lambda tag, schemas: JsonCalls(tag, None, schemas),
        Frame(separator="; "),
        json_call("parameters"),
        write_json("parameters"),
        bare="{",
    ),
    "minimax": _json_format(
        "tool_setting=", "tool_calls", Frame(("<tool_calls>", "\n"), ("\n", "</tool_calls>"), separator="\n")
    ),
    "jamba": _json_format(
        "<tool_calls>", "tool_calls", Frame(("<tool_calls>", "["), ("]", "</tool_calls>"), separator=", ")
    ),
    "hermes": _json_format("<tool_call>", "tool_call", _EACH),
}
"""In order of detection: a sign of one format may appear in templates of earlier ones."""

ALIASES: Final[Mapping[str, str]] = {"granite4": "hermes", "qwen3_xml": "qwen3_coder"}
"""Other names of vLLM's parsers for the same formats."""


def tool_format(name: str) -> ToolFormat:
    """Return the format of a parser's name."""
    return TOOL_FORMATS[ALIASES.get(name, name)]


def find_tool_format(template: str, added_tokens: frozenset[str]) -> str:
    """Return the format that a chat template renders, or else one with a tag among the added tokens, or ``none``."""
    for has in (template.__contains__, added_tokens.__contains__):
        for name, known in TOOL_FORMATS.items():
            if any(map(has, known.signs)):
                return name
    return "none"
